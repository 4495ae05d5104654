// SPDX-License-Identifier: Apache-2.0
//! The alert rules in a real Prometheus that scrapes a lab: none fires while the lab is healthy, and each fires when it is provoked. The
//! waiting times of the rules are shortened, because nobody waits ten minutes for a test. `WeftPeersNotEncrypted` needs WireGuard: promtool
//! judges the rule (tests/deploy/monitoring.rs), and a virtual machine shows that the metric rises and falls
//! (tests/vm/wireguard-change.sh).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Child;
use weft_lab::netns::checked;
use weft_lab::{BackendKind, Lab, LabOptions, StoreKind, wait_for};

use crate::{LIMIT, on_this_thread, options};

const RULES: &str = "deploy/prometheus/weft-rules.yml";
const DASHBOARD: &str = "deploy/grafana/weft.json";
/// What has no value on a healthy lab of vxlan over a directory, in the queries of the dashboard: faults, leases that end, and udp.
const EMPTY: [&str; 7] = [
    "state!=\"programmed\"",
    "result=\"failed\"",
    "result=\"lost\"",
    "weft_unreachable_peers",
    "weft_repairs_total",
    "weft_lease_",
    "weft_tunnel_",
];
/// What is shortened in the rules.
const SHORTER: [(&str, &str); 5] = [
    ("[10m]", "[20s]"),
    ("weft_lease_age_seconds / 3\n        for: 1m", "weft_lease_age_seconds / 3\n        for: 1s"),
    ("weft_store_silence_seconds > 600", "weft_store_silence_seconds > 30"),
    ("increase(weft_repairs_total[20s]) > 100", "increase(weft_repairs_total[20s]) > 3"),
    ("weft_peers{state=\"held\"} > 0\n        for: 1m", "weft_peers{state=\"held\"} > 0\n        for: 1s"),
];
const SERVER: &str = "http://127.0.0.1:9090";

/// A Prometheus in the namespace of the first node.
struct Prometheus {
    _dir: TempDir,
    _process: Child,
}

/// Returns the rules of deploy/ with shorter times, and with these replacements.
fn rules(more: &[(&str, &str)]) -> Result<String> {
    let mut text = fs::read_to_string(RULES)?;
    for minutes in ["5m", "10m", "15m"] {
        text = text.replace(&format!("for: {minutes}\n"), "for: 1s\n");
    }
    for (long, short) in SHORTER.iter().chain(more) {
        ensure!(text.contains(long), "{RULES} does not contain {long:?} any more");
        text = text.replace(long, short);
    }
    Ok(text)
}

fn write_config(dir: &Path, lab: &Lab, more: &[(&str, &str)]) -> Result<()> {
    fs::write(dir.join("rules.yml"), rules(more)?)?;
    let mut targets = String::new();
    for node in &lab.nodes {
        write!(targets, "'{}:8081', ", node.uplink[0])?;
    }
    let config = format!(
        "global: {{ scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s }}\nrule_files: [rules.yml]\n\
         scrape_configs: [{{ job_name: weft, static_configs: [{{ targets: [{targets}] }}] }}]\n"
    );
    Ok(fs::write(dir.join("prometheus.yml"), config)?)
}

impl Prometheus {
    /// Starts it, and waits until it has scraped all nodes for a while.
    async fn start(lab: &Lab) -> Result<Prometheus> {
        Prometheus::start_with(lab, &[]).await
    }

    /// The same with these replacements in the rules.
    async fn start_with(lab: &Lab, more: &[(&str, &str)]) -> Result<Prometheus> {
        let dir = tempfile::tempdir()?;
        write_config(dir.path(), lab, more)?;
        let mut command = lab.nodes[0].ns.command("prometheus");
        command.arg(format!("--config.file={}", dir.path().join("prometheus.yml").display()));
        command.arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()));
        command.args(["--web.listen-address=127.0.0.1:9090", "--log.level=error"]).kill_on_drop(true);
        let process = command.spawn().context("start prometheus (make test installs it)")?;
        let is_scraped = async || {
            let query = "count(sum_over_time(up{job=\"weft\"}[1m]) >= 10)";
            let answer = query_of(lab, query).await.unwrap_or_default();
            answer[0]["value"][1].as_str() == Some(lab.nodes.len().to_string().as_str())
        };
        wait_for("ten scrapes of every node", LIMIT, is_scraped).await?;
        Ok(Prometheus { _dir: dir, _process: process })
    }
}

async fn query_of(lab: &Lab, query: &str) -> Result<Value> {
    let mut command = lab.nodes[0].ns.command("promtool");
    let text = checked(command.args(["query", "instant", "-o", "json", SERVER, query])).await?;
    Ok(serde_json::from_str(&text)?)
}

/// Returns the names of the alerts that fire.
async fn firing(lab: &Lab) -> Result<BTreeSet<String>> {
    let answer = query_of(lab, "ALERTS{alertstate=\"firing\"}").await?;
    let name = |alert: &Value| alert["metric"]["alertname"].as_str().map(str::to_owned);
    Ok(answer.as_array().into_iter().flatten().filter_map(name).collect())
}

/// Waits until these alerts fire together.
async fn fire(lab: &Lab, alerts: &[&str]) -> Result<()> {
    let all = async || firing(lab).await.is_ok_and(|names| alerts.iter().all(|alert| names.contains(*alert)));
    if wait_for("the alerts to fire", LIMIT, all).await.is_err() {
        bail!("{alerts:?} are expected, and these fire: {:?}", firing(lab).await?);
    }
    Ok(())
}

/// Waits until no alert fires. On a busy machine one may fire for a moment, because a scrape or the first leases took long.
async fn none_fires(lab: &Lab) -> Result<()> {
    let none = async || firing(lab).await.is_ok_and(|names| names.is_empty());
    if wait_for("all alerts to end", LIMIT, none).await.is_err() {
        bail!("a healthy lab has alerts: {:?}", firing(lab).await?);
    }
    Ok(())
}

/// Returns the queries of the dashboard that have no value, although they should.
async fn without_values(lab: &Lab) -> Result<Vec<String>> {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(DASHBOARD)?)?;
    let panels = dashboard["panels"].as_array().context("a dashboard without panels")?;
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let queries = targets.filter_map(|target| Some(target["expr"].as_str()?.replace("$instance", ".*")));
    let mut empty = Vec::new();
    for query in queries.filter(|query| !EMPTY.iter().any(|part| query.contains(part))) {
        if query_of(lab, &query).await?.as_array().is_none_or(Vec::is_empty) {
            empty.push(query);
        }
    }
    Ok(empty)
}

fn scraped(options: LabOptions, flags: &[&str]) -> LabOptions {
    let agent_flags = ["--healthz-port=8081"].iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    LabOptions { agent_flags, ..options }
}

#[test]
fn alerts_about_packets_other_programs_and_an_agent_that_is_down() {
    on_this_thread(async {
        let mut lab = Lab::start(&scraped(options(), &[])).await?;
        let _prometheus = Prometheus::start(&lab).await?;
        none_fires(&lab).await?;
        assert_eq!(without_values(&lab).await?, [""; 0], "the dashboard shows nothing for these");
        // Three repairs of an entry in a minute are made at once, and more of them at audits alone. So those of one entry are enough for the
        // alert only once, for some seconds. Those of three entries are enough as long as this goes on.
        let undo = format!(
            "ip route del {}; ip neigh flush dev flannel.1 nud permanent; \
             bridge fdb show dev flannel.1 | while read -r mac rest; do bridge fdb del $mac dev flannel.1; done",
            lab.nodes[1].pod_net().await?.gateways[0].trunc()
        );
        let is_said = async || {
            // What is not there cannot be deleted.
            let _ = checked(lab.nodes[0].ns.command("sh").args(["-c", &undo])).await;
            firing(&lab).await.is_ok_and(|names| names.contains("WeftRepairsAllTheTime"))
        };
        wait_for("WeftRepairsAllTheTime to fire", LIMIT, is_said).await?;
        for text in [
            "add table inet test; add chain inet test in { type filter hook input priority -300; }",
            "add rule inet test in udp dport 8472 drop",
        ] {
            checked(lab.nodes[1].ns.command("nft").arg(text)).await?;
        }
        fire(&lab, &["WeftPeersUnreachable"]).await?;
        checked(lab.nodes[1].ns.command("nft").arg("flush chain inet test in")).await?;
        none_fires(&lab).await?;
        lab.nodes[1].stop(Signal::SIGKILL).await?;
        fire(&lab, &["WeftAgentDown"]).await
    });
}

#[test]
fn alerts_about_the_store() {
    on_this_thread(async {
        let options = LabOptions { store: StoreKind::Etcd, ..options() };
        let mut lab = Lab::start(&scraped(options, &["--etcd-lease-ttl=60s"])).await?;
        let _prometheus = Prometheus::start(&lab).await?;
        none_fires(&lab).await?;
        // Both leases vanish, and one node is not there to write its own again.
        lab.nodes[1].stop(Signal::SIGKILL).await?;
        lab.store.etcd()?.ctl(&["del", "--prefix", "/coreos.com/network/subnets"]).await?;
        fire(&lab, &["WeftPeersHeld"]).await?;
        lab.store.etcd()?.signal(Signal::SIGSTOP)?;
        let provoked = async {
            fire(&lab, &["WeftStoreSilent", "WeftLeaseExpires"]).await?;
            // The store has never answered an agent that starts now.
            lab.nodes[1].start()?;
            fire(&lab, &["WeftStoreNotHeard"]).await
        };
        let fired = provoked.await;
        lab.store.etcd()?.signal(Signal::SIGCONT)?;
        fired
    });
}

#[test]
fn alerts_about_the_traffic_rules() {
    on_this_thread(async {
        let options = LabOptions { backend: BackendKind::HostGw, ..options() };
        let mut lab = Lab::start(&scraped(options, &[])).await?;
        let _prometheus = Prometheus::start(&lab).await?;
        none_fires(&lab).await?;
        // n2 finds no program that writes its rules.
        lab.nodes[1].stop(Signal::SIGTERM).await?;
        lab.nodes[1].set_flag("--firewall=iptables");
        lab.nodes[1].set_env("PATH", "/nonexistent");
        lab.nodes[1].start()?;
        fire(&lab, &["WeftRulesMissing"]).await
    });
}

#[test]
fn alerts_about_entries_that_the_kernel_refuses() {
    on_this_thread(async {
        let lab = Lab::start(&scraped(LabOptions { ipv6: true, ..options() }, &[])).await?;
        let _prometheus = Prometheus::start(&lab).await?;
        none_fires(&lab).await?;
        // A hardening script switches IPv6 off on the device. Linux removes its IPv6 routes, and refuses new ones.
        lab.nodes[1].ns.sysctl(&["ipv6/conf/flannel-v6.1/disable_ipv6=1"])?;
        fire(&lab, &["WeftPeersFailed", "WeftOperationsFail"]).await
    });
}

#[test]
fn alerts_about_entries_that_wait() {
    on_this_thread(async {
        let options = LabOptions { backend: BackendKind::HostGw, ..options() };
        let lab = Lab::start(&scraped(options, &[])).await?;
        let _prometheus = Prometheus::start(&lab).await?;
        none_fires(&lab).await?;
        // The switch port of n1 goes down. Prometheus runs on n1, so it still reads the metrics of n1.
        lab.fabric.ip("link set n1 down").await?;
        fire(&lab, &["WeftPeersPending"]).await
    });
}

/// No node of a lab needs five seconds for a change, so here a change counts as slow after a ten-thousandth of a second.
#[test]
fn alert_about_changes_that_take_long() {
    on_this_thread(async {
        let options = LabOptions { backend: BackendKind::HostGw, store: StoreKind::Etcd, ..options() };
        let mut lab = Lab::start(&scraped(options, &[])).await?;
        let _prometheus = Prometheus::start_with(&lab, &[("[20s]))) > 5\n", "[20s]))) > 0.0001\n")]).await?;
        none_fires(&lab).await?;
        let lease = r#"{"PublicIP":"192.168.77.99","BackendType":"host-gw"}"#;
        // The first subnet of Network is never given to a node.
        lab.store.etcd()?.ctl(&["put", "/coreos.com/network/subnets/10.244.0.0-24", lease]).await?;
        fire(&lab, &["WeftConvergenceSlow"]).await?;
        let is_over = async || firing(&lab).await.is_ok_and(|names| !names.contains("WeftConvergenceSlow"));
        wait_for("the alert to end", LIMIT, is_over).await
    });
}
