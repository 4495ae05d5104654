// SPDX-License-Identifier: Apache-2.0
//! Another port of a WireGuard device, without a pause for its peers.
//!
//! When the port changes, the kernel opens new sockets and closes the old ones. A peer goes on sending to the old port until it receives a
//! packet from the new one: WireGuard sends to where the last authenticated packet came from. So the message that changes the port also makes
//! the kernel send a keepalive packet to each peer with a session. What a peer has sent to the old port until it has this packet is lost, which is
//! the packets of about one round trip.

use std::collections::BTreeMap;
use std::time::Duration;

use super::wireguard::{Device, DeviceChange, Peer, PeerChange, PublicKey, Secret, WireGuard, WireGuardError};

/// What became of the port of a device that was written.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PortWrite {
    /// The port that the device had before, if that was another one.
    pub(super) before: Option<u16>,
    /// Why the device goes on with that port.
    pub(super) refused: Option<String>,
}

/// Reads and writes a device. The tests have one that records what is asked for.
pub(super) trait DeviceWriter {
    /// Reads a device and its peers.
    fn get(&mut self, device: &str) -> Result<Device, WireGuardError>;
    /// Writes a device and some of its peers.
    fn set(&mut self, device: &str, change: DeviceChange<'_>, peers: &[PeerChange<'_>]) -> Result<(), WireGuardError>;
}

impl DeviceWriter for WireGuard {
    fn get(&mut self, device: &str) -> Result<Device, WireGuardError> {
        WireGuard::get(self, device)
    }

    fn set(&mut self, device: &str, change: DeviceChange<'_>, peers: &[PeerChange<'_>]) -> Result<(), WireGuardError> {
        WireGuard::set(self, device, change, peers)
    }
}

/// What makes the kernel send a keepalive packet to each peer that has a session.
struct Keepalives<'a> {
    /// The kernel sends one when the interval becomes more than zero.
    begin: Vec<PeerChange<'a>>,
    /// Sets the interval of those to zero again that have none.
    restore: Vec<PeerChange<'a>>,
}

impl Keepalives<'_> {
    /// Returns what to write for these peers of a device. A peer without a session is left out, because the kernel would begin a handshake with
    /// it, and it sends nothing that could be lost.
    fn to(peers: &BTreeMap<PublicKey, Peer>, now: Duration) -> Self {
        let interval = |key, seconds| PeerChange { update_only: true, keepalive: Some(seconds), ..PeerChange::of(key) };
        let (mut begin, mut restore) = (Vec::new(), Vec::new());
        for (key, peer) in peers.iter().filter(|(_, peer)| peer.endpoint.is_some() && peer.is_live(now)) {
            match peer.keepalive {
                0 => {
                    begin.push(interval(*key, 1));
                    restore.push(interval(*key, 0));
                }
                seconds => begin.extend([interval(*key, 0), interval(*key, seconds)]),
            }
        }
        Keepalives { begin, restore }
    }
}

/// Writes the private key and the port of a device. A device whose wanted port is taken gets the key, and goes on with the port that it has.
///
/// # Errors
/// The kernel refused something else, or did not answer.
pub(super) fn write_device(
    writer: &mut impl DeviceWriter,
    device: &str,
    (private, port): (&Secret, u16),
    now: Duration,
) -> Result<PortWrite, WireGuardError> {
    let key = DeviceChange { private: Some(private), ..DeviceChange::default() };
    let both = DeviceChange { port: Some(port), ..key };
    match writer.get(device) {
        Ok(have) if have.port != port => {
            let before = Some(have.port).filter(|port| *port != 0);
            match move_port(writer, device, both, (&have.peers, now)) {
                Err(error @ WireGuardError::PortTaken { .. }) => {
                    let refused = format!("port {port}: {error}; {device} goes on with port {}", have.port);
                    writer.set(device, key, &[]).map(|()| PortWrite { before, refused: Some(refused) })
                }
                moved => moved.map(|()| PortWrite { before, refused: None }),
            }
        }
        _ => writer.set(device, both, &[]).map(|()| PortWrite::default()),
    }
}

/// Moves a device with these peers to another port, together with what else is to be changed. The port comes first in the message, and the
/// kernel refuses all of it if the port is taken.
///
/// # Errors
/// Those of [`DeviceWriter::set`].
fn move_port(
    writer: &mut impl DeviceWriter,
    device: &str,
    change: DeviceChange<'_>,
    (peers, now): (&BTreeMap<PublicKey, Peer>, Duration),
) -> Result<(), WireGuardError> {
    let Keepalives { begin, restore } = Keepalives::to(peers, now);
    writer.set(device, change, &begin)?;
    if restore.is_empty() { Ok(()) } else { writer.set(device, DeviceChange::default(), &restore) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::wireguard::KEY;

    #[test]
    fn each_peer_with_a_session_gets_a_keepalive_packet_and_keeps_its_interval() {
        let now = Duration::from_secs(1000);
        let peer = |keepalive, handshake: Option<u64>, has_endpoint: bool| Peer {
            endpoint: has_endpoint.then(|| "192.0.2.1:51820".parse().unwrap()),
            keepalive,
            handshake: handshake.map(Duration::from_secs),
            ..Peer::default()
        };
        let peers = [
            peer(0, Some(990), true),
            peer(25, Some(990), true),
            peer(0, Some(800), true),
            peer(0, None, true),
            peer(0, Some(990), false),
        ];
        let peers = (1..).map(|byte| PublicKey([byte; KEY])).zip(peers).collect();
        let Keepalives { begin, restore } = Keepalives::to(&peers, now);
        let shown = |changes: &[PeerChange<'_>]| -> Vec<(u8, Option<u16>)> {
            assert!(
                changes.iter().all(|change| change.update_only),
                "a peer that was removed meanwhile does not come back"
            );
            changes.iter().map(|change| (change.key.0[0], change.keepalive)).collect()
        };
        assert_eq!(shown(&begin), [(1, Some(1)), (2, Some(0)), (2, Some(25))]);
        assert_eq!(shown(&restore), [(1, Some(0))]);
    }

    const DEVICE: &str = "flannel-wg";
    const TAKEN: u16 = 4500;

    /// What was written to a device at once.
    #[derive(Debug, PartialEq, Eq)]
    struct Call {
        /// True if the private key was among it.
        has_key: bool,
        port: Option<u16>,
        /// The intervals of keepalives of its peers.
        intervals: Vec<u16>,
    }

    /// A device on which another program has the port [`TAKEN`].
    struct Recorder {
        /// The port of the device. `None` if it cannot be read.
        port: Option<u16>,
        calls: Vec<Call>,
    }

    impl DeviceWriter for Recorder {
        fn get(&mut self, device: &str) -> Result<Device, WireGuardError> {
            assert_eq!(device, DEVICE);
            let unreadable = || WireGuardError::from(std::io::Error::from(std::io::ErrorKind::Interrupted));
            self.port.map(|port| Device { port, ..Device::default() }).ok_or_else(unreadable)
        }

        fn set(
            &mut self,
            device: &str,
            change: DeviceChange<'_>,
            peers: &[PeerChange<'_>],
        ) -> Result<(), WireGuardError> {
            assert_eq!(device, DEVICE);
            let intervals = peers.iter().filter_map(|peer| peer.keepalive).collect();
            self.calls.push(Call { has_key: change.private.is_some(), port: change.port, intervals });
            match change.port {
                Some(TAKEN) => Err(WireGuardError::PortTaken { device: device.to_owned() }),
                Some(1) => Err(WireGuardError::NotPermitted { device: device.to_owned() }),
                _ => Ok(()),
            }
        }
    }

    /// A device whose port is taken must stay as it is, and a peer without an interval must not send keepalives for ever.
    #[test]
    fn the_port_is_moved_first_and_the_intervals_are_set_back_afterwards() {
        let now = Duration::from_secs(1000);
        let with_session = |keepalive| Peer {
            endpoint: "192.0.2.1:51820".parse().ok(),
            keepalive,
            handshake: Some(now),
            ..Peer::default()
        };
        let asked = |keepalive, port: u16| {
            let peers = BTreeMap::from([(PublicKey([1; KEY]), with_session(keepalive))]);
            let change = DeviceChange { port: Some(port), ..DeviceChange::default() };
            let mut recorder = Recorder { port: None, calls: Vec::new() };
            let is_moved = move_port(&mut recorder, DEVICE, change, (&peers, now)).is_ok();
            (is_moved, recorder.calls)
        };
        let call = |port, intervals: &[u16]| Call { has_key: false, port, intervals: intervals.to_vec() };
        assert_eq!(asked(0, 51821), (true, vec![call(Some(51821), &[1]), call(None, &[0])]));
        assert_eq!(asked(0, TAKEN), (false, vec![call(Some(TAKEN), &[1])]));
        assert_eq!(asked(25, 51821), (true, vec![call(Some(51821), &[0, 25])]), "nothing is to be set back");
    }

    /// Returns what becomes of a device that has the first port and should have the second one, and what was written.
    fn written(has: Option<u16>, wants: u16) -> (Result<PortWrite, WireGuardError>, Vec<Call>) {
        let mut recorder = Recorder { port: has, calls: Vec::new() };
        let done = write_device(&mut recorder, DEVICE, (&Secret::new([7; KEY]), wants), Duration::ZERO);
        (done, recorder.calls)
    }

    /// A device without peers gets its private key, and perhaps a port.
    fn with_key(port: Option<u16>) -> Call {
        Call { has_key: true, port, intervals: Vec::new() }
    }

    #[test]
    fn the_key_and_the_port_are_written_together_and_the_port_before_is_told() {
        let cases = [
            (Some(51820), 51820, None),
            (Some(51820), 51821, Some(51820)),
            (Some(0), 51820, None),
            (None, 51820, None),
        ];
        for (has, wants, before) in cases {
            let (done, calls) = written(has, wants);
            assert_eq!(done.unwrap(), PortWrite { before, refused: None }, "{has:?} {wants}");
            assert_eq!(calls, [with_key(Some(wants))], "{has:?} {wants}");
        }
    }

    /// Without its key, the device would reach no peer.
    #[test]
    fn a_device_whose_port_is_taken_gets_its_key_and_goes_on_with_the_port_that_it_has() {
        let (done, calls) = written(Some(51820), TAKEN);
        let PortWrite { before, refused } = done.unwrap();
        assert_eq!((before, calls), (Some(51820), vec![with_key(Some(TAKEN)), with_key(None)]));
        let refused = refused.unwrap();
        assert!(
            refused.contains("port 4500: ") && refused.ends_with("flannel-wg goes on with port 51820"),
            "{refused}"
        );
        // The kernel has another reason, which does not pass by going on.
        let (done, calls) = written(Some(51820), 1);
        assert!(matches!(done, Err(WireGuardError::NotPermitted { .. })), "{done:?}");
        assert_eq!(calls, [with_key(Some(1))]);
    }
}
