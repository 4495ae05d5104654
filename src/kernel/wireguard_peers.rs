// SPDX-License-Identifier: Apache-2.0
//! WireGuard devices for the kernel adapter: keys, peers and allowed IPs become entries, and operations on them become messages of the
//! family `wireguard` ([`super::wireguard`]).
//!
//! The secrets come from [`LinuxKernel::secrets`]. They are compared here, and no entry contains them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ipnet::IpNet;
use weft_backends::diff::Op;
use weft_backends::state::{Key, Name, Observed, ObservedValue, Value};
use weft_backends::wireguard::WireGuardLink;
use weft_backends::wireguard_key::{DeviceSecrets, PeerId};
use weft_backends::wireguard_peer::WgPeer;
use weft_subnet::outside::wall_clock;

use super::linux::LinuxKernel;
use super::wireguard::{self, DeviceChange, KEY, PeerChange, PublicKey, Secret, WireGuard, WireGuardError};
use super::wireguard_port::{self, PortWrite};
use super::{Outcome, Session, errno};

/// At most this many peers of one [`LinuxKernel::apply_wireguard`] get a handshake at once. The others get one with their first packet:
/// a node that joins a large cluster must not make thousands of nodes compute keys for traffic that may never come.
const MOST_HANDSHAKES: usize = 256;

/// What the link of a device cannot show, and the entries of the device.
pub(super) type WireGuardEntries = (WireGuardLink, Vec<(Key, ObservedValue)>);

/// The peers and prefixes of one device that a sequence of operations ensures and removes.
#[derive(Default)]
struct Changes<'a> {
    peers: Vec<PeerChange<'a>>,
    /// The operations that each of [`Changes::peers`] carries out.
    owners: Vec<Vec<usize>>,
    by_key: HashMap<PublicKey, usize>,
    prefixes: Vec<GonePrefix>,
    gone: Vec<GonePeer>,
}

/// A prefix that an operation takes from a peer.
struct GonePrefix {
    op: usize,
    peer: PublicKey,
    net: IpNet,
}

/// A peer that an operation removes.
struct GonePeer {
    op: usize,
    key: PublicKey,
}

impl<'a> Changes<'a> {
    /// Returns the change of this peer. It adds the peer only if an operation asks for that.
    fn peer(&mut self, key: PublicKey, op: usize) -> &mut PeerChange<'a> {
        let at = *self.by_key.entry(key).or_insert_with(|| {
            self.peers.push(PeerChange { update_only: true, ..PeerChange::of(key) });
            self.owners.push(Vec::new());
            self.peers.len() - 1
        });
        self.owners[at].push(op);
        &mut self.peers[at]
    }

    fn add(&mut self, at: usize, op: &Op, preshared: &'a Secret) {
        match op {
            Op::Ensure(Key::AllowedIp(_, net), Value::AllowedIp(key))
            | Op::Recreate(Key::AllowedIp(_, net), Value::AllowedIp(key)) => self.peer(**key, at).allowed.push(*net),
            Op::Ensure(_, Value::WgPeer(peer)) | Op::Recreate(_, Value::WgPeer(peer)) => {
                let change = self.peer(peer.key, at);
                (change.update_only, change.endpoint) = (false, peer.endpoint);
                (change.keepalive, change.preshared) = (Some(peer.keepalive), Some(preshared));
            }
            Op::Remove(Key::AllowedIp(_, net), Value::AllowedIp(key)) => {
                self.prefixes.push(GonePrefix { op: at, peer: **key, net: *net });
            }
            Op::Remove(_, Value::WgPeer(peer)) => self.gone.push(GonePeer { op: at, key: peer.key }),
            _ => {}
        }
    }

    /// Sets keepalive to one second for the first peers that want none, which makes the kernel begin a handshake. Returns the changes
    /// that turn it off again.
    fn begin_handshakes(&mut self) -> Vec<PeerChange<'a>> {
        let off = self.peers.iter_mut().filter(|peer| peer.keepalive == Some(0)).take(MOST_HANDSHAKES);
        let restore = off.map(|peer| {
            peer.keepalive = Some(1);
            PeerChange { update_only: true, keepalive: Some(0), ..PeerChange::of(peer.key) }
        });
        restore.collect()
    }
}

/// Writes peers into the kernel. The tests have one that records what is asked for.
trait PeerWriter {
    /// Writes what these changes say about peers of a device.
    fn set(&mut self, device: &str, peers: &[PeerChange<'_>]) -> Result<(), WireGuardError>;
    /// Removes an allowed IP from a peer.
    fn remove_allowed(&mut self, device: &str, peer: PublicKey, prefix: IpNet) -> Result<(), WireGuardError>;
    /// Removes peers together with their allowed IPs.
    fn remove_peers(&mut self, device: &str, peers: &[PublicKey]) -> Result<(), WireGuardError>;
}

/// The socket of the family, opened when it is needed for the first time.
impl PeerWriter for Option<WireGuard> {
    fn set(&mut self, device: &str, peers: &[PeerChange<'_>]) -> Result<(), WireGuardError> {
        family(self)?.set(device, DeviceChange::default(), peers)
    }

    fn remove_allowed(&mut self, device: &str, peer: PublicKey, prefix: IpNet) -> Result<(), WireGuardError> {
        family(self)?.remove_allowed(device, peer, prefix)
    }

    fn remove_peers(&mut self, device: &str, peers: &[PublicKey]) -> Result<(), WireGuardError> {
        family(self)?.remove_peers(device, peers)
    }
}

impl LinuxKernel {
    /// Reads a WireGuard device: what its link cannot show, and its entries.
    ///
    /// # Errors
    /// [`WireGuardError::Socket`] if the answer could not be read, else the kernel refused to describe the device.
    pub(super) fn observe_wireguard(&mut self, name: Name) -> Result<WireGuardEntries, WireGuardError> {
        let Some(device) = self.wireguard_device(name)? else {
            // It was deleted a moment ago. The notice of that leads to another observation.
            return Ok((WireGuardLink { public: None, port: 0 }, Vec::new()));
        };
        Ok(described(name, device, &mut self.endpoints, self.secrets.as_ref(), wall_clock()))
    }

    /// Reads the sessions of a device.
    pub(super) fn observe_sessions(&mut self, name: Name) -> io::Result<Vec<Session>> {
        let Some(device) = self.wireguard_device(name)? else { return Ok(Vec::new()) };
        let session = |(key, peer): (PublicKey, wireguard::Peer)| Session {
            device: name,
            peer: key.id(),
            endpoint: peer.endpoint,
            handshake: peer.handshake,
            received: peer.received,
            sent: peer.sent,
        };
        Ok(device.peers.into_iter().map(session).collect())
    }

    /// Writes the private key and the port. Writing what is there already disturbs nothing. If the port is another one, peers with a session
    /// learn it at once.
    ///
    /// A device that is up goes on with its port if another program has the wanted one, so it is not kept from anything else.
    pub(super) fn write_wireguard(&mut self, op: &Op, name: Name, want: &WireGuardLink) -> Result<PortWrite, Outcome> {
        let Some(secrets) = self.secrets.clone() else { return Err(errno::retry(op, "the private key is not known")) };
        let wanted = (&*secrets.private, want.port);
        let write = |family: &mut WireGuard| wireguard_port::write_device(family, &name.text(), wanted, wall_clock());
        self.family().and_then(write).map_err(|error| outcome(op, &error))
    }

    /// Gives a device this port, and changes nothing else.
    pub(super) fn write_port(&mut self, name: Name, port: u16) -> Result<(), WireGuardError> {
        let change = DeviceChange { port: Some(port), ..DeviceChange::default() };
        self.family()?.set(&name.text(), change, &[])
    }

    /// Carries out operations on peers and allowed IPs. Returns one outcome for each, in order.
    pub(super) fn apply_wireguard(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Done; ops.len()];
        let secrets = self.secrets.clone();
        // 32 zeros mean that there is none.
        let none = Secret::new([0; KEY]);
        let preshared = secrets.as_ref().and_then(|secrets| secrets.preshared.as_deref());
        let mut devices: BTreeMap<Name, Changes<'_>> = BTreeMap::new();
        for (at, op) in ops.iter().enumerate() {
            let Some(name) = op.key().device().copied() else { continue };
            match self.resolve(op, name) {
                Ok(_) => {}
                Err(stop) => {
                    outcomes[at] = stop;
                    continue;
                }
            }
            let wanted = match op {
                Op::Ensure(_, Value::WgPeer(peer)) if peer.preshared => preshared,
                _ => Some(&none),
            };
            match wanted {
                Some(wanted) => devices.entry(name).or_default().add(at, op, wanted),
                None => outcomes[at] = errno::retry(op, "the preshared key is not known"),
            }
        }
        for (name, changes) in devices {
            let writer = (&mut self.wireguard, &mut self.endpoints);
            write_changes(writer, name, changes, (ops, &mut outcomes));
        }
        outcomes
    }

    /// Reads a device. `None` if there is no WireGuard device of this name.
    pub(super) fn wireguard_device(&mut self, name: Name) -> Result<Option<wireguard::Device>, WireGuardError> {
        match self.family().and_then(|family| family.get(&name.text())) {
            Ok(device) => Ok(Some(device)),
            Err(WireGuardError::NoDevice { .. } | WireGuardError::NotWireGuard { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// As [`family`], for the socket of this kernel.
    fn family(&mut self) -> Result<&mut WireGuard, WireGuardError> {
        family(&mut self.wireguard)
    }
}

/// Returns the socket of the family, and opens it when it is needed for the first time.
fn family(socket: &mut Option<WireGuard>) -> Result<&mut WireGuard, WireGuardError> {
    match socket {
        Some(family) => Ok(family),
        none => Ok(none.insert(WireGuard::open()?)),
    }
}

/// The endpoint that was written last for each peer of a device.
pub type Endpoints = HashMap<(Name, PeerId), SocketAddr>;

/// Returns the peers and allowed IPs of a device without a preshared key. `written` has the endpoints that were written last. The bench measures an
/// audit with this where the kernel has no WireGuard.
pub fn wireguard_entries(name: Name, device: wireguard::Device, written: &mut Endpoints) -> Observed {
    described(name, device, written, None, wall_clock()).1.into_iter().collect()
}

/// Returns what was read of a device, and forgets the endpoints of peers that it does not have any more.
fn described(
    name: Name,
    device: wireguard::Device,
    endpoints: &mut Endpoints,
    secrets: Option<&DeviceSecrets>,
    now: Duration,
) -> WireGuardEntries {
    let link = WireGuardLink { public: device.public, port: device.port };
    let present: HashSet<PeerId> = device.peers.keys().map(PublicKey::id).collect();
    endpoints.retain(|(of, peer), _| *of != name || present.contains(peer));
    let entries = device.peers.into_iter().flat_map(|(key, peer)| {
        let written = endpoints.get(&(name, key.id())).copied();
        entries((name, key, written), peer, secrets, now)
    });
    // The peers are in order already, and the caller sorts what is in order faster.
    let (mut all, mut allowed): (Vec<_>, Vec<_>) = entries.partition(|(key, _)| matches!(key, Key::WgPeer(..)));
    allowed.sort_unstable_by_key(|(key, _)| *key);
    all.append(&mut allowed);
    (link, all)
}

/// Writes the changes of one device, remembers its endpoints, and sets the outcomes of the operations that the kernel refused.
fn write_changes(
    (writer, endpoints): (&mut impl PeerWriter, &mut Endpoints),
    name: Name,
    mut changes: Changes<'_>,
    (ops, outcomes): (&[Op], &mut [Outcome]),
) {
    let device = name.text().into_owned();
    let restore = changes.begin_handshakes();
    for peer in &changes.peers {
        if let Some(endpoint) = peer.endpoint {
            endpoints.insert((name, peer.key.id()), endpoint);
        }
    }
    for (at, error) in set_peers(writer, &device, &changes.peers) {
        endpoints.remove(&(name, changes.peers[at].key.id()));
        for op in &changes.owners[at] {
            outcomes[*op] = outcome(&ops[*op], &error);
        }
    }
    for (at, error) in set_peers(writer, &device, &restore) {
        if let Some(owners) = changes.by_key.get(&restore[at].key).and_then(|at| changes.owners.get(*at)) {
            owners.iter().for_each(|op| outcomes[*op] = outcome(&ops[*op], &error));
        }
    }
    // The kernel removes the prefixes of a peer together with it.
    let gone: HashSet<PublicKey> = changes.gone.iter().map(|peer| peer.key).collect();
    for GonePrefix { op, peer, net } in changes.prefixes.into_iter().filter(|prefix| !gone.contains(&prefix.peer)) {
        if let Err(error) = writer.remove_allowed(&device, peer, net) {
            outcomes[op] = outcome(&ops[op], &error);
        }
    }
    let keys: Vec<PublicKey> = changes.gone.iter().map(|peer| peer.key).collect();
    if let Err(error) = writer.remove_peers(&device, &keys) {
        changes.gone.iter().for_each(|peer| outcomes[peer.op] = outcome(&ops[peer.op], &error));
    }
}

/// Writes peers, all at once. If the kernel refuses that, they are written one by one, so that one bad peer does not harm the
/// others. Returns those that were refused.
fn set_peers(writer: &mut impl PeerWriter, device: &str, peers: &[PeerChange<'_>]) -> Vec<(usize, WireGuardError)> {
    if peers.is_empty() || writer.set(device, peers).is_ok() {
        return Vec::new();
    }
    let alone = peers.iter().enumerate().map(|(at, peer)| (at, writer.set(device, std::slice::from_ref(peer))));
    alone.filter_map(|(at, result)| Some((at, result.err()?))).collect()
}

/// Returns what was read of a device. `None` if the kernel refuses to describe it: then everything else is compared anyway, and the
/// writes to this device show in the status what the kernel refuses.
///
/// # Errors
/// The answer could not be read. Nothing is known of the peers then, and writing them again could replace endpoints that they have learned.
pub(super) fn unless_refused(
    name: Name,
    read: Result<WireGuardEntries, WireGuardError>,
) -> io::Result<Option<WireGuardEntries>> {
    match read {
        Ok(entries) => Ok(Some(entries)),
        Err(WireGuardError::Socket(error)) => Err(error),
        Err(error) => {
            tracing::warn!("read the WireGuard device {name}: {error}");
            Ok(None)
        }
    }
}

/// Returns the entries of one peer. `written` is the endpoint that was written last.
fn entries(
    (device, key, written): (Name, PublicKey, Option<SocketAddr>),
    peer: wireguard::Peer,
    secrets: Option<&DeviceSecrets>,
    now: Duration,
) -> Vec<(Key, ObservedValue)> {
    let wanted = secrets.and_then(|secrets| secrets.preshared.as_deref());
    let preshared = match wanted {
        Some(wanted) => peer.preshared.as_ref() == Some(wanted),
        None => peer.preshared.is_some(),
    };
    let is_live = peer.is_live(now);
    let wireguard::Peer { endpoint, keepalive, .. } = peer;
    let value = WgPeer { key, endpoint, keepalive, preshared, assumes_port: false, is_live, written };
    let holder = std::sync::Arc::new(key);
    let seen = |value| ObservedValue { value, protocol: 0, mark: false };
    let allowed = peer.allowed.iter().map(|net| (Key::AllowedIp(device, *net), seen(Value::AllowedIp(holder.clone()))));
    std::iter::once((Key::WgPeer(device, key.id()), seen(Value::peer(value)))).chain(allowed).collect()
}

/// Returns what an error means for an operation.
fn outcome(op: &Op, error: &WireGuardError) -> Outcome {
    match error {
        WireGuardError::NoDevice { .. } if matches!(op, Op::Remove(..)) => Outcome::Done,
        WireGuardError::Invalid { .. } | WireGuardError::NotPermitted { .. } | WireGuardError::NoFamily => {
            errno::fatal(op, &error.to_string())
        }
        _ => errno::retry(op, &error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> Name {
        Name::new("flannel-wg").unwrap()
    }

    fn peer(last: u8, keepalive: u16) -> WgPeer {
        let endpoint = Some(format!("192.0.2.{last}:51820").parse().unwrap());
        let (key, preshared) = (PublicKey([last; KEY]), false);
        WgPeer { key, endpoint, keepalive, preshared, assumes_port: false, is_live: false, written: None }
    }

    fn ensure(peer: WgPeer) -> Op {
        Op::Ensure(Key::WgPeer(name(), peer.key.id()), Value::peer(peer))
    }

    fn allow(net: &str, last: u8) -> Op {
        let key = Value::AllowedIp(std::sync::Arc::new(PublicKey([last; KEY])));
        Op::Ensure(Key::AllowedIp(name(), net.parse().unwrap()), key)
    }

    #[test]
    fn a_peer_and_its_prefixes_are_one_change() {
        let (mut changes, secret) = (Changes::default(), Secret::new([9; KEY]));
        let ops = [ensure(peer(1, 0)), ensure(peer(2, 25)), allow("10.5.1.0/24", 1), allow("10.5.3.0/24", 3)];
        for (at, op) in ops.iter().enumerate() {
            changes.add(at, op, &secret);
        }
        let said: Vec<_> = changes.peers.iter().map(|p| (p.key.0[0], p.allowed.len(), p.update_only)).collect();
        assert_eq!(said, [(1, 1, false), (2, 0, false), (3, 1, true)], "a prefix alone adds no peer");
        assert_eq!(changes.owners, [vec![0, 2], vec![1], vec![3]]);
        let secrets: Vec<_> = changes.peers.iter().map(|p| p.preshared).collect();
        assert_eq!(secrets, [Some(&secret), Some(&secret), None], "a prefix alone changes no secret");
        // The kernel begins a handshake when keepalive becomes more than zero.
        let restore: Vec<_> = changes.begin_handshakes().iter().map(|p| (p.key.0[0], p.keepalive)).collect();
        assert_eq!(restore, [(1, Some(0))]);
        let keepalive: Vec<_> = changes.peers.iter().map(|p| p.keepalive).collect();
        assert_eq!(keepalive, [Some(1), Some(25), None]);
    }

    /// What was asked of a [`Recorder`]. A peer is the last byte of its key.
    #[derive(Debug, PartialEq)]
    enum Call {
        /// The peers, each with its keepalive, and whether it may be added.
        Set(Vec<(u8, Option<u16>, bool)>),
        RemoveAllowed(u8, IpNet),
        RemovePeers(Vec<u8>),
    }

    impl Call {
        fn concerns(&self, peer: u8) -> bool {
            match self {
                Call::Set(peers) => peers.iter().any(|(of, ..)| *of == peer),
                Call::RemoveAllowed(of, _) => *of == peer,
                Call::RemovePeers(peers) => peers.contains(&peer),
            }
        }
    }

    /// Says whether the kernel refuses a call.
    type Refuses = fn(&Call) -> bool;

    /// A kernel that refuses some calls.
    struct Recorder {
        calls: Vec<Call>,
        refuses: Refuses,
    }

    impl Recorder {
        fn call(&mut self, call: Call) -> Result<(), WireGuardError> {
            let is_refused = (self.refuses)(&call);
            self.calls.push(call);
            if is_refused { Err(WireGuardError::NotPermitted { device: "flannel-wg".to_owned() }) } else { Ok(()) }
        }
    }

    impl PeerWriter for Recorder {
        fn set(&mut self, device: &str, peers: &[PeerChange<'_>]) -> Result<(), WireGuardError> {
            assert_eq!(device, "flannel-wg");
            self.call(Call::Set(peers.iter().map(|peer| (peer.key.0[0], peer.keepalive, !peer.update_only)).collect()))
        }

        fn remove_allowed(&mut self, device: &str, peer: PublicKey, prefix: IpNet) -> Result<(), WireGuardError> {
            assert_eq!(device, "flannel-wg");
            self.call(Call::RemoveAllowed(peer.0[0], prefix))
        }

        fn remove_peers(&mut self, device: &str, peers: &[PublicKey]) -> Result<(), WireGuardError> {
            assert_eq!(device, "flannel-wg");
            self.call(Call::RemovePeers(peers.iter().map(|peer| peer.0[0]).collect()))
        }
    }

    /// Two new peers, of which the second has a keepalive of its own; a peer that loses a prefix; and a peer that goes with its prefix.
    fn mixed() -> Vec<Op> {
        let remove = |op: Op| match op {
            Op::Ensure(key, value) => Op::Remove(key, value),
            other => other,
        };
        let gone = remove(ensure(peer(4, 0)));
        let [of_living, of_gone] = [("10.5.3.0/24", 3), ("10.5.4.0/24", 4)].map(|(net, last)| remove(allow(net, last)));
        vec![ensure(peer(1, 0)), allow("10.5.1.0/24", 1), ensure(peer(2, 25)), of_living, of_gone, gone]
    }

    /// Returns what is asked of a kernel that refuses some calls, which operations are not done, and whose endpoints are remembered.
    fn written(refuses: Refuses) -> (Vec<Call>, Vec<usize>, Vec<u8>) {
        let (ops, none) = (mixed(), Secret::new([0; KEY]));
        let (mut recorder, mut endpoints) = (Recorder { calls: Vec::new(), refuses }, Endpoints::new());
        let (mut changes, mut outcomes) = (Changes::default(), vec![Outcome::Done; ops.len()]);
        ops.iter().enumerate().for_each(|(at, op)| changes.add(at, op, &none));
        write_changes((&mut recorder, &mut endpoints), name(), changes, (&ops, &mut outcomes));
        let failed = (0..ops.len()).filter(|at| outcomes[*at] != Outcome::Done).collect();
        let has_endpoint = |last: &u8| endpoints.contains_key(&(name(), PublicKey([*last; KEY]).id()));
        (recorder.calls, failed, (1..=4).filter(has_endpoint).collect())
    }

    #[test]
    fn the_kernel_is_asked_for_exactly_the_changes_of_a_device() {
        let set = |peers: &[(u8, Option<u16>, bool)]| Call::Set(peers.to_vec());
        let (both, restore) = (set(&[(1, Some(1), true), (2, Some(25), true)]), set(&[(1, Some(0), false)]));
        // The prefix of the peer that goes is not removed by itself.
        let (prefix, gone) = (Call::RemoveAllowed(3, "10.5.3.0/24".parse().unwrap()), Call::RemovePeers(vec![4]));
        assert_eq!(written(|_| false), (vec![both, restore, prefix, gone], vec![], vec![1, 2]));
    }

    #[test]
    fn a_refusal_concerns_only_the_operations_of_its_peer() {
        let cases: [(&str, Refuses, &[usize], &[u8]); 5] = [
            // A peer and its prefix are one change.
            ("a peer that begins a handshake", |call| call.concerns(1), &[0, 1], &[2]),
            ("a peer with a keepalive", |call| call.concerns(2), &[2], &[1]),
            ("keepalive off", |call| *call == Call::Set(vec![(1, Some(0), false)]), &[0, 1], &[1, 2]),
            ("a prefix that goes", |call| call.concerns(3), &[3], &[1, 2]),
            ("a peer that goes", |call| call.concerns(4), &[5], &[1, 2]),
        ];
        for (what, refuses, failed, known) in cases {
            let (calls, not_done, endpoints) = written(refuses);
            assert_eq!((&not_done[..], &endpoints[..]), (failed, known), "{what}: {calls:?}");
        }
    }

    #[test]
    fn handshakes_are_begun_with_a_bounded_number_of_peers() {
        let (mut changes, none) = (Changes::default(), Secret::new([0; KEY]));
        for at in 0..MOST_HANDSHAKES + 7 {
            let mut key = [0; KEY];
            key[..8].copy_from_slice(&at.to_ne_bytes());
            changes.add(at, &ensure(WgPeer { key: PublicKey(key), ..peer(1, 0) }), &none);
        }
        assert_eq!(changes.begin_handshakes().len(), MOST_HANDSHAKES);
        assert_eq!(changes.peers.iter().filter(|peer| peer.keepalive == Some(0)).count(), 7);
    }

    #[test]
    fn a_device_that_the_kernel_refuses_to_describe_does_not_fail_the_observation() {
        let device = || name().to_string();
        for refusal in [WireGuardError::NoFamily, WireGuardError::NotPermitted { device: device() }] {
            assert!(unless_refused(name(), Err(refusal)).is_ok_and(|read| read.is_none()));
        }
        let lost = || WireGuardError::from(io::Error::from(io::ErrorKind::Interrupted));
        let error = unless_refused(name(), Err(lost())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted, "the dump is read again");
        let read = (WireGuardLink { public: None, port: 7 }, Vec::new());
        assert_eq!(unless_refused(name(), Ok(read)).unwrap().unwrap().0.port, 7);
    }

    #[test]
    fn an_observed_peer_shows_whether_its_secret_is_the_wanted_one() {
        let secret = |byte| std::sync::Arc::new(Secret::new([byte; KEY]));
        let seen = |wanted: Option<u8>, has: Option<u8>| {
            let secrets = DeviceSecrets { private: secret(1), preshared: wanted.map(secret) };
            let observed =
                wireguard::Peer { preshared: has.map(|byte| Secret::new([byte; KEY])), ..Default::default() };
            let entries = entries((name(), PublicKey([2; KEY]), None), observed, Some(&secrets), Duration::ZERO);
            let Value::WgPeer(peer) = &entries[0].1.value else { panic!("{entries:?}") };
            peer.preshared
        };
        assert!(seen(Some(7), Some(7)) && !seen(Some(7), Some(8)) && !seen(Some(7), None));
        assert!(seen(None, Some(7)) && !seen(None, None), "one that is not wanted must go");
    }

    /// Whether an endpoint was written by this agent decides whether one that the kernel has learned stays.
    #[test]
    fn a_device_is_described_with_the_endpoints_that_were_written_and_those_of_gone_peers_are_forgotten() {
        let (v6, key) = (Name::new("flannel-wg-v6").unwrap(), |last: u8| PublicKey([last; KEY]));
        let at = |last: u8| format!("192.0.2.{last}:51820").parse::<SocketAddr>().unwrap();
        let of = |device: Name, last: u8| ((device, key(last).id()), at(last));
        let mut endpoints = Endpoints::from([of(name(), 1), of(name(), 2), of(v6, 2), of(v6, 3)]);
        let peer = |nets: &[&str]| {
            let allowed = nets.iter().map(|net| net.parse().unwrap()).collect();
            wireguard::Peer { allowed, ..wireguard::Peer::default() }
        };
        let peers = BTreeMap::from([(key(1), peer(&["10.5.9.0/24", "10.5.1.0/24"])), (key(3), peer(&["10.5.3.0/24"]))]);
        let device = wireguard::Device { public: Some(key(7)), port: 4500, peers, ..wireguard::Device::default() };
        let (link, entries) = described(name(), device, &mut endpoints, None, Duration::ZERO);
        assert_eq!(link, WireGuardLink { public: Some(key(7)), port: 4500 });
        assert!(entries.is_sorted_by_key(|(key, _)| *key), "{entries:?}");
        let written = entries.iter().filter_map(|(_, seen)| match &seen.value {
            Value::WgPeer(peer) => Some((peer.key, peer.written)),
            _ => None,
        });
        assert_eq!(written.collect::<Vec<_>>(), [(key(1), Some(at(1))), (key(3), None)]);
        let holders = entries.iter().filter_map(|(of, seen)| match (of, &seen.value) {
            (Key::AllowedIp(_, net), Value::AllowedIp(holder)) => Some((net.to_string(), **holder)),
            _ => None,
        });
        let nets = [("10.5.1.0/24", 1), ("10.5.3.0/24", 3), ("10.5.9.0/24", 1)];
        assert_eq!(holders.collect::<Vec<_>>(), nets.map(|(net, last)| (net.to_owned(), key(last))));
        assert_eq!(endpoints, Endpoints::from([of(name(), 1), of(v6, 2), of(v6, 3)]), "the other device has its peers");
    }

    #[test]
    fn an_endpoint_works_while_the_last_handshake_is_young() {
        let live = |handshake: Option<u64>| {
            let observed = wireguard::Peer { handshake: handshake.map(Duration::from_secs), ..Default::default() };
            let entries = entries((name(), PublicKey([2; KEY]), None), observed, None, Duration::from_secs(1000));
            matches!(&entries[0].1.value, Value::WgPeer(peer) if peer.is_live)
        };
        assert!(live(Some(900)) && !live(Some(820)) && !live(None));
        // The clock was set back. A handshake that seems to lie in the future says as little as an old one.
        assert!(live(Some(1100)) && !live(Some(1180)));
    }

    #[test]
    fn what_a_kernel_will_not_accept_later_is_not_tried_again() {
        let device = || name().to_string();
        let (text, Op::Ensure(key, value)) = (String::new(), ensure(peer(1, 0))) else { panic!() };
        let (add, remove) = (Op::Ensure(key, value.clone()), Op::Remove(key, value));
        let gone = WireGuardError::NoDevice { device: device() };
        assert_eq!(outcome(&remove, &gone), Outcome::Done, "the peer is gone with its device");
        for lasting in [
            WireGuardError::NoFamily,
            WireGuardError::NotPermitted { device: device() },
            WireGuardError::Invalid { device: device(), errno: nix::errno::Errno::EINVAL, text },
        ] {
            assert!(matches!(outcome(&add, &lasting), Outcome::Fatal(_)), "{lasting}");
        }
        let lost = WireGuardError::from(io::Error::from(io::ErrorKind::WouldBlock));
        for passing in [gone, WireGuardError::NoMemory { device: device() }, lost] {
            assert!(matches!(outcome(&add, &passing), Outcome::Retry(_)), "{passing}");
        }
    }
}
