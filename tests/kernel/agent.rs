// SPDX-License-Identifier: Apache-2.0
//! The loop of the agent with the real kernel and a monitor that the test controls. It shows what the agent does when notifications of
//! the kernel are missing or lost, or cannot be read. In other tests they always arrive.

use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::LocalSet;
use weft::kernel::{Monitor, Notice};
use weft::observe::socket;
use weft::observe::status::Status;
use weft::options::{Options, Store, UplinkChoice};
use weft_subnet::dir::DirStore;

use super::adapter_net::{alone, ip, kernel};
use crate::namespace::add_uplink;
use crate::patience::PATIENCE;

/// The notices that the monitor will return. After the last one it waits forever.
type Notices = mpsc::UnboundedReceiver<io::Result<Vec<Notice>>>;

struct Controlled(Notices);

impl Monitor for Controlled {
    async fn next(&mut self) -> io::Result<Vec<Notice>> {
        match self.0.recv().await {
            Some(notices) => notices,
            None => pending().await,
        }
    }
}

/// An agent in a thread of its own, in this thread's network namespace.
struct Agent {
    socket: PathBuf,
    notices: mpsc::UnboundedSender<io::Result<Vec<Notice>>>,
}

impl Agent {
    /// Returns the status, or `None` if the agent does not answer.
    fn status(&self) -> Option<Status> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(socket::ask_status(&self.socket)).ok()
    }

    fn until(&self, what: &str, reached: impl Fn(&Agent) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !reached(self) {
            assert!(Instant::now() < deadline, "waited for {what}: {:#?}", self.status());
        }
    }

    /// Asks until there is an answer: on a busy machine it may come too late for the one who asked.
    fn answer(&self) -> Status {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.status() {
                return status;
            }
            assert!(Instant::now() < deadline, "the agent gives no status");
        }
    }

    fn full_passes(&self, cause: &str) -> u64 {
        self.answer().full_passes.get(cause).copied().unwrap_or(0)
    }
}

const ROUTE: &str = "10.5.2.0/24";

fn route_is_there() -> bool {
    ip("-4 route").contains(ROUTE)
}

fn options(dir: &Path, resync: Duration) -> Options {
    Options {
        store: Store::Dir(dir.join("store")),
        uplink: UplinkChoice { ifaces: vec!["up0".to_owned()], ..UplinkChoice::default() },
        resync,
        hold_removals: Duration::ZERO,
        ..Options::minimal(dir)
    }
}

/// Writes the lease of the peer with this number. A lease of udp names no type.
fn put_peer(dir: &Path, number: u8, backend: &str) {
    let kind = if backend == "udp" { "" } else { backend };
    let peer = format!(r#"{{"PublicIP":"10.0.0.{number}","BackendType":"{kind}","Created":{number}}}"#);
    std::fs::write(dir.join(format!("store/subnets/10.5.{number}.0-24.json")), peer).unwrap();
}

/// Runs a test with a ready host-gw agent that has one peer. Its monitor returns only what the test sends.
fn with_agent(resync: Duration, test: impl FnOnce(&Agent) + Send) {
    let options = |dir: &Path| options(dir, resync);
    with_agent_of("host-gw", options, |agent| {
        assert!(route_is_there(), "{}", ip("-4 route"));
        test(agent);
    });
}

/// Does the same for an agent with this backend and these options.
fn with_agent_of(backend: &str, options: impl FnOnce(&Path) -> Options + Send, test: impl FnOnce(&Agent) + Send) {
    alone(|| {
        ip("link set lo up");
        add_uplink();
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("store/subnets")).unwrap();
        let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{backend}"}}}}"#);
        std::fs::write(dir.path().join("store/config.json"), config).unwrap();
        put_peer(dir.path(), 2, backend);
        let (notices, received) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let options = options(dir.path());
        let agent = Agent { socket: options.socket.clone(), notices };
        std::thread::scope(|scope| {
            let running = scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let Store::Dir(store) = options.store.clone() else { unreachable!() };
                let store = Rc::new(DirStore::new(store, weft_backends::register::TYPES));
                let end = async { drop(stopped.await) };
                let agent = weft::agent::serve(options, store, kernel(true), Controlled(received), end);
                LocalSet::new().block_on(&runtime, agent).unwrap();
            });
            let tested = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                agent.until("readiness", |agent| agent.status().is_some_and(|status| status.ready));
                test(&agent);
            }));
            drop(stop);
            running.join().unwrap();
            tested.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
    });
}

#[test]
fn the_audit_repairs_what_was_changed_without_a_notification() {
    with_agent(Duration::from_millis(200), |agent| {
        ip(&format!("route del {ROUTE}"));
        agent.until("the audit to repair the route", |_| route_is_there());
        assert!(agent.full_passes("audit") > 0 && agent.full_passes("kernel") == 0, "{:?}", agent.status());
    });
}

#[test]
fn without_notifications_and_audits_nothing_is_repaired() {
    // The control of the two other tests: it shows that their repair has no other cause.
    with_agent(Duration::from_secs(3600), |agent| {
        ip(&format!("route del {ROUTE}"));
        let before = agent.answer().full_passes;
        // The agent answers all these requests, so its loop runs. It has no reason to compare anything.
        (0..50).for_each(|_| drop(agent.answer()));
        assert!(!route_is_there());
        assert_eq!(agent.answer().full_passes, before);
    });
}

#[test]
fn everything_is_compared_when_notifications_are_lost_or_cannot_be_read() {
    with_agent(Duration::from_secs(3600), |agent| {
        for notice in [Ok(vec![Notice::Lost]), Err(io::Error::from(io::ErrorKind::UnexpectedEof))] {
            let before = agent.full_passes("kernel");
            ip(&format!("route del {ROUTE}"));
            agent.notices.send(notice).unwrap();
            agent.until("the route to come back", |_| route_is_there());
            agent.until("the full pass to be counted", |agent| agent.full_passes("kernel") == before + 1);
        }
    });
}

/// The peer is a lease without a node, so nobody answers. Even that is known only if the loop takes the results of the probes.
#[test]
fn the_results_of_probes_reach_the_status() {
    let probing = |dir: &Path| Options { probe: true, ..options(dir, Duration::from_secs(3600)) };
    with_agent_of("host-gw", probing, |agent| {
        agent.until("a result", |agent| {
            let probe = agent.status().and_then(|status| status.peers.first()?.probe.clone());
            probe.is_some_and(|probe| probe.address == "10.0.0.2" && probe.asked > 0 && probe.lost == probe.asked)
        });
    });
}

/// The agent itself carries the packets of udp, so its loop must start the tunnel, give it the peers that come, and start it again.
#[test]
fn the_tunnel_of_udp_gets_its_peers_and_is_started_again() {
    let options = |dir: &Path| options(dir, Duration::from_secs(3600));
    with_agent_of("udp", options, |agent| {
        let tunnel = |agent: &Agent| agent.status()?.tunnel;
        agent.until("the tunnel", |agent| tunnel(agent).is_some_and(|tunnel| tunnel.running && tunnel.peers == 1));
        put_peer(agent.socket.parent().unwrap(), 3, "udp");
        agent.until("the second peer", |agent| tunnel(agent).is_some_and(|tunnel| tunnel.peers == 2));
        ip("link del flannel0");
        agent.notices.send(Ok(vec![Notice::Links])).unwrap();
        let is_back = |agent: &Agent| tunnel(agent).is_some_and(|tunnel| tunnel.running && tunnel.starts > 1);
        agent.until("the tunnel to come back", is_back);
    });
}
