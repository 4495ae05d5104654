// SPDX-License-Identifier: Apache-2.0
//! Runs the tunnel of the backend udp (the crate weft-udp), which carries packets in two threads of the agent. It is started when its
//! device stands, gets the table of peers after their leases changed, and is started again when it ended because of a fault.
//!
//! The device is persistent: it stays with its address and its route when the tunnel, or the agent, ends. If the service manager keeps the
//! descriptors of the tunnel ([`Handover`]), packets wait in the kernel for the tunnel of the next process, and none is lost.

use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::net::if_::if_nametoindex;
use tokio::sync::Notify;
use tokio::time::Instant;
use weft_backends::tunnel::{Tunnel, TunnelPeer};
use weft_subnet::retry::Backoff;
use weft_udp::counters::Counters;
use weft_udp::{Config, Descriptors, Device, Peer, Routes};

/// The pauses after failures.
const BACKOFF: Backoff = Backoff::without_jitter(Duration::from_secs(1), Duration::from_secs(30));
/// A tunnel that ran for this time is started again without a pause.
const STEADY: Duration = Duration::from_secs(30);
/// The pause between two tables of peers, as a multiple of the time that it took to make one. With 50,000 peers a table takes
/// milliseconds, and leases may change all the time.
const TABLE_PAUSE: u32 = 9;

/// What the data path is to do.
pub struct Wanted<'a> {
    /// The tunnel.
    pub tunnel: Tunnel,
    /// The other ports to which peers may send while the port changes.
    pub more_ports: Vec<u16>,
    /// The version of the peers. Only if it is another one than before, the peers are asked for.
    pub version: u64,
    /// Returns the peers.
    pub peers: &'a dyn Fn() -> Vec<TunnelPeer>,
}

/// The descriptors of an earlier tunnel.
#[derive(Debug, Default)]
pub struct Earlier {
    /// The TUN device.
    pub device: Option<OwnedFd>,
    /// The UDP sockets.
    pub sockets: Vec<OwnedFd>,
}

/// What the service manager is to do with the descriptors of the tunnel.
#[derive(Debug)]
pub enum Handover {
    /// It keeps these for the next process.
    Keep(Descriptors),
    /// It closes what it keeps.
    Forget,
}

/// The tunnel, and what is known of its failures.
#[derive(Debug, Default)]
pub struct DataPath {
    running: Option<Running>,
    /// What the next tunnel takes over. A device has one descriptor that works, so the tunnel cannot open it while the service manager keeps
    /// another one.
    earlier: Earlier,
    /// The socket of a tunnel that will replace the running one ([`DataPath::reserve`]).
    reserved: Option<UdpSocket>,
    /// True if there is a service manager that may keep descriptors.
    is_managed: bool,
    handover: Option<Handover>,
    /// All tunnels of this agent count here.
    counters: Arc<Counters>,
    ended: Arc<Notify>,
    problem: Option<String>,
    /// Failures without a tunnel that ran for [`STEADY`] in between.
    failures: u32,
    retry_at: Option<Instant>,
    starts: u64,
}

/// A tunnel that was started.
#[derive(Debug)]
struct Running {
    tunnel: weft_udp::Tunnel,
    described: Tunnel,
    more_ports: Vec<u16>,
    since: Instant,
    /// Number of peers in its table.
    peers: usize,
    /// Version of the peers in its table.
    version: u64,
    /// The table is older than the leases, and is replaced at `next_table`.
    outdated: bool,
    next_table: Instant,
    /// When the refused ones of the other ports are tried again. `None` if all are open.
    ports_at: Option<Instant>,
    /// How often they were tried again.
    port_tries: u32,
}

impl DataPath {
    /// Returns a data path under a service manager, if there `is_managed` one, that kept these descriptors of an earlier process.
    pub fn new(is_managed: bool, earlier: Earlier) -> DataPath {
        DataPath { is_managed, earlier, ..DataPath::default() }
    }

    /// Returns what the service manager is to do, once. [`DataPath::hand_over_later`] takes back what it could not be told.
    pub fn take_handover(&mut self) -> Option<Handover> {
        self.handover.take()
    }

    /// Asks for this again, unless something else is wanted by now.
    pub fn hand_over_later(&mut self, handover: Handover) {
        self.handover.get_or_insert(handover);
    }

    /// No tunnel is wanted in the future, so nothing is kept for one.
    pub fn forget(&mut self) {
        self.reserved = None;
        let Earlier { device, sockets } = std::mem::take(&mut self.earlier);
        if device.is_some() || !sockets.is_empty() {
            self.handover = Some(Handover::Forget);
        }
    }

    /// Brings the tunnel into the wanted state. With `None` it ends. This costs nothing while nothing has changed.
    pub fn update(&mut self, wanted: Option<&Wanted<'_>>, now: Instant) {
        let Some(wanted) = wanted else { return self.stop() };
        self.record_end(now);
        // A socket cannot be bound to another address, so another tunnel takes over the device, and packets wait in it meanwhile.
        if let Some(other) = self.running.take_if(|running| !running.is_as_wanted(wanted)) {
            self.keep_descriptors(&other);
        }
        self.retry_ports(now);
        match &mut self.running {
            Some(running) => running.update_peers(wanted, now),
            None if self.retry_at.is_none_or(|at| at <= now) => self.start(wanted, now),
            None => {}
        }
    }

    /// Ends the tunnel, and forgets its failures. The device stays.
    pub fn stop(&mut self) {
        if let Some(running) = self.running.take()
            && self.is_managed
        {
            self.keep_descriptors(&running);
        }
        (self.problem, self.failures, self.retry_at) = (None, 0, None);
    }

    /// Opens the socket of the `next` tunnel, which is to take over the device of the running one. So peers may send to it before that.
    ///
    /// # Errors
    /// Its address and port cannot be used.
    pub fn reserve(&mut self, next: &Tunnel) -> Result<(), weft_udp::Error> {
        self.reserved = None;
        if self.running.as_ref().is_some_and(|running| running.listens_as(next)) {
            return Ok(());
        }
        let address = SocketAddrV4::new(next.local, next.port);
        let socket = UdpSocket::bind(address).map_err(|source| weft_udp::Error::Socket { address, source })?;
        self.reserved = Some(socket);
        Ok(())
    }

    /// Returns when to call [`DataPath::update`], besides after every event.
    pub fn next(&self) -> Option<Instant> {
        match &self.running {
            Some(running) => running.next(),
            None => self.retry_at,
        }
    }

    /// Returns what is notified when the tunnel has ended. Call [`DataPath::update`] then.
    pub fn ended(&self) -> Arc<Notify> {
        self.ended.clone()
    }

    /// Returns why no packets are carried, if so.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Describes the other ports that the running tunnel could not open. They are tried again.
    pub fn port_problems(&self) -> impl Iterator<Item = String> {
        let refused = self.running.iter().flat_map(|running| running.tunnel.refused());
        refused
            .map(|error| format!("peers that have not followed the change of the port do not reach this node: {error}"))
    }

    /// Returns the running tunnel and the number of peers in its table.
    pub fn running(&self) -> Option<(Tunnel, usize)> {
        self.running.as_ref().map(|running| (running.described, running.peers))
    }

    /// Returns how often a tunnel was started.
    pub fn starts(&self) -> u64 {
        self.starts
    }

    /// Returns the counters, which go on from one tunnel to the next.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Keeps the descriptors of a tunnel that ends for the next one.
    fn keep_descriptors(&mut self, running: &Running) {
        if let Ok(Descriptors { device, sockets }) = running.tunnel.descriptors() {
            self.earlier = Earlier { device: Some(device), sockets };
        }
    }

    /// Tries the other ports again that were refused. If one of them can be opened by now, the running tunnel ends, and the next one takes over
    /// its socket.
    fn retry_ports(&mut self, now: Instant) {
        let Some(running) = self.running.as_mut().filter(|running| running.ports_at.is_some_and(|at| at <= now)) else {
            return;
        };
        let opened = running.open_refused();
        if opened.is_empty() {
            running.port_tries += 1;
            running.ports_at = Some(now + BACKOFF.nth(running.port_tries));
            return;
        }
        if let Some(running) = self.running.take() {
            self.keep_descriptors(&running);
        }
        self.earlier.sockets.extend(opened);
    }

    fn start(&mut self, wanted: &Wanted<'_>, now: Instant) {
        let name = wanted.tunnel.device;
        if if_nametoindex(name.as_bytes()).is_err() {
            // To open the device would create it, without its attributes. The pass that creates it is followed by an update.
            self.problem = Some(format!("the device {name} does not exist yet"));
            // A time that is over would wake up the loop again at once, as long as the device is missing.
            self.retry_at = None;
            return;
        }
        let mut earlier = std::mem::take(&mut self.earlier);
        earlier.sockets.extend(self.reserved.take().map(OwnedFd::from));
        match Running::start(wanted, (&self.counters, self.ended.clone()), earlier, now) {
            Ok(running) => {
                tracing::info!(tunnel = %wanted.tunnel, peers = running.peers, "the tunnel carries packets");
                if self.is_managed {
                    self.handover = running.tunnel.descriptors().ok().map(Handover::Keep);
                }
                self.running = Some(running);
                for problem in self.port_problems() {
                    tracing::warn!("{problem}");
                }
                self.starts += 1;
                (self.problem, self.retry_at) = (None, None);
            }
            Err(error) => self.record_failure(error.to_string(), now),
        }
    }

    fn record_end(&mut self, now: Instant) {
        let Some(Running { tunnel, since, .. }) = self.running.take_if(|running| running.tunnel.has_ended()) else {
            return;
        };
        let cause = tunnel.stop().err().map_or_else(|| "its threads ended".to_owned(), |error| error.to_string());
        let was_steady = now.saturating_duration_since(since) >= STEADY;
        if was_steady {
            self.failures = 0;
        }
        self.record_failure(cause, now);
        if was_steady {
            self.retry_at = None;
        }
    }

    fn record_failure(&mut self, cause: String, now: Instant) {
        if self.is_managed {
            // A descriptor that the service manager keeps may be the reason.
            self.handover = Some(Handover::Forget);
        }
        let pause = BACKOFF.nth(self.failures);
        if self.problem.as_ref() != Some(&cause) {
            tracing::warn!("the tunnel carries no packets: {cause}");
        }
        self.failures += 1;
        (self.problem, self.retry_at) = (Some(cause), Some(now + pause));
    }
}

impl Running {
    fn start(
        wanted: &Wanted<'_>,
        (counters, ended): (&Arc<Counters>, Arc<Notify>),
        earlier: Earlier,
        now: Instant,
    ) -> Result<Running, weft_udp::Error> {
        let Tunnel { device, mtu, local, port, subnet } = wanted.tunnel;
        let adopted = earlier.device.and_then(|fd| adopt(fd, &device.text()));
        let device = adopted.map_or_else(|| Device::open(&device.text()), Ok)?;
        let more_ports = wanted.more_ports.clone();
        let config = Config {
            device,
            uplink: local,
            port,
            more_ports: more_ports.clone(),
            subnet,
            mtu,
            sockets: earlier.sockets,
            counters: counters.clone(),
        };
        let Table { routes, peers, took } = table(wanted);
        let tunnel = weft_udp::Tunnel::start(config, routes, move || ended.notify_one())?;
        let next_table = now + took * TABLE_PAUSE;
        let (described, version) = (wanted.tunnel, wanted.version);
        let ports_at = (!tunnel.refused().is_empty()).then(|| now + BACKOFF.nth(0));
        Ok(Running {
            tunnel,
            described,
            more_ports,
            since: now,
            peers,
            version,
            outdated: false,
            next_table,
            ports_at,
            port_tries: 0,
        })
    }

    /// Returns when it has something to do.
    fn next(&self) -> Option<Instant> {
        let table = self.outdated.then_some(self.next_table);
        table.into_iter().chain(self.ports_at).min()
    }

    /// Opens the sockets of those of the other ports that were refused and can be opened now.
    fn open_refused(&self) -> Vec<OwnedFd> {
        let refused = self.more_ports.iter().filter(|port| !self.tunnel.listens_on(**port));
        let open = |port: &u16| UdpSocket::bind(SocketAddrV4::new(self.described.local, *port)).ok();
        refused.filter_map(open).map(OwnedFd::from).collect()
    }

    /// Returns true if this is the wanted tunnel, with whatever peers.
    fn is_as_wanted(&self, wanted: &Wanted<'_>) -> bool {
        self.described == wanted.tunnel && self.more_ports == wanted.more_ports
    }

    /// Returns true if it receives what is sent to the other tunnel.
    fn listens_as(&self, other: &Tunnel) -> bool {
        self.described.local == other.local && self.tunnel.listens_on(other.port)
    }

    fn update_peers(&mut self, wanted: &Wanted<'_>, now: Instant) {
        self.outdated = self.version != wanted.version;
        if !self.outdated || now < self.next_table {
            return;
        }
        let Table { routes, peers, took } = table(wanted);
        self.tunnel.set_routes(routes);
        (self.peers, self.version, self.outdated, self.next_table) =
            (peers, wanted.version, false, now + took * TABLE_PAUSE);
    }
}

/// Takes over the device of an earlier tunnel. `None` if it was deleted since, or if it is another one.
fn adopt(fd: OwnedFd, name: &str) -> Option<Device> {
    let adopted = Device::adopt(fd).inspect_err(|error| tracing::debug!(%error, "the device of an earlier process"));
    adopted.ok().filter(|device| device.name() == name)
}

/// The table of peers.
struct Table {
    routes: Routes,
    /// The number of peers.
    peers: usize,
    /// How long it took to make the table.
    took: Duration,
}

fn table(wanted: &Wanted<'_>) -> Table {
    let began = Instant::now();
    let peers = (wanted.peers)();
    let count = peers.len();
    let routes = Routes::new(peers.into_iter().map(|TunnelPeer { subnet, address, sends_from }| Peer {
        subnet,
        address,
        sends_from,
    }));
    Table { routes, peers: count, took: began.elapsed() }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::Ipv4Addr;

    use weft_backends::state::Name;

    use super::*;

    fn descriptor() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    /// The service manager could not be told the first wish. Meanwhile there is another one.
    #[test]
    fn an_older_wish_to_the_service_manager_does_not_replace_a_newer_one() {
        let mut data_path = DataPath::new(true, Earlier { device: Some(descriptor()), sockets: Vec::new() });
        data_path.forget();
        data_path.hand_over_later(Handover::Keep(Descriptors { device: descriptor(), sockets: vec![descriptor()] }));
        assert!(matches!(data_path.take_handover(), Some(Handover::Forget)));
        data_path.hand_over_later(Handover::Forget);
        assert!(matches!(data_path.take_handover(), Some(Handover::Forget)), "it is told later");
        assert!(data_path.take_handover().is_none());
    }

    /// The loop wakes up at the time that [`DataPath::next`] returns. While the device is missing, it would do nothing else.
    #[test]
    fn a_missing_device_is_no_reason_to_wake_up_after_a_failure() {
        let (mut data_path, device) = (DataPath::default(), Name::new("flannel-none").unwrap());
        data_path.record_failure("the TUN device flannel-none was lost".to_owned(), Instant::now());
        let due = data_path.next().expect("the tunnel is started again after a pause");
        let (local, subnet) = (Ipv4Addr::LOCALHOST, "10.5.1.0/24".parse().unwrap());
        let tunnel = Tunnel { device, mtu: 1472, local, port: 8285, subnet };
        let peers = Vec::<TunnelPeer>::new;
        data_path.update(Some(&Wanted { tunnel, more_ports: Vec::new(), version: 1, peers: &peers }), due);
        assert_eq!(data_path.problem(), Some("the device flannel-none does not exist yet"));
        assert_eq!(data_path.next(), None, "the pass that creates the device is followed by an update");
    }
}
