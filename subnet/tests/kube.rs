// SPDX-License-Identifier: Apache-2.0
//! The Kubernetes store with a real API server and no kubelets: the contract of all stores, and what only this store does.

// The exemption of tests in .clippy.toml does not reach their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

// Stores that choose subnets themselves use more of the contract.
#[allow(dead_code)]
#[path = "store/contract.rs"]
mod contract;
#[path = "kube/manifests.rs"]
mod manifests;
#[path = "kube/own.rs"]
mod own;
#[path = "kube/policy.rs"]
mod policy;
#[path = "kube/relay.rs"]
mod relay;
#[path = "kube/server.rs"]
mod server;
#[path = "kube/watch.rs"]
mod watch;

use serde_json::json;
use weft_subnet::source::Source;

impl contract::SharedStore for server::Cluster {
    fn open_for(&self, last: u8) -> Box<dyn Source> {
        Box::new(self.store(last))
    }

    async fn put(&self, name: &str, value: &str) {
        let Some(key) = name.strip_prefix("subnets/") else {
            return std::fs::write(self.conf.path().join("net-conf.json"), value).unwrap();
        };
        let name = format!("{}-{}", self.name, key.replace('/', "-"));
        let annotations =
            json!({self.annotation("kube-subnet-manager"): "true", self.annotation("backend-data"): value});
        let cidr = key.replacen("-24", "/24", 1);
        let cidrs: &[&str] = if key.contains("-24") { &[&cidr] } else { &[] };
        self.create_as(&name, cidrs, annotations).await;
    }
}

macro_rules! contract {
    ($($name:ident),* $(,)?) => {
        mod in_kube {
            $(#[tokio::test] async fn $name() { super::contract::$name(&super::server::Cluster::shared().await).await; })*
        }
    };
}

contract!(
    creates_a_lease_and_takes_it_over_later,
    retakes_what_was_deleted,
    retakes_only_what_is_ours,
    releases_only_what_is_ours,
    changes_are_reported_in_order,
    a_bad_entry_does_not_affect_others,
    a_change_of_net_conf_is_reported,
);
