// SPDX-License-Identifier: Apache-2.0
//! The Debian package: the same input gives the same bytes, lintian has no complaint, and the package is installed, upgraded under traffic,
//! removed and purged in a Debian with systemd, which runs in a container. There, the commands of docs/install.md work as they stand, and
//! systemd keeps the device of udp over restarts. Needs root, and what `make test-deb` prepares.
//!
//! `WEFT_BIN` and `WEFT_CNI` name other binaries than those of this build, such as static ones.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test says what it expected")]
#![allow(clippy::disallowed_methods, reason = "a test is told its binaries by the environment")]

#[path = "common/exe.rs"]
mod exe;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// The checks of tests/deb/scenario.sh that must have been made, beside others.
const CHECKS: [&str; 8] = [
    "the plugin is weft's, beside older plugins",
    "the first installation starts nothing",
    "the pod of the other node answers",
    "no packet is lost by the upgrade",
    "an upgrade while the store is away does not wait",
    "pods keep their network",
    "purge keeps the directory store",
    "purge leaves nothing",
];
/// Seconds for the whole container. A busy machine needs about one minute.
const LIMIT: &str = "900";
/// The time of the files in the packages, so that the tests do not depend on the clone.
const EPOCH: &str = "1700000000";

fn tree() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn ok(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error} (make test-deb)"));
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{text}", output.status);
    output
}

/// Returns a copy of a program without its symbols, as a release has it.
fn stripped(program: &Path, dir: &Path) -> PathBuf {
    let copy = dir.join(program.file_name().unwrap());
    ok(Command::new("strip").arg("-o").arg(&copy).arg(program));
    copy
}

/// Writes a package with the programs of this build.
fn package(dir: &Path, name: &str, revision: &str) -> PathBuf {
    let package = dir.join(name);
    let weft = exe::weft_exe();
    let cni = std::env::var_os("WEFT_CNI").map_or_else(|| weft.with_file_name("weft-cni"), PathBuf::from);
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("manual");
    let mut tool = Command::new(tree().join("tools/deb"));
    tool.arg(&package).arg("amd64").arg(stripped(&weft, dir)).arg(stripped(&cni, dir)).arg(target);
    ok(tool.env("SOURCE_DATE_EPOCH", EPOCH).env("DEB_REVISION", revision).env("DEB_COMPRESSION", "gzip"));
    package
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = fs::read(package(one.path(), "a.deb", "1")).unwrap();
    assert!(first == fs::read(package(two.path(), "b.deb", "1")).unwrap(), "the packages differ");
}

#[test]
fn lintian_has_no_complaint() {
    let dir = tempfile::tempdir().unwrap();
    let package = package(dir.path(), "weft.deb", "1");
    // A build for tests is linked with the C library of this machine, and the package is made for static programs.
    let dynamic = "missing-dependency-on-libc,undeclared-elf-prerequisites,library-not-linked-against-libc";
    let mut lintian = Command::new("lintian");
    lintian.args(["--allow-root", "--fail-on", "error,warning", "--suppress-tags", dynamic]).arg(package);
    ok(&mut lintian);
}

/// A Debian with systemd, which is made once and never changed. Two tests want it at the same time.
static DEBIAN: LazyLock<PathBuf> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("debian-bookworm");
    if !root.is_dir() {
        let aside = tempfile::Builder::new().prefix("debian-").tempdir_in(root.parent().unwrap()).unwrap();
        let packages = "--include=systemd,systemd-sysv,dbus,iproute2,iputils-ping";
        ok(Command::new("debootstrap").args(["--variant=minbase", packages, "bookworm"]).arg(aside.path()));
        // Renamed, so that a Debian that was broken off is never used.
        fs::rename(aside.keep(), &root).unwrap();
    }
    root
});

/// Boots a Debian with systemd, in which this script of tests/deb runs with these files, and returns what it wrote.
fn boot(script: &str, packages: &Path, more: &[String]) -> String {
    let out = tempfile::tempdir().unwrap();
    let bind = |from: &Path, to: &str| format!("--bind-ro={}:{to}", from.display());
    let scenario = tree().join("tests/deb");
    let mut container = Command::new("timeout");
    container
        .args([
            "--kill-after=10",
            LIMIT,
            "systemd-nspawn",
            "--quiet",
            "--register=no",
            "--keep-unit",
            "--private-network",
        ])
        .args(["--volatile=overlay", "--console=pipe", "--capability=CAP_NET_ADMIN"])
        .arg(format!("--machine=weft-deb-{}-{}", std::process::id(), script.trim_end_matches(".sh")))
        .arg(format!("--directory={}", DEBIAN.display()))
        .args([bind(packages, "/packages"), bind(&scenario.join(script), "/scenario.sh")])
        .arg(bind(&scenario.join("lib.sh"), "/scenario-lib.sh"))
        .arg(bind(&scenario.join("scenario.service"), "/run/systemd/system/scenario.service"))
        .arg(format!("--bind={}:/out", out.path().display()))
        .args(more)
        .args(["--boot", "--", "--unit=scenario.service"]);
    let output = container.output().expect("run systemd-nspawn (make test-deb)");
    let console = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let log =
        fs::read_to_string(out.path().join("log")).unwrap_or_else(|error| panic!("no result: {error}\n{console}"));
    assert_eq!(log.lines().last(), Some("END"), "{log}");
    log
}

#[test]
fn install_upgrade_under_traffic_remove_and_purge() {
    let packages = tempfile::tempdir().unwrap();
    package(packages.path(), "old.deb", "1");
    package(packages.path(), "new.deb", "2");
    let log = boot("scenario.sh", packages.path(), &[]);
    for check in CHECKS {
        assert!(log.contains(&format!("PASS {check}\n")), "'{check}' was never checked:\n{log}");
    }
}

#[test]
fn systemd_keeps_the_device_of_udp_over_restarts() {
    let packages = tempfile::tempdir().unwrap();
    package(packages.path(), "new.deb", "2");
    let log = boot("udp.sh", packages.path(), &["--bind=/dev/net/tun".to_owned()]);
    for check in ["no packet is lost by restarts", "the device is the same one", "it is kept again"] {
        assert!(log.contains(&format!("PASS {check}\n")), "'{check}' was never checked:\n{log}");
    }
}

/// Returns the commands of a section of docs/install.md.
fn commands(section: &str) -> Vec<String> {
    let page = fs::read_to_string(tree().join("docs/install.md")).unwrap();
    let (_, section) = page.split_once(&format!("\n## {section}\n")).expect("the section is there");
    let lines = section.lines().take_while(|line| !line.starts_with("## "));
    lines.filter_map(|line| line.strip_prefix("    ")).map(str::to_owned).collect()
}

/// The page is pasted as it stands, but for what builds the programs in this tree.
#[test]
fn the_commands_of_install_md_install_a_release() {
    let dir = tempfile::tempdir().unwrap();
    let version = env!("CARGO_PKG_VERSION");
    package(dir.path(), &format!("weft_{version}-1_amd64.deb"), "1");
    fs::rename(
        dir.path().join(exe::weft_exe().file_name().unwrap()),
        dir.path().join(format!("weft-{version}-linux-amd64")),
    )
    .unwrap();
    let transform = format!("--transform=s,^,weft-{version}/,");
    let archive = dir.path().join(format!("weft-{version}-deploy.tar.gz"));
    ok(Command::new("tar")
        .current_dir(tree())
        .args(["--create", "--gzip", &transform, "--file"])
        .arg(archive)
        .arg("deploy"));
    ok(Command::new("sh").current_dir(dir.path()).args(["-c", "sha256sum -- weft* >SHA256SUMS"]));
    for (file, section) in [("debian.sh", "Debian, with etcd"), ("linux.sh", "Any Linux, with systemd")] {
        let lines: Vec<String> = commands(section).into_iter().filter(|line| !line.contains(" target/")).collect();
        assert!(lines.len() >= 4, "{section}: {lines:?}");
        fs::write(dir.path().join(file), lines.join("\n") + "\n").unwrap();
    }
    let etcd = ["etcd", "etcdctl"].map(|name| format!("--bind-ro=/usr/bin/{name}:/usr/local/bin/{name}"));
    let log = boot("paste.sh", dir.path(), &etcd);
    for check in ["the commands for Debian", "the commands for any Linux", "the node has its lease again"] {
        assert!(log.contains(&format!("PASS {check}\n")), "'{check}' was never checked:\n{log}");
    }
}
