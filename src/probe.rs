// SPDX-License-Identifier: Apache-2.0
//! Probes: asks the peers, a few each second, whether packets reach them (docs/adr/026-probes.md).
//!
//! A healthy peer gets one echo request of the size of the MTU in each round, over IPv4 in one round and over IPv6 in the next, if it has
//! both. If it does not answer, it is examined step by step ([`examine`]) until it is known what is wrong. Probes change nothing in the
//! kernel and decide nothing. Their results are shown.

pub mod cause;
pub mod connection;
pub mod echo;
pub mod examine;
pub mod samples;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Id;

use cause::Cause;
use echo::{Answer, Echo, EchoError};
use examine::{Examination, Packet, Step};
use samples::{Sample, Samples};

/// The packets of this time are sent together, because each packet that is sent alone wakes the agent up several times.
const BURST_PAUSE: Duration = Duration::from_secs(1);
/// The same pause while many peers were found silent and no peer has ever answered. Then ICMP is filtered, or this node is cut off, and more
/// packets tell nothing new.
const SILENT_BURST_PAUSE: Duration = Duration::from_secs(5);
/// Number of packets that are sent together.
const MAX_BURST: u32 = 5;
/// The shortest time between the turns of two peers.
const MIN_PAUSE: Duration = Duration::from_millis(BURST_PAUSE.as_millis() as u64 / MAX_BURST as u64);
/// All peers are asked in this time, if the number of packets allows it.
const ROUND: Duration = Duration::from_secs(30);
/// The longest time between two peers.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Number of peers that are examined at once. They need sockets, memory and packets.
const MAX_EXAMINED: usize = 32;
/// Number of peers whose lease changed that wait to be asked out of turn.
const MAX_CHANGED: usize = 64;
/// A peer whose lease changed is asked after this time, because its node may still be making its device.
const AFTER_CHANGE: Duration = Duration::from_secs(3);
/// How long the answer of a healthy peer is waited for.
const WAIT: Duration = Duration::from_secs(1);
/// The pause between two packets to a peer that is examined.
const PAUSE: Duration = Duration::from_secs(1);
/// When the cause was found, an answer is waited for so long. Meanwhile requests of that peer are noticed.
const LONG_WAIT: Duration = Duration::from_secs(4);

/// Where a peer is, for probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its place among all leases ([`weft_subnet::peers::Peers::believed_from`]).
    pub place: usize,
    /// The family of the address that is asked.
    pub family: Family,
    /// A number made from its lease. Results of another lease that had this place before do not count.
    pub tag: u32,
    /// The address that is asked.
    pub address: IpAddr,
    /// The address that its lease publishes, if packets for the first address go through a tunnel to it.
    pub published: Option<IpAddr>,
    /// The largest packet that pods may send, in bytes.
    pub mtu: u16,
}

/// What is known of a peer since its last packet, and was not known before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Packets do not reach it, for this cause.
    Faulty(Cause),
    /// Packets reach it again.
    Reached,
}

impl Target {
    /// Returns what tells this target from all others at the same time.
    pub fn slot(&self) -> Slot {
        (self.place, self.family)
    }
}

/// The place of a peer, and one of its families.
pub type Slot = (usize, Family);

/// A packet to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outgoing {
    /// The peer that it is about.
    pub target: Target,
    /// What it examines.
    pub packet: Packet,
    /// The echo request.
    pub echo: Echo,
}

impl Outgoing {
    /// Sends the packet and waits for the answer.
    ///
    /// # Errors
    /// There is no socket for echo requests.
    pub async fn send(&self) -> Result<Answer, EchoError> {
        match self.packet {
            Packet::Connection => {
                let (round_trip, heard) = echo::hearing(self.echo.to, connection::answers(self.echo.to)).await;
                Ok(Answer { round_trip, heard })
            }
            _ => self.echo.send().await,
        }
    }
}

/// The peer whose turn it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// The next peer of the round.
    Next,
    /// A peer whose lease changed.
    Changed(Id),
}

/// Numbers for the metrics, since the start of the agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that were answered.
    pub answered: u64,
    /// Requests without an answer.
    pub lost: u64,
}

/// What is known about the ways to the peers.
#[derive(Debug)]
pub struct Prober {
    samples: Samples,
    /// Peers that did not answer, by place and family.
    examined: BTreeMap<Slot, Examined>,
    changed: VecDeque<(Instant, Id)>,
    /// The place at which the round goes on. It should begin at another place on each node.
    pub cursor: usize,
    /// Whose turn it is in this round, of the peers that have both families.
    pub family: Family,
    next_peer: Instant,
    /// When the last burst began, and how many packets it may still have. `None` before the first.
    burst: Option<(Instant, u32)>,
    /// The families in which any peer has answered, at any of its addresses.
    answered: BTreeSet<Family>,
    /// True if the last packet was for a peer that is examined. Others must have their turn, too.
    examined_last: bool,
    counts: Counts,
    /// Why no packet can be sent.
    pub problem: Option<String>,
}

#[derive(Debug)]
struct Examined {
    target: Target,
    examination: Examination,
    due: Instant,
    /// A packet is on its way.
    is_open: bool,
    /// A cause was found. It may have ended before a packet of full size was answered.
    was_faulty: bool,
}

impl Prober {
    /// Returns a state in which nothing is known yet.
    pub fn new(now: Instant) -> Prober {
        Prober {
            samples: Samples::default(),
            examined: BTreeMap::new(),
            changed: VecDeque::new(),
            cursor: 0,
            family: Family::V4,
            next_peer: now + AFTER_CHANGE,
            burst: None,
            answered: BTreeSet::new(),
            examined_last: false,
            counts: Counts::default(),
            problem: None,
        }
    }

    /// Takes notice that the lease of this peer changed. It is asked soon, unless too many others wait for that already.
    pub fn lease_changed(&mut self, id: &Id, now: Instant) {
        if self.changed.len() < MAX_CHANGED && !self.changed.iter().any(|(_, other)| other == id) {
            self.changed.push_back((now + AFTER_CHANGE, id.clone()));
        }
    }

    /// Begins a round with the peer in the first place. Peers with both families are asked in the other one.
    pub fn begin_round(&mut self) {
        self.cursor = 0;
        self.family = self.family.other();
    }

    /// Forgets all peers.
    pub fn forget_peers(&mut self) {
        self.examined.clear();
        self.changed.clear();
    }

    /// Returns when a packet is to be sent.
    pub fn next(&self) -> Instant {
        let examined = self.examined.values().filter(|one| !one.is_open).map(|one| one.due);
        let changed = self.changed.front().map(|(at, _)| *at);
        let due = examined.chain(changed).chain([self.next_peer]).min().unwrap_or(self.next_peer);
        self.burst.map_or(due, |(began, _)| due.max(began + self.burst_pause()))
    }

    /// Returns the time between the beginnings of two bursts.
    fn burst_pause(&self) -> Duration {
        if self.answered.is_empty() && self.is_full() { SILENT_BURST_PAUSE } else { BURST_PAUSE }
    }

    /// Returns true if a packet may be sent now.
    fn may_send(&self, now: Instant) -> bool {
        self.burst.is_none_or(|(began, left)| now >= began + self.burst_pause() || (left > 0 && now == began))
    }

    /// Counts a packet that is sent now.
    fn count_packet(&mut self, now: Instant) {
        let going_on = self.burst.filter(|(began, _)| now < *began + self.burst_pause());
        let (began, left) = going_on.unwrap_or((now, MAX_BURST));
        self.burst = Some((began, left.saturating_sub(1)));
    }

    /// Returns the packet for a peer that is examined, if one is due. `current` returns the target as it is now, or `None` if the peer is
    /// gone.
    pub fn examine(&mut self, now: Instant, current: impl Fn(Slot) -> Option<Target>) -> Option<Outgoing> {
        if !self.may_send(now) || (self.examined_last && self.next_peer <= now) {
            return None;
        }
        self.examined.retain(|slot, one| current(*slot) == Some(one.target));
        let due = self.examined.values_mut().filter(|one| !one.is_open && one.due <= now);
        let one = due.min_by_key(|one| one.due)?;
        let packet = one.examination.packet();
        let is_over = one.examination.is_over() && packet != Packet::Connection;
        let wait = if is_over { long_wait(one.target.tag, self.counts.lost) } else { WAIT };
        let (to, size) = match packet {
            Packet::Full => (one.target.address, one.target.mtu),
            Packet::Small | Packet::Connection => (one.target.address, examine::SMALL),
            Packet::Size(size) => (one.target.address, size),
            Packet::Published => (one.target.published.unwrap_or(one.target.address), examine::SMALL),
        };
        one.is_open = true;
        let target = one.target;
        self.count_packet(now);
        self.examined_last = true;
        let listen = (to != target.address).then_some(target.address);
        Some(Outgoing { target, packet, echo: Echo { to, size, wait, listen } })
    }

    /// Returns whose turn it is, if it is time. [`Prober::ask`] must follow. `targets` is the number of peers, in all
    /// families.
    pub fn turn(&mut self, targets: usize, now: Instant) -> Option<Turn> {
        if !self.may_send(now) {
            return None;
        }
        if let Some((_, id)) = self.changed.pop_front_if(|(at, _)| *at <= now) {
            return Some(Turn::Changed(id));
        }
        if now < self.next_peer {
            return None;
        }
        self.examined_last = false;
        let pause = ROUND / u32::try_from(targets.max(1)).unwrap_or(u32::MAX);
        // The turns since the last burst are due together.
        let since = now.checked_sub(BURST_PAUSE).map_or(self.next_peer, |since| self.next_peer.max(since));
        self.next_peer = since + pause.clamp(MIN_PAUSE, MAX_PAUSE);
        Some(Turn::Next)
    }

    /// Returns the packet for this peer. `None` if it is being examined already.
    pub fn ask(&mut self, target: Target, now: Instant) -> Option<Outgoing> {
        if self.examined.get(&target.slot()).is_some_and(|one| one.target == target) {
            return None;
        }
        self.count_packet(now);
        let echo = Echo { to: target.address, size: target.mtu, wait: WAIT, listen: None };
        Some(Outgoing { target, packet: Packet::Full, echo })
    }

    /// Takes over a result. Returns what it has changed, if it has.
    pub fn ended(&mut self, sent: &Outgoing, answer: Answer, now: Instant) -> Option<Change> {
        let is_answered = answer.round_trip.is_some();
        if sent.packet != Packet::Connection {
            *(if is_answered { &mut self.counts.answered } else { &mut self.counts.lost }) += 1;
        }
        if is_answered || answer.heard {
            self.answered.insert(sent.target.family);
        }
        let sample = self.samples.of(&sent.target);
        if sent.packet != Packet::Published {
            sample.record(sent.packet, sent.target.mtu, answer.round_trip);
        }
        let Some(one) = self.examined.get_mut(&sent.target.slot()).filter(|one| one.target == sent.target) else {
            if !is_answered && self.examined.len() < MAX_EXAMINED {
                let mut examination = Examination::new(sent.target.mtu, sent.target.published.is_some());
                if sample.is_silent() {
                    examination.begin_briefly();
                }
                let (target, due) = (sent.target, now);
                let examined = Examined { target, examination, due, is_open: false, was_faulty: false };
                self.examined.insert(sent.target.slot(), examined);
            }
            return None;
        };
        one.is_open = false;
        let before = one.examination.cause();
        let step = one.examination.answered(is_answered, answer.heard);
        // When the cause is known, the next packet follows at once, so that requests of the peer are noticed nearly all the time.
        one.due = if before.is_some() { now } else { now + PAUSE };
        let after = one.examination.cause();
        one.was_faulty |= after.is_some();
        let was_faulty = one.was_faulty;
        if is_answered && !one.examination.is_over() {
            // Nothing was waited for, so the next step can follow at once.
            one.due = now;
        }
        match step {
            Step::Reached | Step::Silent => {
                self.examined.remove(&sent.target.slot());
                if was_faulty {
                    self.samples.of(&sent.target).forget_losses();
                }
                before.map(|_| Change::Reached)
            }
            Step::Continue if after == before => None,
            Step::Continue => Some(after.map_or(Change::Reached, Change::Faulty)),
        }
    }

    /// Takes notice that a packet could not be sent, so that nothing is known.
    pub fn not_sent(&mut self, sent: &Outgoing, problem: String, now: Instant) {
        if let Some(one) = self.examined.get_mut(&sent.target.slot()).filter(|one| one.target == sent.target) {
            (one.is_open, one.due) = (false, now + LONG_WAIT);
        }
        self.problem = Some(problem);
    }

    /// Returns why packets do not reach this peer, if that is known. While nobody has ever answered in this family, it is not: see
    /// [`Prober::silence`].
    pub fn cause(&self, target: &Target) -> Option<Cause> {
        let one = self.examined.get(&target.slot()).filter(|one| one.target == *target)?;
        one.examination.cause().filter(|_| self.answered.contains(&target.family))
    }

    /// Returns the peers that packets do not reach, by place. A peer that they reach in neither family counts once.
    pub fn unreachable(&self) -> impl Iterator<Item = (&Target, Cause)> {
        let known = self.examined.values().filter(|one| self.answered.contains(&one.target.family));
        let found = known.filter_map(|one| Some((&one.target, one.examination.cause()?)));
        let mut last = None;
        found.filter(move |(target, _)| last.replace(target.place) != Some(target.place))
    }

    /// Returns how many peers were found silent in a family, if no peer has answered in it since the start of the agent. Then the likely
    /// cause is not a peer.
    pub fn silence(&self, family: Family) -> Option<usize> {
        let of_family = self.examined.values().filter(|one| one.target.family == family);
        let silent = of_family.filter(|one| one.examination.cause().is_some()).count();
        (!self.answered.contains(&family) && silent > 0).then_some(silent)
    }

    /// Returns true if more peers are silent than can be examined.
    pub fn is_full(&self) -> bool {
        self.examined.len() >= MAX_EXAMINED
    }

    /// Returns the results of this peer. `None` if it was not asked yet.
    pub fn sample(&self, target: &Target) -> Option<&Sample> {
        self.samples.get(target)
    }

    /// Returns the smallest path MTU that was found, in bytes.
    pub fn smallest_mtu(&self) -> Option<u16> {
        self.samples.smallest_mtu()
    }

    /// Returns the numbers for the metrics.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

/// Returns the time for which an answer of this peer is waited for. It is another one each time. Otherwise two nodes that examine each
/// other could miss each other's requests for ever.
fn long_wait(tag: u32, count: u64) -> Duration {
    let random = tag.rotate_left((count % 32) as u32) % 1000;
    LONG_WAIT + Duration::from_millis(random.into())
}

#[cfg(test)]
mod tests;
