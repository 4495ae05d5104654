// SPDX-License-Identifier: Apache-2.0
//! Lists the rules of iptables with its programs, without blocking this thread, and lets the crate `weft-doctor` judge a packet by all rules.

use std::path::Path;

use weft_doctor::explain::Step;
use weft_doctor::explain::facts::Way;
use weft_doctor::explain::legacy_tables::{self, Examined};
use weft_doctor::explain::rules::{self, Endpoint, Listed, NotListed};
use weft_subnet::cidr::Family;

use crate::firewall::error::ProgramError;
use crate::firewall::iptables;
use crate::instance::Instance;

/// Returns what all firewalls of this node do with the packet of a way.
pub async fn of(way: &Way, subnet_file: &Path) -> Vec<Step> {
    let (legacy, listed) = (side_tables_of_legacy(way).await, listed(way).await);
    rules::of(way, &listed, legacy, &Instance::new(subnet_file).name)
}

/// Returns what the firewalls of this node do with the packets of a tunnel itself, to the other node and from it. Only what is not in order is
/// a step. `agent_port` is the UDP port of a tunnel whose device does not show it.
pub async fn of_tunnel(way: &Way, subnet_file: &Path, agent_port: Option<u16>) -> Vec<Step> {
    let mut steps = Vec::new();
    for outer in rules::ways_of_tunnel(way, agent_port) {
        steps.extend(of(&outer, subnet_file).await);
    }
    rules::faults_of_tunnel(steps)
}

/// Returns the first address that the destination of a packet is translated to: see [`rules::service`].
pub async fn service(way: &Way) -> Option<(Step, Option<Endpoint>)> {
    rules::service(way, &listed(way).await)
}

/// Lists the rules of the packet's family.
async fn listed(way: &Way) -> Listed {
    let family = Family::of(way.packet.to);
    let has_legacy_tables = !iptables::legacy_tables(family).trim().is_empty();
    let mut listed = Listed { has_legacy_tables, ..Listed::default() };
    for flavour in iptables::installed() {
        match iptables::save(flavour, family).await {
            Err(ProgramError::Missing { .. }) => {}
            saved => listed.flavours.push((flavour, saved.map_err(|error| NotListed(Box::new(error))))),
        }
    }
    listed
}

/// Follows the packet through the tables of iptables-legacy in which filters are rare. A program lists them, which nothing else must wait for.
async fn side_tables_of_legacy(way: &Way) -> Examined {
    let way = way.clone();
    tokio::task::spawn_blocking(move || legacy_tables::examine(&way)).await.unwrap_or_default()
}
