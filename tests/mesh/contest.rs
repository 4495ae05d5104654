// SPDX-License-Identifier: Apache-2.0
//! Two agents share one subnet and one VTEP MAC, as a machine and its clone do. Each writes its own address into the same lease.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use weft::observe::problem::Problem;
use weft_lab::netns::checked;
use weft_lab::node::Node;
use weft_lab::store::Store;
use weft_lab::{Lab, LabOptions, StoreKind, wait_for};

use crate::exe::weft_exe;
use crate::{on_this_thread, options};

/// The pauses begin with 5 s, and each is twice as long as the one before. So a slow machine, which looks late, waits for a long one.
const LIMIT: Duration = Duration::from_secs(240);
/// How long to wait for the end of the fault. It ends when the lease has stayed unchanged for longer than the next pause of the other
/// agent, and no pause is longer than five minutes.
const RECOVERY: Duration = Duration::from_secs(660);

/// Returns the number of records of the store, and how often the record of this key was written since it was created.
async fn writes(lab: &mut Lab, key: &str) -> Result<(usize, i64)> {
    let etcd = lab.store.etcd()?;
    let leases = etcd.leases().await?.len();
    let out = etcd.ctl(&["get", &format!("/coreos.com/network/subnets/{key}"), "-w", "json"]).await?;
    let out: serde_json::Value = serde_json::from_str(&out)?;
    Ok((leases, out["kvs"][0]["version"].as_i64().context("the key has a version")?))
}

/// The second node becomes a clone of the first one: it has the same subnet.env and a device with the same MAC.
async fn clone(lab: &Lab) -> Result<String> {
    let (first, second) = (&lab.nodes[0], &lab.nodes[1]);
    let env = fs::read_to_string(first.subnet_file())?;
    let subnet = env.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).context("a subnet")?;
    let key = subnet.replace(".1/24", ".0-24");
    fs::write(second.subnet_file(), &env)?;
    let link = first.ns.ip("link show flannel.1").await?;
    let mac = link.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).context("a MAC")?;
    let mark = format!("weft {}", second.subnet_file().display());
    let vxlan = "type vxlan id 1 local 192.168.77.12 dev eth0 dstport 8472 nolearning";
    second.ns.ip(&format!("link add flannel.1 address {mac} {vxlan}")).await?;
    let mut alias = second.ns.command("ip");
    checked(alias.args(["link", "set", "flannel.1", "alias", &mark])).await?;
    Ok(key)
}

/// Returns the most writes that there are in this time, if there is a pause of at least 2.5 s between two, half of the first pause.
fn most_writes(time: Duration) -> i64 {
    i64::try_from(time.as_millis() / 2500).unwrap_or(i64::MAX - 1) + 1
}

/// Checks that the two agents write one lease, and make pauses. The second one was started at this time.
async fn writes_have_pauses(lab: &mut Lab, key: &str, started: Instant) -> Result<()> {
    // The clock begins before the question, so it has run for every write that is counted.
    let began = Instant::now();
    let (leases, version) = writes(lab, key).await?;
    ensure!(leases == 1, "the two nodes have one lease");
    let most = 11 + most_writes(started.elapsed());
    ensure!(version <= most, "the lease was written {version} times before both nodes noticed");
    // Both go on writing.
    let mut now = version;
    while now < version + 2 {
        ensure!(began.elapsed() < LIMIT, "the nodes do not try again:\n{}", lab.logs(10));
        tokio::time::sleep(Duration::from_millis(20)).await;
        now = writes(lab, key).await?.1;
    }
    let took = began.elapsed();
    ensure!(now - version <= most_writes(took), "{} writes without a pause in {took:?}", now - version);
    Ok(())
}

/// Waits until the node is not ready and names the address of the other one, or until neither is so.
async fn contested(node: &Node, other: &str, wanted: bool, limit: Duration) -> Result<()> {
    let said = async || {
        node.status_as::<weft::observe::status::Status>().await.is_ok_and(|status| {
            let names = |problem: &Problem| problem.text.contains("our lease of ") && problem.text.contains(other);
            status.ready != wanted && status.problems.iter().any(names) == wanted
        })
    };
    let what = format!("{} to be in a contest with {other}: {wanted}", node.name());
    wait_for(&what, limit, said).await.with_context(|| node.log_tail(20))
}

fn lines(node: &Node, words: &str) -> Result<usize> {
    Ok(fs::read_to_string(node.log())?.lines().filter(|line| line.contains(words)).count())
}

async fn a_clone(store: StoreKind) -> Result<()> {
    let mut lab = Lab::build(&LabOptions { nodes: 2, store, ..options() }).await?;
    lab.nodes[0].start()?;
    lab.nodes[0].ready().await?;
    let key = clone(&lab).await?;
    let started = Instant::now();
    lab.nodes[1].start()?;
    contested(&lab.nodes[0], "192.168.77.12", true, LIMIT).await?;
    contested(&lab.nodes[1], "192.168.77.11", true, LIMIT).await?;
    if let Store::Etcd(_) = lab.store {
        writes_have_pauses(&mut lab, &key, started).await?;
    }
    for node in &lab.nodes {
        let (held, said) = (lines(node, "own lease held")?, lines(node, " WARN 192.168.77.1")?);
        ensure!(held <= 2 && said == 1, "{held} and {said} lines:\n{}", node.log_tail(40));
    }
    // The other agent writes no more, so the fault ends by itself.
    lab.nodes[1].stop(Signal::SIGKILL).await?;
    contested(&lab.nodes[0], "192.168.77.12", false, RECOVERY).await?;
    // The remedy that the message names gives the clone a subnet of its own.
    let second = &lab.nodes[1];
    let mut cleanup = second.ns.command(weft_exe());
    cleanup.arg("cleanup").arg(format!("--subnet-file={}", second.subnet_file().display()));
    cleanup.arg(format!("--socket={}", second.socket().display()));
    cleanup.arg(format!("--state-dir={}", second.state_dir().display()));
    checked(cleanup.arg(format!("--cni-conf-dir={}", lab.dir().join("none").display()))).await?;
    lab.nodes[1].start()?;
    lab.nodes[1].ready().await?;
    let [first, second] = [0, 1].map(|at: usize| fs::read_to_string(lab.nodes[at].subnet_file()));
    ensure!(first? != second?, "each node has a subnet of its own");
    lab.nodes[0].ready().await
}

#[test]
fn a_clone_does_not_rewrite_the_lease_without_limit_etcd() {
    on_this_thread(a_clone(StoreKind::Etcd));
}

#[test]
fn a_clone_does_not_rewrite_the_lease_without_limit_dir() {
    on_this_thread(a_clone(StoreKind::Dir));
}
