// SPDX-License-Identifier: Apache-2.0
//! What etcd itself counts: the requests of each kind, their bytes, and its CPU time. So the clients need not count anything, and what
//! a library sends on its own is counted, too.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::time::ClockId;

use crate::peers::STORE;
use crate::process::cpu_of_process;

/// Messages of a client by method. A unary call is one message, and a stream has one for each request that is sent in it.
const RECEIVED: &str = "grpc_server_msg_received_total{";
const BYTES_RECEIVED: &str = "etcd_network_client_grpc_received_bytes_total";
const BYTES_SENT: &str = "etcd_network_client_grpc_sent_bytes_total";
/// Each event counts once for each watcher that it is sent to.
const EVENTS: &str = "etcd_debugging_mvcc_events_total";

/// Counters of an etcd and the CPU time of both sides, since their processes began.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counters {
    /// Requests by method, such as `Range`.
    pub requests: BTreeMap<String, u64>,
    /// Bytes of all requests, without the headers of HTTP and TCP.
    pub bytes_received: u64,
    /// Bytes of all answers and events.
    pub bytes_sent: u64,
    /// Events that were sent to watchers.
    pub events: u64,
    /// CPU time of etcd.
    pub etcd_cpu: Duration,
    /// CPU time of this process, in which the clients run.
    pub own_cpu: Duration,
}

impl Counters {
    /// Reads the counters of the etcd with this process id.
    ///
    /// # Errors
    /// etcd does not answer, or lacks a counter.
    pub fn read(etcd: u32) -> Result<Counters> {
        let mut counters = Counters::parse(&scrape()?)?;
        counters.etcd_cpu = cpu_of_process(etcd).context("etcd")?;
        counters.own_cpu = Duration::from(ClockId::CLOCK_PROCESS_CPUTIME_ID.now().context("read our CPU clock")?);
        Ok(counters)
    }

    fn parse(text: &str) -> Result<Counters> {
        let mut counters = Counters::default();
        let mut found = 0;
        for (name, value) in text.lines().filter_map(|line| line.rsplit_once(' ')) {
            // etcd writes large numbers as 1.234e+06.
            let Ok(value) = value.parse::<f64>().map(|value| value as u64) else { continue };
            if let Some(labels) = name.strip_prefix(RECEIVED) {
                let method = labels.split("grpc_method=\"").nth(1).and_then(|rest| rest.split('"').next());
                *counters.requests.entry(method.context("a counter without its method")?.to_owned()).or_default() +=
                    value;
                continue;
            }
            let counter = match name {
                BYTES_RECEIVED => &mut counters.bytes_received,
                BYTES_SENT => &mut counters.bytes_sent,
                EVENTS => &mut counters.events,
                _ => continue,
            };
            *counter = value;
            found += 1;
        }
        ensure!(found == 3 && !counters.requests.is_empty(), "this etcd does not have the counters that are needed");
        Ok(counters)
    }

    /// Returns what was added since `before`.
    pub fn since(&self, before: &Counters) -> Counters {
        let requests = self.requests.iter().filter_map(|(method, count)| {
            let added = count - before.requests.get(method).copied().unwrap_or(0);
            (added > 0).then(|| (method.clone(), added))
        });
        Counters {
            requests: requests.collect(),
            bytes_received: self.bytes_received - before.bytes_received,
            bytes_sent: self.bytes_sent - before.bytes_sent,
            events: self.events - before.events,
            etcd_cpu: self.etcd_cpu.saturating_sub(before.etcd_cpu),
            own_cpu: self.own_cpu.saturating_sub(before.own_cpu),
        }
    }

    /// Returns the number of all requests.
    pub fn all_requests(&self) -> u64 {
        self.requests.values().sum()
    }

    /// Returns what grows while a storm lasts: the events, and the requests without those that nodes make when nothing happens. Many nodes
    /// ask etcd for signs of life (`Range`) all the time.
    pub fn storm(&self) -> u64 {
        let signs_of_life = self.requests.get("Range").copied().unwrap_or_default();
        self.all_requests() - signs_of_life + self.events
    }
}

/// Returns the page of etcd's metrics. This is HTTP, so it does not count as a request.
fn scrape() -> Result<String> {
    let mut stream = TcpStream::connect((STORE, 2379)).context("connect to etcd")?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).context("limit a read")?;
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: etcd\r\n\r\n").context("ask etcd for its metrics")?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("read etcd's metrics")?;
    ensure!(text.starts_with("HTTP/1.0 200"), "etcd does not show its metrics");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "HTTP/1.0 200 OK\r\n\r\n# TYPE x counter\n\
        grpc_server_msg_received_total{grpc_method=\"Range\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"} 12\n\
        grpc_server_msg_received_total{grpc_method=\"Txn\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"} 0\n\
        etcd_debugging_mvcc_events_total 7\netcd_network_client_grpc_received_bytes_total 1.5e+06\n\
        etcd_network_client_grpc_sent_bytes_total 20\n";

    #[test]
    fn counters_are_read_from_the_page_and_subtracted() {
        let first = Counters::parse(PAGE).unwrap();
        assert_eq!((first.bytes_received, first.bytes_sent, first.events), (1_500_000, 20, 7));
        let second = Counters::parse(&PAGE.replace("} 12", "} 15")).unwrap();
        assert_eq!(second.since(&first).requests, BTreeMap::from([("Range".to_owned(), 3)]));
        assert!(Counters::parse("HTTP/1.0 200 OK\r\n\r\n").is_err(), "a page without counters must be refused");
    }
}
