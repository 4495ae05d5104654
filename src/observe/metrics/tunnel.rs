// SPDX-License-Identifier: Apache-2.0
//! The metrics of the tunnel of the backend udp.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use weft_udp::counters::{Counters, Reason};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    direction: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Drop {
    direction: &'static str,
    reason: &'static str,
}

/// Metrics of the tunnel of the backend udp. Without a tunnel they are not rendered.
#[derive(Debug, Default)]
pub(super) struct TunnelMetrics {
    counters: OnceLock<Arc<Counters>>,
    packets: Family<Labels, Counter>,
    bytes: Family<Labels, Counter>,
    dropped: Family<Drop, Counter>,
}

impl TunnelMetrics {
    /// Registers all of them.
    pub(super) fn register(&self, registry: &mut Registry) {
        let packets = "Packets that the agent's tunnel carried, by direction";
        registry.register("weft_tunnel_packets", packets, self.packets.clone());
        let bytes = "Bytes of the packets that the agent's tunnel carried, by direction";
        registry.register("weft_tunnel_bytes", bytes, self.bytes.clone());
        let dropped = "Packets that the agent's tunnel dropped, by direction and reason";
        registry.register("weft_tunnel_dropped", dropped, self.dropped.clone());
    }

    /// Says where the packets are counted. Only the first call has an effect.
    pub(super) fn count(&self, counters: &Arc<Counters>) {
        self.counters.get_or_init(|| counters.clone());
    }

    /// Copies the counters, which the threads of the tunnel write.
    pub(super) fn refresh(&self) {
        let Some(counters) = self.counters.get() else { return };
        for (direction, counted) in [("sent", &counters.sent), ("received", &counters.received)] {
            let labels = Labels { direction };
            self.packets.get_or_create(&labels).inner().store(counted.packets(), Ordering::Relaxed);
            self.bytes.get_or_create(&labels).inner().store(counted.bytes(), Ordering::Relaxed);
            for reason in Reason::ALL {
                let label = Drop { direction, reason: reason.label() };
                self.dropped.get_or_create(&label).inner().store(counted.dropped(*reason), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::observe::metrics::Metrics;

    #[test]
    fn each_number_of_a_tunnel_has_its_direction_and_its_reason() {
        let (metrics, counters) = (Metrics::new(), Arc::<Counters>::default());
        metrics.tunnel(&counters);
        metrics.tunnel(&Arc::default());
        counters.sent.forward(1, 100);
        assert!(metrics.render(Instant::now()).contains("weft_tunnel_packets_total{direction=\"sent\"} 1\n"));
        counters.sent.forward(1, 200);
        counters.received.forward(5, 700);
        counters.sent.drop_packets(Reason::NoRoute, 7);
        counters.received.drop_packets(Reason::Stranger, 3);
        let text = metrics.render(Instant::now());
        for line in [
            "weft_tunnel_packets_total{direction=\"sent\"} 2",
            "weft_tunnel_bytes_total{direction=\"sent\"} 300",
            "weft_tunnel_packets_total{direction=\"received\"} 5",
            "weft_tunnel_bytes_total{direction=\"received\"} 700",
            "weft_tunnel_dropped_total{direction=\"sent\",reason=\"no_route\"} 7",
            "weft_tunnel_dropped_total{direction=\"received\",reason=\"stranger\"} 3",
            "weft_tunnel_dropped_total{direction=\"received\",reason=\"no_route\"} 0",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
        }
    }
}
