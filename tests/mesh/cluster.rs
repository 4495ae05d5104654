// SPDX-License-Identifier: Apache-2.0
//! `weft mesh --all` puts the rows of all nodes together.

use std::cell::RefCell;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_lab::netns::checked;
use weft_lab::node::Node;
use weft_lab::{Lab, LabOptions, wait_for};

use crate::exe::weft_exe;
use crate::{on_this_thread, options};

/// Probes need some seconds for each pair. The machine may be busy.
const LIMIT: Duration = Duration::from_secs(120);

async fn mesh(node: &Node, flags: &[&str]) -> Result<Output> {
    let mut command = node.ns.command(weft_exe());
    command.arg("mesh").arg(format!("--socket={}", node.socket().display())).arg("--all").args(flags);
    Ok(command.output().await?)
}

/// Waits until the answer of `weft mesh --all` begins with this text. A node that does not answer within two seconds is left out, and a
/// busy machine may need longer.
async fn says(node: &Node, flags: &[&str], begin: &str) -> Result<(String, Option<i32>)> {
    let last = RefCell::new((String::new(), None));
    let said = async || {
        let Ok(out) = mesh(node, flags).await else { return false };
        last.replace((String::from_utf8_lossy(&out.stdout).into_owned(), out.status.code()));
        last.borrow().0.starts_with(begin)
    };
    let waited = wait_for(begin.trim_end(), LIMIT, said).await;
    let last = last.into_inner();
    waited.with_context(|| last.0.clone())?;
    Ok(last)
}

async fn as_json(node: &Node) -> Result<Vec<Value>> {
    let answer: Value = serde_json::from_slice(&mesh(node, &["-o", "json"]).await?.stdout)?;
    answer["nodes"].as_array().cloned().context("the nodes")
}

/// Returns the states of all ways, and how many of them probes have measured.
fn ways(nodes: &[Value]) -> (Vec<String>, usize) {
    let all: Vec<&Value> = nodes.iter().flat_map(|node| node["ways"].as_array().into_iter().flatten()).collect();
    let state = |way: &&Value| way["state"].as_str().unwrap_or("programmed").to_owned();
    (all.iter().map(state).collect(), all.iter().filter(|way| way["mtu"].as_u64().is_some()).count())
}

fn with_health_port() -> LabOptions {
    LabOptions { agent_flags: vec!["--healthz-port=8081".to_owned()], ..options() }
}

#[test]
fn all_nodes_are_asked_and_a_broken_pair_comes_first() {
    on_this_thread(async {
        let lab = Lab::start(&with_health_port()).await?;
        let (n1, n2, n3) = (&lab.nodes[0], &lab.nodes[1], &lab.nodes[2]);
        let measured = async || as_json(n1).await.is_ok_and(|nodes| ways(&nodes).1 == 6);
        wait_for("all ways to be measured", LIMIT, measured).await.with_context(|| lab.logs(5))?;
        let (text, code) = says(n1, &[], "3 nodes, 3 answered; 6 ways, 6 known, 0 broken\n").await?;
        ensure!(code == Some(0), "{text}");
        // The firewall is between the other two nodes, so n1 itself sees no fault.
        let rule = format!("ip saddr {} udp dport 8472", n3.uplink[0]);
        for text in [
            "add table inet test; add chain inet test in { type filter hook input priority -300; }",
            &format!("add rule inet test in {rule} drop"),
        ] {
            checked(n2.ns.command("nft").arg(text)).await?;
        }
        let broken = async || {
            let states = as_json(n1).await.map(|nodes| ways(&nodes).0).unwrap_or_default();
            states.iter().filter(|state| *state == "unreachable").count() == 2
        };
        wait_for("both directions to be unreachable", LIMIT, broken).await?;
        let (text, code) = says(n1, &[], "3 nodes, 3 answered; 6 ways, 6 known, 2 broken\n").await?;
        ensure!(code == Some(2), "{text}");
        let first = text.lines().skip_while(|line| !line.starts_with("FROM  ")).nth(1).context("the worst way")?;
        ensure!(first.contains("unreachable"), "{text}");
        ensure!(text.contains("drops UDP port 8472"), "{text}");
        let drawn = async || {
            let Ok(out) = mesh(n1, &["-o", "svg"]).await else { return false };
            let picture = String::from_utf8_lossy(&out.stdout);
            picture.starts_with("<svg ") && picture.contains("3 nodes, 3 answered, 2 broken ways; ")
        };
        wait_for("a picture of the broken ways", LIMIT, drawn).await?;
        Ok(())
    });
}

#[test]
fn nodes_that_do_not_answer_are_named_and_strangers_get_no_row() {
    on_this_thread(async {
        let mut lab = Lab::build(&with_health_port()).await?;
        lab.nodes[1].set_flag("--healthz-ip=127.0.0.1");
        lab.nodes[2].remove_flag("--healthz-port");
        for node in &mut lab.nodes {
            node.start()?;
        }
        for node in &mut lab.nodes {
            node.ready().await?;
        }
        let all_known = async || as_json(&lab.nodes[0]).await.is_ok_and(|nodes| nodes.len() == 3);
        wait_for("all nodes to be known", LIMIT, all_known).await?;
        let (text, _) = says(&lab.nodes[0], &[], "3 nodes, 1 answered; 6 ways, 2 known, 0 broken\n").await?;
        let line = text.replace("\n  ", " ");
        for address in ["192.168.77.12", "192.168.77.13"] {
            ensure!(line.contains(&format!("connect to {address}:8081: Connection refused")), "{text}");
        }
        let out = mesh(&lab.nodes[2], &[]).await?;
        let error = String::from_utf8(out.stderr)?;
        ensure!(
            out.status.code() == Some(1) && error.contains("the agent of this node has no --healthz-port"),
            "{error}"
        );
        says(&lab.nodes[2], &["--port", "8081"], "3 nodes, 2 answered;").await?;
        // No lease names the address of the fabric.
        let mut ask = lab.fabric.command("bash");
        ask.args(["-c", "exec 3<>/dev/tcp/192.168.77.11/8081; printf 'GET /mesh HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"]);
        let refused = checked(&mut ask).await?;
        ensure!(
            refused.contains(" 403 ")
                && refused
                    .ends_with("192.168.77.1 is not the published address of a node: only nodes may read this page\n"),
            "{refused}"
        );
        Ok(())
    });
}
