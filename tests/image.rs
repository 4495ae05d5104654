// SPDX-License-Identifier: Apache-2.0
//! `tools/image`: what is in the archive, and that the same files give the same bytes.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test says what it expected")]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

fn image(archive: &Path, root: &Path, umask: &str) -> Output {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/image");
    let mut sh = Command::new("sh");
    sh.args(["-c", "umask $0 && exec \"$@\"", umask])
        .arg(tool)
        .arg(archive)
        .args(["weft:1.2.3"])
        .arg(root)
        .arg("/weft");
    sh.output().unwrap()
}

/// The root of an image, with files made in this order.
fn root(home: &Path, names: &[&str], mode: u32, age: u64) -> PathBuf {
    let root = home.join("root");
    fs::create_dir_all(root.join("etc")).unwrap();
    for name in names {
        let path = root.join(name);
        fs::write(&path, name).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + age);
        File::open(&path).unwrap().set_modified(at).unwrap();
    }
    symlink("weft", root.join("flanneld")).unwrap();
    root
}

fn tar(args: &[&str], archive: &Path) -> String {
    let out = Command::new("tar").args(args).env("LC_ALL", "C").env("TZ", "UTC").arg(archive).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn the_same_files_give_the_same_bytes() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let a = root(one.path(), &["weft", "weft-cni", "etc/a"], 0o755, 0);
    let b = root(two.path(), &["etc/a", "weft-cni", "weft"], 0o775, 77);
    let (first, second) = (one.path().join("a.tar"), two.path().join("b.tar"));
    for (archive, root, umask) in [(&first, &a, "022"), (&second, &b, "077")] {
        let out = image(archive, root, umask);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    assert_eq!(fs::read(first).unwrap(), fs::read(second).unwrap());
}

#[test]
fn the_archive_is_what_container_runtimes_import() {
    let home = tempfile::tempdir().unwrap();
    let root = root(home.path(), &["weft", "weft-cni"], 0o755, 0);
    let archive = home.path().join("a.tar");
    assert!(image(&archive, &root, "022").status.success());
    let read =
        |name: &str| -> Value { serde_json::from_str(&tar(&["--to-stdout", "-x", name, "-f"], &archive)).unwrap() };
    let manifest = read("manifest.json");
    assert_eq!(manifest[0]["RepoTags"], json!(["weft:1.2.3"]));
    let config = read(manifest[0]["Config"].as_str().unwrap());
    assert_eq!((&config["os"], &config["config"]["Entrypoint"]), (&json!("linux"), &json!(["/weft"])));
    let layer = manifest[0]["Layers"][0].as_str().unwrap();
    tar(&["-C", home.path().to_str().unwrap(), "-x", layer, "-f"], &archive);
    let layer = home.path().join(layer);
    let sum = Command::new("sha256sum").arg(&layer).output().unwrap();
    let sum = String::from_utf8(sum.stdout).unwrap();
    assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{}", sum.split(' ').next().unwrap()));
    let listed = tar(&["--numeric-owner", "-tvf"], &layer);
    let lines: Vec<String> = listed.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let wanted = [
        "drwxr-xr-x 0/0 0 1970-01-01 00:00 ./",
        "drwxr-xr-x 0/0 0 1970-01-01 00:00 etc/",
        "lrwxr-xr-x 0/0 0 1970-01-01 00:00 flanneld -> weft",
        "-rwxr-xr-x 0/0 4 1970-01-01 00:00 weft",
        "-rwxr-xr-x 0/0 8 1970-01-01 00:00 weft-cni",
    ];
    assert_eq!(lines, wanted);
}

#[test]
fn mistakes_are_named_and_leave_no_archive() {
    let home = tempfile::tempdir().unwrap();
    let archive = home.path().join("a.tar");
    let out = image(&archive, home.path(), "022");
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("has no /weft"));
    assert!(!archive.exists());
}
