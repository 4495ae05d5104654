// SPDX-License-Identifier: Apache-2.0
//! Our messages against an independent implementation of the format, in both directions, and against the limits.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6};

use netlink_packet_core::{Emitable, NlasIterator, Parseable};
use netlink_packet_wireguard::{
    WireguardAllowedIpAttr, WireguardAllowedIpFlags, WireguardAttribute, WireguardPeer, WireguardPeerAttribute,
    WireguardPeerFlags,
};
use netlink_sys::protocols::NETLINK_FIB_LOOKUP;
use nix::errno::Errno;
use proptest::prelude::*;
use weft_netlink::wire::{attrs, attrs_after, messages};

use super::encode::{self, Batch, MAX_PEERS, MAX_REMOVALS, WGDEVICE_A_PEERS};
use super::*;

const FAMILY: u16 = 0x1e;

fn key(n: u32) -> PublicKey {
    let mut bytes = [7; KEY];
    bytes[..4].copy_from_slice(&n.to_be_bytes());
    PublicKey(bytes)
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// The attributes of a message as the independent implementation reads them.
fn read(batch: &mut Batch) -> Vec<WireguardAttribute> {
    let message = messages(batch.finish(1)).next().unwrap();
    assert_eq!((message.kind, message.flags), (FAMILY, 5), "request with acknowledgement");
    assert_eq!(&message.payload[..4], &[1, 1, 0, 0], "SET_DEVICE, version 1");
    NlasIterator::new(&message.payload[4..]).map(|nla| WireguardAttribute::parse(&nla.unwrap()).unwrap()).collect()
}

fn peers(batch: &mut Batch) -> Vec<Vec<WireguardPeerAttribute>> {
    let list = read(batch).into_iter().find_map(|a| if let WireguardAttribute::Peers(p) = a { Some(p) } else { None });
    list.unwrap_or_default().into_iter().map(|p| p.0).collect()
}

/// Prefixes of a peer, with their flags.
fn prefixes(peer: &[WireguardPeerAttribute]) -> Vec<(IpNet, Option<WireguardAllowedIpFlags>)> {
    let mut all = Vec::new();
    for entry in
        peer.iter().flat_map(|a| if let WireguardPeerAttribute::AllowedIps(l) = a { l.clone() } else { vec![] })
    {
        let (mut ip, mut length, mut flags) = (None, None, None);
        for attr in entry.0 {
            match attr {
                WireguardAllowedIpAttr::IpAddr(a) => ip = Some(a),
                WireguardAllowedIpAttr::Cidr(l) => length = Some(l),
                WireguardAllowedIpAttr::Flags(f) => flags = Some(f),
                _ => {}
            }
        }
        all.push((IpNet::new(ip.unwrap(), length.unwrap()).unwrap(), flags));
    }
    all
}

#[test]
fn the_bytes_of_a_small_request() {
    let change = DeviceChange { port: Some(51820), ..DeviceChange::default() };
    let mut peer = PeerChange::of(PublicKey([0xaa; KEY]));
    peer.endpoint = Some("192.0.2.1:51820".parse().unwrap());
    peer.keepalive = Some(25);
    peer.allowed = vec![net("10.5.2.0/24")];
    let binding = [peer];
    let mut all: Vec<Batch> = encode::batches(FAMILY, "wg0", change, &binding).collect();
    assert_eq!(all.len(), 1);
    let mut want: Vec<u8> = vec![
        0x98, 0, 0, 0, 0x1e, 0, 5, 0, 9, 0, 0, 0, 0, 0, 0, 0, // nlmsghdr
        1, 1, 0, 0, // genlmsghdr
        8, 0, 2, 0, b'w', b'g', b'0', 0, // IFNAME
        6, 0, 6, 0, 0x6c, 0xca, 0, 0, // LISTEN_PORT
        0x74, 0, 8, 0x80, // PEERS
        0x70, 0, 0, 0x80, // its first entry
        0x24, 0, 1, 0,
    ];
    want.extend([0xaa; 32]);
    want.extend([20, 0, 4, 0, 2, 0, 0xca, 0x6c, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0]); // ENDPOINT
    want.extend([6, 0, 5, 0, 25, 0, 0, 0]); // PERSISTENT_KEEPALIVE_INTERVAL
    want.extend([0x20, 0, 9, 0x80, 0x1c, 0, 0, 0x80]); // ALLOWEDIPS and its first entry
    want.extend([6, 0, 1, 0, 2, 0, 0, 0, 8, 0, 2, 0, 10, 5, 2, 0, 5, 0, 3, 0, 24, 0, 0, 0]);
    want[0] = u8::try_from(want.len()).unwrap();
    want[36] = u8::try_from(want.len() - 36).unwrap();
    want[40] = u8::try_from(want.len() - 40).unwrap();
    assert_eq!(all[0].finish(9), want);
}

#[test]
fn the_device_s_own_values_stand_in_the_first_message_only() {
    let secret = Secret::new([3; KEY]);
    let change = DeviceChange { private: Some(&secret), port: Some(1) };
    let many: Vec<PeerChange<'_>> = (0..1_500).map(|n| PeerChange::of(key(n))).collect();
    let mut all: Vec<Batch> = encode::batches(FAMILY, "flannel-wg", change, &many).collect();
    let first = read(&mut all[0]);
    assert!(first.contains(&WireguardAttribute::PrivateKey([3; KEY])));
    assert!(first.contains(&WireguardAttribute::ListenPort(1)));
    for batch in &mut all[1..] {
        let own = read(batch);
        assert_eq!(own.len(), 2, "name and peers only");
    }
    assert_eq!(encode::batches(FAMILY, "flannel-wg", change, &[]).count(), 1, "a device without peers is written, too");
}

#[test]
fn no_list_of_peers_is_longer_than_its_length_field() {
    let secret = Secret::new([9; KEY]);
    let mut many: Vec<PeerChange<'_>> = Vec::new();
    for n in 0..2_000 {
        let mut peer = PeerChange::of(key(n));
        peer.endpoint =
            Some(if n % 3 == 0 { "192.0.2.1:1".parse().unwrap() } else { "[2001:db8::1]:1".parse().unwrap() });
        peer.keepalive = (n % 2 == 0).then_some(25);
        peer.preshared = (n % 5 == 0).then_some(&secret);
        peer.update_only = n % 7 == 0;
        peer.allowed.push(IpNet::new(Ipv4Addr::from(0x0a00_0000 + (n << 8)).into(), 24).unwrap());
        many.push(peer);
    }
    let mut all: Vec<Batch> = encode::batches(FAMILY, "wg0", DeviceChange::default(), &many).collect();
    assert!((3..=6).contains(&all.len()), "{} messages", all.len());
    let mut seen = Vec::new();
    for batch in &mut all {
        let message = batch.finish(1).to_vec();
        let list = messages(&message)
            .flat_map(|m| attrs_after(m.payload, 4).collect::<Vec<_>>())
            .find(|(kind, _)| *kind == WGDEVICE_A_PEERS)
            .unwrap();
        assert!(list.1.len() + 4 <= MAX_PEERS, "{}", list.1.len());
        assert_eq!(message.len(), 16 + 4 + 8 + 4 + list.1.len(), "nothing stands behind the list");
        seen.extend(attrs(list.1).map(|(_, peer)| attrs(peer).next().unwrap().1[..4].to_vec()));
    }
    assert_eq!(seen, (0..2_000u32).map(|n| n.to_be_bytes().to_vec()).collect::<Vec<_>>());
}

#[test]
fn a_peer_with_very_many_prefixes_is_split_and_its_values_are_written_once() {
    let mut peer = PeerChange::of(key(1));
    peer.keepalive = Some(1);
    peer.allowed = (0..5_000u32).map(|n| IpNet::new(Ipv6Addr::from(u128::from(n) << 64).into(), 64).unwrap()).collect();
    let binding = [peer];
    let mut all: Vec<Batch> = encode::batches(FAMILY, "wg0", DeviceChange::default(), &binding).collect();
    let parts: Vec<Vec<WireguardPeerAttribute>> = all.iter_mut().flat_map(peers).collect();
    let got: Vec<IpNet> = parts.iter().flat_map(|p| prefixes(p)).map(|(net, _)| net).collect();
    assert_eq!(got, binding[0].allowed);
    let keepalive = WireguardPeerAttribute::PersistentKeepalive(1);
    assert!(parts.len() > 1 && parts[0].contains(&keepalive), "{} parts", parts.len());
    assert_eq!(parts.iter().filter(|p| p.contains(&keepalive)).count(), 1);
}

#[test]
fn removals_are_spread_over_messages() {
    let keys: Vec<PublicKey> = (0..100).map(key).collect();
    let mut all: Vec<Batch> = encode::removals(FAMILY, "wg0", &keys).collect();
    assert_eq!(all.len(), 100usize.div_ceil(MAX_REMOVALS));
    let parts: Vec<Vec<WireguardPeerAttribute>> = all.iter_mut().flat_map(peers).collect();
    assert_eq!(parts.len(), 100);
    for (part, key) in parts.iter().zip(&keys) {
        let remove = WireguardPeerAttribute::Flags(WireguardPeerFlags::RemoveMe);
        assert_eq!(part, &vec![WireguardPeerAttribute::PublicKey(key.0), remove]);
    }
}

#[test]
fn one_prefix_is_removed_by_a_flag_or_by_moving_it() {
    let new = peers(&mut encode::remove_allowed(FAMILY, "wg0", key(1), net("10.5.2.0/24")));
    assert_eq!(prefixes(&new[0]), [(net("10.5.2.0/24"), Some(WireguardAllowedIpFlags::RemoveMe))]);
    assert!(new[0].contains(&WireguardPeerAttribute::Flags(WireguardPeerFlags::UpdateOnly)), "adds no peer");
    let old = peers(&mut encode::remove_allowed_by_moving(FAMILY, "wg0", net("10.5.2.0/24")));
    assert_eq!(prefixes(&old[0]), [(net("10.5.2.0/24"), None)]);
    let nobody = WireguardPeerAttribute::PublicKey([0; KEY]);
    assert!(old[0].contains(&nobody));
    assert_eq!(old[1], [nobody, WireguardPeerAttribute::Flags(WireguardPeerFlags::RemoveMe)]);
}

#[test]
fn secrets_are_not_printed() {
    let secret = Secret::new([0xab; KEY]);
    let device = Device { private: Some(secret.clone()), ..Device::default() };
    let peer = Peer { preshared: Some(secret.clone()), ..Peer::default() };
    let mut change = PeerChange::of(key(1));
    change.preshared = Some(&secret);
    change.keepalive = Some(1);
    let own = DeviceChange { private: Some(&secret), ..DeviceChange::default() };
    let text = format!("{secret:?} {device:?} {peer:?} {:?} {own:?}", change.preshared);
    assert!(!text.contains("171") && !text.contains("ab, ab"), "{text}");
}

#[test]
fn errors_name_the_device_and_a_remedy() {
    for (errno, words) in [
        (Errno::ENODEV, "no device wg0"),
        (Errno::EOPNOTSUPP, "wg0 is not a WireGuard device"),
        (Errno::EADDRINUSE, "ss -lunp"),
        (Errno::ENOMEM, "wg0: the kernel has no memory left"),
        (Errno::EPERM, "CAP_NET_ADMIN"),
        (Errno::EINVAL, "refused a value for wg0"),
        (Errno::EACCES, "CAP_NET_ADMIN"),
        (Errno::ERANGE, "refused a value for wg0"),
        (Errno::EBADR, "refused a value for wg0"),
        (Errno::EPFNOSUPPORT, "refused a value for wg0"),
        (Errno::EIO, "refused a request for wg0"),
    ] {
        let text = WireGuardError::of("wg0", errno, "text".to_owned()).to_string();
        assert!(text.contains(words), "{errno}: {text}");
    }
    // In a dump, the answers of the kernel are errors of the socket.
    for errno in [Errno::ENODEV, Errno::EOPNOTSUPP, Errno::EPERM, Errno::EACCES, Errno::EINVAL] {
        let (answer, refusal) =
            (WireGuardError::of_io("wg0", errno.into()), WireGuardError::of("wg0", errno, String::new()));
        assert_eq!(answer.to_string(), refusal.to_string());
    }
    for errno in [Errno::EINTR, Errno::ENOBUFS] {
        let lost = WireGuardError::of_io("wg0", errno.into());
        assert!(matches!(lost, WireGuardError::Socket(_)), "the dump is read again: {lost}");
    }
}

/// A module that was removed and loaded again has another number.
#[test]
fn a_number_that_the_kernel_no_longer_knows_is_asked_for_again() {
    type Request<'a> = &'a dyn Fn(&mut WireGuard) -> Result<(), WireGuardError>;
    // The kernel gives no family a number as high as this.
    const OLD: u16 = 0xfff0;
    let mut family = WireGuard { netlink: generic::open().unwrap(), family: OLD, removes_allowed: true };
    let (device, prefix) = ("no-such-device", net("10.5.2.0/24"));
    let port = DeviceChange { port: Some(1), ..DeviceChange::default() };
    let requests: [Request<'_>; 4] = [
        &|family| family.get(device).map(drop),
        &|family| family.set(device, port, &[]),
        &|family| family.remove_peers(device, &[key(1)]),
        &|family| family.remove_allowed(device, key(1), prefix),
    ];
    for (at, request) in requests.into_iter().enumerate() {
        let error = request(&mut family).unwrap_err();
        // The kernel has no WireGuard, or it has one and no such device, or the test runs without root.
        let is_answer = matches!(
            error,
            WireGuardError::NoFamily | WireGuardError::NoDevice { .. } | WireGuardError::NotPermitted { .. }
        );
        assert!(is_answer, "request {at}: {error:?}");
        family.family = OLD;
    }
}

/// A peer that was perhaps not written must not count as written.
#[test]
fn a_change_whose_acknowledgement_is_lost_is_an_error() {
    // The kernel reads the messages of this protocol, and acknowledges none.
    let netlink = Netlink::open_on(NETLINK_FIB_LOOKUP).unwrap();
    let mut family = WireGuard { netlink, family: FAMILY, removes_allowed: true };
    let port = DeviceChange { port: Some(1), ..DeviceChange::default() };
    for error in [family.set("wg0", port, &[]), family.remove_peers("wg0", &[key(1)])].map(Result::unwrap_err) {
        let is_lost = matches!(&error, WireGuardError::Socket(error) if error.kind() == io::ErrorKind::WouldBlock);
        assert!(is_lost, "{error:?}");
    }
}

/// On a kernel that cannot remove a single prefix, the prefix is moved away, whoever has it. A wrong device says nothing about the kernel.
#[test]
fn a_refusal_of_both_ways_to_remove_a_prefix_does_not_make_the_kernel_an_old_one() {
    // The controller of generic netlink has no such command, and refuses it as a device of another type does.
    const CONTROLLER: u16 = 0x10;
    let mut family = WireGuard { netlink: generic::open().unwrap(), family: CONTROLLER, removes_allowed: true };
    let error = family.remove_allowed("wg0", key(1), net("10.5.2.0/24")).unwrap_err();
    assert!(matches!(error, WireGuardError::NotWireGuard { .. }), "{error:?}");
    assert!(family.removes_allowed);
}

/// A dump message as the independent implementation writes it.
fn dumped(attributes: Vec<WireguardAttribute>) -> Vec<u8> {
    let mut body = vec![0; attributes.as_slice().buffer_len()];
    attributes.as_slice().emit(&mut body);
    let mut w = Writer::default();
    w.begin(FAMILY, 2, &[0, 1, 0, 0]);
    w.fixed(&body);
    w.end(1);
    w.bytes().to_vec()
}

fn allowed_ip(net: IpNet) -> netlink_packet_wireguard::WireguardAllowedIp {
    use netlink_packet_wireguard::{WireguardAddressFamily, WireguardAllowedIp};
    let family = if net.addr().is_ipv4() { WireguardAddressFamily::Ipv4 } else { WireguardAddressFamily::Ipv6 };
    WireguardAllowedIp(vec![
        WireguardAllowedIpAttr::Family(family),
        WireguardAllowedIpAttr::IpAddr(net.addr()),
        WireguardAllowedIpAttr::Cidr(net.prefix_len()),
    ])
}

fn dumped_peer(key: &PublicKey, peer: &Peer, allowed: &[IpNet], first: bool) -> WireguardPeer {
    use WireguardPeerAttribute as A;
    let mut all = vec![A::PublicKey(key.0)];
    if first {
        all.push(A::PresharedKey(peer.preshared.as_ref().map_or([0; KEY], |s| *s.expose())));
        let at = peer.handshake.unwrap_or_default();
        all.push(A::LastHandshake(netlink_packet_wireguard::WireguardTimeSpec {
            seconds: i64::try_from(at.as_secs()).unwrap(),
            nano_seconds: i64::from(at.subsec_nanos()),
        }));
        all.extend([A::PersistentKeepalive(peer.keepalive), A::TxBytes(peer.sent), A::RxBytes(peer.received)]);
        all.push(A::ProtocolVersion(1));
        all.extend(peer.endpoint.map(A::Endpoint));
    }
    all.push(A::AllowedIps(allowed.iter().map(|net| allowed_ip(*net)).collect()));
    WireguardPeer(all)
}

fn any_net() -> impl Strategy<Value = IpNet> {
    prop_oneof![
        (any::<u32>(), 0u8..=32).prop_map(|(ip, len)| IpNet::new(Ipv4Addr::from(ip).into(), len).unwrap().trunc()),
        (any::<u128>(), 0u8..=128).prop_map(|(ip, len)| IpNet::new(Ipv6Addr::from(ip).into(), len).unwrap().trunc()),
    ]
}

fn any_endpoint() -> impl Strategy<Value = SocketAddr> {
    prop_oneof![
        (any::<u32>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(Ipv4Addr::from(ip).into(), port)),
        (any::<u128>(), any::<u16>()).prop_map(|(ip, p)| SocketAddrV6::new(Ipv6Addr::from(ip), p, 0, 0).into()),
    ]
}

fn any_peer() -> impl Strategy<Value = Peer> {
    let times = (any::<Option<u32>>(), 0u32..1_000_000_000);
    let counters = (any::<u64>(), any::<u64>(), any::<u16>());
    let lists = (prop::collection::vec(any_net(), 0..6), prop::option::of(any_endpoint()), any::<bool>());
    (times, counters, lists).prop_map(|((seconds, nano), (received, sent, keepalive), (allowed, endpoint, psk))| Peer {
        preshared: psk.then(|| Secret::new([5; KEY])),
        endpoint,
        keepalive,
        handshake: seconds.map(|s| Duration::new(u64::from(s) + 1, nano)),
        received,
        sent,
        allowed,
    })
}

proptest! {
    #[test]
    fn what_we_write_is_read_alike(wanted in prop::collection::vec((any::<u32>(), any_peer()), 0..8)) {
        let changes: Vec<PeerChange<'_>> = wanted.iter().map(|(n, p)| PeerChange {
            key: key(*n),
            endpoint: p.endpoint,
            keepalive: Some(p.keepalive),
            preshared: p.preshared.as_ref(),
            update_only: false,
            allowed: p.allowed.clone(),
        }).collect();
        let mut all: Vec<Batch> = encode::batches(FAMILY, "wg0", DeviceChange::default(), &changes).collect();
        prop_assert_eq!(all.len(), 1);
        let got = peers(&mut all[0]);
        prop_assert_eq!(got.len(), changes.len());
        for (peer, change) in got.iter().zip(&changes) {
            prop_assert!(peer.contains(&WireguardPeerAttribute::PublicKey(change.key.0)));
            prop_assert!(peer.contains(&WireguardPeerAttribute::PersistentKeepalive(change.keepalive.unwrap())));
            prop_assert!(change.endpoint.is_none_or(|e| peer.contains(&WireguardPeerAttribute::Endpoint(e))));
            let psk = change.preshared.map(|s| WireguardPeerAttribute::PresharedKey(*s.expose()));
            prop_assert!(psk.is_none_or(|a| peer.contains(&a)));
            let nets: Vec<IpNet> = prefixes(peer).into_iter().map(|(net, _)| net).collect();
            prop_assert_eq!(&nets, &change.allowed);
        }
    }

    #[test]
    fn a_dump_is_coalesced(
        wanted in prop::collection::btree_map(any::<u32>(), any_peer(), 0..8),
        cut in 0usize..6,
        datagrams in any::<bool>(),
    ) {
        let mut device = Device { port: 51820, ..Device::default() };
        device.private = Some(Secret::new([1; KEY]));
        device.public = Some(PublicKey([2; KEY]));
        let own = vec![
            WireguardAttribute::IfIndex(7),
            WireguardAttribute::PrivateKey([1; KEY]),
            WireguardAttribute::PublicKey([2; KEY]),
            WireguardAttribute::ListenPort(51820),
            WireguardAttribute::Fwmark(3),
        ];
        let mut parts = vec![dumped(own)];
        for (n, peer) in &wanted {
            let (head, tail) = peer.allowed.split_at(cut.min(peer.allowed.len()));
            parts.push(dumped(vec![WireguardAttribute::Peers(vec![dumped_peer(&key(*n), peer, head, true)])]));
            parts.push(dumped(vec![WireguardAttribute::Peers(vec![dumped_peer(&key(*n), peer, tail, false)])]));
            device.peers.insert(key(*n), peer.clone());
        }
        let mut got = Device::default();
        if datagrams {
            parts.iter().for_each(|part| decode::datagram(&mut got, FAMILY, part));
        } else {
            decode::datagram(&mut got, FAMILY, &parts.concat());
        }
        prop_assert_eq!(got, device);
    }

    #[test]
    fn nonsense_is_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut w = Writer::default();
        w.begin(FAMILY, 2, &[0, 1, 0, 0]);
        w.nest(WGDEVICE_A_PEERS, |w| w.nest(0, |w| w.fixed(&bytes)));
        w.fixed(&bytes);
        w.end(1);
        decode::datagram(&mut Device::default(), FAMILY, w.bytes());
        decode::datagram(&mut Device::default(), FAMILY, &bytes);
    }
}
