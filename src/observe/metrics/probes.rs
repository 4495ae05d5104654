// SPDX-License-Identifier: Apache-2.0
//! The metrics of probes. None has a label for each peer.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::register;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    cause: &'static str,
}

/// Counters and gauges of the probes.
#[derive(Debug)]
pub(super) struct ProbeMetrics {
    packets: Family<Outcome, Counter>,
    round_trip: Histogram,
    unreachable: Family<Why, Gauge>,
    smallest_mtu: Gauge,
}

impl ProbeMetrics {
    pub(super) fn new(all: &mut Registry) -> ProbeMetrics {
        // The buckets reach from 0.1 ms to 1.6 s.
        let round_trip = Histogram::new(exponential_buckets(0.000_1, 4.0, 8));
        all.register("weft_probe_round_trip_seconds", "Time between a probe and its answer", round_trip.clone());
        ProbeMetrics {
            packets: register(all, "weft_probes", "Echo requests to peers, by result"),
            round_trip,
            unreachable: register(all, "weft_unreachable_peers", "Peers that packets do not reach, by cause"),
            smallest_mtu: register(
                all,
                "weft_probe_smallest_mtu_bytes",
                "The smallest of the largest packets that reached each peer; 0 = not known yet",
            ),
        }
    }

    pub(super) fn answered(&self, round_trip: Option<Duration>) {
        let result = if round_trip.is_some() { "answered" } else { "lost" };
        self.packets.get_or_create(&Outcome { result }).inc();
        round_trip.iter().for_each(|trip| self.round_trip.observe(trip.as_secs_f64()));
    }

    pub(super) fn unreachable(&self, by_cause: &[(&'static str, usize)], smallest_mtu: Option<u16>) {
        for (cause, count) in by_cause {
            self.unreachable.get_or_create(&Why { cause }).set(i64::try_from(*count).unwrap_or(i64::MAX));
        }
        self.smallest_mtu.set(smallest_mtu.unwrap_or(0).into());
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::observe::metrics::Metrics;

    #[test]
    fn answers_losses_causes_and_the_smallest_mtu_have_their_own_numbers() {
        let metrics = Metrics::new();
        for round_trip in [Some(Duration::from_millis(2)), None, None] {
            metrics.probe(round_trip);
        }
        metrics.unreachable(&[("tunnel", 3), ("mtu", 1)], Some(1400));
        metrics.unreachable(&[("tunnel", 2), ("mtu", 1)], Some(1400));
        let text = metrics.render(Instant::now());
        for line in [
            "weft_probes_total{result=\"answered\"} 1",
            "weft_probes_total{result=\"lost\"} 2",
            "weft_probe_round_trip_seconds_count 1",
            "weft_probe_round_trip_seconds_sum 0.002",
            "weft_unreachable_peers{cause=\"tunnel\"} 2",
            "weft_unreachable_peers{cause=\"mtu\"} 1",
            "weft_probe_smallest_mtu_bytes 1400",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
        }
        metrics.unreachable(&[], None);
        assert!(metrics.render(Instant::now()).contains("weft_probe_smallest_mtu_bytes 0\n"), "it is not known");
    }
}
