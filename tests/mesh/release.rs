// SPDX-License-Identifier: Apache-2.0
//! Commands that list, remove and give back leases in etcd: `weft lease ls`, `weft lease rm` and `weft release`.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tokio::process::Command;
use weft_lab::netns::checked;
use weft_lab::node::Node;
use weft_lab::{Lab, LabOptions, StoreKind, wait_for};

use crate::exe::weft_exe;
use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);

fn weft(lab: &Lab, at: usize, words: &[&str]) -> Command {
    let mut command = lab.nodes[at].ns.command(weft_exe());
    command.args(words).args(lab.store.flags());
    command
}

fn release(lab: &Lab, at: usize) -> Command {
    let node = &lab.nodes[at];
    let mut command = weft(lab, at, &["release"]);
    command.arg(format!("--subnet-file={}", node.subnet_file().display()));
    command.arg(format!("--socket={}", node.socket().display()));
    command.arg(format!("--state-dir={}", node.state_dir().display()));
    command
}

fn key(node: &Node) -> Result<String> {
    let env = fs::read_to_string(node.subnet_file())?;
    let subnet = env.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).context("a subnet")?;
    Ok(subnet.replace(".1/24", ".0-24"))
}

async fn route(node: &Node, key: &str, there: bool) -> Result<()> {
    let prefix = key.replace('-', "/");
    let seen =
        async || node.ns.ip(&format!("route show {prefix}")).await.is_ok_and(|text| text.contains(&prefix) == there);
    let what = format!("{}: the route to {prefix} to be there: {there}", node.name());
    wait_for(&what, LIMIT, seen).await.with_context(|| node.log_tail(20))
}

#[test]
fn a_lease_in_etcd_is_listed_released_and_removed() {
    on_this_thread(async {
        let mut lab = Lab::start(&LabOptions { nodes: 3, store: StoreKind::Etcd, ..options() }).await?;
        let keys = lab.nodes.iter().map(key).collect::<Result<Vec<_>>>()?;
        let listed = checked(&mut weft(&lab, 0, &["lease", "ls"])).await?;
        for (key, ip) in keys.iter().zip(["192.168.77.11", "192.168.77.12", "192.168.77.13"]) {
            let row = listed.lines().find(|line| line.starts_with(key)).context("a row of the lease")?;
            ensure!(row.contains(ip) && row.contains("vxlan"), "{listed}");
        }
        let refused = checked(&mut release(&lab, 0)).await.expect_err("the agent runs").to_string();
        ensure!(refused.contains("an agent answers on"), "{refused}");
        ensure!(lab.store.etcd()?.leases().await?.len() == 3, "nothing was released");

        lab.nodes[0].stop(Signal::SIGTERM).await?;
        route(&lab.nodes[1], &keys[0], true).await?;
        let said = checked(&mut release(&lab, 0)).await?;
        ensure!(said == format!("released {}\n", keys[0].replace('-', "/")), "{said}");
        ensure!(!lab.store.etcd()?.leases().await?.contains(&keys[0]), "the key is gone from etcd");
        let files = fs::read_dir(lab.nodes[0].state_dir())?.collect::<std::io::Result<Vec<_>>>()?;
        let names: Vec<String> = files.iter().map(|file| file.file_name().to_string_lossy().into_owned()).collect();
        // The history shows what was changed, with a lease and without one.
        ensure!(
            names.iter().all(|name| name.starts_with("history-")),
            "the saved peers stay without the lease: {names:?}"
        );
        route(&lab.nodes[1], &keys[0], false).await?;
        let again = checked(&mut release(&lab, 0)).await.expect_err("it is gone").to_string();
        ensure!(again.contains("is in the store: there is nothing to release"), "{again}");

        // The lease of a machine that does not exist any more.
        lab.nodes[2].stop(Signal::SIGKILL).await?;
        let said = checked(&mut weft(&lab, 0, &["lease", "rm", &keys[2]])).await?;
        ensure!(said == format!("removed {}\n", keys[2]), "{said}");
        ensure!(lab.store.etcd()?.leases().await? == [keys[1].clone()], "one lease is left");
        route(&lab.nodes[1], &keys[2], false).await?;

        // If another machine has the lease of our subnet, it is not released.
        let theirs = lab.store.etcd()?;
        let value = r#"{"PublicIP":"192.168.77.99","BackendType":"host-gw"}"#;
        theirs.ctl(&["put", &format!("/coreos.com/network/subnets/{}", keys[0]), value]).await?;
        let refused = checked(&mut release(&lab, 0)).await.expect_err("another node's").to_string();
        ensure!(refused.contains("belongs to 192.168.77.99, which is no address of this machine"), "{refused}");
        ensure!(lab.store.etcd()?.leases().await?.contains(&keys[0]), "it is still there");
        Ok(())
    });
}
