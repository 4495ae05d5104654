// SPDX-License-Identifier: Apache-2.0
//! What is kept of each peer that was asked: 12 bytes for each of its families.

use std::time::Duration;

use super::Target;
use super::examine::Packet;

/// Number of results that are kept for the loss.
pub const KEPT: u32 = 8;

/// The peer answered a TCP connection after it had answered no echo request.
const SILENT: u8 = 1 << 7;

/// How many packets were lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// The number of losses among the results.
    pub lost: u32,
    /// The number of results.
    pub asked: u32,
}

/// The last results of one peer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// [`Target::tag`]. Zero is that of no peer.
    tag: u32,
    /// The last round trip in microseconds.
    round_trip_us: u32,
    /// The largest packet that was answered since the last loss of a smaller one, in bytes. Zero if none was.
    mtu: u16,
    /// The last results, the newest in the lowest bit. A loss is a one.
    losses: u8,
    /// Number of results in `losses`, and [`SILENT`].
    results: u8,
}

impl Sample {
    /// Takes over a result. `mtu` is the size of a full packet.
    pub(super) fn record(&mut self, packet: Packet, mtu: u16, round_trip: Option<Duration>) {
        let size = match packet {
            Packet::Full => Some(mtu),
            Packet::Size(size) => Some(size),
            Packet::Small | Packet::Published | Packet::Connection => None,
        };
        if let Some(round_trip) = round_trip {
            self.round_trip_us = u32::try_from(round_trip.as_micros()).unwrap_or(u32::MAX);
            self.results &= !SILENT;
        }
        if packet == Packet::Connection {
            self.results = (self.results & !SILENT) | if round_trip.is_some() { SILENT } else { 0 };
            return;
        }
        if round_trip.is_some() {
            self.mtu = size.map_or(self.mtu, |size| self.mtu.max(size));
        } else if size.is_some_and(|size| size <= self.mtu) {
            self.mtu = 0;
        }
        // A lost packet of a search says nothing about the loss.
        if size.is_none_or(|size| size == mtu) || round_trip.is_some() {
            self.losses = self.losses << 1 | u8::from(round_trip.is_none());
            let count = self.results & !SILENT;
            self.results = (self.results & SILENT) | (count + 1).min(KEPT as u8);
        }
    }

    /// Forgets the losses of a fault that is over. Otherwise the peer would be shown as one to which some packets get lost.
    pub(super) fn forget_losses(&mut self) {
        self.losses = 0;
        self.results = (self.results & SILENT) | (self.results & !SILENT).min(1);
    }

    /// Returns the last round trip, if there was one.
    pub fn round_trip(&self) -> Option<Duration> {
        (self.round_trip_us > 0).then(|| Duration::from_micros(self.round_trip_us.into()))
    }

    /// Returns the largest packet in bytes that reached the peer, if one is known.
    pub fn mtu(&self) -> Option<u16> {
        (self.mtu > 0).then_some(self.mtu)
    }

    /// Returns true if the peer answers TCP connections, and no echo requests.
    pub fn is_silent(&self) -> bool {
        self.results & SILENT != 0
    }

    /// Returns how many of the last results are losses. Losses behind a firewall that drops ICMP say nothing.
    pub fn loss(&self) -> Loss {
        if self.is_silent() {
            return Loss { lost: 0, asked: 0 };
        }
        Loss { lost: self.losses.count_ones(), asked: self.results.into() }
    }
}

/// The results of all peers, by place. Those of IPv4 come first, then those of IPv6.
#[derive(Debug, Default)]
pub(super) struct Samples([Vec<Sample>; 2]);

impl Samples {
    /// Returns the results of this peer, which are empty if its lease is another one than before.
    pub(super) fn of(&mut self, target: &Target) -> &mut Sample {
        let samples = &mut self.0[target.family as usize];
        if samples.len() <= target.place {
            samples.resize(target.place + 1, Sample::default());
        }
        let sample = &mut samples[target.place];
        if sample.tag != target.tag {
            *sample = Sample { tag: target.tag, ..Sample::default() };
        }
        sample
    }

    pub(super) fn get(&self, target: &Target) -> Option<&Sample> {
        self.0[target.family as usize].get(target.place).filter(|sample| sample.tag == target.tag)
    }

    /// Returns the smallest MTU of a peer, in bytes. Peers that are gone since may count.
    pub(super) fn smallest_mtu(&self) -> Option<u16> {
        self.0.iter().flatten().filter_map(Sample::mtu).min()
    }
}

#[cfg(test)]
mod tests {
    use weft_subnet::cidr::Family;

    use super::*;

    fn loss(lost: u32, asked: u32) -> Loss {
        Loss { lost, asked }
    }

    #[test]
    fn a_sample_is_small_and_says_what_was_measured() {
        assert_eq!(size_of::<Sample>(), 12);
        let mut sample = Sample::default();
        let trip = Some(Duration::from_micros(250));
        sample.record(Packet::Full, 1450, trip);
        assert_eq!((sample.round_trip(), sample.mtu(), sample.loss()), (trip, Some(1450), loss(0, 1)));
        sample.record(Packet::Full, 1450, None);
        sample.record(Packet::Size(1300), 1450, trip);
        sample.record(Packet::Size(1400), 1450, None);
        assert_eq!((sample.mtu(), sample.loss()), (Some(1300), loss(1, 3)));
        (0..20).for_each(|_| sample.record(Packet::Small, 1450, None));
        assert_eq!((sample.loss(), sample.round_trip()), (loss(8, 8), trip));
    }

    #[test]
    fn losses_of_a_fault_that_is_over_do_not_count() {
        let mut sample = Sample::default();
        let trip = Some(Duration::from_micros(250));
        (0..6).for_each(|_| sample.record(Packet::Full, 1450, None));
        sample.record(Packet::Full, 1450, trip);
        assert_eq!(sample.loss(), loss(6, 7));
        sample.forget_losses();
        assert_eq!((sample.loss(), sample.mtu(), sample.round_trip()), (loss(0, 1), Some(1450), trip));
        sample.record(Packet::Full, 1450, None);
        assert_eq!(sample.loss(), loss(1, 2));
    }

    #[test]
    fn losses_of_a_peer_that_answers_connections_alone_do_not_count() {
        let mut sample = Sample::default();
        let trip = Some(Duration::from_micros(400));
        (0..9).for_each(|_| sample.record(Packet::Full, 1450, None));
        sample.record(Packet::Connection, 1450, trip);
        assert_eq!((sample.is_silent(), sample.loss(), sample.round_trip()), (true, loss(0, 0), trip));
        sample.record(Packet::Full, 1450, None);
        assert!(sample.is_silent(), "the next round loses its echo request, too");
        sample.record(Packet::Connection, 1450, None);
        assert_eq!((sample.is_silent(), sample.loss()), (false, loss(8, 8)));
        sample.record(Packet::Connection, 1450, trip);
        sample.record(Packet::Full, 1450, trip);
        assert_eq!((sample.is_silent(), sample.loss(), sample.mtu()), (false, loss(7, 8), Some(1450)));
    }

    #[test]
    fn another_lease_in_the_same_place_begins_anew() {
        let mut samples = Samples::default();
        let target = |tag| Target {
            place: 3,
            family: Family::V4,
            tag,
            address: [10, 5, 2, 0].into(),
            published: None,
            mtu: 1450,
        };
        samples.of(&target(7)).record(Packet::Full, 1450, Some(Duration::from_micros(1)));
        assert!(samples.get(&target(7)).is_some() && samples.get(&target(8)).is_none());
        assert_eq!(samples.of(&target(8)).loss(), loss(0, 0));
    }
}
