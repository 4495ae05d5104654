// SPDX-License-Identifier: Apache-2.0
//! `weft lab` is killed with SIGKILL. Its processes end with it, and `tools/clean-lab` removes its files, but not those of a running lab,
//! which `weft lab mesh` finds.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;
use weft_lab::process::signal;
use weft_lab::wait_for;

use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);

/// Returns the processes whose command line contains this directory. They belong to the lab in it.
fn processes(dir: &Path) -> Vec<String> {
    let dir = dir.to_string_lossy();
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let lines = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let texts = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    texts.filter(|text| text.contains(&*dir)).collect()
}

async fn clean(tmp: &Path) -> Result<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/clean-lab");
    let out = Command::new(script).env("TMPDIR", tmp).output().await.context("run tools/clean-lab")?;
    ensure!(out.status.success(), "tools/clean-lab: {}", String::from_utf8_lossy(&out.stderr));
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn labs(tmp: &Path) -> Result<usize> {
    Ok(fs::read_dir(tmp)?.count())
}

#[test]
fn killed_lab_leaves_only_files_and_those_are_cleaned() {
    on_this_thread(async {
        let tmp = tempfile::tempdir()?;
        let exe = options().exe.context("a binary under test")?;
        let mut command = Command::new(&exe);
        command.args(["lab", "--nodes=2", "--store=etcd", "--keep"]).env("TMPDIR", tmp.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut lab = command.spawn().context("start weft lab")?;
        let mut lines = BufReader::new(lab.stdout.take().context("its output")?).lines();
        let up = async {
            while let Some(line) = lines.next_line().await? {
                if line.starts_with("all agents ready") {
                    return anyhow::Ok(());
                }
            }
            anyhow::bail!("weft lab ended before its agents were ready")
        };
        tokio::time::timeout(LIMIT, up).await.context("the lab did not come up in time")??;

        let said = clean(tmp.path()).await?;
        ensure!(said.contains("is running") && labs(tmp.path())? == 1, "a running lab is left alone: {said}");
        // There are at least two agents and etcd. The command line of the lab itself does not contain the directory.
        let before = processes(tmp.path());
        ensure!(before.len() >= 3, "processes of the lab: {before:?}");

        // Another test may run a lab, too. One of the two is shown.
        let is_shown = async || {
            let Ok(out) = Command::new(&exe).args(["lab", "mesh"]).output().await else { return false };
            String::from_utf8_lossy(&out.stdout)
                .lines()
                .any(|line| line.contains(" answered; ") && line.contains(" ways, "))
        };
        wait_for("weft lab mesh to show a running lab", LIMIT, is_shown).await?;

        let mut command = Command::new(&exe);
        command.args(["lab", "ui", "--port=0"]).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut ui = command.spawn().context("start weft lab ui")?;
        let mut url = String::new();
        BufReader::new(ui.stdout.take().context("its output")?).read_line(&mut url).await?;
        let address = url.strip_prefix("http://").and_then(|rest| rest.split_once('/')).context("an address")?.0;
        let is_served = async || TcpStream::connect(address).await.is_ok();
        ensure!(is_served().await, "{url} is not served");
        signal(Some(&ui), Signal::SIGTERM)?;
        wait_for("weft lab ui and its page to end after SIGTERM", LIMIT, async || !is_served().await).await?;
        tokio::time::timeout(LIMIT, ui.wait()).await.context("weft lab ui goes on after SIGTERM")??;

        lab.kill().await.context("kill weft lab")?;
        wait_for("all processes of a killed lab to end", LIMIT, async || processes(tmp.path()).is_empty()).await?;
        let said = clean(tmp.path()).await?;
        ensure!(labs(tmp.path())? == 0, "files of a killed lab are left: {said}");
        Ok(())
    });
}
