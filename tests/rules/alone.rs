// SPDX-License-Identifier: Apache-2.0
//! The binary in an otherwise empty root directory, without iptables, nft and a shell. With nftables it needs none of them.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use weft_lab::{LabOptions, wait_for};

use crate::exe::weft_exe;
use crate::program::write_program;
use crate::site::{Family, PATIENCE, Site, on_this_thread, options, straight};

const REMEDY: &str = "install the package iptables, or choose --firewall=nft";

/// Makes a directory with the binary, the libraries that it needs, and /proc. A process of its own copies the binary: a copy by this process
/// would be open for writing in the children that other tests start meanwhile, and the kernel refuses to run such a file.
fn empty_root() -> TempDir {
    let root = tempfile::Builder::new().prefix("weft-root-").tempdir().unwrap();
    assert!(Command::new("cp").arg(weft_exe()).arg(root.path().join("weft")).status().unwrap().success());
    fs::create_dir(root.path().join("proc")).unwrap();
    let linked = Command::new("ldd").arg(weft_exe()).output().unwrap();
    for word in String::from_utf8_lossy(&linked.stdout).split_whitespace().filter(|word| word.starts_with('/')) {
        let copy = root.path().join(word.trim_start_matches('/'));
        fs::create_dir_all(copy.parent().unwrap()).unwrap();
        fs::copy(word, copy).unwrap();
    }
    root
}

/// Writes a program that runs the binary there. The directory of the lab is mounted in it; `weft lab exec` gives it mounts of its own.
fn entrance(root: &Path) -> std::path::PathBuf {
    let script = root.join("../").join(format!("{}.sh", root.file_name().unwrap().to_str().unwrap()));
    let text = format!(
        "#!/bin/sh\nset -e\nroot={}\nfor word; do case $word in\n\
         --subnet-file=*|--socket=*) lab=$(dirname \"$(dirname \"${{word#*=}}\")\") ;;\nesac; done\n\
         mkdir -p \"$root$lab\"\nmount --bind \"$lab\" \"$root$lab\"\nmount -t proc proc \"$root/proc\"\n\
         exec chroot \"$root\" /weft \"$@\"\n",
        root.display()
    );
    write_program(&script, &text);
    script
}

/// Runs a test with the binary in an empty root directory, which is removed afterwards.
fn alone(flags: &[&str], test: impl AsyncFn(Site) + std::panic::RefUnwindSafe) {
    let root = empty_root();
    let exe = entrance(root.path());
    let options = LabOptions { exe: Some(exe.clone()), launcher: Some(weft_exe()), ..options(flags) };
    let outcome = std::panic::catch_unwind(|| {
        on_this_thread(async { test(Site::with(options.clone()).await).await });
    });
    fs::remove_file(exe).unwrap();
    drop(root);
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn nftables_needs_no_program() {
    alone(&["--ip-masq", "--guard-tunnel", "--iptables-resync=3600", "--resync=1h"], async |mut site| {
        site.start().await;
        masqueraded(&site);
        site.nft("n1", "flush ruleset").await;
        masqueraded(&site);
    });
}

/// A host with the rules of iptables-nft, and an agent that has no program of iptables (docs/adr/009-other-programs-firewalls.md): an
/// accept in our own table does not undo the drop, so pods need two rules in FORWARD. iptables reads and removes these as its own.
fn pods_get_through(set: &'static str, reset: &'static str) {
    alone(&["--ip-masq", "--iptables-resync=1"], async move |mut site| {
        let both = |command: &str| ["", "6"].map(|six| format!("ip{six}tables-nft -w 20 {command}")).join("; ");
        site.on_nodes(&both(set)).await;
        site.start().await;
        assert!(
            site.lab.nodes[0]
                .status_as::<weft::observe::status::Status>()
                .await
                .unwrap()
                .rules
                .filter
                .starts_with("nftables")
        );
        masqueraded(&site);
        for six in ["", "6"] {
            let saved = site.run("n1", &[&format!("ip{six}tables-nft"), "-S", "FORWARD"]).await;
            let ours: Vec<&str> = saved.lines().filter(|line| line.ends_with("-j ACCEPT")).collect();
            assert_eq!(ours.len(), 2, "{saved}");
            for rule in ours {
                // A program that loads the rules of the node again may remove ours. They are written again.
                let delete = format!("ip{six}tables-nft -w 20 {}", rule.replacen("-A", "-D", 1));
                site.run("n1", &["sh", "-ec", &delete]).await;
            }
        }
        masqueraded(&site);
        // Without the drop the rules are not needed, and are removed.
        site.on_nodes(&both("-F FORWARD")).await;
        site.on_nodes(&both(reset)).await;
        masqueraded(&site);
        // Between the two commands the agent may have written them again, and it needs a moment to see that the drop is gone.
        let is_clean = async || {
            let saved = site.run("n1", &["iptables-nft-save"]).await;
            !saved.contains("WEFT") && !saved.contains("-A ")
        };
        wait_for("the rules to be removed", PATIENCE, is_clean).await.unwrap();
    });
}

#[test]
fn pods_get_through_a_policy_of_iptables_nft() {
    pods_get_through("-P FORWARD DROP", "-P FORWARD ACCEPT");
}

#[test]
fn pods_get_through_a_last_reject_of_iptables_nft() {
    pods_get_through("-A FORWARD -j REJECT", "-P FORWARD ACCEPT");
}

/// iptables is wanted and not installed. The node is not ready, and the status says what to do.
#[test]
fn missing_programs_of_iptables_are_reported() {
    alone(&["--ip-masq", "--firewall=iptables"], async |mut site| {
        site.lab.nodes[0].start().unwrap();
        let reported = async || match site.lab.nodes[0].status_as::<weft::observe::status::Status>().await {
            Ok(status) => !status.ready && status.problems.iter().any(|problem| problem.text.contains(REMEDY)),
            Err(_) => false,
        };
        wait_for("the problem to be reported", PATIENCE, reported).await.unwrap();
    });
}

fn masqueraded(site: &Site) {
    for family in Family::BOTH {
        for (from, to, expected) in [("n1-p1", "n2-p1", "n1-p1"), ("n1-p1", "out", "n1"), ("n1-p1", "n2", "n1")] {
            site.until_seen(&straight(from, to), family, expected);
        }
    }
}
