// SPDX-License-Identifier: Apache-2.0
//! The files of deploy/systemd, judged by systemd itself. Needs `systemd-analyze` (Debian package `systemd`) and fails without it.
//! What deploy/kube and deploy/helm say twice; a server judges them in `subnet/tests/kube/manifests.rs`.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test says what it expected")]

#[path = "deploy/monitoring.rs"]
mod monitoring;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Highest exposure level allowed, times ten: 4.0.
const THRESHOLD: &str = "40";

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/systemd").join(name)
}

fn analyze(args: &[&str], unit: &Path) -> Output {
    Command::new("systemd-analyze")
        .args(args)
        .arg(unit)
        .output()
        .unwrap_or_else(|e| panic!("cannot run systemd-analyze (install the package systemd): {e}"))
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Lines that are neither blank nor comment.
fn settings(name: &str) -> Vec<String> {
    let text = fs::read_to_string(file(name)).expect("read deploy file");
    text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')).map(str::to_owned).collect()
}

#[test]
fn unit_is_hardened() {
    let output =
        analyze(&["security", "--offline=true", "--threshold", THRESHOLD, "--no-pager"], &file("weft.service"));
    assert!(output.status.success(), "exposure above {THRESHOLD}/10:\n{}", said(&output));
    assert!(said(&output).contains("Overall exposure level"), "no verdict in:\n{}", said(&output));
}

/// The installed path does not exist here, so the same unit is verified with the binary of this build in its place.
#[test]
fn unit_is_valid() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let text = fs::read_to_string(file("weft.service")).expect("read unit");
    assert!(text.contains("ExecStart=/usr/local/bin/weft agent"), "the unit starts something else");
    let unit = dir.path().join("weft.service");
    fs::write(&unit, text.replace("/usr/local/bin/weft", env!("CARGO_BIN_EXE_weft"))).expect("write unit");
    let output = analyze(&["verify", "--man=no"], &unit);
    let text = said(&output);
    assert!(output.status.success(), "systemd-analyze verify:\n{text}");
    assert!(!text.contains("weft.service:"), "systemd-analyze verify warns:\n{text}");
}

#[test]
fn unit_keeps_its_promises() {
    let unit = settings("weft.service");
    for line in [
        "Type=notify",
        "TimeoutStartSec=infinity",
        "WatchdogSec=60s",
        "Restart=always",
        "RuntimeDirectory=flannel",
        "RuntimeDirectoryPreserve=yes",
        "CapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW",
        "ReadWritePaths=-/run/xtables.lock",
        "RestrictAddressFamilies=AF_NETLINK AF_INET AF_INET6 AF_UNIX",
        "EnvironmentFile=-/etc/default/weft",
    ] {
        assert!(unit.iter().any(|l| l == line), "weft.service lacks {line}");
    }
    // Either would make the sysctls that the agent sets unwritable.
    for key in ["ProtectKernelTunables=", "ProcSubset="] {
        assert!(!unit.iter().any(|l| l.starts_with(key)), "weft.service sets {key}");
    }
}

/// The unit hides all devices. For the backend udp the drop-in shows one of them, and the unit stays valid and hardened with it.
#[test]
fn the_drop_in_for_udp_shows_one_device() {
    let device = "DeviceAllow=/dev/net/tun rw";
    let wanted = ["[Service]", "PrivateDevices=no", "DevicePolicy=closed", device, "FileDescriptorStoreMax=2"];
    assert_eq!(settings("weft-udp.conf"), wanted);
    assert!(settings("weft.service").iter().any(|line| line == "PrivateDevices=yes"), "the drop-in is not needed");
    let dir = tempfile::tempdir().expect("temporary directory");
    let text = fs::read_to_string(file("weft.service")).expect("read unit");
    let unit = dir.path().join("weft.service");
    fs::write(&unit, text.replace("/usr/local/bin/weft", env!("CARGO_BIN_EXE_weft"))).expect("write unit");
    let drop_in = dir.path().join("weft.service.d/udp.conf");
    fs::create_dir(drop_in.parent().expect("a directory")).expect("create directory");
    fs::copy(file("weft-udp.conf"), drop_in).expect("copy drop-in");
    for args in [&["verify", "--man=no"][..], &["security", "--offline=true", "--threshold", THRESHOLD, "--no-pager"]] {
        let output = analyze(args, &unit);
        assert!(output.status.success() && !said(&output).contains("udp.conf:"), "{args:?}:\n{}", said(&output));
    }
}

/// The commands of extension inherit the hardening of the unit: the drop-in sets the flag and loosens nothing by itself.
#[test]
fn the_drop_in_for_extension_sets_the_flag_alone() {
    assert_eq!(settings("weft-extension.conf"), ["[Service]", "Environment=FLANNELD_ALLOW_EXTENSION=true"]);
    // Whoever takes the mark away from an example must not get a setting that belongs to no section.
    let text = fs::read_to_string(file("weft-extension.conf")).expect("read drop-in");
    let before = text.split("[Service]").next().expect("a beginning");
    let example = |line: &str| line.starts_with('#') && line.contains('=') && !line.starts_with("# ");
    assert!(!before.lines().any(example) && text.lines().any(example), "{text}");
}

/// As shipped nothing is switched on: the defaults are those of the agent.
#[test]
fn environment_file_is_all_examples() {
    assert_eq!(settings("weft.env"), Vec::<String>::new());
    let text = fs::read_to_string(file("weft.env")).expect("read environment file");
    let examples: Vec<&str> =
        text.lines().filter_map(|l| l.strip_prefix('#')).filter(|l| !l.starts_with(' ')).collect();
    assert!(examples.len() > 5, "{examples:?}");
    for example in examples {
        let (name, value) = example.split_once('=').unwrap_or_else(|| panic!("no KEY=VALUE: {example}"));
        assert!(name.starts_with("FLANNELD_") || name == "WEFT_ARGS", "{name} is read by nobody");
        assert!(!value.is_empty(), "{name} has no example value");
    }
}

/// It may hold the password of the store: whoever reads that writes leases, and owns the routes of every node. systemd reads it
/// as root.
#[test]
fn environment_file_is_installed_for_root_alone() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).expect("read README.md");
    let lines: Vec<&str> = readme.lines().filter(|line| line.contains("/etc/default/weft")).collect();
    assert!(!lines.is_empty(), "README.md does not say how to install weft.env");
    for line in lines {
        assert!(line.trim().starts_with("install -D -m 0600 deploy/systemd/weft.env /etc/default/weft"), "{line}");
    }
}

#[test]
fn others_keep_their_hands_off_the_devices() {
    assert_eq!(settings("10-flannel.link"), ["[Match]", "OriginalName=flannel*", "[Link]", "MACAddressPolicy=none"]);
    assert_eq!(
        settings("weft-unmanaged.conf"),
        ["[keyfile]", "unmanaged-devices+=interface-name:flannel*;interface-name:cni0"]
    );
}

/// Files of deploy/ that name the image, and how often.
const NAMING: [(&str, &str, usize); 4] = [
    ("kube/weft.yml", "image: weft:VERSION", 2),
    ("helm/weft/values.yaml", "tag: \"VERSION\"", 1),
    ("helm/weft/Chart.yaml", "ersion: VERSION", 2),
    ("Dockerfile", "--tag weft:VERSION", 1),
];

#[test]
fn manifests_name_the_image_of_this_version() {
    for (name, line, times) in NAMING {
        let text = fs::read_to_string(file("..").join(name)).expect(name);
        let line = line.replace("VERSION", env!("CARGO_PKG_VERSION"));
        assert_eq!(text.matches(&line).count(), times, "{name}: {line}");
    }
}

/// A release has them for those who do not have this tree. They name the image where it was published, also in the archive of deploy/: people
/// who come from flannel apply the manifest in it.
#[test]
fn manifest_chart_and_archive_of_a_release_name_the_published_image() {
    let tool = |dir: &Path, image: &str| {
        let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/manifests");
        Command::new(tool).arg(dir).arg(image).output().expect("run tools/manifests")
    };
    let (one, two) = (tempfile::tempdir().expect("directory"), tempfile::tempdir().expect("directory"));
    for place in [&one, &two] {
        let output = tool(place.path(), "r.test:5000/net/weft");
        assert!(output.status.success(), "{}", said(&output));
    }
    let version = env!("CARGO_PKG_VERSION");
    let name = |end: &str| format!("weft-{version}-{end}");
    for end in ["kube.yml", "chart.tgz", "deploy.tar.gz"] {
        let read = |place: &Path| fs::read(place.join(name(end))).expect("the tool writes it");
        assert!(read(one.path()) == read(two.path()), "{end} differs from run to run");
    }
    let manifest = fs::read_to_string(one.path().join(name("kube.yml"))).expect("a manifest");
    assert_eq!(manifest.matches(&format!("image: r.test:5000/net/weft:{version}\n")).count(), 2);
    assert!(!manifest.contains("image: weft") && manifest.contains("\nkind: Namespace\n"));
    let packed = |end: &str, file: &str| {
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--gzip", "--to-stdout", "--file"]).arg(one.path().join(name(end)));
        said(&tar.arg(file).output().expect("run tar"))
    };
    let in_archive = |file: &str| packed("deploy.tar.gz", &format!("weft-{version}/deploy/{file}"));
    assert!(manifest.ends_with(&in_archive("kube/weft.yml")), "the archive has another manifest");
    let values = packed("chart.tgz", "weft/values.yaml");
    assert_eq!(values.matches("    repository: r.test:5000/net/weft\n").count(), 1, "{values}");
    assert_eq!(in_archive("helm/weft/values.yaml"), values);
    for wrong in ["weft:1", "r.test/weft:1", "r.test/", "a b", "a,b"] {
        assert!(said(&tool(one.path(), wrong)).contains("is no name of an image without a tag"), "{wrong}");
    }
}

/// Releases are made with this tool: it must find every file that repeats the version.
#[test]
fn a_new_version_is_written_everywhere() {
    let place = tempfile::tempdir().expect("temporary directory");
    let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
    let all = [
        "Cargo.toml",
        "Cargo.lock",
        "CHANGELOG.md",
        "deploy",
        "tests/kube/flannel.yml",
        "subnet/tests/kube/policy.rs",
        "docs/install.md",
        "docs/cni.md",
        "docs/testing.md",
        "tools/version",
    ];
    let mut copy = Command::new("cp");
    let copied = copy.current_dir(tree).args(["-r", "--parents"]).args(all).arg(place.path()).status();
    assert!(copied.expect("run cp").success());
    let set = |version: &str| {
        Command::new(place.path().join("tools/version")).arg(version).output().expect("run tools/version")
    };
    assert!(said(&set("98.7.6")).contains("CHANGELOG.md has no heading '## 98.7.6'"), "a release needs its changes");
    let log = place.path().join("CHANGELOG.md");
    fs::write(&log, format!("## 98.7.6\n\n{}", fs::read_to_string(&log).expect("read"))).expect("write");
    let output = set("98.7.6");
    assert!(output.status.success(), "{}", said(&output));
    fs::remove_file(log).expect("remove the log, which names all versions");
    let old = env!("CARGO_PKG_VERSION").replace('.', "\\.");
    let pattern = format!("weft[a-z-]*[-_:]{old}|(^version = \"|ersion: |tag: \"|tag=|tar:|checkout v|release-){old}");
    let found = Command::new("grep").args(["-rE", "--exclude=Cargo.lock", &pattern]).arg(place.path()).output();
    assert_eq!(said(&found.expect("run grep")), "", "the old version is still there");
    let install = fs::read_to_string(place.path().join("docs/install.md")).expect("read a page");
    assert!(install.contains("/weft:98.7.6\n") && !install.contains(env!("CARGO_PKG_VERSION")), "{install}");
    let lock = fs::read_to_string(place.path().join("Cargo.lock")).expect("read the lock");
    let ours = lock.split("[[package]]").filter(|one| one.contains("name = \"weft") && !one.contains("source ="));
    let versions: Vec<bool> = ours.map(|one| one.contains("version = \"98.7.6\"")).collect();
    assert!(versions.len() > 5 && versions.iter().all(|new| *new), "{versions:?}");
}

#[test]
fn the_agent_has_one_memory_limit() {
    for name in ["kube/weft.yml", "helm/weft/values.yaml"] {
        let text = fs::read_to_string(file("..").join(name)).expect(name);
        let limits: Vec<&str> = text.lines().skip_while(|line| line.trim() != "limits:").skip(1).take(1).collect();
        assert_eq!(limits.iter().map(|line| line.trim()).collect::<Vec<_>>(), ["memory: 128Mi"], "{name}");
    }
}

#[test]
fn there_is_one_cni_configuration() {
    let read = |name: &str| fs::read_to_string(file("..").join(name)).expect(name);
    let list = read("cni/10-flannel.conflist");
    let indented: String = list.lines().map(|line| format!("    {line}\n")).collect();
    for name in ["kube/config.yml", "helm/weft/values.yaml"] {
        assert!(read(name).contains(&indented), "{name} has another one than deploy/cni");
    }
}

/// `weft lab --pods cni` looks for the plugin beside the agent that runs it.
#[test]
fn make_demo_builds_agent_and_plugin_before_the_lab() {
    let output = Command::new("make").current_dir(env!("CARGO_MANIFEST_DIR")).args(["-n", "demo"]).output();
    let recipe = said(&output.expect("run make"));
    let at = |text: &str| recipe.find(text).unwrap_or_else(|| panic!("{text:?} is not in the recipe:\n{recipe}"));
    let lab = at("release/weft lab");
    assert!(at("--release --locked --bin weft\n") < lab && at("-p weft-cni --bin weft-cni\n") < lab, "{recipe}");
}
