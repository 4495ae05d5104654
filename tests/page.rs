// SPDX-License-Identifier: Apache-2.0
//! The page of `weft ui` in a real browser without a screen. Needs root and chromium, which `make test-ui` installs. `WEFT_SCREENSHOTS`
//! names a directory that gets the pictures.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "common/exe.rs"]
mod exe;
#[path = "common/places.rs"]
mod places;
#[path = "common/thread.rs"]
mod thread;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use weft_lab::netns::checked;
use weft_lab::{Lab, LabOptions, wait_for};

use exe::weft_exe;
use thread::on_this_thread;

/// The browser may take long to start on a busy machine.
const LIMIT: Duration = Duration::from_secs(180);
const VIEWS: [&str; 4] = ["mesh", "space", "nodes", "history"];

/// Adds what starts a browser without a screen, a profile and a sandbox, which root cannot have.
fn without_screen(command: &mut Command, dir: &Path) {
    command.env("HOME", dir).env("XDG_CONFIG_HOME", dir).env("XDG_CACHE_HOME", dir);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]);
    command.args(["--no-first-run", "--disable-background-networking", "--window-size=1200,900"]);
    command.arg("--virtual-time-budget=6000").arg(format!("--user-data-dir={}", dir.join("profile").display()));
    command.stdin(Stdio::null()).stderr(Stdio::null());
}

/// Returns the value of an attribute of the root element.
fn data<'a>(dom: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = dom.split_once(&format!("data-{name}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

/// Opens the page in `command`'s browser. Returns the elements of the page, after its scripts have run.
async fn open(mut command: Command, dir: &Path, url: &str) -> Result<String> {
    without_screen(&mut command, dir);
    let mut command = tokio::process::Command::from(command);
    let run = command.args(["--dump-dom", url]).kill_on_drop(true).output();
    let dom = String::from_utf8(tokio::time::timeout(LIMIT, run).await.context("the browser hangs")??.stdout)?;
    ensure!(data(&dom, "error").is_none(), "a script failed: {:?}", data(&dom, "error"));
    ensure!(data(&dom, "loaded") == Some("yes"), "{url} was not loaded: {dom}");
    Ok(dom)
}

/// Writes a picture of the page into the directory of `WEFT_SCREENSHOTS`, or into a temporary one.
async fn picture(mut command: Command, dir: &Path, url: &str, name: &str) -> Result<()> {
    without_screen(&mut command, dir);
    let target = std::env::var_os("WEFT_SCREENSHOTS").map_or_else(|| dir.to_owned(), Into::into);
    let file = target.join(format!("{name}.png"));
    let mut command = tokio::process::Command::from(command);
    let run = command
        .arg(format!("--screenshot={}", file.display()))
        .arg(url)
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .status();
    tokio::time::timeout(LIMIT, run).await.context("the browser hangs")??;
    let picture = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
    ensure!(picture.starts_with(b"\x89PNG") && picture.len() > 5000, "{} is no picture", file.display());
    Ok(())
}

#[test]
fn every_view_shows_a_real_cluster() {
    on_this_thread(async {
        let dir = tempfile::tempdir()?;
        let agent_flags = vec!["--healthz-port=8081".to_owned()];
        let lab = Lab::start(&LabOptions { exe: Some(weft_exe()), agent_flags, ..LabOptions::default() }).await?;
        let n1 = &lab.nodes[0];
        for text in [
            "add table inet test; add chain inet test in { type filter hook input priority -300; }",
            "add rule inet test in udp dport 8472 drop",
        ] {
            checked(lab.nodes[2].ns.command("nft").arg(text)).await?;
        }
        let socket = format!("--socket={}", n1.socket().display());
        let broken = async || {
            let mut command = n1.ns.command(weft_exe());
            let text = checked_any(command.args(["mesh", "--all", &socket])).await.unwrap_or_default();
            text.contains(" 6 known, 4 broken")
        };
        wait_for("four broken ways", LIMIT, broken).await?;
        let mut ui = n1.ns.command(weft_exe());
        let instance = format!("--subnet-file={}", n1.subnet_file().display());
        let mut ui = ui.args(["ui", "--port=0", &instance]).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let mut url = String::new();
        BufReader::new(ui.stdout.take().context("stdout")?).read_line(&mut url).await?;
        for view in VIEWS {
            let url = format!("{}#{view}", url.trim());
            let browser = || n1.ns.command("chromium").into_std();
            let dom = open(browser(), dir.path(), &url).await?;
            let wanted = match view {
                "mesh" => data(&dom, "nodes") == Some("3") && data(&dom, "broken") == Some("4"),
                "space" => data(&dom, "taken") == Some("3") && dom.contains("253 of 256 cells are free"),
                "nodes" => dom.matches("<td>ready</td>").count() == 3 && dom.contains("3 of 3 nodes"),
                _ => dom.contains("start: ") && dom.contains(" written"),
            };
            ensure!(wanted, "{view}: {dom}");
            picture(browser(), dir.path(), &url, view).await?;
        }
        // A link that names no packet puts nothing into a command.
        let dom =
            open(n1.ns.command("chromium").into_std(), dir.path(), &format!("{}#explain/$(id)/10.244.0.1", url.trim()))
                .await?;
        ensure!(!dom.contains("ssh root@"), "{dom}");
        // A link may name the packet. n1 has a rule against the second one.
        checked(
            n1.ns
                .command("nft")
                .arg("add table inet test; add chain inet test forwarded { type filter hook forward priority 0; }"),
        )
        .await?;
        let (from, n2, n3) = (n1.pods[0].addrs[0], lab.nodes[1].pods[0].addrs[0], lab.nodes[2].pods[0].addrs[0]);
        checked(n1.ns.command("nft").arg(format!("add rule inet test forwarded ip daddr {n3} drop"))).await?;
        for (to, verdict, words) in [(n2, "works", "flannel.1"), (n3, "broken", &*format!("ip daddr {n3} drop"))] {
            let url = format!("{}#explain/{from}/{to}", url.trim());
            let browser = || n1.ns.command("chromium").into_std();
            let dom = open(browser(), dir.path(), &url).await?;
            ensure!(data(&dom, "verdict") == Some(verdict) && dom.contains(words), "{to}: {dom}");
            let node = if to == n2 { "192.168.77.12" } else { "192.168.77.13" };
            let there = format!("ssh root@{node} 'PATH=$PATH:/opt/cni/bin; weft explain {from} {to}'");
            ensure!(dom.contains(&there), "{there}: {dom}");
            picture(browser(), dir.path(), &url, &format!("explain-{verdict}")).await?;
        }
        Ok(())
    });
}

/// Returns the output of a program, whatever its exit code.
async fn checked_any(command: &mut tokio::process::Command) -> Result<String> {
    Ok(String::from_utf8(command.output().await?.stdout)?)
}

/// The mesh of some nodes, in the form that `weft ui` sends.
fn mesh_of(count: usize) -> String {
    let subnet = |number: usize| format!("10.{}.{}.0/24", number / 250, number % 250);
    let node = |from: usize| {
        let way = |to: usize| {
            if (from + to).is_multiple_of(997) {
                [to as i64, 5, 100, -1, -1]
            } else {
                [to as i64, (to % 4) as i64, 0, 300, 1450]
            }
        };
        let ways: Vec<i64> = (0..count).filter(|to| *to != from).flat_map(way).collect();
        serde_json::json!({ "subnet": subnet(from), "public": "192.168.0.1", "name": format!("n{from}"), "version": "1", "backend": "vxlan",
            "mtu": 1450, "ready": true, "problems": [], "known": count - 1, "ways": ways, "reasons": {} })
    };
    let classes = ["a", "b", "c", "d", "loses packets", "broken", "not in the kernel", "not asked yet", "unknown"];
    let nodes: Vec<_> = (0..count).map(node).collect();
    serde_json::json!({ "at_ms": 1, "notice": "", "classes": classes, "nodes": nodes }).to_string()
}

/// What a browser gets in a test instead of the answers of an agent.
struct Site {
    mesh: String,
    status: String,
    /// A script that runs after those of the page.
    script: &'static str,
}

impl Site {
    /// Returns the content type and the text of a file.
    fn file(&self, path: &str) -> (&'static str, String) {
        let file = |name: &str| fs::read_to_string(format!("src/commands/ui/{name}")).unwrap_or_default();
        match path.trim_start_matches('/') {
            "" => {
                let with_script = "<script src=\"test.js\"></script>\n</body>";
                ("text/html", file("page.html").replace("</body>", with_script))
            }
            "test.js" => ("text/javascript", self.script.to_owned()),
            name if name.ends_with(".js") => ("text/javascript", file(name)),
            "page.css" => ("text/css", file("page.css")),
            "mesh.json" => ("application/json", self.mesh.clone()),
            "status.json" => ("application/json", self.status.clone()),
            _ => ("application/json", "[]".to_owned()),
        }
    }

    async fn answer(&self, mut stream: TcpStream) {
        let mut request = [0; 4096];
        let length = stream.read(&mut request).await.unwrap_or(0);
        let text = String::from_utf8_lossy(&request[..length]).into_owned();
        let (kind, body) = self.file(text.split(' ').nth(1).unwrap_or_default());
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        let _ = stream.write_all((head + &body).as_bytes()).await;
    }
}

/// Serves the files of the page with a mesh of some nodes, and with a script that runs after those of the page. Returns the address.
async fn page_of(count: usize, script: &'static str) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    let peer = |subnet: &str| serde_json::json!({ "subnet": subnet, "public": "192.168.0.2", "state": "programmed" });
    // Anybody who may write to the store may write the last ones, and they must not harm the page.
    let subnets =
        ["10.0.1.0/24", "::/300", "10.0.2.0/33", "10.0.256.0/24", "10.0.3/24", "1:2:3:4:5:6:7:8:9::/64", "::1::/64"];
    let status = serde_json::json!({ "version": "1", "node": "n0", "subnet": "10.0.0.0/24", "network": "10.0.0.0/8",
        "peers": subnets.map(peer) })
    .to_string();
    let site = Arc::new(Site { mesh: mesh_of(count), status, script });
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            let site = site.clone();
            // A browser may open a connection and ask nothing on it.
            tokio::spawn(async move { site.answer(stream).await });
        }
    });
    Ok(url)
}

#[test]
fn a_thousand_nodes_are_drawn() {
    on_this_thread(async {
        let dir = tempfile::tempdir()?;
        let url = page_of(1000, "").await?;
        let dom = open(Command::new("chromium"), dir.path(), &url).await?;
        ensure!(data(&dom, "nodes") == Some("1000"), "{dom}");
        println!("a million cells were prepared in {} ms", data(&dom, "paint").unwrap_or("?"));
        let broken: usize = data(&dom, "broken").context("the number of broken ways")?.parse()?;
        ensure!(broken > 900, "{broken}");
        let nodes = open(Command::new("chromium"), dir.path(), &format!("{url}#nodes")).await?;
        ensure!(nodes.contains("1000 of 1000 nodes"));
        let space = open(Command::new("chromium"), dir.path(), &format!("{url}#space")).await?;
        ensure!(data(&space, "taken") == Some("2"), "this node and the one peer with a subnet: {space}");
        picture(Command::new("chromium"), dir.path(), &url, "mesh-1000").await
    });
}

/// The cells, the node or the lease that somebody has just looked at may be gone when the page is refreshed. The script goes on with
/// leases in each state, and with every key of the page.
#[test]
fn inputs_do_no_harm_while_nodes_and_the_lease_come_and_go() {
    on_this_thread(async {
        let dir = tempfile::tempdir()?;
        let url = page_of(3, include_str!("page/inputs.js")).await?;
        let dom = open(Command::new("chromium"), dir.path(), &url).await?;
        ensure!(data(&dom, "inputs") == Some("done"), "the script did not come to its end: {dom}");
        Ok(())
    });
}
