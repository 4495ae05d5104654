// SPDX-License-Identifier: Apache-2.0
//! Tests of the stores: those that all stores must pass, and those of etcd and the directory alone.

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
#[path = "store/requests.rs"]
mod requests;
#[path = "store/secure.rs"]
mod secure;
#[path = "store/server.rs"]
mod server;
#[path = "store/unchanged.rs"]
mod unchanged;

use contract::SharedStore;
use server::{PREFIX, Server};
use weft_backends::register::TYPES;
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

impl SharedStore for Kind {
    fn open_for(&self, _last: u8) -> Box<dyn Source> {
        match self {
            Kind::Dir(dir) => Box::new(DirStore::new(dir.path().into(), TYPES)),
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

    fn patience(&self) -> std::time::Duration {
        match self {
            Kind::Dir(_) => dir::LIMIT,
            Kind::Etcd(_) => contract::PATIENCE,
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
    creates_a_lease_and_takes_it_over_later,
    the_previous_subnet_is_taken_again,
    of_several_leases_of_ours_that_of_our_pods_is_taken,
    reports_that_there_is_no_free_subnet,
    no_subnet_contains_addresses_of_nodes,
    an_incompatible_lease_is_deleted,
    a_family_that_is_turned_on_or_off_leaves_the_subnet_of_the_other,
    a_lease_that_no_other_can_replace_is_kept,
    many_leases_of_ours_are_replaced_by_one,
    nodes_that_start_together_get_distinct_subnets,
    dual_stack_nodes_that_start_together_share_no_subnet,
    retakes_what_was_deleted,
    retakes_only_what_is_ours,
    a_lease_with_another_address_is_not_retaken,
    only_a_lease_of_the_same_length_keeps_us_out,
    a_lease_outside_network_takes_no_subnet,
    an_unreadable_value_under_our_key_is_written_again_and_not_released,
    releases_only_what_is_ours,
    two_nodes_with_one_address_keep_their_own_leases,
    nodes_behind_one_nat_keep_their_own_leases,
    a_renumbered_node_keeps_its_lease,
    changes_are_reported_in_order,
    a_bad_entry_does_not_affect_others,
    a_change_of_net_conf_is_reported,
);
