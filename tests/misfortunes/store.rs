// SPDX-License-Identifier: Apache-2.0
//! Misfortunes of the store: it is silent or slow, or certificates and clocks do not fit together.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tokio::process::Child;
use weft_lab::netns::checked;
use weft_lab::node::Node;
use weft_lab::{Lab, LabOptions, StoreKind, wait_for};

use crate::{LIMIT, doctor, gone, named, named_with, on_this_thread, options};

const PLAIN: &str = "--etcd-endpoints=http://192.168.77.1:2379";

/// 17: the lease lives for a minute without the store.
#[test]
fn the_lease_ends_soon_while_the_store_is_silent() {
    on_this_thread(async {
        let agent_flags = vec!["--etcd-lease-ttl=60s".to_owned()];
        let mut lab = Lab::start(&LabOptions { store: StoreKind::Etcd, agent_flags, ..options() }).await?;
        gone(&lab.nodes[0], "agent").await?;
        lab.store.etcd()?.signal(Signal::SIGSTOP)?;
        named(&lab.nodes[0], "agent", &["store: ", "the own lease ends in "]).await?;
        lab.store.etcd()?.signal(Signal::SIGCONT)?;
        gone(&lab.nodes[0], "agent").await
    });
}

/// 18: etcd stands still while the command waits for its answer.
#[test]
fn etcd_is_slow() {
    on_this_thread(async {
        let mut lab = Lab::build(&LabOptions { store: StoreKind::Etcd, ..options() }).await?;
        let flags = ["--check-store", PLAIN, "--only", "store"];
        let is_fast = async || doctor(&lab.nodes[0], &flags).await.is_ok_and(|findings| findings.is_empty());
        wait_for("etcd to be fast before", LIMIT, is_fast).await?;
        let deadline = Instant::now() + LIMIT;
        loop {
            let findings = with_a_slow_etcd(&mut lab, &flags).await?;
            ensure!(findings.len() == 1, "{findings:?}");
            if findings[0][1].contains(" s for one answer") {
                ensure!(findings[0][2].contains("wal_fsync"), "{findings:?}");
                return Ok(());
            }
            // An answer is waited for three seconds. A busy machine may continue etcd too late for that.
            ensure!(findings[0][1].contains("does not answer") && Instant::now() < deadline, "{findings:?}");
        }
    });
}

/// Stops etcd, and continues it some time after `weft doctor` has connected to it. Returns what `weft doctor` finds.
async fn with_a_slow_etcd(lab: &mut Lab, flags: &[&str]) -> Result<Vec<[String; 3]>> {
    let etcd = lab.store.etcd()?;
    etcd.signal(Signal::SIGSTOP)?;
    let node = &lab.nodes[0];
    let (findings, continued) = tokio::join!(doctor(node, flags), async {
        let is_connected = async || {
            let sockets = checked(node.ns.command("ss").args(["-Htn", "dst", "192.168.77.1:2379"])).await;
            sockets.is_ok_and(|text| text.contains("ESTAB"))
        };
        let connected = wait_for("weft doctor to wait for etcd", LIMIT, is_connected).await;
        // This is the misfortune: the answer takes longer than a second.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        etcd.signal(Signal::SIGCONT)?;
        connected
    });
    continued?;
    findings
}

/// Runs openssl in a directory.
async fn openssl(node: &Node, dir: &Path, line: &str) -> Result<()> {
    let mut command = node.ns.command("openssl");
    checked(command.current_dir(dir).args(line.split_whitespace())).await.map(drop)
}

const KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
const CA: &str = "[ca]\ndefault_ca=d\n[d]\ndatabase=index\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\nunique_subject=no\npolicy=p\n\
                  [p]\ncommonName=supplied\n";

/// Creates a CA and a certificate of the server.
async fn authority(node: &Node, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    for (name, text) in
        [("ca.conf", CA), ("index", ""), ("serial", "01\n"), ("san", "subjectAltName=IP:192.168.77.1\n")]
    {
        fs::write(dir.join(name), text)?;
    }
    openssl(node, dir, &format!("req -x509 {KEY} -keyout ca.key -out ca.pem -days 400 -subj /CN=ca")).await?;
    certificate(node, dir, "server", "-days 300").await
}

/// Creates NAME.key and NAME.pem, valid as `validity` says.
async fn certificate(node: &Node, dir: &Path, name: &str, validity: &str) -> Result<()> {
    openssl(node, dir, &format!("req {KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}")).await?;
    let sign = format!("-cert ca.pem -keyfile ca.key -in {name}.csr -out {name}.pem -notext -extfile san");
    openssl(node, dir, &format!("ca -batch -config ca.conf {sign} {validity}")).await
}

/// Starts an etcd with this certificate, which accepts nobody without one.
async fn secure_etcd(lab: &Lab, dir: &Path, certificate: &str) -> Result<Child> {
    let file = |name: &str| dir.join(name).display().to_string();
    let mut command = lab.fabric.command("etcd");
    command.arg(format!("--data-dir={}", file("data"))).arg("--client-cert-auth");
    let url = "https://192.168.77.1:23790";
    command.arg(format!("--listen-client-urls={url}")).arg(format!("--advertise-client-urls={url}"));
    command
        .arg("--listen-peer-urls=http://127.0.0.1:23800")
        .arg("--initial-advertise-peer-urls=http://127.0.0.1:23800");
    command.arg("--initial-cluster=default=http://127.0.0.1:23800");
    for (flag, name) in [("cert", &format!("{certificate}.pem")), ("key", &format!("{certificate}.key"))] {
        command.arg(format!("--{flag}-file={}", file(name)));
    }
    command.arg(format!("--trusted-ca-file={}", file("ca.pem")));
    lab.fabric.spawn(&mut command, &dir.join("etcd.log"))
}

/// Returns the flags for this etcd and a certificate.
fn flags(dir: &Path, name: &str) -> Vec<String> {
    let mut flags = vec!["--etcd-endpoints=https://192.168.77.1:23790".to_owned()];
    for (flag, file) in [("ca", "ca.pem".to_owned()), ("cert", format!("{name}.pem")), ("key", format!("{name}.key"))] {
        flags.push(format!("--etcd-{flag}file={}", dir.join(file).display()));
    }
    flags
}

/// 19, 21: with a certificate that is valid, the store answers; with one that has ended or begins later, the cause is named.
#[test]
fn a_certificate_has_ended_or_begins_in_the_future() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        let dir = lab.dir().join("tls");
        let node = &lab.nodes[0];
        authority(node, &dir).await?;
        let later = checked(node.ns.command("date").args(["-u", "-d", "10 minutes", "+%Y%m%d%H%M%SZ"])).await?;
        certificate(node, &dir, "good", "-days 300").await?;
        certificate(node, &dir, "ended", "-startdate 20240101000000Z -enddate 20250101000000Z").await?;
        certificate(node, &dir, "early", &format!("-startdate {} -enddate 20490101000000Z", later.trim())).await?;
        let mut etcd = secure_etcd(&lab, &dir, "server").await?;
        let check = |name: &str| [vec!["--check-store".to_owned()], flags(&dir, name)].concat();
        let good = check("good");
        let good: Vec<&str> = good.iter().map(String::as_str).collect();
        let words = ["answers, and has no net-conf", "write it, for example: ETCDCTL_API=3 etcdctl"];
        named_with(node, "store", &words, &good).await?;
        let findings = doctor(node, &good).await?;
        ensure!(findings.iter().all(|finding| finding[0] == "store"), "{findings:?}");
        let ended = check("ended");
        let ended: Vec<&str> = ended.iter().map(String::as_str).collect();
        named_with(node, "certificates", &["ended.pem", "ended on 2025-01-01T00:00:00Z", "replace the file"], &ended)
            .await?;
        named_with(node, "store", &["does not answer"], &ended).await?;
        let early = check("early");
        let early: Vec<&str> = early.iter().map(String::as_str).collect();
        named_with(node, "clock", &["early.pem", "the clock of this node says 20", "NTP"], &early).await?;
        // An agent with this certificate waits for the store, and says why: etcd sends an alert that names the certificate.
        let flags = flags(&dir, "ended");
        let node = lab.nodes.first_mut().context("a node")?;
        node.set_flags(flags);
        node.start()?;
        named(node, "agent", &["net-conf", "192.168.77.1:23790", "fatal alert: ", "Certificate"]).await?;
        // The certificate of the store itself begins in the future.
        etcd.kill().await?;
        let etcd = secure_etcd(&lab, &dir, "early").await?;
        let words = ["certificate not valid yet", "set the clock of this node"];
        named_with(&lab.nodes[0], "store", &words, &good).await?;
        drop(etcd);
        Ok(())
    });
}

/// 103: agents that only renew their leases do not notice it.
#[test]
fn etcd_is_full() {
    on_this_thread(async {
        let lab = Lab::build(&options()).await?;
        let (node, dir) = (&lab.nodes[0], lab.dir().join("full"));
        fs::create_dir_all(&dir)?;
        let (url, peers) = ("http://192.168.77.1:23790", "http://127.0.0.1:23800");
        let mut etcd = lab.fabric.command("etcd");
        etcd.arg(format!("--data-dir={}", dir.join("data").display())).arg("--quota-backend-bytes=2097152");
        etcd.arg(format!("--listen-client-urls={url}")).arg(format!("--advertise-client-urls={url}"));
        etcd.arg(format!("--listen-peer-urls={peers}")).arg(format!("--initial-advertise-peer-urls={peers}"));
        etcd.arg(format!("--initial-cluster=default={peers}"));
        let etcd = lab.fabric.spawn(&mut etcd, &dir.join("etcd.log"))?;
        let flags = ["--check-store".to_owned(), format!("--etcd-endpoints={url}")];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        named_with(node, "store", &["answers, and has no net-conf"], &flags).await?;
        let etcdctl = async |line: &str| {
            // The disk of a busy machine may need long.
            let limits = "--dial-timeout=60s --command-timeout=60s";
            let line = format!("export ETCDCTL_API=3; e() {{ etcdctl {limits} --endpoints={url} \"$@\"; }}; {line}");
            checked(node.ns.command("sh").args(["-c", &line])).await
        };
        let is_full = |findings: &[[String; 3]]| findings.iter().any(|finding| finding[1].contains("alarm NOSPACE"));
        etcdctl("e put /coreos.com/network/config '{\"Network\":\"10.244.0.0/16\"}'").await?;
        ensure!(!is_full(&doctor(node, &flags).await?), "it has space before");
        let put = "head -c 500000 /dev/zero | tr '\\0' x | e put big";
        etcdctl(&format!("for n in $(seq 60); do e alarm list | grep -q NOSPACE && break; {put} || :; done")).await?;
        named_with(node, "store", &["answers, but it is full", "etcdctl defrag, etcdctl alarm disarm"], &flags).await?;
        etcdctl("e compact $(e get big -w fields | sed -n 's/^\"Revision\" : //p') && e defrag && e alarm disarm")
            .await?;
        ensure!(!is_full(&doctor(node, &flags).await?), "after the remedy");
        drop(etcd);
        Ok(())
    });
}
