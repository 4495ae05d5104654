// SPDX-License-Identifier: Apache-2.0
//! What a node says of itself: readiness and its reasons, metrics, the answer to `weft status`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use weft_backends::state::Key;
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::{Id, Lease};

use crate::firewall::guard;
use crate::kernel::Kernel;
use crate::node::Node;
use crate::observe::claims;
use crate::observe::node_condition::Health;
use crate::observe::status::{Failure, Pass, Peer, PeerState, Status};
use crate::pass::{self, Pending};

/// The host's name, for people.
pub fn node_name() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Why our own device carries no packets, if it does not: it, or its address, is not there, or lacks what packets need.
pub fn device_problem<K: Kernel>(node: &Node<K>) -> Option<String> {
    of_own_device(node).find(|(_, pending)| !pending.works).map(|(key, pending)| format!("{key}: {}", pending.reason))
}

/// What our own device lacks although it carries packets. A person should know, and nothing waits for it.
fn device_remarks<K: Kernel>(node: &Node<K>) -> impl Iterator<Item = String> {
    let lacking = of_own_device(node).filter(|(_, pending)| pending.works);
    lacking.map(|(key, pending)| format!("{key}: {}; packets do not need it", pending.reason))
}

/// What the kernel has not of our own device and its address.
fn of_own_device<K: Kernel>(node: &Node<K>) -> impl Iterator<Item = (&Key, &Pending)> {
    let own = |key: &Key| matches!(key, Key::Link(_) | Key::Addr(..)) && node.plan.is_own_device(key);
    node.passer.pending().iter().filter(move |(key, _)| own(key))
}

/// Why the node is not ready. With the peers that were saved it is: an agent that ran when its store went is so, too.
fn blockers<K: Kernel>(node: &Node<K>) -> Vec<String> {
    let snapshot = (!node.knows_peers()).then(|| "no complete list of leases from the store yet".to_owned());
    snapshot.into_iter().chain(faults(node)).collect()
}

/// What is wrong with this node itself, whatever its store and its peers do.
fn faults<K: Kernel>(node: &Node<K>) -> Vec<String> {
    [
        device_problem(node),
        node.kernel_problem.clone(),
        node.env_problem.clone(),
        node.rules_blocker(),
        node.host_problem.as_ref().map(|problem| format!("uplink: {problem}")),
        node.lost.clone(),
        node.contest_problem(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// How the network of this node is, for those who look at the store.
fn health<K: Kernel>(node: &Node<K>, ready: bool) -> Health {
    let mut faults = faults(node);
    faults.extend(node.lease_gone.map(str::to_owned));
    match (faults.is_empty(), ready && node.resumed.is_none()) {
        (false, _) => Health::Unwell(faults.join("; ")),
        (true, true) => Health::Well,
        // The store is away, or was not heard yet.
        (true, false) => Health::Unknown,
    }
}

/// Brings readiness, metrics and systemd's status up to date. Costs nothing per peer unless something is wrong.
pub fn publish<K: Kernel>(node: &mut Node<K>) {
    let blockers = blockers(node);
    let ready = blockers.is_empty();
    // Pods shall run where all is in place that this node has a say in; a list that comes in a moment is waited for.
    let only_the_store_is_away = blockers.len() == 1 && !node.snapshot_applied && node.store_trouble.is_some();
    let text = blockers.first().or(node.resumed.as_ref()).cloned().unwrap_or_else(|| {
        format!(
            "subnet {}, {} peers, {}",
            node.plan.own().subnets,
            node.plan.peers().len(),
            node.plan.network().backend_type
        )
    });
    if node.world.readiness.set(blockers) {
        if ready {
            tracing::info!(subnet = %node.plan.own().subnets, peers = node.plan.peers().len(), "ready");
        } else {
            tracing::warn!(reason = text, "not ready");
        }
    }
    if ready {
        node.world.notify.ready();
    }
    node.world.condition.set(health(node, ready));
    if ready || only_the_store_is_away {
        node.world.conflist.keep(Instant::now());
    }
    node.world.notify.status(&text);
    let version = node.passer.pending().version();
    if node.troubled.0 != version {
        let (pending, failed) = troubled(node);
        node.troubled = (version, pending.len(), failed.len());
    }
    let (_, pending, failed) = node.troubled;
    let count = |state, count| node.world.metrics.peers(state, count);
    count(PeerState::Pending, pending);
    count(PeerState::Failed, failed);
    let held = node.hold.len();
    count(PeerState::Held, held);
    let aside = node.plan.set_aside_count();
    count(PeerState::SetAside, aside);
    let believed = node.plan.peers().len();
    let unwell = pending + failed + held + node.plan.skipped_count();
    count(PeerState::Programmed, believed.saturating_sub(unwell));
}

/// Peers with an entry that waits, and peers with one that the kernel refused.
fn troubled<K: Kernel>(node: &Node<K>) -> (HashSet<Id>, HashMap<Id, String>) {
    let (mut pending, mut failed) = (HashSet::new(), HashMap::new());
    for (key, entry) in node.passer.pending().iter().filter(|(key, _)| !guard::is_of_guard_or_fence(key)) {
        let Some(id) = node.plan.owner(key) else { continue };
        if entry.retry {
            pending.insert(id.clone());
        } else {
            failed.insert(id.clone(), entry.reason.clone());
        }
    }
    pending.retain(|id| !failed.contains_key(id));
    (pending, failed)
}

/// An error, for status.
pub fn failure(text: String) -> Failure {
    Failure { at_ms: now_ms(), text }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A pass, for status.
pub fn pass(report: &pass::Report) -> Pass {
    Pass {
        at_ms: now_ms(),
        took_us: u64::try_from(report.took.as_micros()).unwrap_or(u64::MAX),
        writes: report.writes(),
        failed: report.failed(),
        cause: report.cause.as_str().to_owned(),
    }
}

/// The answer to `weft status`.
pub fn status<K: Kernel>(node: &Node<K>) -> Status {
    let now = Instant::now();
    let (own, host) = (node.plan.own(), node.plan.host());
    let mut problems = blockers(node);
    let ready = problems.is_empty();
    problems.extend(device_remarks(node));
    problems.extend(node.resumed.clone());
    problems.extend(node.world.conflist.problem());
    problems.extend(node.world.store.remark());
    problems.extend(node.lease_trouble.as_ref().map(|text| format!("own lease: {text}")));
    problems.extend(node.restart_wanted.clone());
    problems.extend(node.sysctl_problems.iter().cloned());
    problems.extend(node.rules_warnings());
    problems.extend(node.plan.problems());
    problems.extend(node.fence_trouble());
    problems.extend(claims::problems(&node.plan));
    problems.extend(node.guard_trouble().map(|text| format!("tunnel guard: {text}")));
    let addresses: Vec<String> = [host.uplink.v4.map(|ip| ip.to_string()), host.uplink.v6.map(|ip| ip.to_string())]
        .into_iter()
        .flatten()
        .collect();
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: node_name(),
        ready,
        problems,
        subnet: own.subnets.to_string(),
        lease_ttl_s: node.ttl.map(|(at, ttl)| ttl.saturating_sub(now - at).as_secs()),
        public: public(&own.attrs),
        network: node.plan.network().networks.to_string(),
        backend: node.plan.network().backend_type.clone(),
        mtu: node.plan.mtu(),
        uplink: format!("{} {} mtu {}", host.uplink.name, addresses.join(" "), host.uplink.mtu),
        store: node.world.store.describe(),
        store_silent_s: (now - node.last_word).as_secs(),
        store_trouble: node.store_trouble.clone(),
        peers: peers(node),
        last_pass: node.last_pass.clone(),
        last_error: node.last_error.clone(),
        audit_interval_s: node.audit_interval.as_secs_f64(),
        full_passes: node.full_passes.iter().map(|(cause, count)| ((*cause).to_owned(), *count)).collect(),
        next_audit_s: node.next_audit.saturating_duration_since(now).as_secs_f64(),
        held: node.hold.len(),
        rules: node.rules_status(),
    }
}

fn public(attrs: &Attrs) -> Vec<String> {
    [attrs.public_ip.map(|ip| ip.to_string()), attrs.public_ipv6.map(|ip| ip.to_string())]
        .into_iter()
        .flatten()
        .collect()
}

fn peers<K: Kernel>(node: &Node<K>) -> Vec<Peer> {
    let (pending, failed) = troubled(node);
    let held: HashSet<&Id> = node.hold.held().collect();
    let state = |lease: &Lease| -> (PeerState, Option<String>) {
        if let Some(reason) = failed.get(&lease.id) {
            (PeerState::Failed, Some(reason.clone()))
        } else if pending.contains(&lease.id) {
            let first = node
                .plan
                .keys(&lease.id)
                .into_iter()
                .filter(|key| !guard::is_of_guard_or_fence(key))
                .find_map(|key| node.passer.pending().get(&key));
            (PeerState::Pending, first.map(|pending| pending.reason.clone()))
        } else if held.contains(&lease.id) {
            (PeerState::Held, Some("gone from the store all of a sudden; kept for the grace time".to_owned()))
        } else if let Some(reason) = node.plan.skipped(&lease.id) {
            (PeerState::SetAside, Some(reason.to_owned()))
        } else {
            (PeerState::Programmed, claims::remark(&node.plan, lease))
        }
    };
    let mut rows: BTreeMap<_, Peer> = BTreeMap::new();
    for lease in node.plan.peers().believed() {
        let (state, reason) = state(lease);
        rows.insert((lease.subnets, lease.id.clone()), row(lease, state, reason));
    }
    for (id, reason, lease) in node.plan.peers().set_aside() {
        let reason = Some(reason.to_owned());
        let peer = match lease {
            Some(lease) => row(lease, PeerState::SetAside, reason),
            None => Peer {
                subnet: id.to_string(),
                public: String::new(),
                backend: String::new(),
                state: PeerState::SetAside,
                reason,
            },
        };
        rows.insert((lease.map(|lease| lease.subnets).unwrap_or_default(), id.clone()), peer);
    }
    rows.into_values().collect()
}

fn row(lease: &Lease, state: PeerState, reason: Option<String>) -> Peer {
    let public = public(&lease.attrs).join(",");
    Peer { subnet: lease.subnets.to_string(), public, backend: lease.attrs.backend_type.clone(), state, reason }
}
