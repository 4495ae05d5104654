// SPDX-License-Identifier: Apache-2.0
//! etcd is down when nodes start. They use the saved peers, and compare them with the leases when etcd answers.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use weft_lab::node::Node;
use weft_lab::{Lab, LabOptions, StoreKind, wait_for};
use weft_subnet::saved_peers::{self, Expiry, Head};

use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);
/// Peers without a machine. While nodes are down, one of them leaves and the other one joins. Nodes get nothing of the first /24 of Network.
const GOES: (&str, &str) = ("10.244.0.0/25", "192.168.77.250");
const COMES: (&str, &str) = ("10.244.0.128/25", "192.168.77.251");

fn key((subnet, _): (&str, &str)) -> String {
    format!("/coreos.com/network/subnets/{}", subnet.replace('/', "-"))
}

fn value((_, public): (&str, &str)) -> String {
    format!(
        r#"{{"PublicIP":"{public}","PublicIPv6":null,"BackendType":"vxlan","BackendData":{{"VNI":1,"VtepMAC":"0e:00:00:00:00:fa"}}}}"#
    )
}

/// Returns the file with the saved peers. A file that is still being written has another name.
fn file(node: &Node) -> Option<PathBuf> {
    let mut all = fs::read_dir(node.state_dir()).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    all.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("peers-")))
}

fn saved(node: &Node) -> Option<String> {
    fs::read_to_string(file(node)?).ok()
}

async fn stop(lab: &mut Lab) -> Result<()> {
    for node in &mut lab.nodes {
        node.stop(Signal::SIGKILL).await?;
    }
    Ok(())
}

/// Builds a lab whose nodes have saved each other and a peer without a machine. Then all agents are killed.
async fn remembered() -> Result<Lab> {
    let mut lab = Lab::start(&LabOptions { store: StoreKind::Etcd, ..options() }).await?;
    lab.reach_all().await?;
    lab.store.etcd()?.ctl(&["put", &key(GOES), &value(GOES)]).await?;
    stop(&mut lab).await?;
    // The first list of a run is saved at once.
    for node in &mut lab.nodes {
        let _ = fs::remove_dir_all(node.state_dir());
        node.start()?;
    }
    for node in &lab.nodes {
        let all = [".11", ".12", ".13", ".250"].map(|end| format!("192.168.77{end}\""));
        let whole = async || saved(node).is_some_and(|text| all.iter().all(|ip| text.contains(ip)));
        wait_for("peers to be saved", LIMIT, whole).await.with_context(|| node.log_tail(20))?;
    }
    stop(&mut lab).await?;
    Ok(lab)
}

/// Removes what a boot removes.
async fn boot(node: &Node) -> Result<()> {
    node.ns.ip("link del flannel.1").await?;
    node.ns.ip("nexthop flush").await?;
    node.ns.ip("route flush proto 90").await?;
    fs::remove_file(node.subnet_file()).context("remove subnet.env")
}

async fn route(node: &Node, subnet: &str, there: bool) -> Result<()> {
    let what = format!("{}: route to {subnet} to be {}", node.name(), if there { "there" } else { "gone" });
    let seen =
        async || node.ns.ip(&format!("route show {subnet}")).await.is_ok_and(|text| text.contains(subnet) == there);
    wait_for(&what, LIMIT, seen).await.with_context(|| node.log_tail(20))
}

async fn problem(node: &Node, words: &str, there: bool) -> Result<()> {
    let said = async || {
        node.status_as::<weft::observe::status::Status>()
            .await
            .is_ok_and(|status| status.problems.iter().any(|problem| problem.text.contains(words)) == there)
    };
    wait_for(&format!("{}: {words:?} to be {there}", node.name()), LIMIT, said).await.with_context(|| node.log_tail(20))
}

#[test]
fn a_boot_without_etcd() {
    on_this_thread(async {
        let mut lab = remembered().await?;
        let etcd = lab.store.etcd()?;
        etcd.ctl(&["del", &key(GOES)]).await?;
        etcd.ctl(&["put", &key(COMES), &value(COMES)]).await?;
        let leases = etcd.leases().await?;
        // net-conf is changed, too. The saved file has the old one.
        let (key_of_conf, old) = ("/coreos.com/network/config", r#""Backend":{"#);
        let conf = etcd.ctl(&["get", "--print-value-only", key_of_conf]).await?;
        let changed = conf.trim().replace(old, r#""EnableNFTables":true,"Backend":{"#);
        ensure!(changed != conf.trim(), "{conf}");
        etcd.ctl(&["put", key_of_conf, &changed]).await?;
        etcd.kill().await?;
        for node in &mut lab.nodes {
            boot(node).await?;
            node.start()?;
        }
        for node in &mut lab.nodes {
            node.ready().await?;
            problem(node, "the store is away: the agent uses the peers that were saved on 20", true).await?;
            route(node, GOES.0, true).await?;
        }
        lab.reach_all().await?;
        lab.store.etcd()?.start().await?;
        for node in &lab.nodes {
            route(node, COMES.0, true).await?;
            route(node, GOES.0, false).await?;
            problem(node, "the store is away", false).await?;
            problem(node, "restart the agent to apply the change of EnableNFTables", true).await?;
        }
        ensure!(lab.store.etcd()?.leases().await? == leases, "each has the lease that it had");
        lab.reach_all().await.map(drop)
    });
}

/// The saved lease gives no right to the subnet. Another node that got it meanwhile keeps it.
#[test]
fn a_subnet_that_another_node_got_meanwhile() {
    on_this_thread(async {
        let mut lab = remembered().await?;
        let before = fs::read_to_string(lab.nodes[0].subnet_file())?;
        let gateway = before.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).context("a subnet")?;
        let subnet = gateway.replace(".1/24", ".0/24");
        let etcd = lab.store.etcd()?;
        etcd.ctl(&["put", &key((&subnet, "")), &value((&subnet, "192.168.77.99"))]).await?;
        etcd.kill().await?;
        let node = &mut lab.nodes[0];
        boot(node).await?;
        node.start()?;
        node.ready().await?;
        ensure!(fs::read_to_string(node.subnet_file())? == before, "nothing else is known yet");
        lab.store.etcd()?.start().await?;
        let node = &lab.nodes[0];
        let moved = async || fs::read_to_string(node.subnet_file()).is_ok_and(|text| text != before);
        wait_for("another subnet", LIMIT, moved).await.with_context(|| node.log_tail(20))?;
        route(node, &subnet, true).await?;
        let kept = lab.store.etcd()?.ctl(&["get", "--print-value-only", &key((&subnet, ""))]).await?;
        ensure!(kept.contains("192.168.77.99"), "{kept}");
        Ok(())
    });
}

/// Changes the head of the saved file.
fn alter(node: &Node, change: impl FnOnce(&mut Head)) -> Result<()> {
    let file = file(node).context("a file")?;
    let text = fs::read(&file)?;
    let line = text.split(|byte| *byte == b'\n').nth(1).context("a head")?;
    let store: serde_json::Value = serde_json::from_slice(line)?;
    let mut saved = saved_peers::read(&text, store["store"].as_str().context("a store")?)?;
    change(&mut saved.head);
    saved_peers::write(fs::File::create(&file)?, &saved.head, &saved.peers)?;
    Ok(())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Nodes were away for longer than their leases live, were upgraded meanwhile, or have wrong clocks. They wait for etcd.
#[test]
fn a_lease_that_may_have_ended_is_no_start() {
    on_this_thread(async {
        let mut lab = remembered().await?;
        let leases = lab.store.etcd()?.leases().await?;
        lab.store.etcd()?.kill().await?;
        for node in &lab.nodes {
            boot(node).await?;
        }
        alter(&lab.nodes[0], |head| {
            // The etcd lease lives for a day from its last renewal.
            assert!(
                matches!(head.expires, Expiry::At(end) if end > now() + 80_000 && end <= now() + 86_400),
                "{head:?}"
            );
            (head.saved, head.expires) = (now() - 3600, Expiry::At(now() - 1));
        })?;
        alter(&lab.nodes[1], |head| head.expires = Expiry::Unknown)?;
        alter(&lab.nodes[2], |head| head.saved = now() + 7200)?;
        let reasons = ["ended on 20", "which did not write down when our lease", "their age cannot be known"];
        for (node, reason) in lab.nodes.iter_mut().zip(reasons) {
            node.start()?;
            problem(node, "waiting: net-conf: read", true).await?;
            let log = fs::read_to_string(node.log())?;
            let lines: Vec<&str> = log.lines().filter(|line| line.contains("saved peers: ")).collect();
            ensure!(lines.len() == 1 && lines[0].contains(reason), "{lines:#?}");
            ensure!(!node.subnet_file().exists(), "no subnet.env");
        }
        lab.store.etcd()?.start().await?;
        for node in &mut lab.nodes {
            node.ready().await?;
        }
        ensure!(lab.store.etcd()?.leases().await? == leases, "the leases live, and each has its own");
        lab.reach_all().await.map(drop)
    });
}

#[test]
fn what_was_saved_does_not_count_for_another_address_nor_damaged() {
    on_this_thread(async {
        let mut lab = remembered().await?;
        lab.store.etcd()?.kill().await?;
        let waits = async |node: &Node, why: &str| {
            problem(node, "waiting: net-conf: read", true).await?;
            let log = fs::read_to_string(node.log())?;
            let lines: Vec<&str> = log.lines().filter(|line| line.contains("saved peers: ")).collect();
            ensure!(lines.len() == 1 && lines[0].contains(why), "{lines:#?}");
            ensure!(!node.subnet_file().exists(), "no subnet.env");
            anyhow::Ok(())
        };
        boot(&lab.nodes[0]).await?;
        lab.nodes[0].ns.ip("addr del 192.168.77.11/24 dev eth0").await?;
        lab.nodes[0].ns.ip("addr add 192.168.77.99/24 dev eth0").await?;
        lab.nodes[0].start()?;
        waits(&lab.nodes[0], "this node had other addresses then").await?;
        boot(&lab.nodes[1]).await?;
        let file = file(&lab.nodes[1]).context("a file")?;
        let text = fs::read_to_string(&file)?;
        fs::write(&file, text.replace("192.168.77.13", "192.168.77.14"))?;
        lab.nodes[1].start()?;
        waits(&lab.nodes[1], "it is damaged").await?;
        boot(&lab.nodes[2]).await?;
        // The same etcd with another prefix is another store.
        lab.nodes[2].set_flag("--etcd-prefix=/other");
        lab.nodes[2].start()?;
        waits(&lab.nodes[2], "it was saved for another store").await
    });
}

/// Returns the subnet of this node in the form that a key has.
fn own(node: &Node) -> Result<String> {
    let env = fs::read_to_string(node.subnet_file())?;
    let gateway = env.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).context("a subnet")?;
    Ok(gateway.replace(".1/24", ".0/24"))
}

/// Waits until the node has saved its own lease with the time of its end, so that a start without etcd would use it.
async fn saved_alive(node: &Node) -> Result<()> {
    let alive = async || saved(node).is_some_and(|text| text.contains("\"expires\":"));
    wait_for("the node to be saved", LIMIT, alive).await.with_context(|| node.log_tail(20))
}

/// Another node takes the subnet of the first one.
async fn intrude(lab: &mut Lab) -> Result<()> {
    let subnet = own(&lab.nodes[0])?;
    let etcd = lab.store.etcd()?;
    etcd.ctl(&["put", &key((&subnet, "")), &value((&subnet, "192.168.77.99"))]).await.map(drop)
}

/// Checks that a boot followed by a start without etcd does not use the lost lease. The agent has ended before.
async fn is_not_used_again(lab: &mut Lab) -> Result<()> {
    lab.store.etcd()?.kill().await?;
    let node = &mut lab.nodes[0];
    boot(node).await?;
    node.start()?;
    problem(node, "waiting: net-conf: read", true).await?;
    ensure!(!node.subnet_file().exists(), "no subnet.env");
    let log = fs::read_to_string(node.log())?;
    ensure!(!log.contains("peers as saved on"), "the start went on from a lost lease:\n{}", node.log_tail(20));
    Ok(())
}

#[test]
fn a_lease_that_is_lost_with_exit_ends_the_agent_and_is_not_used_again() {
    on_this_thread(async {
        let flags = vec!["--on-lost-lease=exit".to_owned()];
        let options = LabOptions { nodes: 2, store: StoreKind::Etcd, agent_flags: flags, ..options() };
        let mut lab = Lab::start(&options).await?;
        saved_alive(&lab.nodes[0]).await?;
        intrude(&mut lab).await?;
        let ended = lab.nodes[0].ended().await.with_context(|| lab.nodes[0].log_tail(20))?;
        ensure!(ended.code() == Some(1), "{ended}");
        ensure!(fs::read_to_string(lab.nodes[0].log())?.contains("own lease lost"), "{}", lab.nodes[0].log_tail(20));
        ensure!(lab.nodes[0].ns.ip("link show flannel.1").await.is_ok(), "the data path stays as it is");
        is_not_used_again(&mut lab).await
    });
}

#[test]
fn a_lease_that_was_lost_right_before_a_kill_is_not_used_again() {
    on_this_thread(async {
        let mut lab = Lab::start(&LabOptions { nodes: 2, store: StoreKind::Etcd, ..options() }).await?;
        saved_alive(&lab.nodes[0]).await?;
        intrude(&mut lab).await?;
        problem(&lab.nodes[0], "belongs to 192.168.77.99 now", true).await?;
        lab.nodes[0].stop(Signal::SIGKILL).await?;
        is_not_used_again(&mut lab).await
    });
}

/// etcd is down when a node starts for the first time, so nothing was saved.
#[test]
fn a_first_start_without_etcd_waits_and_writes_nothing() {
    on_this_thread(async {
        let mut lab = Lab::build(&LabOptions { nodes: 2, store: StoreKind::Etcd, ..options() }).await?;
        lab.store.etcd()?.kill().await?;
        // The kernel changes the state of a link some time after the carrier has come.
        let is_up = async || lab.nodes[0].ns.ip("-o link show eth0").await.is_ok_and(|text| text.contains("state UP"));
        wait_for("the uplink to be up", LIMIT, is_up).await?;
        let before = lab.nodes[0].ns.ip("-o link").await?;
        let rules = lab.nodes[0].ns.ip("rule").await?;
        for node in &mut lab.nodes {
            node.start()?;
        }
        for node in &lab.nodes {
            problem(node, "waiting: net-conf: read", true).await?;
            let said = async || {
                fs::read_to_string(node.log())
                    .is_ok_and(|log| log.contains("waiting: net-conf: read /coreos.com/network/config from http://"))
            };
            wait_for("the log to say so", LIMIT, said).await?;
            let status = node.status_as::<weft::observe::status::Status>().await?;
            ensure!(!status.ready && status.subnet.is_empty(), "{status:?}");
            ensure!(!node.subnet_file().exists() && file(node).is_none(), "no file is written");
        }
        let node = &lab.nodes[0];
        ensure!(
            node.ns.ip("-o link").await? == before && node.ns.ip("rule").await? == rules,
            "the kernel is as it was"
        );
        ensure!(node.ns.ip("route show proto 90").await?.is_empty(), "no routes");
        lab.store.etcd()?.start().await?;
        lab.settle().await?;
        lab.reach_all().await?;
        ensure!(lab.store.etcd()?.leases().await?.len() == 2, "both have a lease");
        Ok(())
    });
}
