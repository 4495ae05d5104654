// SPDX-License-Identifier: Apache-2.0
//! The tunnel of the backend udp, which the agent itself carries packets through. [`crate::data_path`] runs it.

use std::os::fd::AsFd;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::time::Instant;
use weft_backends::state::Key;
use weft_backends::tunnel::Tunnel;
use weft_udp::counters::{Direction, Reason};

use super::Node;
use crate::data_path::{DataPath, Earlier, Handover, Wanted};
use crate::kernel::Kernel;
use crate::observe::status::{TunnelCounts, TunnelStatus};
use crate::observe::systemd::Notify as Systemd;

/// The names under which systemd keeps the descriptors of the tunnel.
const DEVICE: &str = "tunnel-device";
const SOCKET: &str = "tunnel-socket";

/// Returns a data path that takes over the descriptors that systemd kept.
pub(super) fn at_start(systemd: &mut Systemd) -> DataPath {
    let earlier =
        Earlier { device: systemd.take_kept(DEVICE), sockets: systemd.take_kept(SOCKET).into_iter().collect() };
    DataPath::new(systemd.is_connected(), earlier)
}

/// Tells systemd what to do with the descriptors of the tunnel. Of several sockets it keeps the one on the port of this node, because units have
/// room for two descriptors. Returns false if its queue is full.
fn tell(systemd: &Systemd, handover: &Handover) -> bool {
    match handover {
        Handover::Keep(all) => {
            let socket = all.sockets.first();
            systemd.keep(DEVICE, all.device.as_fd()) && socket.is_none_or(|fd| systemd.keep(SOCKET, fd.as_fd()))
        }
        Handover::Forget => systemd.forget(DEVICE) && systemd.forget(SOCKET),
    }
}

impl<K: Kernel> Node<K> {
    /// Brings the tunnel up to date with the plan: starts it, replaces its table of peers, or ends it. The loop calls this once after
    /// every event.
    pub fn update_data_path(&mut self) {
        let plan = &self.plan;
        let peers = || plan.tunnel_peers().collect();
        let planned = plan.tunnel().map(|planned| planned.tunnel);
        let tunnel = planned.filter(|tunnel| self.may_carry(tunnel));
        let wanted = tunnel.map(|tunnel| Wanted {
            tunnel,
            more_ports: plan.more_tunnel_ports(),
            version: plan.peers_version(),
            peers: &peers,
        });
        if wanted.is_some() {
            self.context.reporter.metrics.tunnel(self.data_path.counters());
        }
        self.data_path.update(wanted.as_ref(), Instant::now());
        if planned.is_none() {
            self.data_path.forget();
        }
        if let Some(handover) = self.data_path.take_handover()
            && !tell(&self.context.reporter.notify, &handover)
        {
            self.data_path.hand_over_later(handover);
        }
    }

    /// Returns what is notified when the tunnel has ended because of a fault.
    pub fn tunnel_ended(&self) -> Arc<Notify> {
        self.data_path.ended()
    }

    /// Returns true if the tunnel may run. Before the peers are known, it would tell pods that their peers cannot be reached. And a
    /// device that was refused may belong to another agent of this host.
    fn may_carry(&self, tunnel: &Tunnel) -> bool {
        let link = self.passer.pending().get(&Key::Link(tunnel.device));
        self.knows_peers() && link.is_none_or(|pending| pending.stands)
    }

    /// Returns why the tunnel carries no packets, if so. Nothing depends yet on the tunnel of a backend that our lease does not name.
    pub(super) fn tunnel_problem(&self) -> Option<String> {
        let problem = self.data_path.problem()?;
        let is_next = self.plan.tunnel().is_some_and(|planned| planned.is_next);
        (!is_next).then(|| format!("tunnel: {problem}"))
    }

    /// Starts the tunnel of the next backend, if it has one. If another backend has a tunnel, too, the next one takes over its device when our
    /// lease names it, so only its port is opened here. Returns why it will carry no packets, if so.
    pub(super) fn next_tunnel_problem(&mut self) -> Option<String> {
        let next = self.plan.next_tunnel()?;
        if self.plan.tunnel().is_some_and(|planned| !planned.is_next) {
            return self.data_path.reserve(&next).err().map(|error| error.to_string());
        }
        self.update_data_path();
        let problem = self.data_path.problem().map(str::to_owned);
        problem.or_else(|| self.data_path.running().is_none().then(|| "the tunnel does not run yet".to_owned()))
    }

    /// Returns the tunnel for `weft status`, or `None` if the backend has none.
    pub(super) fn tunnel_status(&self) -> Option<TunnelStatus> {
        let tunnel = self.plan.tunnel()?.tunnel;
        let counters = self.data_path.counters();
        Some(TunnelStatus {
            device: tunnel.device.to_string(),
            socket: format!("{}:{}", tunnel.local, tunnel.port),
            running: self.data_path.running().is_some(),
            peers: self.data_path.running().map_or(0, |(_, peers)| peers),
            starts: self.data_path.starts(),
            sent: counts(&counters.sent),
            received: counts(&counters.received),
        })
    }
}

fn counts(direction: &Direction) -> TunnelCounts {
    let dropped = Reason::ALL.iter().map(|reason| (reason.label().to_owned(), direction.dropped(*reason)));
    TunnelCounts {
        packets: direction.packets(),
        bytes: direction.bytes(),
        dropped: dropped.filter(|(_, count)| *count > 0).collect(),
    }
}
