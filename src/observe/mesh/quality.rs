// SPDX-License-Identifier: Apache-2.0
//! What is known of one way: whether packets arrive, how many get lost, and how long they take.

use crate::observe::status::{PeerProbe, PeerState};

/// What is known of a way. It is small, because there may be millions of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quality {
    /// The state of the peer.
    pub state: PeerState,
    /// How many of a hundred requests were not answered. `None` if the peer was not asked.
    pub loss: Option<u8>,
    /// The last round trip in microseconds.
    pub rtt_us: Option<u32>,
    /// The largest packet in bytes that reached the peer.
    pub mtu: Option<u16>,
}

impl Quality {
    /// Returns the quality of the way to a peer. `state` is the state of the peer, and `probe` is what probes found out.
    pub fn new(state: PeerState, probe: Option<&PeerProbe>) -> Quality {
        let asked = probe.filter(|probe| probe.asked > 0);
        Quality {
            state,
            loss: asked.map(|probe| u8::try_from(loss_percent(probe)).unwrap_or(100).min(100)),
            rtt_us: probe.and_then(|probe| probe.round_trip_us).map(|trip| u32::try_from(trip).unwrap_or(u32::MAX)),
            mtu: probe.and_then(|probe| probe.mtu),
        }
    }

    /// Returns true if packets reach the peer, and none of the last ones was lost.
    pub fn is_healthy(&self) -> bool {
        self.state == PeerState::Programmed && self.loss.is_none_or(|loss| loss == 0)
    }

    /// Returns what ways are sorted by: broken ones, those that are not in the kernel, those that lose packets, then the slow ones.
    pub fn rank(&self) -> impl Ord + use<> {
        let is_broken = self.state == PeerState::Unreachable;
        std::cmp::Reverse((is_broken, self.state != PeerState::Programmed, self.loss.unwrap_or(0), self.rtt_us))
    }

    /// Returns the loss, the round trip and the MTU as text.
    pub fn cells(&self) -> [String; 3] {
        let unknown = || "-".to_owned();
        let trip = |micros: u32| format!("{}.{:02} ms", micros / 1000, micros % 1000 / 10);
        [
            self.loss.map_or_else(unknown, |loss| format!("{loss} %")),
            self.rtt_us.map_or_else(unknown, trip),
            self.mtu.map_or_else(unknown, |mtu| mtu.to_string()),
        ]
    }

    /// Returns the state, the loss, the round trip and the MTU as columns of a table.
    pub fn columns(&self) -> String {
        let [loss, trip, mtu] = self.cells();
        aligned([self.state.word(), &loss, &trip, &mtu])
    }
}

/// Returns the headings of [`Quality::columns`].
pub fn headings() -> String {
    aligned(["STATE", "LOSS", "RTT", "MTU"])
}

fn aligned([state, loss, trip, mtu]: [&str; 4]) -> String {
    format!("{state:11}  {loss:>5}  {trip:>9}  {mtu:>5}")
}

/// Returns how many of a hundred requests were not answered.
fn loss_percent(probe: &PeerProbe) -> u32 {
    (probe.lost * 100).checked_div(probe.asked).unwrap_or(0)
}
