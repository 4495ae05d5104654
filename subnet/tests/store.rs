// SPDX-License-Identifier: Apache-2.0
//! The stores: one contract, run against each, and what is etcd's alone.

// The exemption of tests in .clippy.toml does not reach their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "store/contract.rs"]
mod contract;
#[path = "store/dir.rs"]
mod dir;
#[path = "store/etcd.rs"]
mod etcd;
#[path = "store/failover.rs"]
mod failover;
#[path = "store/fences.rs"]
mod fences;
#[path = "store/secure.rs"]
mod secure;
#[path = "store/server.rs"]
mod server;

use contract::Place;
use server::{PREFIX, Server};
use weft_subnet::dir::DirStore;
use weft_subnet::source::Source;

enum Kind {
    Dir(tempfile::TempDir),
    Etcd(Box<Server>),
}

impl Kind {
    fn dir() -> Kind {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("subnets")).unwrap();
        Kind::Dir(dir)
    }

    async fn etcd() -> Kind {
        Kind::Etcd(Box::new(Server::start().await))
    }
}

impl Place for Kind {
    fn open_for(&self, _last: u8) -> Box<dyn Source> {
        match self {
            Kind::Dir(dir) => Box::new(DirStore::new(dir.path().into())),
            Kind::Etcd(server) => Box::new(server.store()),
        }
    }

    async fn put(&self, name: &str, value: &str) {
        match self {
            Kind::Dir(dir) => std::fs::write(dir.path().join(format!("{name}.json")), value).unwrap(),
            Kind::Etcd(server) => {
                server.client().await.put(format!("{PREFIX}/{name}"), value, None).await.unwrap();
            }
        }
    }
}

macro_rules! contract {
    ($($name:ident),* $(,)?) => {
        mod in_dir { $(#[tokio::test] async fn $name() { super::contract::$name(&super::Kind::dir()).await; })* }
        mod in_etcd { $(#[tokio::test] async fn $name() { super::contract::$name(&super::Kind::etcd().await).await; })* }
    };
}

contract!(
    creates_and_takes_over,
    previous_is_taken_again,
    runs_out_of_subnets,
    no_subnet_over_addresses_of_nodes,
    incompatible_lease_is_deleted,
    racers_get_distinct_subnets,
    dual_stack_racers_share_neither_half,
    retakes_what_was_deleted,
    retakes_only_what_is_ours,
    only_an_equal_lease_keeps_us_out,
    releases_only_what_is_ours,
    one_address_of_two_nodes,
    a_renumbered_node_keeps_its_lease,
    watch_tells_in_order,
    bad_entries_stand_alone,
    config_change_is_told,
);
