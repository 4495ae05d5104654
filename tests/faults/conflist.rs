// SPDX-License-Identifier: Apache-2.0
//! The CNI configuration: when it is published, what is left of it after a boot, and what happens when another file takes its place.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::site::{Kind, Site, each, ip};

const LIST: &str = r#"{"name":"cbr0","cniVersion":"1.0.0","plugins":[{"type":"flannel"}]}"#;

each! {
    the_configuration_is_published_when_the_node_is_ready: Vxlan HostGw;
    the_link_dangles_from_a_boot_until_the_agent_is_ready: Vxlan;
    a_bad_configuration_is_named_and_the_good_one_stays: Vxlan;
    flannels_file_replaces_the_link_and_weft_restores_it: Vxlan;
    cleanup_removes_the_configuration: Vxlan;
}

fn site(kind: Kind) -> Site {
    let mut site = Site::new(kind);
    fs::write(site.path("cni-conf.json"), LIST).unwrap();
    let conf = site.path("cni-conf.json");
    site.flags.push(format!("--cni-conf={}", conf.display()));
    site.flags.push(format!("--cni-conf-dir={}", site.path("net.d").display()));
    site
}

fn link(site: &Site) -> PathBuf {
    site.path("net.d/10-flannel.conflist")
}

/// Returns what a runtime reads.
fn read(site: &Site) -> Option<String> {
    fs::read_to_string(link(site)).ok()
}

fn inode(site: &Site) -> u64 {
    fs::symlink_metadata(link(site)).unwrap().ino()
}

fn the_configuration_is_published_when_the_node_is_ready(kind: Kind) {
    let mut site = site(kind);
    // Without an address of the uplink, pods cannot be reached.
    ip("addr flush dev up0");
    site.start();
    site.until("the reason", |site| site.log().contains("waiting"));
    assert!(!link(&site).is_symlink() && read(&site).is_none(), "{}", site.log());
    ip("addr add 10.0.0.1/24 dev up0");
    site.healed("the address came");
    site.until("the configuration", |site| read(site).as_deref() == Some(LIST));
    assert_eq!(fs::read_link(link(&site)).unwrap(), site.path("run/10-flannel.conflist"));
    let log = site.log();
    let at = |text: &str| log.find(text).unwrap_or_else(|| panic!("{text}: {log}"));
    assert!(at("subnet.env written") < at("CNI configuration published"));
}

fn the_link_dangles_from_a_boot_until_the_agent_is_ready(kind: Kind) {
    let mut site = site(kind);
    site.start();
    site.until("the configuration", |site| read(site).is_some());
    let before = inode(&site);
    // A second name keeps the inode in use, so that the new link cannot get the same number.
    fs::hard_link(link(&site), site.path("held")).unwrap();
    site.stop(Signal::SIGKILL);
    fs::remove_dir_all(site.path("run")).unwrap();
    assert!(link(&site).is_symlink() && read(&site).is_none(), "not ready, says the runtime");
    site.start();
    site.until("the configuration", |site| read(site).as_deref() == Some(LIST));
    site.until("a new link, which the runtime sees", |site| inode(site) != before);
    site.healed("the boot");
}

fn a_bad_configuration_is_named_and_the_good_one_stays(kind: Kind) {
    let mut site = site(kind);
    fs::write(site.path("cni-conf.json"), "{").unwrap();
    site.start();
    site.healed("the start");
    let problem = |site: &Site| site.status().map(|status| status["problems"].to_string()).unwrap_or_default();
    site.until("the problem", |site| problem(site).contains("cni-conf.json is not a list of CNI plugins"));
    assert!(!link(&site).is_symlink());
    // kubelet changes a mounted file in this way. The agent must notice it without a restart, and before the audit.
    fs::write(site.path("aside"), LIST).unwrap();
    fs::rename(site.path("aside"), site.path("cni-conf.json")).unwrap();
    site.until("the good one", |site| read(site).as_deref() == Some(LIST));
    site.until("no problem", |site| problem(site) == "[]");
    fs::write(site.path("cni-conf.json"), "[]").unwrap();
    site.until("the problem", |site| problem(site).contains("is not a list of CNI plugins"));
    assert_eq!(read(&site).as_deref(), Some(LIST));
}

/// The init container of earlier versions of flannel calls `cp -f` of busybox. (Later ones rename a file, which replaces anything.) /run/flannel
/// is not mounted there, so weft's link dangles in it.
fn flannels_file_replaces_the_link_and_weft_restores_it(kind: Kind) {
    let mut site = site(kind);
    site.start();
    site.until("the configuration", |site| read(site).is_some());
    site.stop(Signal::SIGTERM);
    let flannels = LIST.replace("1.0.0", "0.3.1");
    fs::write(site.path("flannels"), &flannels).unwrap();
    for dangling in [true, false] {
        if dangling {
            fs::rename(site.path("run"), site.path("elsewhere")).unwrap();
        }
        let done = Command::new("busybox").args(["cp", "-f"]).arg(site.path("flannels")).arg(link(&site)).status();
        assert!(done.expect("this test needs busybox (Debian: busybox-static)").success());
        if dangling {
            fs::rename(site.path("elsewhere"), site.path("run")).unwrap();
        }
        // If the link does not dangle, `cp` writes into the file to which it leads.
        assert_eq!(link(&site).is_symlink(), !dangling);
        assert_eq!(read(&site).as_deref(), Some(&*flannels));
        site.start();
        site.until("ours again", |site| read(site).as_deref() == Some(LIST));
        site.stop(Signal::SIGTERM);
    }
}

fn cleanup_removes_the_configuration(kind: Kind) {
    let mut site = site(kind);
    site.start();
    site.until("the configuration", |site| read(site).is_some());
    site.stop(Signal::SIGTERM);
    assert_eq!(read(&site).as_deref(), Some(LIST), "the end of the agent changes nothing");
    let clean = |site: &Site| {
        let mut weft = site.weft("cleanup");
        weft.arg(format!("--subnet-file={}", site.env_file().display()));
        weft.arg(format!("--cni-conf-dir={}", site.path("net.d").display()));
        let out = weft.output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    assert!(clean(&site).contains("and the CNI configuration"));
    assert!(!link(&site).is_symlink() && !site.path("run/10-flannel.conflist").exists());
    fs::write(link(&site), LIST).unwrap();
    assert!(!clean(&site).contains("CNI configuration"), "somebody else's stays");
    assert_eq!(read(&site).as_deref(), Some(LIST));
}
