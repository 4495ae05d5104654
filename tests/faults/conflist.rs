// SPDX-License-Identifier: Apache-2.0
//! The CNI configuration: when it is published, what happens to it at a boot, and when another program replaces it.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::site::{Kind, Site, each, ip};

const LIST: &str = r#"{"name":"cbr0","cniVersion":"1.0.0","plugins":[{"type":"flannel"}]}"#;

each! {
    the_configuration_is_published_when_the_node_is_ready: Vxlan HostGw;
    it_is_withdrawn_from_a_boot_until_the_agent_is_ready: Vxlan;
    a_bad_configuration_is_named_and_the_good_one_stays: Vxlan;
    flannels_file_replaces_it_and_weft_restores_it: Vxlan;
    a_chained_plugin_stays: Vxlan;
    a_link_of_an_earlier_version_becomes_a_file: Vxlan;
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

fn file(site: &Site) -> PathBuf {
    site.path("net.d/10-flannel.conflist")
}

/// Returns what a runtime reads.
fn read(site: &Site) -> Option<String> {
    fs::read_to_string(file(site)).ok()
}

/// Returns the inode. Programs in containers see only the directory, so the file must be a regular one.
fn inode(site: &Site) -> u64 {
    let about = fs::symlink_metadata(file(site)).unwrap();
    assert!(about.is_file());
    about.ino()
}

fn the_configuration_is_published_when_the_node_is_ready(kind: Kind) {
    let mut site = site(kind);
    // Without an address of the uplink, pods cannot be reached.
    ip("addr flush dev up0");
    site.start();
    site.until("the reason", |site| site.log().contains("waiting"));
    assert!(read(&site).is_none(), "{}", site.log());
    ip("addr add 10.0.0.1/24 dev up0");
    site.healed("the address came");
    site.until("the configuration", |site| read(site).as_deref() == Some(LIST));
    inode(&site);
    let log = site.log();
    let at = |text: &str| log.find(text).unwrap_or_else(|| panic!("{text}: {log}"));
    assert!(at("subnet.env written") < at("CNI configuration published"));
}

/// After a boot, the node has no address at first, so the agent is not ready.
fn it_is_withdrawn_from_a_boot_until_the_agent_is_ready(kind: Kind) {
    let mut site = site(kind);
    site.start();
    site.until("the configuration", |site| read(site).is_some());
    let before = inode(&site);
    site.stop(Signal::SIGTERM);
    site.start();
    site.healed("a restart");
    assert_eq!(inode(&site), before, "the node stays ready during a restart");
    site.stop(Signal::SIGKILL);
    fs::remove_dir_all(site.path("run")).unwrap();
    ip("addr flush dev up0");
    site.start();
    site.until("not ready, sees the runtime", |site| read(site).is_none());
    site.until("the reason", |site| site.log().contains("waiting"));
    assert!(read(&site).is_none());
    ip("addr add 10.0.0.1/24 dev up0");
    site.until("the configuration", |site| read(site).as_deref() == Some(LIST));
    site.healed("the boot");
}

/// istio-cni, linkerd-cni and others replace the file by one that calls them, too, and do so again when the file lacks them.
fn a_chained_plugin_stays(kind: Kind) {
    let mut site = site(kind);
    site.start();
    site.until("the configuration", |site| read(site).is_some());
    let chained = LIST.replace("}]", r#"},{"type":"istio-cni"}]"#);
    fs::write(site.path("net.d/.new"), &chained).unwrap();
    fs::rename(site.path("net.d/.new"), file(&site)).unwrap();
    let said = |site: &Site, of: &str| site.status().map(|status| status[of].to_string()).unwrap_or_default();
    site.until("the remark", |site| said(site, "remarks").contains("added istio-cni"));
    site.until("no problem", |site| said(site, "problems") == "[]");
    // It stays after a restart and a boot, too.
    for boot in [false, true] {
        site.stop(Signal::SIGKILL);
        if boot {
            fs::remove_dir_all(site.path("run")).unwrap();
        }
        site.start();
        site.until("the remark", |site| said(site, "remarks").contains("added istio-cni"));
        assert_eq!(read(&site).as_deref(), Some(&*chained));
    }
    fs::write(site.path("aside"), LIST.replace("flannel\"", "flannel\",\"delegate\":{}")).unwrap();
    fs::rename(site.path("aside"), site.path("cni-conf.json")).unwrap();
    site.until("what to do", |site| said(site, "remarks").contains("is different by now: to publish it, run `rm "));
    assert_eq!(read(&site).as_deref(), Some(&*chained));
    site.stop(Signal::SIGTERM);
    assert!(clean(&site).contains("and the CNI configuration"));
    assert!(read(&site).is_none());
}

/// Earlier versions made a link to the file beside subnet.env.
fn a_link_of_an_earlier_version_becomes_a_file(kind: Kind) {
    let mut site = site(kind);
    let target = site.path("run/10-flannel.conflist");
    for has_target in [true, false] {
        fs::create_dir_all(site.path("run")).unwrap();
        fs::create_dir_all(site.path("net.d")).unwrap();
        if has_target {
            fs::write(&target, LIST).unwrap();
        }
        symlink(&target, file(&site)).unwrap();
        site.start();
        site.until("a file", |site| file(site).symlink_metadata().is_ok_and(|about| about.is_file()));
        assert_eq!(read(&site).as_deref(), Some(LIST));
        site.stop(Signal::SIGTERM);
        clean(&site);
    }
}

fn a_bad_configuration_is_named_and_the_good_one_stays(kind: Kind) {
    let mut site = site(kind);
    fs::write(site.path("cni-conf.json"), "{").unwrap();
    site.start();
    site.healed("the start");
    let problem = |site: &Site| site.status().map(|status| status["problems"].to_string()).unwrap_or_default();
    site.until("the problem", |site| problem(site).contains("cni-conf.json is not a list of CNI plugins"));
    assert!(read(&site).is_none());
    // kubelet changes a mounted file in this way. The agent must notice it without a restart, and before the audit.
    fs::write(site.path("aside"), LIST).unwrap();
    fs::rename(site.path("aside"), site.path("cni-conf.json")).unwrap();
    site.until("the good one", |site| read(site).as_deref() == Some(LIST));
    site.until("no problem", |site| problem(site) == "[]");
    fs::write(site.path("cni-conf.json"), "[]").unwrap();
    site.until("the problem", |site| problem(site).contains("is not a list of CNI plugins"));
    assert_eq!(read(&site).as_deref(), Some(LIST));
}

/// The init container of earlier versions of flannel calls `cp -f` of busybox. (Later ones rename a file, which replaces anything.)
fn flannels_file_replaces_it_and_weft_restores_it(kind: Kind) {
    let mut site = site(kind);
    site.start();
    site.until("the configuration", |site| read(site).is_some());
    site.stop(Signal::SIGTERM);
    let flannels = LIST.replace("1.0.0", "0.3.1");
    fs::write(site.path("flannels"), &flannels).unwrap();
    let done = Command::new("busybox").args(["cp", "-f"]).arg(site.path("flannels")).arg(file(&site)).status();
    assert!(done.expect("this test needs busybox (Debian: busybox-static)").success());
    assert_eq!(read(&site).as_deref(), Some(&*flannels));
    site.start();
    site.until("ours again", |site| read(site).as_deref() == Some(LIST));
}

/// Runs `weft cleanup`, and returns what it says.
fn clean(site: &Site) -> String {
    let mut weft = site.weft("cleanup");
    weft.arg(format!("--subnet-file={}", site.env_file().display()));
    weft.arg(format!("--cni-conf-dir={}", site.path("net.d").display()));
    let out = weft.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn cleanup_removes_the_configuration(kind: Kind) {
    let mut site = site(kind);
    site.start();
    site.until("the configuration", |site| read(site).is_some());
    site.stop(Signal::SIGTERM);
    assert_eq!(read(&site).as_deref(), Some(LIST), "the end of the agent changes nothing");
    assert!(clean(&site).contains("and the CNI configuration"));
    assert!(read(&site).is_none() && !site.path("run/10-flannel.conflist").exists());
    fs::write(file(&site), LIST).unwrap();
    assert!(!clean(&site).contains("CNI configuration"), "somebody else's stays");
    assert_eq!(read(&site).as_deref(), Some(LIST));
}
