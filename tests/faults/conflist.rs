// SPDX-License-Identifier: Apache-2.0
//! The CNI configuration: when it is published, what a boot leaves of it, who may take its place.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::site::{Kind, Site, each, ip};

const LIST: &str = r#"{"name":"cbr0","cniVersion":"1.0.0","plugins":[{"type":"flannel"}]}"#;

each! {
    it_is_published_when_the_node_is_ready: Vxlan HostGw;
    a_boot_leaves_it_dangling: Vxlan;
    a_bad_one_is_named_and_a_good_one_stays: Vxlan;
    flannels_own_takes_its_place_and_gives_it_back: Vxlan;
    cleanup_takes_it_away: Vxlan;
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

/// What a runtime reads.
fn read(site: &Site) -> Option<String> {
    fs::read_to_string(link(site)).ok()
}

fn inode(site: &Site) -> u64 {
    fs::symlink_metadata(link(site)).unwrap().ino()
}

fn it_is_published_when_the_node_is_ready(kind: Kind) {
    let mut site = site(kind);
    // Without an address there is no data path.
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

fn a_boot_leaves_it_dangling(kind: Kind) {
    let mut site = site(kind);
    site.start();
    site.until("the configuration", |site| read(site).is_some());
    let before = inode(&site);
    // Held, so that its number is not given again.
    fs::hard_link(link(&site), site.path("held")).unwrap();
    site.stop(Signal::SIGKILL);
    fs::remove_dir_all(site.path("run")).unwrap();
    assert!(link(&site).is_symlink() && read(&site).is_none(), "not ready, says the runtime");
    site.start();
    site.until("the configuration", |site| read(site).as_deref() == Some(LIST));
    site.until("a new link, which the runtime sees", |site| inode(site) != before);
    site.healed("the boot");
}

fn a_bad_one_is_named_and_a_good_one_stays(kind: Kind) {
    let mut site = site(kind);
    fs::write(site.path("cni-conf.json"), "{").unwrap();
    site.start();
    site.healed("the start");
    let problem = |site: &Site| site.status().map(|status| status["problems"].to_string()).unwrap_or_default();
    site.until("the problem", |site| problem(site).contains("cni-conf.json is not a list of CNI plugins"));
    assert!(!link(&site).is_symlink());
    // As kubelet mounts a new version: no restart, no audit for an hour.
    fs::write(site.path("aside"), LIST).unwrap();
    fs::rename(site.path("aside"), site.path("cni-conf.json")).unwrap();
    site.until("the good one", |site| read(site).as_deref() == Some(LIST));
    site.until("no problem", |site| problem(site) == "[]");
    fs::write(site.path("cni-conf.json"), "[]").unwrap();
    site.until("the problem", |site| problem(site).contains("is not a list of CNI plugins"));
    assert_eq!(read(&site).as_deref(), Some(LIST));
}

/// flannel's init container, of old: busybox's `cp -f`; of late it renames, which takes anything's place. /run/flannel is not mounted
/// in it, so our link dangles there.
fn flannels_own_takes_its_place_and_gives_it_back(kind: Kind) {
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
        // Where it does not dangle, `cp` writes through it.
        assert_eq!(link(&site).is_symlink(), !dangling);
        assert_eq!(read(&site).as_deref(), Some(&*flannels));
        site.start();
        site.until("ours again", |site| read(site).as_deref() == Some(LIST));
        site.stop(Signal::SIGTERM);
    }
}

fn cleanup_takes_it_away(kind: Kind) {
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
