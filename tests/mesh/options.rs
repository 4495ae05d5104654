// SPDX-License-Identifier: Apache-2.0
//! Options and Network are changed in net-conf while a cluster with the directory store runs. All nodes follow, and no packet between two pods
//! is lost.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use weft_lab::change::{StreamLoss, Streams, vxlan};
use weft_lab::node::Node;
use weft_lab::{Lab, LabOptions, StoreKind, wait_for};

use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);

/// Removals are not held, because the first node finds an empty store, and would remove nothing for five minutes.
fn lab_options() -> LabOptions {
    let agent_flags = ["--change-grace=3s", "--hold-removals=0s"].map(str::to_owned).to_vec();
    LabOptions { store: StoreKind::Dir, agent_flags, ..options() }
}

/// What every node has after it has followed a net-conf.
struct Followed<'a> {
    /// Lines of subnet.env.
    env: &'a [&'a str],
    /// The device that packets to the pods of other nodes leave by.
    device: &'a str,
    /// Words of `ip -d link show` of flannel's devices.
    link: &'a str,
}

impl Followed<'_> {
    async fn by(&self, node: &Node, to: &Node) -> Result<bool> {
        let env = std::fs::read_to_string(node.subnet_file())?;
        let route = node.ns.ip(&format!("route get {}", to.pods[0].addrs[0])).await?;
        let links = node.ns.ip("-d link show type vxlan").await?;
        let has_env = self.env.iter().all(|line| env.lines().any(|other| other == *line));
        Ok(has_env && route.contains(&format!("dev {} ", self.device)) && links.contains(self.link))
    }
}

/// Writes each net-conf in turn under pings, and waits until every node has followed.
async fn walk(steps: &[(String, Followed<'_>)]) -> Result<()> {
    let mut lab = Lab::start(&lab_options()).await?;
    lab.reach_all().await?;
    for (conf, wanted) in steps {
        let mut streams = Streams::start(&lab.nodes).await?;
        lab.store.set_net_conf(conf).await?;
        for at in 0..lab.nodes.len() {
            let (node, to) = (&lab.nodes[at], &lab.nodes[(at + 1) % lab.nodes.len()]);
            let followed = async || wanted.by(node, to).await.is_ok_and(|followed| followed);
            let what = format!("{} to follow {conf}", node.name());
            wait_for(&what, LIMIT, followed).await.with_context(|| lab.logs(30))?;
        }
        // A node that was faster than others says that they still need the earlier backend.
        for node in &lab.nodes {
            let is_content = async || {
                node.status().await.is_ok_and(|status| status.problems.iter().all(|text| !text.contains("net-conf")))
            };
            let waited = wait_for(&format!("no problem with {conf}"), LIMIT, is_content).await;
            waited.with_context(|| format!("{}: {}", node.name(), lab.logs(30)))?;
        }
        streams.answers(50).await?;
        let StreamLoss { all: loss, names } = streams.stop().await.with_context(|| lab.logs(20))?;
        ensure!(loss.lost == 0, "{conf}: {} of {} lost: {names:?}\n{}", loss.lost, loss.sent, lab.logs(30));
        lab.reach_all().await?;
    }
    Ok(())
}

fn conf(options: &Value) -> String {
    let mut backend = vxlan(1);
    for (key, value) in options.as_object().into_iter().flatten() {
        backend[key] = value.clone();
    }
    lab_options().net_conf_with(&backend)
}

#[test]
fn mtu_direct_routing_and_port_are_followed() {
    let tunnel = |env: &'static [&'static str], link| Followed { env, device: "flannel.1", link };
    let steps = vec![
        (conf(&json!({ "MTU": 1400 })), tunnel(&["FLANNEL_MTU=1350"], "mtu 1350")),
        (conf(&json!({})), tunnel(&["FLANNEL_MTU=1450"], "mtu 1450")),
        (
            conf(&json!({ "DirectRouting": true })),
            Followed { env: &["FLANNEL_MTU=1450"], device: "eth0", link: "flannel.1" },
        ),
        (conf(&json!({})), tunnel(&["FLANNEL_MTU=1450"], "dstport 8472")),
        // Linux fixes the port when the device is made, so it needs another VNI.
        (
            conf(&json!({ "VNI": 7, "Port": 4789 })),
            Followed { env: &["FLANNEL_MTU=1450"], device: "flannel.7", link: "dstport 4789" },
        ),
    ];
    on_this_thread(async move { walk(&steps).await });
}

#[test]
fn a_wider_network_is_followed() {
    let wider = conf(&json!({})).replace("10.244.0.0/16", "10.240.0.0/12");
    let back = conf(&json!({}));
    let followed = |env: &'static [&'static str]| Followed { env, device: "flannel.1", link: "flannel.1" };
    let steps = vec![
        (wider, followed(&["FLANNEL_NETWORK=10.240.0.0/12"])),
        (back, followed(&["FLANNEL_NETWORK=10.244.0.0/16"])),
    ];
    on_this_thread(async move { walk(&steps).await });
}

/// Restarts every agent, one after the other.
async fn restart_all(lab: &mut Lab) -> Result<()> {
    for node in &mut lab.nodes {
        node.stop(Signal::SIGTERM).await?;
        node.start()?;
        node.ready().await.with_context(|| node.log_tail(30))?;
    }
    Ok(())
}

async fn has_problem(lab: &Lab, words: &str) -> Result<()> {
    for node in &lab.nodes {
        let named = async || {
            node.status().await.is_ok_and(|status| status.problems.iter().any(|problem| problem.contains(words)))
        };
        wait_for(&format!("{} to say {words}", node.name()), LIMIT, named).await?;
    }
    Ok(())
}

/// A change of the families needs a restart of the agents. Until then nothing changes, and no packet is lost. Every pod keeps its IPv4 address,
/// and is reached again after the restart of its node's agent. (The lease gets another key, so a few packets are lost.)
#[test]
fn ipv6_is_turned_on_and_off_by_a_restart_of_the_agents() {
    on_this_thread(async {
        let single = lab_options();
        let dual = LabOptions { ipv6: true, ..lab_options() };
        let mut lab = Lab::start(&single).await?;
        lab.reach_all().await?;
        for (conf, has_ipv6) in [(dual.net_conf(), true), (single.net_conf(), false)] {
            let mut streams = Streams::start(&lab.nodes).await?;
            lab.store.set_net_conf(&conf).await?;
            has_problem(&lab, "restart the agent to apply the change of EnableIPv6").await?;
            streams.answers(30).await?;
            let StreamLoss { all: loss, names } = streams.stop().await.with_context(|| lab.logs(20))?;
            ensure!(loss.lost == 0, "{conf}: {} of {} lost: {names:?}\n{}", loss.lost, loss.sent, lab.logs(30));
            let mut streams = Streams::start(&lab.nodes).await?;
            restart_all(&mut lab).await?;
            streams.answers(50).await.with_context(|| format!("{conf}: {}", lab.logs(30)))?;
            streams.stop().await?;
            for node in &mut lab.nodes {
                let subnets = node.pod_net().await?.gateways;
                let pod = node.pods[0].addrs[0];
                ensure!(subnets.iter().any(|subnet| subnet.contains(&pod)), "its IPv4 subnet changed: {subnets:?}");
                ensure!((subnets.len() == 2) == has_ipv6, "{subnets:?}");
            }
        }
        Ok(())
    });
}
