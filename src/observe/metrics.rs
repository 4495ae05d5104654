// SPDX-License-Identifier: Apache-2.0
//! The metrics for /metrics, in the OpenMetrics text format. Times such as the lease's remaining lifetime are computed
//! when the metrics are rendered.

mod probes;
mod tunnel;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};
use tokio::time::Instant;
use weft_udp::counters::Counters;

use crate::observe::status::PeerState;
use probes::ProbeMetrics;
use tunnel::TunnelMetrics;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Cause {
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    kind: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: &'static str,
}

/// Times from which gauges are computed.
#[derive(Debug, Default)]
struct Times {
    /// When the store last answered.
    store_answer: Option<Instant>,
    /// When the lease was last renewed, and its time to live then. `None` if it does not expire, because then nothing renews it.
    lease: Option<(Instant, Duration)>,
}

/// All metrics of one agent.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    passes: Family<Cause, Counter>,
    full_passes: Family<Cause, Counter>,
    operations: Family<Operation, Counter>,
    peers: Family<State, Gauge>,
    not_encrypted: Gauge,
    repairs: Family<Cause, Counter>,
    durations: Histogram,
    convergence: Histogram,
    gauges: Gauges,
    rules: Rules,
    tunnel: TunnelMetrics,
    probes: ProbeMetrics,
    times: Mutex<Times>,
}

/// What is computed when the metrics are rendered.
#[derive(Debug)]
struct Gauges {
    lease_ttl: Gauge<f64, AtomicU64>,
    lease_age: Gauge<f64, AtomicU64>,
    store_silence: Gauge<f64, AtomicU64>,
    memory: Gauge,
}

impl Gauges {
    fn new(all: &mut Registry) -> Gauges {
        Gauges {
            lease_ttl: register(
                all,
                "weft_lease_ttl_seconds",
                "Seconds until this node's lease expires unless it is renewed; -1 = it does not expire, or there is none yet",
            ),
            lease_age: register(
                all,
                "weft_lease_age_seconds",
                "Seconds since this node's lease was last renewed; -1 = not yet, or the store renews none",
            ),
            store_silence: register(
                all,
                "weft_store_silence_seconds",
                "Seconds since the last answer of the store; -1 = none yet",
            ),
            memory: register(all, "process_resident_memory_bytes", "Resident memory size in bytes"),
        }
    }
}

/// Registers a metric with its initial value, and returns it.
fn register<M: Metric + Clone + Default>(all: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    all.register(name, help, metric.clone());
    metric
}

/// Metrics of the traffic rules.
#[derive(Debug, Default)]
struct Rules {
    in_place: Gauge,
    writes: Counter,
    repaired: Counter,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

impl Metrics {
    /// Creates all metrics with their initial values.
    pub fn new() -> Metrics {
        let mut all = Registry::default();
        // The buckets reach from 0.1 ms to 105 s.
        let times = || Histogram::new(exponential_buckets(0.000_1, 4.0, 11));
        let passes = register(&mut all, "weft_passes", "Comparisons of the desired state with the kernel, by cause");
        let full_passes = "Passes that compared the whole desired state with a dump of the kernel, by cause";
        let full_passes = register(&mut all, "weft_full_passes", full_passes);
        let operations = register(&mut all, "weft_operations", "Writes to the kernel, by kind and result");
        let repairs =
            "Writes to the kernel because it was not as it should be: announced by the kernel, or found by an audit";
        let repairs = register(&mut all, "weft_repairs", repairs);
        let peers = register(&mut all, "weft_peers", "Peers, by state");
        let not_encrypted = register(
            &mut all,
            "weft_peers_not_encrypted",
            "Peers to which packets go in clear text although the backend of this node encrypts",
        );
        let (durations, convergence) = (times(), times());
        all.register("weft_pass_duration_seconds", "Duration of a pass", durations.clone());
        all.register(
            "weft_convergence_seconds",
            "Time from an event of the store that the agent takes up to the last write to the kernel that follows from it",
            convergence.clone(),
        );
        let gauges = Gauges::new(&mut all);
        let rules = Rules {
            in_place: register(&mut all, "weft_rules_in_place", "1 while the traffic rules are in place"),
            writes: register(&mut all, "weft_rules_writes", "Writes of the traffic rules"),
            repaired: register(
                &mut all,
                "weft_rules_mended",
                "Writes of the traffic rules because other programs had changed them",
            ),
        };
        let tunnel = TunnelMetrics::default();
        tunnel.register(&mut all);
        let probes = ProbeMetrics::new(&mut all);
        all.register("weft_build", "Version", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        let times = Mutex::default();
        Metrics {
            registry: all,
            passes,
            full_passes,
            operations,
            repairs,
            peers,
            not_encrypted,
            durations,
            convergence,
            gauges,
            rules,
            tunnel,
            probes,
            times,
        }
    }

    /// Records a pass that has ended. `cause` is that of [`crate::observe::status::Pass`].
    pub fn pass(&self, cause: &'static str, took: Duration) {
        self.passes.get_or_create(&Cause { cause }).inc();
        self.durations.observe(took.as_secs_f64());
    }

    /// Records that the whole desired state was compared with a dump of the kernel. `cause` is that of
    /// [`crate::observe::status::Pass`].
    pub fn full_pass(&self, cause: &'static str) {
        self.full_passes.get_or_create(&Cause { cause }).inc();
    }

    /// Records `count` writes to the kernel. `kind` is the word that `pass::kind` returns for the entry. `result` is `done` or `failed`.
    pub fn operations(&self, kind: &'static str, result: &'static str, count: u64) {
        self.operations.get_or_create(&Operation { kind, result }).inc_by(count);
    }

    /// Records `count` writes that restored what the kernel should contain. `cause` is `kernel` or `audit`.
    pub fn repairs(&self, cause: &'static str, count: u64) {
        self.repairs.get_or_create(&Cause { cause }).inc_by(count);
    }

    /// Records that everything that an event of the store led to is in the kernel, this long after the agent took the event up.
    pub fn converged(&self, took: Duration) {
        self.convergence.observe(took.as_secs_f64());
    }

    /// Sets the number of peers in a state. A state that was never set is not rendered.
    pub fn peers(&self, state: PeerState, count: usize) {
        self.peers.get_or_create(&State { state: state.word() }).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Sets the number of peers to which packets go in clear text although the backend of this node encrypts.
    pub fn peers_not_encrypted(&self, count: usize) {
        self.not_encrypted.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Sets the state of the traffic rules. `writes` and `mended` are totals since the start of the agent.
    pub fn rules(&self, in_place: bool, writes: u64, mended: u64) {
        self.rules.in_place.set(i64::from(in_place));
        self.rules.writes.inc_by(writes.saturating_sub(self.rules.writes.get()));
        self.rules.repaired.inc_by(mended.saturating_sub(self.rules.repaired.get()));
    }

    /// Says where the tunnel counts its packets. An agent has one set of counters, so only the first call has an effect.
    pub fn tunnel(&self, counters: &Arc<Counters>) {
        self.tunnel.count(counters);
    }

    /// Records a probe that was answered after this time, or that was not answered.
    pub fn probe(&self, round_trip: Option<Duration>) {
        self.probes.answered(round_trip);
    }

    /// Sets how many peers packets do not reach, by cause, and the smallest MTU of a path in bytes.
    pub fn unreachable(&self, by_cause: &[(&'static str, usize)], smallest_mtu: Option<u16>) {
        self.probes.unreachable(by_cause, smallest_mtu);
    }

    /// Records that the store has answered.
    pub fn store_answered(&self, now: Instant) {
        self.times().store_answer = Some(now);
    }

    /// Records that the lease was renewed at `now`, with this time to live. `None` means that it does not expire.
    pub fn lease_kept(&self, now: Instant, ttl: Option<Duration>) {
        self.times().lease = ttl.map(|ttl| (now, ttl));
    }

    /// Renders all metrics in Prometheus' text format 0.0.4, in which the metadata of a counter bears its whole name.
    pub fn render_classic(&self, now: Instant) -> String {
        classic(&self.render(now))
    }

    /// Renders all metrics in the OpenMetrics text format.
    pub fn render(&self, now: Instant) -> String {
        {
            let times = self.times();
            let left = |(at, ttl): (Instant, Duration)| ttl.saturating_sub(now.saturating_duration_since(at));
            self.gauges.lease_ttl.set(times.lease.map_or(-1.0, |lease| left(lease).as_secs_f64()));
            let since = |at: Option<Instant>| at.map_or(-1.0, |at| now.saturating_duration_since(at).as_secs_f64());
            self.gauges.lease_age.set(since(times.lease.map(|(at, _)| at)));
            self.gauges.store_silence.set(since(times.store_answer));
        }
        self.gauges.memory.set(resident_bytes().and_then(|bytes| bytes.try_into().ok()).unwrap_or(-1));
        self.tunnel.refresh();
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            // Writing into a String cannot fail.
            Err(_) => String::new(),
        }
    }

    fn times(&self) -> std::sync::MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the resident memory of this process in bytes, as the kernel counts it (proc_pid_statm(5)).
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
    pages.checked_mul(page.try_into().ok()?)
}

/// Converts OpenMetrics' text into Prometheus' older format. There the metadata of a counter and of an info bears the suffix of the
/// samples, an info is a gauge, and units and the end are not marked.
fn classic(text: &str) -> String {
    let kind_of = |line: &str| {
        line.strip_prefix("# TYPE ")?.split_once(' ').map(|(name, kind)| (name.to_owned(), kind.to_owned()))
    };
    let kinds: std::collections::HashMap<String, String> = text.lines().filter_map(kind_of).collect();
    let suffix = |name: &str| match kinds.get(name).map(String::as_str) {
        Some("counter") => "_total",
        Some("info") => "_info",
        _ => "",
    };
    let mut out = String::with_capacity(text.len() + 512);
    for line in text.lines().filter(|line| *line != "# EOF" && !line.starts_with("# UNIT ")) {
        let metadata = ["# HELP ", "# TYPE "].into_iter().find_map(|mark| Some((mark, line.strip_prefix(mark)?)));
        match metadata.and_then(|(mark, rest)| Some((mark, rest.split_once(' ')?))) {
            Some((mark, (name, rest))) => {
                let rest = if mark == "# TYPE " && rest == "info" { "gauge" } else { rest };
                out.extend([mark, name, suffix(name), " ", rest]);
            }
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_their_documented_names_and_values() {
        let metrics = Metrics::new();
        let start = Instant::now();
        assert!(metrics.render(start).contains("weft_store_silence_seconds -1"));
        metrics.pass("lease", Duration::from_millis(3));
        metrics.full_pass("audit");
        metrics.operations("route", "done", 3);
        metrics.operations("route", "failed", 1);
        metrics.peers(PeerState::SetAside, 2);
        metrics.peers_not_encrypted(1);
        metrics.store_answered(start);
        metrics.lease_kept(start, Some(Duration::from_secs(100)));
        metrics.repairs("audit", 2);
        metrics.converged(Duration::from_millis(2));
        metrics.rules(true, 3, 2);
        metrics.rules(true, 4, 2);
        metrics.tunnel(&Arc::default());
        let text = metrics.render(start + Duration::from_secs(40));
        for line in [
            "weft_passes_total{cause=\"lease\"} 1",
            "weft_full_passes_total{cause=\"audit\"} 1",
            "weft_operations_total{kind=\"route\",result=\"done\"} 3",
            "weft_operations_total{kind=\"route\",result=\"failed\"} 1",
            "weft_peers{state=\"set-aside\"} 2",
            "weft_peers_not_encrypted 1",
            "weft_lease_ttl_seconds 60",
            "weft_rules_in_place 1",
            "weft_rules_writes_total 4",
            "weft_rules_mended_total 2",
            "weft_tunnel_packets_total{direction=\"sent\"} 0",
            "weft_tunnel_bytes_total{direction=\"received\"} 0",
            "weft_tunnel_dropped_total{direction=\"received\",reason=\"stranger\"} 0",
            "weft_store_silence_seconds 40",
            "weft_lease_age_seconds 40",
            "weft_repairs_total{cause=\"audit\"} 2",
            "weft_convergence_seconds_count 1",
            "weft_pass_duration_seconds_count 1",
            &format!("weft_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION")),
        ] {
            assert!(text.lines().any(|l| l.strip_suffix(".0").unwrap_or(l) == line), "{line} is missing in\n{text}");
        }
    }

    /// A directory, or Kubernetes, reports each minute that the lease is kept, and renews nothing.
    #[test]
    fn a_lease_that_does_not_expire_has_no_age_and_one_that_ended_has_no_time_left() {
        let (metrics, start) = (Metrics::new(), Instant::now());
        let gauges = |after: u64| {
            let text = metrics.render(start + Duration::from_secs(after));
            ["weft_lease_ttl_seconds ", "weft_lease_age_seconds "]
                .map(|name| text.lines().find_map(|line| line.strip_prefix(name)?.parse().ok()))
        };
        assert_eq!(gauges(5), [Some(-1.0), Some(-1.0)], "there is no lease yet");
        metrics.lease_kept(start, Some(Duration::from_secs(10)));
        assert_eq!(gauges(60), [Some(0.0), Some(60.0)]);
        metrics.lease_kept(start, None);
        assert_eq!(gauges(60), [Some(-1.0), Some(-1.0)]);
        metrics.rules(true, 1, 0);
        metrics.rules(false, 1, 0);
        assert!(metrics.render(start).contains("weft_rules_in_place 0\n"));
    }

    #[test]
    fn memory_is_that_of_this_process() {
        let text = Metrics::new().render(Instant::now());
        let line = text.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes ")).unwrap();
        assert!(line.parse::<u64>().unwrap() > 1 << 20, "{line}");
    }

    #[test]
    fn in_the_older_format_metadata_has_the_names_of_the_samples() {
        let metrics = Metrics::new();
        metrics.pass("lease", Duration::ZERO);
        let text = metrics.render_classic(Instant::now());
        for line in [
            "# TYPE weft_passes_total counter",
            "# HELP weft_passes_total Comparisons of the desired state with the kernel, by cause.",
            "weft_passes_total{cause=\"lease\"} 1",
            "# TYPE weft_build_info gauge",
            "# TYPE weft_pass_duration_seconds histogram",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("# EOF"));
    }

    #[test]
    fn operations_md_documents_every_metric() {
        let doc = include_str!("../../docs/operations.md");
        let metrics = Metrics::new();
        // A family is rendered only if it has a member.
        metrics.pass("lease", Duration::ZERO);
        metrics.full_pass("start");
        metrics.operations("route", "done", 1);
        metrics.peers(PeerState::Held, 0);
        metrics.repairs("audit", 0);
        metrics.probe(None);
        metrics.unreachable(&[("tunnel", 0)], None);
        assert!(!metrics.render(Instant::now()).contains("weft_tunnel_packets_total"), "there is no tunnel");
        metrics.tunnel(&Arc::default());
        let text = metrics.render(Instant::now());
        let types: Vec<(&str, &str)> =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
        assert_eq!(types.len(), 23, "{text}");
        for (name, kind) in types {
            let suffix = match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            assert!(doc.contains(&format!("`{name}{suffix}`")), "{name}{suffix} is missing");
        }
    }
}
