// SPDX-License-Identifier: Apache-2.0
//! The examination of a peer that did not answer a packet of full size. It is a state machine without a clock and without sockets.
//!
//! First, small packets show whether the peer is reached at all. If they are lost, a TCP connection shows whether only ICMP is dropped, and
//! then the published address of the peer is asked. If a small packet is answered and packets of full size get lost again, the largest size
//! that arrives is searched by bisection. Packets that get lost at random mislead the search. So the size that it found must arrive several
//! times, and the next larger one must get lost as often. After that, the peer is asked from time to time until it is reached again.

use super::cause::Cause;

/// The size of a small packet in bytes, with its IP header. Every path carries it.
pub const SMALL: u16 = 84;
/// This many losses in a row are no accident.
const LOSSES: u8 = 3;
/// The same for the steps after the first one, when the peer is suspected already.
const MORE_LOSSES: u8 = 2;
/// A request of the peer shows for so many packets that its packets arrive here.
const HEARD: u8 = 4;

/// A packet of an examination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packet {
    /// A packet as large as the MTU.
    Full,
    /// A small packet.
    Small,
    /// A packet of this size in bytes.
    Size(u16),
    /// A small packet to the published address, outside the tunnel.
    Published,
    /// The first packet of a TCP connection.
    Connection,
}

/// What follows from an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The examination goes on.
    Continue,
    /// The peer is reached by packets of full size. The examination ends.
    Reached,
    /// The peer is reached, and a firewall drops its answers to echo requests. The examination ends.
    Silent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Small packets, of which this many were lost in a row.
    Small(u8),
    /// A TCP connection, after small packets were lost.
    Connection,
    /// Packets to the published address.
    Published(u8),
    /// Packets of full size, after a small one was answered.
    Full(u8),
    /// Packets of `reached` bytes arrive, those of `lost` bytes do not. The size between them was lost `losses` times.
    Search { reached: u16, lost: u16, losses: u8 },
    /// No packet reaches the peer. `next` is sent next.
    Unreachable { is_answering: bool, next: Packet },
    /// The search ended with this size. Packets of it have arrived so often, and packets with one byte more were lost so often. The way may have
    /// come back during the search, or lose packets of all sizes.
    Confirm { reached: u16, arrived: u8, lost: u8 },
    /// Larger packets than this get lost. Such a packet is sent next after `losses`, or else one of full size.
    TooSmall { reached: u16, asks_full: bool, losses: u8 },
}

/// The examination of one peer.
#[derive(Debug)]
pub struct Examination {
    stage: Stage,
    mtu: u16,
    has_tunnel: bool,
    heard: u8,
}

impl Examination {
    /// Begins after a packet of `mtu` bytes was lost. `has_tunnel` is true if the peer has a published address besides the one that is asked.
    pub fn new(mtu: u16, has_tunnel: bool) -> Examination {
        Examination { stage: Stage::Small(1), mtu, has_tunnel, heard: 0 }
    }

    /// Begins again with one small packet before the TCP connection, because the peer answered a connection before and no echo request. If it
    /// answers the small packet now, it has another fault.
    pub fn begin_briefly(&mut self) {
        self.stage = Stage::Small(LOSSES - 1);
    }

    /// Returns the packet that is to be sent next.
    pub fn packet(&self) -> Packet {
        match self.stage {
            Stage::Small(_) => Packet::Small,
            Stage::Published(_) => Packet::Published,
            Stage::Full(_) => Packet::Full,
            Stage::Search { reached, lost, .. } => Packet::Size(reached + (lost - reached) / 2),
            Stage::Connection => Packet::Connection,
            Stage::Unreachable { next, .. } => next,
            Stage::Confirm { reached, arrived, lost } if arrived == lost => Packet::Size(reached),
            Stage::Confirm { reached, .. } if reached + 1 < self.mtu => Packet::Size(reached + 1),
            Stage::Confirm { .. } | Stage::TooSmall { asks_full: true, .. } => Packet::Full,
            Stage::TooSmall { reached, .. } => Packet::Size(reached),
        }
    }

    /// Returns true if the cause was found, and the peer is only asked whether it is reached again.
    pub fn is_over(&self) -> bool {
        self.cause().is_some()
    }

    /// Returns the cause, if it was found.
    pub fn cause(&self) -> Option<Cause> {
        match self.stage {
            Stage::TooSmall { reached, .. } => Some(Cause::Mtu(reached)),
            Stage::Unreachable { is_answering, .. } => Some(match (is_answering, self.heard > 0) {
                (true, true) => Cause::OneDirection,
                (true, false) => Cause::Tunnel,
                // Without a tunnel there is one address only, so this is all that is known.
                (false, true) if !self.has_tunnel => Cause::OneDirection,
                // The peer runs, but not at the address that it publishes.
                (false, _) => Cause::Underlay,
            }),
            Stage::Small(_) | Stage::Connection | Stage::Published(_) => None,
            Stage::Full(_) | Stage::Search { .. } | Stage::Confirm { .. } => None,
        }
    }

    /// Takes notice that the last packet was answered, or was not. `heard` is true if requests of the peer itself arrived meanwhile. A connection
    /// is waited for so briefly that their absence tells nothing.
    pub fn answered(&mut self, is_answered: bool, heard: bool) -> Step {
        let packet = self.packet();
        if heard {
            self.heard = HEARD;
        } else if packet != Packet::Connection {
            self.heard = self.heard.saturating_sub(1);
        }
        match packet {
            Packet::Full if is_answered => return Step::Reached,
            Packet::Connection if is_answered && self.stage == Stage::Connection => return Step::Silent,
            _ => {}
        }
        self.stage = if is_answered { self.after_answer() } else { self.after_loss() };
        Step::Continue
    }

    fn after_answer(&self) -> Stage {
        match self.stage {
            Stage::Published(_) | Stage::Unreachable { next: Packet::Published, .. } => {
                Stage::Unreachable { is_answering: true, next: Packet::Connection }
            }
            Stage::Search { lost, reached, .. } => self.searched(reached + (lost - reached) / 2, lost),
            Stage::TooSmall { reached, .. } => Stage::TooSmall { reached, asks_full: true, losses: 0 },
            Stage::Confirm { reached, arrived, lost } if arrived == lost => {
                Stage::Confirm { reached, arrived: arrived + 1, lost }
            }
            // Whether echo requests are answered by now decides what it means.
            Stage::Unreachable { next: Packet::Connection, .. } => Stage::Small(LOSSES - 1),
            Stage::Small(_)
            | Stage::Connection
            | Stage::Full(_)
            | Stage::Confirm { .. }
            | Stage::Unreachable { .. } => Stage::Full(0),
        }
    }

    fn after_loss(&self) -> Stage {
        match self.stage {
            Stage::Small(lost) if lost + 1 < LOSSES => Stage::Small(lost + 1),
            Stage::Small(_) => Stage::Connection,
            Stage::Connection if self.has_tunnel => Stage::Published(0),
            Stage::Published(lost) if lost + 1 < MORE_LOSSES => Stage::Published(lost + 1),
            Stage::Connection | Stage::Published(_) => Stage::Unreachable { is_answering: false, next: Packet::Small },
            Stage::Full(lost) if lost + 1 < MORE_LOSSES => Stage::Full(lost + 1),
            Stage::Full(_) => self.searched(SMALL, self.mtu),
            Stage::Search { reached, lost, losses } if losses + 1 < MORE_LOSSES => {
                Stage::Search { reached, lost, losses: losses + 1 }
            }
            Stage::Search { reached, lost, .. } => self.searched(reached, reached + (lost - reached) / 2),
            // A packet of a size that arrived before was lost, so the size is not the cause, or the way has changed.
            Stage::Confirm { arrived, lost, .. } if arrived == lost => Stage::Small(1),
            Stage::Confirm { reached, arrived, lost } if lost + 1 < LOSSES => {
                Stage::Confirm { reached, arrived, lost: lost + 1 }
            }
            Stage::Confirm { reached, .. } => Stage::TooSmall { reached, asks_full: true, losses: 0 },
            Stage::Unreachable { is_answering, next } => self.unreachable(is_answering, next),
            Stage::TooSmall { reached, asks_full: true, losses } => {
                Stage::TooSmall { reached, asks_full: false, losses }
            }
            Stage::TooSmall { losses, .. } if losses + 1 >= LOSSES => Stage::Small(0),
            Stage::TooSmall { reached, losses, .. } => {
                Stage::TooSmall { reached, asks_full: false, losses: losses + 1 }
            }
        }
    }

    /// Returns the stage after one more packet was lost: the three ways to ask an unreachable peer take turns.
    fn unreachable(&self, is_answering: bool, lost: Packet) -> Stage {
        match lost {
            Packet::Small if self.has_tunnel => Stage::Unreachable { is_answering, next: Packet::Published },
            Packet::Small => Stage::Unreachable { is_answering, next: Packet::Connection },
            Packet::Published => Stage::Unreachable { is_answering: false, next: Packet::Connection },
            _ => Stage::Unreachable { is_answering, next: Packet::Small },
        }
    }

    /// Returns the next stage of the search.
    fn searched(&self, reached: u16, lost: u16) -> Stage {
        if lost > reached + 1 {
            return Stage::Search { reached, lost, losses: 0 };
        }
        if reached <= SMALL {
            // Nothing was answered since the first small packet, so the size is not the cause.
            return Stage::Small(0);
        }
        Stage::Confirm { reached, arrived: 0, lost: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path as a peer sees it.
    struct Path {
        /// The largest packet that is answered; 0 if none is.
        tunnel: u16,
        published: bool,
        heard: bool,
        /// Connections are accepted or refused.
        connection: bool,
    }

    /// Examines a peer until a cause is found or it is reached. Also returns the number of packets.
    fn examine(examination: &mut Examination, path: &Path) -> (Option<Cause>, usize) {
        for packets in 1..100 {
            let answered = match examination.packet() {
                Packet::Full => examination.mtu <= path.tunnel,
                Packet::Small => SMALL <= path.tunnel,
                Packet::Size(size) => size <= path.tunnel,
                Packet::Published => path.published,
                Packet::Connection => path.connection || SMALL <= path.tunnel,
            };
            if examination.answered(answered, path.heard) != Step::Continue {
                return (None, packets);
            }
            if examination.is_over() {
                return (examination.cause(), packets);
            }
        }
        panic!("no end: {examination:?}");
    }

    #[test]
    fn each_cause_is_found_with_few_packets() {
        let path = |tunnel, published, heard| Path { tunnel, published, heard, connection: false };
        let found = |path: &Path| examine(&mut Examination::new(1450, true), path);
        assert_eq!(found(&path(0, true, false)), (Some(Cause::Tunnel), 4));
        assert_eq!(found(&path(0, false, false)), (Some(Cause::Underlay), 5));
        assert_eq!(found(&path(0, true, true)), (Some(Cause::OneDirection), 4));
        assert_eq!(found(&path(0, false, true)), (Some(Cause::Underlay), 5), "it publishes a wrong address");
        assert_eq!(found(&path(1450, true, false)), (None, 2), "one packet was lost by accident");
        for mtu in [SMALL + 1, 1350, 1449] {
            let (cause, packets) = found(&path(mtu, true, false));
            assert!(cause == Some(Cause::Mtu(mtu)) && packets <= 30, "{cause:?} after {packets}");
        }
        let (cause, _) = examine(&mut Examination::new(1500, false), &path(0, false, false));
        assert_eq!(cause, Some(Cause::Underlay), "without a tunnel there is no second address");
    }

    #[test]
    fn a_cause_changes_with_the_path_and_ends_with_it() {
        let mut examination = Examination::new(1450, true);
        let (none, tunnel) = (Path { tunnel: 0, published: false, heard: false, connection: false }, 1450);
        assert_eq!(examine(&mut examination, &none).0, Some(Cause::Underlay));
        let filtered = Path { published: true, ..none };
        while examination.cause() != Some(Cause::Tunnel) {
            examine(&mut examination, &filtered);
        }
        let narrow = Path { tunnel: 1300, ..filtered };
        while examination.cause() != Some(Cause::Mtu(1300)) {
            examine(&mut examination, &narrow);
        }
        let narrower = Path { tunnel: 1200, ..narrow };
        while examination.cause() != Some(Cause::Mtu(1200)) {
            examine(&mut examination, &narrower);
        }
        let whole = Path { tunnel, ..narrower };
        assert!((0..10).any(|_| examine(&mut examination, &whole).0.is_none()));
    }

    #[test]
    fn a_peer_that_answers_connections_alone_is_no_fault_before_and_after_one() {
        let filtered = |published, heard| Path { tunnel: 0, published, heard, connection: true };
        for path in [filtered(false, false), filtered(true, false), filtered(true, true)] {
            let mut examination = Examination::new(1450, true);
            assert_eq!(examine(&mut examination, &path), (None, 3));
            let mut again = Examination::new(1450, true);
            again.begin_briefly();
            assert_eq!(examine(&mut again, &path), (None, 2), "it is known by now");
            again.begin_briefly();
            let narrow = Path { tunnel: 1300, ..path };
            assert_eq!(examine(&mut again, &narrow).0, Some(Cause::Mtu(1300)), "another fault is found nevertheless");
            let again = Examination::new(1450, true);
            let broken = Path { connection: false, ..path };
            for mut one in [examination, again] {
                while one.cause().is_none() {
                    examine(&mut one, &broken);
                }
                // The filter is still there when the fault ends.
                assert!((0..6).any(|_| examine(&mut one, &path).0.is_none()));
            }
        }
    }

    #[test]
    fn a_path_that_breaks_during_the_search_is_not_taken_for_a_small_one() {
        let mut examination = Examination::new(1450, true);
        let narrow = Path { tunnel: 1000, published: true, heard: false, connection: false };
        while !matches!(examination.packet(), Packet::Size(_)) {
            let small = examination.packet() == Packet::Small;
            examination.answered(small, narrow.heard);
        }
        let broken = Path { tunnel: 0, ..narrow };
        assert_eq!(examine(&mut examination, &broken).0, Some(Cause::Tunnel));
    }

    #[test]
    fn a_path_that_comes_back_during_the_search_is_not_taken_for_a_small_one() {
        let mut examination = Examination::new(1450, true);
        while !matches!(examination.packet(), Packet::Size(_)) {
            let small = examination.packet() == Packet::Small;
            examination.answered(small, false);
        }
        // One larger packet is lost before the way is whole again.
        examination.answered(false, false);
        examination.answered(false, false);
        let whole = Path { tunnel: 1450, published: true, heard: false, connection: false };
        assert_eq!(examine(&mut examination, &whole).0, None);
    }

    /// Every packet through the tunnel is lost with the same probability, in percent. Random numbers come from a generator with a fixed seed.
    #[test]
    fn a_path_that_loses_packets_at_random_is_not_taken_for_a_small_one() {
        let mut state = 1_u64;
        let mut is_lost = |percent: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % 100 < percent
        };
        for (tunnel, percent) in [(1450, 20), (1450, 40), (1450, 60), (1300, 20)] {
            let mut wrong = 0;
            for _ in 0..1000 {
                let mut examination = Examination::new(1450, true);
                for _ in 0..200 {
                    let size = match examination.packet() {
                        Packet::Full => 1450,
                        Packet::Size(size) => size,
                        Packet::Small | Packet::Published | Packet::Connection => SMALL,
                    };
                    let is_answered = size <= tunnel && !is_lost(percent);
                    if examination.answered(is_answered, false) != Step::Continue || examination.is_over() {
                        break;
                    }
                }
                let is_wrong = |cause: Cause| matches!(cause, Cause::Mtu(size) if size != tunnel);
                wrong += usize::from(examination.cause().is_some_and(is_wrong));
            }
            assert!(wrong <= 10, "{wrong} of 1000 with a loss of {percent} % and a size of {tunnel}");
        }
    }

    #[test]
    fn a_request_of_the_peer_shows_for_a_few_packets_that_its_packets_arrive() {
        let mut examination = Examination::new(1450, true);
        let heard = Path { tunnel: 0, published: true, heard: true, connection: false };
        assert_eq!(examine(&mut examination, &heard).0, Some(Cause::OneDirection));
        let silent = Path { heard: false, ..heard };
        // A connection is waited for briefly, so it does not count.
        let mut echoes = 0;
        while echoes < HEARD {
            echoes += u8::from(examination.packet() != Packet::Connection);
            let wanted = if echoes < HEARD { Cause::OneDirection } else { Cause::Tunnel };
            assert_eq!(examine(&mut examination, &silent).0, Some(wanted), "after {echoes} echo requests");
        }
    }
}
