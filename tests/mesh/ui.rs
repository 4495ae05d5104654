// SPDX-License-Identifier: Apache-2.0
//! `weft ui` serves its page and what it shows of real agents, on 127.0.0.1 alone.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use weft_lab::netns::{Netns, checked};
use weft_lab::{Lab, LabOptions, wait_for};

use crate::exe::weft_exe;
use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);

/// Sends a GET request with this Host header, and returns the whole answer.
async fn get(ns: &Netns, (address, port): (&str, &str), host: &str, path: &str) -> Result<String> {
    let script = format!(
        "exec 3<>/dev/tcp/{address}/{port}; printf 'GET {path} HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n' >&3; cat <&3"
    );
    checked(ns.command("bash").args(["-c", &script])).await
}

#[test]
fn the_page_shows_all_nodes_and_refuses_others() {
    on_this_thread(async {
        let flags = vec!["--healthz-port=8081".to_owned()];
        let lab = Lab::start(&LabOptions { agent_flags: flags, ..options() }).await?;
        let n1 = &lab.nodes[0];
        let mut command = n1.ns.command(weft_exe());
        command.args(["ui", "--port=0"]).arg(format!("--subnet-file={}", n1.subnet_file().display()));
        let mut ui = command.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let mut line = String::new();
        BufReader::new(ui.stdout.take().context("stdout")?).read_line(&mut line).await?;
        let rest = line.trim().strip_prefix("http://127.0.0.1:").with_context(|| line.clone())?;
        let (port, path) = rest.split_once('/').context("a path")?;
        let path = format!("/{path}");
        let server = ("127.0.0.1", port);
        let page = get(&n1.ns, server, "localhost", &path).await?;
        ensure!(page.starts_with("HTTP/1.1 200") && page.contains("page.js"), "{page}");
        let json = async |name: &str| -> Result<Value> {
            let text = get(&n1.ns, server, "localhost", &format!("{path}{name}")).await?;
            let (_, body) = text.split_once("\r\n\r\n").context("a body")?;
            serde_json::from_str(body).with_context(|| text.clone())
        };
        // All six ways are there, and each has a round trip.
        let is_complete = async || {
            let mesh = json("mesh.json").await.unwrap_or_default();
            let nodes = mesh["nodes"].as_array().cloned().unwrap_or_default();
            let numbers: Vec<i64> = nodes
                .iter()
                .flat_map(|node| node["ways"].as_array().into_iter().flatten().filter_map(Value::as_i64))
                .collect();
            nodes.len() == 3 && numbers.len() == 30 && numbers.chunks(5).all(|way| way[3] > 0 && way[4] == 1450)
        };
        wait_for("all ways in the page", LIMIT, is_complete).await?;
        let status = json("status.json").await?;
        ensure!(status["peers"].as_array().map(Vec::len) == Some(2), "{status}");
        let history = json("history.json").await?;
        ensure!(history.as_array().is_some_and(|records| !records.is_empty()), "{history}");
        let (from, to) = (n1.pods[0].addrs[0], lab.nodes[1].pods[0].addrs[0]);
        let report = json(&format!("explain/{from}/{to}/80")).await?;
        ensure!(report["verdict"] == "works" && report["to"] == to.to_string(), "{report}");
        ensure!(report["steps"].as_array().is_some_and(|steps| steps.len() > 5), "{report}");
        for (host, path, wanted) in [("evil.example", path.as_str(), " 403 "), ("localhost", "/mesh.json", " 404 ")] {
            let refused = get(&n1.ns, server, host, path).await?;
            ensure!(refused.starts_with("HTTP/1.1") && refused.contains(wanted), "{refused}");
        }
        let outside = get(&lab.nodes[1].ns, (&n1.uplink[0].to_string(), port), "localhost", &path).await;
        ensure!(outside.is_err(), "other hosts must not reach the page: {outside:?}");
        Ok(())
    });
}
