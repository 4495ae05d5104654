// SPDX-License-Identifier: Apache-2.0
//! Clusters with the backend extension. The agents run the commands of net-conf, and change nothing that the commands made.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use weft_lab::node::Node;
use weft_lab::{Lab, LabOptions, StoreKind, wait_for};

use crate::flanneld::flanneld;
use crate::program::write_program;
use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);
const LEASES: &str = "/coreos.com/network/subnets/";

/// Builds two nodes with these options of the backend. No agent runs yet.
async fn build(backend: serde_json::Value, flags: &[&str]) -> Result<Lab> {
    build_with(options(), backend, flags).await
}

/// As [`build`], with the families of these options.
async fn build_with(options: LabOptions, backend: serde_json::Value, flags: &[&str]) -> Result<Lab> {
    let agent_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let options = LabOptions { nodes: 2, store: StoreKind::Etcd, agent_flags, ..options };
    let mut lab = Lab::build(&options).await?;
    lab.store.set_net_conf(&options.net_conf_with(&backend)).await?;
    Ok(lab)
}

/// Waits until the status of the agent, as text, contains these words.
async fn says(node: &Node, words: &str) -> Result<()> {
    let said =
        async || node.status_as::<serde_json::Value>().await.is_ok_and(|status| status.to_string().contains(words));
    let shown = format!("{} to say {words}", node.name());
    let waited = wait_for(&shown, LIMIT, said).await;
    waited.with_context(|| node.log_tail(20))
}

async fn routes(node: &Node) -> Result<Vec<String>> {
    let routes = node.ns.ip("route show").await?;
    let to_peers = routes.lines().filter(|route| route.starts_with("10.244.") && route.contains(" via "));
    Ok(to_peers.map(|route| route.trim().to_owned()).collect())
}

#[test]
fn nodes_reach_each_other_by_routes_of_commands_which_weft_leaves_alone() {
    on_this_thread(async {
        let backend = json!({
            "Type": "extension",
            "SubnetAddCommand": "ip route add $SUBNET via $PUBLIC_IP",
            "SubnetRemoveCommand": "ip route del $SUBNET via $PUBLIC_IP",
        });
        let mut lab = build(backend, &["--allow-extension", "--resync=1s", "--hold-removals=0s"]).await?;
        for node in &mut lab.nodes {
            node.start()?;
        }
        lab.settle().await?;
        lab.reach_all().await?;
        let before = routes(&lab.nodes[0]).await?;
        ensure!(before.len() == 1, "{before:?}");
        // flannel's host-gw writes routes of the same form. Another program has written subnet.env, as flanneld would have.
        lab.nodes[0].stop(Signal::SIGTERM).await?;
        let file = lab.nodes[0].subnet_file();
        let env = fs::read_to_string(&file)?;
        fs::remove_file(&file)?;
        fs::write(&file, env)?;
        lab.nodes[0].start()?;
        lab.nodes[0].ready().await?;
        // This command fails, and the operator sees why.
        says(&lab.nodes[0], "SubnetAddCommand: exit status: 2: RTNETLINK answers: File exists").await?;
        let mut changes = node_passes(&lab.nodes[0]).await?;
        // Audits compare everything, and leave the route alone.
        wait_for("three audits", LIMIT, async || {
            let now = node_passes(&lab.nodes[0]).await.unwrap_or(changes);
            now >= changes + 3
        })
        .await?;
        changes = node_passes(&lab.nodes[0]).await?;
        ensure!(changes > 0 && routes(&lab.nodes[0]).await? == before, "the route stays");
        lab.reach_all().await?;
        // n2 leaves while the agent of n1 is down.
        lab.nodes[0].stop(Signal::SIGKILL).await?;
        lab.nodes[1].stop(Signal::SIGTERM).await?;
        let etcd = lab.store.etcd()?;
        let keys = etcd.ctl(&["get", "--prefix", "--keys-only", LEASES]).await?;
        let subnet = before[0].split('/').next().context("a route has a subnet")?;
        let key = keys.lines().find(|key| key.contains(subnet)).context("the lease of n2")?;
        // There is another lease, so the first list does not look like that of a wiped store.
        let other = r#"{"PublicIP":"192.168.77.99","PublicIPv6":null,"BackendType":"extension"}"#;
        etcd.ctl(&["put", &format!("{LEASES}10.244.0.0-24"), other]).await?;
        etcd.ctl(&["del", key]).await?;
        lab.nodes[0].start()?;
        let gone = async || routes(&lab.nodes[0]).await.is_ok_and(|now| !now.contains(&before[0]));
        wait_for("the command for the peer that left", LIMIT, gone).await.with_context(|| lab.nodes[0].log_tail(20))?;
        Ok(())
    });
}

/// Returns the number of full passes so far.
async fn node_passes(node: &Node) -> Result<u64> {
    let status: serde_json::Value = node.status_as().await?;
    let passes = status["full_passes"].as_object().context("status has full_passes")?;
    Ok(passes.values().filter_map(serde_json::Value::as_u64).sum())
}

#[test]
fn without_the_flag_the_agent_takes_no_lease_and_runs_nothing() {
    on_this_thread(async {
        let file = std::env::temp_dir().join(format!("weft-extension-{}", std::process::id()));
        let backend = json!({ "Type": "extension", "PreStartupCommand": format!("touch {}", file.display()) });
        let mut lab = build(backend, &[]).await?;
        lab.nodes[0].start()?;
        says(&lab.nodes[0], "start the agent with --allow-extension").await?;
        let leases = lab.store.etcd()?.ctl(&["get", "--prefix", LEASES]).await?;
        ensure!(leases.trim().is_empty() && !file.exists() && !lab.nodes[0].subnet_file().exists(), "{leases}");
        Ok(())
    });
}

/// The command is that of k3s with tailscale in dual-stack. It fails until there is a file.
#[test]
fn pods_wait_for_the_command_after_the_lease() {
    on_this_thread(async {
        let dir = tempfile::tempdir()?;
        let [gate, words, tailscale] = ["gate", "words", "tailscale"].map(|name| dir.path().join(name));
        let script = format!("#!/bin/sh\ncat {} && echo \"$@\" > {}\n", gate.display(), words.display());
        write_program(&tailscale, &script);
        let command = format!("{} set --accept-routes --advertise-routes=$SUBNET,$IPV6SUBNET", tailscale.display());
        let backend = json!({ "Type": "extension", "PostStartupCommand": command });
        let dual = LabOptions { ipv6: true, ..options() };
        let mut lab = build_with(dual.clone(), backend, &["--allow-extension"]).await?;
        lab.nodes[0].start()?;
        says(&lab.nodes[0], "PostStartupCommand: exit status: 1: cat: ").await?;
        let status = lab.nodes[0].status().await?;
        ensure!(!status.ready && !lab.nodes[0].subnet_file().exists(), "{:?}", status.problems);
        fs::write(&gate, "")?;
        lab.nodes[0].ready().await?;
        ensure!(fs::read_to_string(lab.nodes[0].subnet_file())?.contains("FLANNEL_MTU=1500"));
        let subnets: Vec<String> =
            lab.nodes[0].pod_net().await?.gateways.iter().map(|gateway| gateway.trunc().to_string()).collect();
        ensure!(subnets.len() == 2, "{subnets:?}");
        let expected = format!("set --accept-routes --advertise-routes={}\n", subnets.join(","));
        ensure!(fs::read_to_string(&words)? == expected, "{expected}");
        // A running agent does not begin to run other commands.
        lab.store.set_net_conf(&dual.net_conf_with(&json!({ "Type": "vxlan" }))).await?;
        says(&lab.nodes[0], "restart the agent on each node to apply the change of Backend.").await?;
        lab.nodes[0].stop(Signal::SIGTERM).await?;
        lab.nodes[0].start()?;
        lab.nodes[0].ready().await?;
        ensure!(lab.nodes[0].status().await?.backend == "vxlan");
        Ok(())
    });
}

/// A command that writes its arguments, its variables and its input into a file. The name of the file contains the address of the node and
/// the first argument.
const RECORDER: &str = r#"#!/bin/sh
file="$0.$(ip -4 -o addr show dev eth0 | sed 's/.*inet \([0-9.]*\).*/\1/').$1"
{
  for word in "$@"; do printf 'word %s\n' "$word"; done
  for name in NETWORK SUBNET IPV6SUBNET PUBLIC_IP PUBLIC_IPV6; do
    eval "set=\${$name+x} value=\${$name-}"
    if [ -n "$set" ]; then printf 'variable %s=%s\n' "$name" "$value"; fi
  done
  printf 'input '; od -An -v -tx1 | tr -d ' \n'; echo
} > "$file.$$"
mv "$file.$$" "$file"
if [ "$1" = pre ]; then printf ' two\nlines "quoted" <&> \377 end \n'; fi
"#;

/// Returns the file of a command of this node.
fn record(script: &Path, node: &Node, name: &str) -> PathBuf {
    PathBuf::from(format!("{}.{}.{name}", script.display(), node.uplink[0]))
}

/// The input of each command, by its name.
fn recorded(script: &Path, node: &Node) -> Result<BTreeMap<&'static str, Vec<String>>> {
    let mut all = BTreeMap::new();
    for name in ["pre", "post", "add", "remove"] {
        let file = record(script, node, name);
        if let Ok(text) = fs::read_to_string(&file) {
            fs::remove_file(&file)?;
            all.insert(name, text.lines().map(str::to_owned).collect());
        }
    }
    Ok(all)
}

/// n2 joins and leaves, and n1 records what its commands get. Returns these records and the values of the leases.
async fn peer_comes_and_leaves(
    lab: &mut Lab,
    script: &Path,
    flanneld: &Path,
) -> Result<(BTreeMap<&'static str, Vec<String>>, String)> {
    let exists = |lab: &Lab, name: &str| record(script, &lab.nodes[0], name).exists();
    wait_for("the command after the lease", LIMIT, async || exists(lab, "post")).await?;
    lab.nodes[1].start_other(flanneld)?;
    wait_for("the command for a peer", LIMIT, async || exists(lab, "add")).await?;
    // Wait until n2 has written its lease.
    wait_for("the command of the peer after its lease", LIMIT, async || record(script, &lab.nodes[1], "post").exists())
        .await?;
    let leases = lab.store.etcd()?.ctl(&["get", "--prefix", LEASES]).await?;
    // flanneld does not always end within 5 s of SIGTERM while it runs commands.
    lab.nodes[1].stop(Signal::SIGKILL).await?;
    let theirs = format!("\"{}\"", lab.nodes[1].uplink[0]);
    let lines: Vec<&str> = leases.lines().collect();
    let key = lines.windows(2).find(|pair| pair[1].contains(&theirs)).context("the lease of n2")?[0];
    lab.store.etcd()?.ctl(&["del", key]).await?;
    wait_for("the command for a peer that left", LIMIT, async || exists(lab, "remove")).await?;
    let etcd = lab.store.etcd()?;
    etcd.ctl(&["put", key, lines.iter().find(|line| line.contains(&theirs)).context("the value")?]).await?;
    recorded(script, &lab.nodes[1])?;
    Ok((recorded(script, &lab.nodes[0])?, leases))
}

#[test]
#[ignore = "needs FLANNELD"]
fn commands_get_what_flanneld_gives_them() {
    let flanneld = flanneld();
    on_this_thread(async move {
        let dir = tempfile::tempdir()?;
        let script = dir.path().join("record");
        write_program(&script, RECORDER);
        let command =
            |name: &str| format!(r#"{} {name} "$SUBNET" ${{PUBLIC_IP}}/x $UNKNOWN $(a;b) $1 | $$"#, script.display());
        let backend = json!({
            "Type": "extension",
            "PreStartupCommand": command("pre"),
            "PostStartupCommand": command("post"),
            "SubnetAddCommand": command("add"),
            "SubnetRemoveCommand": command("remove"),
        });
        let mut lab = build(backend, &["--allow-extension", "--hold-removals=0s"]).await?;
        lab.nodes[0].start_other(&flanneld)?;
        let (flannels, leases) = peer_comes_and_leaves(&mut lab, &script, &flanneld).await?;
        ensure!(flannels.len() == 4, "{flannels:#?}");
        ensure!(leases.contains(r#""BackendData":"two\nlines \"quoted\" \u003c\u0026\u003e \ufffd end"}"#), "{leases}");
        lab.nodes[0].stop(Signal::SIGKILL).await?;
        fs::remove_file(lab.nodes[0].subnet_file())?;
        recorded(&script, &lab.nodes[0])?;
        lab.nodes[0].start()?;
        let (ours, our_leases) = peer_comes_and_leaves(&mut lab, &script, &flanneld).await?;
        ensure!(our_leases == leases, "the leases are equal to the byte:\n{leases}\n{our_leases}");
        for name in ["pre", "post"] {
            let flannels: Vec<String> = flannels[name].iter().map(|line| line.replace("<nil>", "")).collect();
            ensure!(ours[name] == flannels, "{name}:\n{:#?}\n{flannels:#?}", ours[name]);
        }
        for name in ["add", "remove"] {
            let missing: Vec<_> = flannels[name].iter().filter(|line| !ours[name].contains(line)).collect();
            ensure!(missing.is_empty(), "{name} lacks {missing:#?}:\n{:#?}", ours[name]);
        }
        Ok(())
    });
}
