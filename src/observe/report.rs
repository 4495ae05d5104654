// SPDX-License-Identifier: Apache-2.0
//! Turns the values that the node hands out into readiness, metrics, the status of systemd and the condition of the node.

use std::sync::Arc;

use weft_subnet::cidr::Subnets;

use crate::observe::fault::{Fault, FaultKind};
use crate::observe::fault_events::EventReporter;
use crate::observe::metrics::Metrics;
use crate::observe::node_condition::{ConditionReporter, Health};
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::readiness::Readiness;
use crate::observe::status::{PeerState, Status};
use crate::observe::systemd::Notify;

/// Where the leases of the peers come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PeerList {
    /// The store has not sent a complete list yet.
    #[default]
    Missing,
    /// The store cannot be reached, and the peers are those that an earlier run saved. The text says so.
    Saved(String),
    /// The store has sent a complete list.
    Complete,
}

/// Numbers of peers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerCounts {
    /// Peers whose lease is believed.
    pub believed: usize,
    /// Peers with an entry that will be tried again, and none that the kernel refused.
    pub pending: usize,
    /// Peers with an entry that the kernel refused.
    pub failed: usize,
    /// Peers whose lease is gone and that are kept for the grace time.
    pub held: usize,
    /// Leases that are set aside: those that are not believed, and those that are unplanned.
    pub set_aside: usize,
    /// Believed leases for which not all entries could be planned.
    pub unplanned: usize,
    /// Peers that packets do not reach, as probes found.
    pub unreachable: usize,
    /// Peers to which packets go in clear text although the backend of this node encrypts. Each of them is also counted by its state.
    pub in_clear_text: usize,
}

/// The state of a node after an event. To make one costs nothing for each peer, unless entries have just failed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeState {
    /// The node's own subnets.
    pub subnets: Subnets,
    /// The type of its backend.
    pub backend: String,
    /// Where the leases of the peers come from.
    pub peer_list: PeerList,
    /// Numbers of peers.
    pub peers: PeerCounts,
    /// What is wrong with this node itself, whatever the store and the peers do.
    pub faults: Vec<Fault>,
    /// Set while the own lease is missing from the store. The node goes on meanwhile.
    pub lease_missing: Option<String>,
    /// The store does not answer.
    pub store_fails: bool,
}

impl NodeState {
    /// Returns why the node is not ready, in words. With saved peers it is ready, as an agent that ran before the store failed.
    pub fn blockers(&self) -> Vec<String> {
        self.problems().map(|problem| problem.text).collect()
    }

    /// Returns why the node is not ready.
    pub fn problems(&self) -> impl Iterator<Item = Problem> {
        let list = (self.peer_list == PeerList::Missing)
            .then(|| Problem::new(ProblemKind::PeerList, "no complete list of leases from the store yet"));
        list.into_iter().chain(self.faults.iter().map(|fault| Problem::new(fault.kind.into(), &fault.text)))
    }

    /// Returns true if pods may start. That is so when the node is ready, and also when it lacks only the list of leases
    /// and the store does not answer. If the store answers, the list comes in a moment, so the pods wait for it.
    pub fn pods_may_start(&self) -> bool {
        self.faults.is_empty() && (self.peer_list != PeerList::Missing || self.store_fails)
    }

    /// Returns what is reported to the store about the network of this node.
    fn health(&self) -> Health {
        let faults: Vec<&str> = self.lasting().map(|(_, text)| text).collect();
        if !faults.is_empty() {
            return Health::Unwell(faults.join("; "));
        }
        // Without a list from the store, nothing is known about whether peers can be reached.
        if self.peer_list == PeerList::Complete { Health::Well } else { Health::Unknown }
    }

    /// Returns the faults of this node, and the missing lease.
    fn lasting(&self) -> impl Iterator<Item = (FaultKind, &str)> {
        let missing = self.lease_missing.as_deref().map(|text| (FaultKind::LeaseMissing, text));
        self.faults.iter().map(|fault| (fault.kind, fault.text.as_str())).chain(missing)
    }

    /// Returns one line for systemd: the first problem, or what the node does.
    fn line(&self, blockers: &[String]) -> String {
        match (blockers.first(), &self.peer_list) {
            (Some(blocker), _) => blocker.clone(),
            (None, PeerList::Saved(text)) => text.clone(),
            (None, _) => format!("subnet {}, {} peers, {}", self.subnets, self.peers.believed, self.backend),
        }
    }
}

/// The places where the state of the node is shown.
#[derive(Debug)]
pub struct Reporter {
    /// The state behind /readyz.
    pub readiness: Readiness,
    /// The numbers behind /metrics.
    pub metrics: Arc<Metrics>,
    /// The connection to systemd.
    pub notify: Notify,
    /// The report to the store.
    pub condition: ConditionReporter,
    /// The notices of lasting faults in the store.
    pub events: EventReporter,
}

impl Reporter {
    /// Brings readiness, metrics, systemd's status and the report to the store up to date.
    pub fn publish(&mut self, state: &NodeState) {
        let blockers = state.blockers();
        let (ready, line) = (blockers.is_empty(), state.line(&blockers));
        if self.readiness.set(blockers) {
            if ready {
                tracing::info!(subnet = %state.subnets, peers = state.peers.believed, "ready");
            } else {
                tracing::warn!(reason = line, "not ready");
            }
        }
        if ready {
            self.notify.ready();
        }
        self.condition.set(state.health());
        let lasting = state.lasting().map(|(kind, text)| Fault { kind, text: text.to_owned() });
        self.events.set(&lasting.collect::<Vec<_>>());
        self.notify.status(&line);
        let peers = state.peers;
        let troubled = peers.pending + peers.failed + peers.held + peers.unplanned + peers.unreachable;
        for (state, count) in [
            (PeerState::Pending, peers.pending),
            (PeerState::Failed, peers.failed),
            (PeerState::Held, peers.held),
            (PeerState::SetAside, peers.set_aside),
            (PeerState::Unreachable, peers.unreachable),
            (PeerState::Programmed, peers.believed.saturating_sub(troubled)),
        ] {
            self.metrics.peers(state, count);
        }
        self.metrics.peers_not_encrypted(peers.in_clear_text);
    }
}

/// Returns the host's name.
pub fn node_name() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns the answer to `weft status` before the agent has a lease. `reasons` say why it has none.
pub fn starting(store: String, reasons: Vec<String>, remarks: Vec<String>) -> Status {
    let (version, problems) =
        (env!("CARGO_PKG_VERSION").to_owned(), Problem::each(ProblemKind::Start, reasons).collect());
    Status { version, node: node_name(), problems, remarks, store, ..Status::default() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::net::UnixDatagram;
    use std::rc::Rc;
    use std::time::Duration;

    use tokio::task::LocalSet;
    use tokio::time::{Instant, sleep};
    use weft_backends::register::TYPES;
    use weft_subnet::dir::DirStore;
    use weft_subnet::source::Source;

    use super::*;
    use crate::log::tests::{Output, text_of};
    use crate::observe::fault_events::tests::event_reporter;
    use crate::observe::node_condition::tests::condition;

    fn ready() -> NodeState {
        NodeState { peer_list: PeerList::Complete, ..NodeState::default() }
    }

    fn with_fault() -> NodeState {
        NodeState { faults: vec![Fault { kind: FaultKind::Device, text: "no device".to_owned() }], ..ready() }
    }

    #[test]
    fn readiness_needs_a_list_of_leases_or_saved_peers_and_no_fault() {
        let saved = NodeState { peer_list: PeerList::Saved("saved peers".to_owned()), ..ready() };
        assert!(ready().blockers().is_empty() && saved.blockers().is_empty());
        assert_eq!(with_fault().blockers(), ["no device"]);
        let blockers = NodeState { peer_list: PeerList::Missing, ..with_fault() }.blockers();
        assert_eq!(blockers, ["no complete list of leases from the store yet", "no device"]);
    }

    /// A peer has one state, so the numbers together are those of all leases.
    #[tokio::test]
    async fn each_number_of_peers_is_published_under_its_state_and_systemd_gets_a_line() {
        let publishing = async {
            let dir = tempfile::tempdir().unwrap();
            let store: Rc<dyn Source> = Rc::new(DirStore::new(dir.path().into(), TYPES));
            let path = dir.path().join("notify");
            let systemd = UnixDatagram::bind(&path).unwrap();
            systemd.set_nonblocking(true).unwrap();
            let mut reporter = Reporter {
                readiness: Readiness::new(),
                metrics: Arc::new(Metrics::new()),
                notify: Notify::to(&path).unwrap(),
                condition: ConditionReporter::new(store.clone(), Duration::from_secs(60)),
                events: EventReporter::new(store),
            };
            let peers = PeerCounts {
                believed: 100,
                pending: 1,
                failed: 2,
                held: 3,
                set_aside: 40,
                unplanned: 5,
                unreachable: 6,
                in_clear_text: 7,
            };
            let (subnets, backend) = (Subnets::from_key("10.5.1.0-24").unwrap(), "vxlan".to_owned());
            reporter.publish(&NodeState { subnets, backend, peers, ..ready() });
            assert!(reporter.readiness.is_ready());
            let text = reporter.metrics.render(Instant::now());
            let states = ["programmed", "pending", "failed", "held", "set-aside", "unreachable"];
            for (state, count) in states.into_iter().zip([83, 1, 2, 3, 40, 6]) {
                let line = format!("weft_peers{{state=\"{state}\"}} {count}\n");
                assert!(text.contains(&line), "{line} is missing in\n{text}");
            }
            assert!(text.contains("weft_peers_not_encrypted 7\n"), "{text}");
            let received = || {
                let mut buffer = [0; 128];
                let length = systemd.recv(&mut buffer).unwrap();
                String::from_utf8_lossy(&buffer[..length]).into_owned()
            };
            assert_eq!(received(), "READY=1\n");
            assert_eq!(received(), "STATUS=subnet 10.5.1.0/24, 100 peers, vxlan\n");
            reporter.publish(&with_fault());
            assert_eq!(reporter.readiness.reasons(), ["no device"]);
        };
        LocalSet::new().run_until(publishing).await;
    }

    #[tokio::test(start_paused = true)]
    async fn faults_and_a_missing_lease_are_told_to_the_store_as_condition_and_as_notices_until_they_end() {
        let publishing = async {
            let ((condition, reports), (events, notices)) = (condition(0), event_reporter());
            let (readiness, metrics, notify) = (Readiness::new(), Arc::new(Metrics::new()), Notify::default());
            let mut reporter = Reporter { readiness, metrics, notify, condition, events };
            reporter.publish(&NodeState { lease_missing: Some("own lease is gone".to_owned()), ..with_fault() });
            sleep(Duration::from_secs(900)).await;
            let reported = |what: Option<&str>| {
                let last = reports.borrow().last().cloned();
                last.is_some_and(|(_, fault)| fault.as_deref() == what)
            };
            let take = || {
                let taken = notices.borrow_mut().split_off(0);
                taken.iter().map(|(_, notice)| notice.reason()).collect::<BTreeSet<String>>()
            };
            assert!(reported(Some("no device; own lease is gone")), "{reports:?}");
            assert_eq!(take(), BTreeSet::from(["DeviceFault", "LeaseMissing"].map(str::to_owned)));
            reporter.publish(&ready());
            sleep(Duration::from_secs(1)).await;
            assert!(reported(None), "{reports:?}");
            assert_eq!(take(), BTreeSet::from(["DeviceFaultEnded", "LeaseMissingEnded"].map(str::to_owned)));
        };
        LocalSet::new().run_until(publishing).await;
    }

    #[test]
    fn the_line_for_systemd_is_the_first_problem_or_says_where_the_peers_come_from() {
        let line = |state: NodeState| state.line(&state.blockers());
        assert_eq!(line(with_fault()), "no device");
        let saved = PeerList::Saved("the store is away: peers of 12:00".to_owned());
        assert_eq!(line(NodeState { peer_list: saved.clone(), ..ready() }), "the store is away: peers of 12:00");
        assert_eq!(line(NodeState { peer_list: saved, ..with_fault() }), "no device");
    }

    #[test]
    fn pods_wait_for_a_list_unless_the_store_does_not_answer() {
        let without_list = NodeState::default();
        assert!(ready().pods_may_start() && !without_list.pods_may_start());
        assert!(NodeState { store_fails: true, ..without_list }.pods_may_start());
        assert!(!NodeState { store_fails: true, ..with_fault() }.pods_may_start());
        let saved = PeerList::Saved("saved peers".to_owned());
        let saved = NodeState { peer_list: saved, store_fails: true, ..with_fault() };
        assert!(!saved.pods_may_start(), "saved peers do not make up for a fault of the node");
    }

    #[test]
    fn a_fault_is_reported_to_the_store_even_while_the_list_is_missing() {
        assert_eq!(ready().health(), Health::Well);
        assert_eq!(NodeState::default().health(), Health::Unknown);
        let saved = NodeState { peer_list: PeerList::Saved("saved peers".to_owned()), ..ready() };
        assert_eq!(saved.health(), Health::Unknown);
        let state = NodeState { lease_missing: Some("own lease is gone".to_owned()), ..with_fault() };
        assert_eq!(state.health(), Health::Unwell("no device; own lease is gone".to_owned()));
        assert_eq!(state.blockers(), ["no device"], "a missing lease alone does not make the node unready");
    }

    /// systemd starts what comes after the agent only then.
    #[tokio::test]
    async fn systemd_is_not_told_that_the_agent_is_ready_before_the_node_is() {
        let publishing = async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("notify");
            let systemd = UnixDatagram::bind(&path).unwrap();
            systemd.set_nonblocking(true).unwrap();
            let ((condition, _), (events, _)) = (condition(0), event_reporter());
            let (readiness, metrics, notify) = (Readiness::new(), Arc::new(Metrics::new()), Notify::to(&path).unwrap());
            let mut reporter = Reporter { readiness, metrics, notify, condition, events };
            let received = || {
                let mut buffer = [0; 128];
                let length = systemd.recv(&mut buffer).ok()?;
                Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
            };
            reporter.publish(&with_fault());
            assert_eq!(received().as_deref(), Some("STATUS=no device\n"));
            assert_eq!(received(), None);
            reporter.publish(&ready());
            assert_eq!(received().as_deref(), Some("READY=1\n"));
        };
        LocalSet::new().run_until(publishing).await;
    }

    /// The state is published after every event.
    #[tokio::test]
    async fn the_log_says_once_that_the_node_is_ready_and_once_that_it_is_not_any_more() {
        let output = Output::default();
        let lines = tracing_subscriber::fmt().with_writer(output.writer()).finish();
        let _guard = tracing::subscriber::set_default(lines);
        let publishing = async {
            let ((condition, _), (events, _)) = (condition(0), event_reporter());
            let (readiness, metrics, notify) = (Readiness::new(), Arc::new(Metrics::new()), Notify::default());
            let mut reporter = Reporter { readiness, metrics, notify, condition, events };
            for state in [with_fault(), ready(), ready(), with_fault(), with_fault()] {
                reporter.publish(&state);
            }
        };
        LocalSet::new().run_until(publishing).await;
        let text = text_of(&output);
        let is_said = |words: &str| text.lines().filter(|line| line.contains(words)).count();
        assert_eq!((is_said("report: ready "), is_said("report: not ready ")), (1, 1), "{text}");
        assert!(text.contains("no device"), "{text}");
    }
}
