// SPDX-License-Identifier: Apache-2.0
//! The book of misfortunes (docs/testing.md): what goes wrong on nodes in practice. Each test provokes some of them for real in a lab, and
//! `weft doctor` must name the cause and the remedy. Needs root, iproute2, nftables, iptables, ping, etcd, openssl,
//! systemd-networkd and prometheus.

#[path = "misfortunes/alerts.rs"]
mod alerts;
#[path = "common/exe.rs"]
mod exe;
#[path = "misfortunes/leases.rs"]
mod leases;
#[path = "misfortunes/local.rs"]
mod local;
#[path = "misfortunes/peers.rs"]
mod peers;
#[path = "common/places.rs"]
mod places;
#[path = "misfortunes/store.rs"]
mod store;
#[path = "common/thread.rs"]
mod thread;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use thread::on_this_thread;
use weft_lab::node::Node;
use weft_lab::{LabOptions, wait_for};

/// A misfortune must be named within 60 s. The machine may be busy, so a test waits longer, and its output says how long it took.
const LIMIT: Duration = Duration::from_secs(120);

/// Options with the binary under test, and two nodes.
fn options() -> LabOptions {
    LabOptions { exe: Some(exe::weft_exe()), nodes: 2, ..LabOptions::default() }
}

/// Returns what `weft doctor` finds on a node: for each finding the name of the check, the evidence and the remedy.
async fn doctor(node: &Node, flags: &[&str]) -> Result<Vec<[String; 3]>> {
    let mut command = node.ns.command(exe::weft_exe());
    command.arg("doctor").arg(format!("--socket={}", node.socket().display()));
    command.arg(format!("--subnet-file={}", node.subnet_file().display())).args(["-o", "json"]).args(flags);
    let output = command.output().await?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let answer: Value = serde_json::from_slice(&output.stdout).with_context(|| format!("weft doctor: {errors}"))?;
    let findings = answer["findings"].as_array().context("findings")?;
    let code = if findings.is_empty() { 0 } else { 2 };
    ensure!(output.status.code() == Some(code), "{:?} with {} findings", output.status, findings.len());
    let part = |finding: &Value, name: &str| finding[name].as_str().map(str::to_owned).context("a text");
    let texts = |finding| Ok([part(finding, "check")?, part(finding, "evidence")?, part(finding, "remedy")?]);
    findings.iter().map(texts).collect()
}

/// Waits until `weft doctor` has a finding of this check, with all words in evidence and remedy. The time that it prints begins
/// with the call: most tests provoke the misfortune just before it.
async fn named(node: &Node, check: &str, words: &[&str]) -> Result<()> {
    named_with(node, check, words, &[]).await
}

/// As [`named`], with flags for `weft doctor`.
async fn named_with(node: &Node, check: &str, words: &[&str], flags: &[&str]) -> Result<()> {
    let is_it = |finding: &[String; 3]| {
        let [name, evidence, remedy] = finding;
        let text = format!("{evidence}\n{remedy}");
        name == check && words.iter().all(|word| text.contains(word))
    };
    let begin = Instant::now();
    let found = async || doctor(node, flags).await.is_ok_and(|findings| findings.iter().any(is_it));
    if wait_for("the misfortune to be named", LIMIT, found).await.is_err() {
        let findings = doctor(node, flags).await?;
        bail!("{}: {check} with {words:?} is not among {findings:#?}\n{}", node.name(), node.log_tail(20));
    }
    eprintln!("{}: {check} with {words:?} was named after {:.1} s", node.name(), begin.elapsed().as_secs_f64());
    Ok(())
}

/// Waits until `weft doctor` has no finding of this check.
async fn gone(node: &Node, check: &str) -> Result<()> {
    let is_gone =
        async || doctor(node, &[]).await.is_ok_and(|findings| findings.iter().all(|finding| finding[0] != check));
    if wait_for("the misfortune to be over", LIMIT, is_gone).await.is_err() {
        bail!("{}: {check} is still among {:#?}", node.name(), doctor(node, &[]).await?);
    }
    Ok(())
}
