// SPDX-License-Identifier: Apache-2.0
//! A change of the backend while the cluster runs, under pings between all pods.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::cluster::Lab;
use super::node::Node;
use super::options::LabOptions;
use super::ping::{Loss, Stream};
use super::process::PATIENCE;
use super::report::{duration, print_line};
use super::wait_for;

/// A stream of 100 pings a second from the first pod of every node to every address of the first pod of every other node.
#[derive(Debug)]
pub struct Streams(Vec<(String, Stream)>);

/// What the streams lost.
#[derive(Debug)]
pub struct StreamLoss {
    /// The sum of all streams.
    pub all: Loss,
    /// The streams that lost packets, each with how many.
    pub names: Vec<String>,
}

impl Streams {
    /// Starts the streams, and waits until each one has an answer.
    ///
    /// # Errors
    /// ping cannot be started, or there is no answer.
    pub async fn start(nodes: &[Node]) -> Result<Streams> {
        let mut streams = Vec::new();
        for from in nodes {
            for to in nodes.iter().filter(|to| to.name() != from.name()) {
                let (Some(pod), Some(target)) = (from.pods.first(), to.pods.first()) else { continue };
                for addr in &target.addrs {
                    let name = format!("{} -> {addr}", pod.ns.name());
                    streams.push((name, Stream::start(pod, *addr).await?));
                }
            }
        }
        Ok(Streams(streams))
    }

    /// Waits until every stream has `count` more answers.
    ///
    /// # Errors
    /// They do not come in time.
    pub async fn answers(&mut self, count: usize) -> Result<()> {
        for (name, stream) in &mut self.0 {
            stream.answers(count, PATIENCE).await.with_context(|| name.clone())?;
        }
        Ok(())
    }

    /// Ends the streams, and returns what they lost.
    ///
    /// # Errors
    /// As [`Streams::answers`], or ping cannot be ended.
    pub async fn stop(mut self) -> Result<StreamLoss> {
        self.answers(20).await?;
        let (mut all, mut names) = (Loss { sent: 0, lost: 0 }, Vec::new());
        for (name, stream) in self.0 {
            let loss = stream.stop().await?;
            (all.sent, all.lost) = (all.sent + loss.sent, all.lost + loss.lost);
            if loss.lost > 0 {
                names.push(format!("{name}: {} of {}", loss.lost, loss.sent));
            }
        }
        Ok(StreamLoss { all, names })
    }
}

/// Waits until the leases of these nodes name this backend and no earlier one.
///
/// # Errors
/// That does not happen in time.
pub async fn changed(nodes: &[Node], kind: &str) -> Result<()> {
    for node in nodes {
        let done =
            async || node.status().await.is_ok_and(|status| status.backend == kind && status.other_ways.is_empty());
        let waited = wait_for(&format!("{} to change to {kind}", node.name()), PATIENCE, done).await;
        if waited.is_err() {
            return waited.context(format!("its status: {:?}", node.status().await));
        }
    }
    Ok(())
}

/// Changes to the backend of `--change-backend` and back, and prints what was lost. Returns true if nothing was, or if the options ask for
/// no change.
///
/// # Errors
/// The net-conf cannot be written, or a node does not follow it.
pub async fn to_other_backend_and_back(lab: &mut Lab, options: &LabOptions) -> Result<bool> {
    let Some(other) = options.change_backend else { return Ok(true) };
    let mut nothing_lost = true;
    for kind in [other, options.backend] {
        print_line(&format!("changing net-conf to {} under pings between all nodes", kind.wire()));
        let conf = if kind == options.backend {
            options.net_conf()
        } else {
            options.net_conf_with(&json!({ "Type": kind.wire() }))
        };
        let (took, StreamLoss { all: loss, .. }) = change(lab, &conf, kind.wire()).await?;
        let took = duration(took);
        print_line(&format!("          changed in {took}: {} of {} packets lost", loss.lost, loss.sent));
        nothing_lost &= loss.lost == 0;
    }
    Ok(nothing_lost)
}

/// Writes this net-conf, and waits until all nodes have followed to this backend. Returns the time, and what the pings lost.
///
/// # Errors
/// As [`changed`], or pings are not answered any more.
pub async fn change(lab: &mut Lab, conf: &str, kind: &str) -> Result<(Duration, StreamLoss)> {
    let mut streams = Streams::start(&lab.nodes).await?;
    let begin = Instant::now();
    lab.store.set_net_conf(conf).await?;
    changed(&lab.nodes, kind).await.with_context(|| lab.logs(20))?;
    let took = begin.elapsed();
    streams.answers(20).await?;
    Ok((took, streams.stop().await?))
}

/// Returns the names of the devices of backends that a node has, sorted. Only tests use it: a lab itself does not need iproute2.
///
/// # Errors
/// As [`super::netns::Netns::ip`].
pub async fn devices(node: &Node) -> Result<Vec<String>> {
    let text = node.ns.ip("-o link show").await?;
    let names =
        text.lines().filter_map(|line| line.split(": ").nth(1)).map(|name| name.split('@').next().unwrap_or(name));
    let mut names: Vec<String> = names.filter(|name| name.starts_with("flannel")).map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

/// Returns a `Backend` object of type vxlan with this VNI.
pub fn vxlan(vni: u32) -> Value {
    json!({ "Type": "vxlan", "VNI": vni })
}
