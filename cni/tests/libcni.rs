// SPDX-License-Identifier: Apache-2.0
//! Calls the plugins through libcni, as container runtimes do: all verbs and all versions. The delegates are current
//! releases of the reference plugins, because Debian's do not support GC and STATUS. Go builds them and the calling
//! program from `libcni/`, whose go.sum pins the versions.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::site::{Site, V4_TEXT, env_text, on_a_node};

#[allow(dead_code, reason = "the other tests use more of it")]
#[path = "plugin/site.rs"]
mod site;

/// Directory of the programs that Go built.
static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libcni");
    let plugins = ["main/bridge", "main/ptp", "ipam/host-local", "meta/portmap"];
    let go = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/go")).output().unwrap();
    assert!(go.status.success(), "{}", String::from_utf8_lossy(&go.stderr));
    let mut build = Command::new(String::from_utf8(go.stdout).unwrap().trim_end());
    build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/libcni"));
    // The build uses exactly the pinned versions: it must neither fetch a newer toolchain nor change go.mod or go.sum.
    build.env("GOTOOLCHAIN", "local").env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=readonly -buildvcs=false");
    build.args(["build", "-o"]).arg(format!("{}/", dir.display())).arg(".");
    build.args(plugins.map(|name| format!("github.com/containernetworking/plugins/plugins/{name}")));
    let out = build.output().unwrap();
    assert!(out.status.success(), "go build: {}", String::from_utf8_lossy(&out.stderr));
    dir
});

/// Writes the list of plugins from deploy/cni, with this test's paths, version and delegate.
fn list(site: &Site, version: &str, delegate: &str) -> PathBuf {
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/cni/10-flannel.conflist");
    let mut list: Value = serde_json::from_slice(&fs::read(shipped).unwrap()).unwrap();
    assert_eq!(
        list["cniVersion"], "1.0.0",
        "1.0.0 is the newest version that Debian's plugins and containerd 1.6 support"
    );
    list["cniVersion"] = json!(version);
    let plugin = &mut list["plugins"][0];
    plugin["delegate"]["type"] = json!(delegate);
    for (key, value) in site.conf(json!({})).as_object().unwrap() {
        if !["name", "cniVersion"].contains(&key.as_str()) {
            plugin[key] = value.clone();
        }
    }
    let file = site.path("list.json");
    fs::write(&file, list.to_string()).unwrap();
    file
}

/// Calls libcni once and returns its answer.
fn call(site: &Site, verb: &str, list: &Path, more: &[&str]) -> Value {
    let mut command = Command::new(BUILT.join("libcni"));
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("CNI_PATH", format!("{}:{}", site.path("bin").display(), BUILT.display()));
    command.arg(verb).arg(list).arg(site.path("cache")).args(more);
    let out = command.output().unwrap();
    serde_json::from_slice(&out.stdout).unwrap_or_else(|error| panic!("{verb}: {error}: {out:?}"))
}

#[track_caller]
fn assert_success(answer: &Value) {
    assert!(answer["error"].is_null(), "{answer}");
}

const ALL: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

#[test]
fn all_verbs_work_in_all_versions() {
    on_a_node(|site| {
        let dual = env_text("10.5.1", "fd05:0:0:1", 1450);
        for (number, version) in ALL.iter().enumerate() {
            let delegates: &[&str] = if *version >= "1.0.0" { &["bridge", "ptp", "weft-veth"] } else { &["bridge"] };
            for delegate in delegates {
                let ptp = *delegate == "ptp";
                site.subnet_env(if ptp { V4_TEXT } else { &dual });
                let wanted = if ptp { vec!["10.5.1.2"] } else { vec!["10.5.1.2", "fd05:0:0:1::2"] };
                let list = list(&site, version, delegate);
                let name = format!("p{number}-{delegate}");
                let netns = site.pod(&name);
                let pod = [name.as_str(), netns.as_str(), "eth0"];
                assert_eq!(call(&site, "VERSION", &list, &[])["known"], json!(ALL));
                assert_success(&call(&site, "VALIDATE", &list, &[]));
                assert_success(&call(&site, "STATUS", &list, &[]));
                let added = call(&site, "ADD", &list, &pod);
                assert_success(&added);
                assert_eq!(added["result"]["cniVersion"], *version, "{added}");
                assert_eq!(site.addresses(), wanted, "{added}");
                let checked = call(&site, "CHECK", &list, &pod);
                if *version >= "0.4.0" {
                    assert_success(&checked);
                } else {
                    assert!(checked["error"].as_str().unwrap().contains("does not support the CHECK"), "{checked}");
                }
                assert_success(&call(&site, "GC", &list, &[&format!("{name}/eth0")]));
                assert_eq!(site.files("records").len(), 1, "{version} {delegate}: GC removed a valid attachment");
                for _ in 0..2 {
                    assert_success(&call(&site, "DEL", &list, &pod));
                }
                let _ = fs::remove_file(site.path("networks/cbr0/last_reserved_ip.0"));
                let _ = fs::remove_file(site.path("networks/cbr0/last_reserved_ip.1"));
                site.nothing_left();
            }
        }
    });
}

#[test]
fn gc_and_status_of_version_1_1_0_reach_the_plugin() {
    on_a_node(|site| {
        let list = list(&site, "1.1.0", "bridge");
        let netns: Vec<_> = ["a", "b", "c"].map(|name| site.pod(name)).into();
        for (name, netns) in ["a", "b", "c"].iter().zip(&netns) {
            assert_success(&call(&site, "ADD", &list, &[name, netns, "eth0"]));
        }
        // The runtime has lost its cached result of b. libcni calls no DEL for it, so only GC can remove it.
        for file in fs::read_dir(site.path("cache/results")).unwrap() {
            let path = file.unwrap().path();
            if path.to_str().unwrap().contains("-b-") {
                fs::remove_file(path).unwrap();
            }
        }
        assert_success(&call(&site, "GC", &list, &["a/eth0"]));
        assert_eq!(site.files("records"), ["a"]);
        assert_eq!(site.addresses(), ["10.5.1.2", "fd05:0:0:1::2"]);
        assert_success(&call(&site, "GC", &list, &[]));
        site.nothing_left();
        fs::remove_file(site.path("run/subnet.env")).unwrap();
        let answer = call(&site, "STATUS", &list, &[]);
        assert_eq!(answer["code"], 50, "{answer}");
    });
}

#[test]
fn error_codes_reach_the_runtime() {
    on_a_node(|site| {
        let list = list(&site, "1.0.0", "nosuch");
        let netns = site.pod("p1");
        let answer = call(&site, "ADD", &list, &["p1", &netns, "eth0"]);
        assert!(answer["code"] == 999 && answer["error"].as_str().unwrap().contains("nosuch"), "{answer}");
        let answer = call(&site, "ADD", &list, &["p1", "/run/netns/none", "eth0"]);
        assert_eq!(answer["code"], 8, "{answer}");
        let answer = call(&site, "ADD", &list, &["p1", "/proc/self/ns/net", "eth0"]);
        assert_eq!(answer["code"], 8, "{answer}");
    });
}
