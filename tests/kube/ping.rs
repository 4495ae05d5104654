// SPDX-License-Identifier: Apache-2.0
//! A ping with 100 requests a second from one pod to another, and which of them were lost.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cluster::{Cluster, Pod};

/// A ping that runs in a pod's network namespace. It is the machine's program, because that of busybox has a receive buffer of a few
/// packets, in which it also gets the requests of others.
pub struct Ping<'a> {
    cluster: &'a Cluster,
    what: String,
    node: String,
    process: String,
    log: String,
}

/// The result of a ping.
pub struct Score {
    what: String,
    answered: usize,
    lost: Vec<u32>,
}

impl<'a> Ping<'a> {
    /// Starts a ping, and waits for the first answer.
    pub fn start(cluster: &'a Cluster, from: &Pod, address: &str) -> Ping<'a> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let log = format!("/run/ping-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let own = &from.addresses[0];
        let begin = format!(
            "for pod in /run/netns/*; do
                 nsenter --net=$pod ip -o addr | grep -q ' {own}/' || continue
                 nsenter --net=$pod ping -n -i 0.01 {address} </dev/null >{log} 2>&1 &
                 echo $!
             done"
        );
        let process = cluster.on(&from.node, &begin);
        assert!(!process.is_empty(), "no network namespace with {own} on {}", from.node);
        let what = format!("{} to {address}", from.node);
        let ping = Ping { cluster, what, node: from.node.clone(), process, log };
        cluster.until(&format!("the first answer, {}", ping.what), || !ping.seen().is_empty());
        ping
    }

    /// Starts a ping from every pod to the next one in every family.
    pub fn ring(cluster: &'a Cluster, pods: &[Pod]) -> Vec<Ping<'a>> {
        let next = pods.iter().cycle().skip(1);
        let pairs = pods.iter().zip(next);
        pairs.flat_map(|(from, to)| to.addresses.iter().map(|to| Ping::start(cluster, from, to))).collect()
    }

    fn read(&self) -> String {
        self.cluster.on(&self.node, &format!("cat {}", self.log))
    }

    fn seen(&self) -> BTreeSet<u32> {
        self.read().lines().filter_map(sequence).collect()
    }

    /// Ends the ping when requests of from now on were answered. What is still on its way then is not lost.
    pub fn stop(self) -> Score {
        let last = || self.seen().last().copied().unwrap_or_default();
        let now = last();
        self.cluster.until(&format!("a later answer, {}", self.what), || last() >= now + 20);
        self.cluster.on(&self.node, &format!("kill -INT {}", self.process));
        self.cluster.until("the end of ping", || self.read().contains("packets transmitted"));
        let seen = self.seen();
        let expected = 1..*seen.last().unwrap();
        Score {
            what: self.what,
            answered: seen.len(),
            lost: expected.filter(|number| !seen.contains(number)).collect(),
        }
    }
}

/// Returns the sequence number of an answer. A line about an error has no time, and neither has one that is not written yet.
fn sequence(line: &str) -> Option<u32> {
    line.contains(" time=").then_some(())?;
    line.split_once("seq=")?.1.split_whitespace().next()?.parse().ok()
}

impl Score {
    pub fn assert_nothing_lost(&self, during: &str) {
        let Score { what, answered, lost } = self;
        assert!(*answered > 100, "{what}, {during}: only {answered} answers: nothing was measured");
        assert!(lost.is_empty(), "{what}, {during}: lost {lost:?}, answered {answered}");
    }
}
