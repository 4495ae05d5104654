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
