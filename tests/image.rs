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

/// Runs one of the tools. Returns what went wrong.
fn tool(name: &str, args: &[&str]) -> Result<(), String> {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools").join(name);
    let out = Command::new(tool).args(args).output().unwrap();
    if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
}

#[test]
fn the_image_has_the_programs_of_flannels_images() {
    let home = tempfile::tempdir().unwrap();
    for name in ["agent", "plugin"] {
        fs::write(home.path().join(name), name).unwrap();
    }
    let path = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let (root, agent, plugin) = (path("root"), path("agent"), path("plugin"));
    // A root of an earlier version must not show through.
    fs::create_dir(&root).unwrap();
    fs::write(path("root/old"), "").unwrap();
    tool("image-root", &[&root, &agent, &plugin]).unwrap();
    assert!(!Path::new(&path("root/old")).exists());
    for (name, program) in [
        ("weft", "agent"),
        ("flanneld", "agent"),
        ("opt/bin/flanneld", "agent"),
        ("opt/bin/install-conf", "agent"),
        ("opt/bin/mk-docker-opts.sh", "agent"),
        ("bin/cp", "agent"),
        ("weft-cni", "plugin"),
        ("flannel", "plugin"),
    ] {
        let file = Path::new(&root).join(name);
        assert_eq!(fs::read_to_string(&file).unwrap(), program, "{name}");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o755, "{name}");
        assert!(file.canonicalize().unwrap().starts_with(&root), "{name} leads out of the image");
    }
}

#[test]
fn an_index_has_an_image_for_each_processor() {
    let home = tempfile::tempdir().unwrap();
    let root = root(home.path(), &["weft"], 0o755, 0);
    let path = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let (first, second) = (path("a.tar"), path("b.tar"));
    let (amd, arm) = (format!("amd64={}", root.display()), format!("arm/v7={}", root.display()));
    for archive in [&first, &second] {
        tool("image-index", &[archive, "weft:1.2.3", "/weft", &amd, &arm]).unwrap();
    }
    assert_eq!(fs::read(&first).unwrap(), fs::read(&second).unwrap());
    let read = |name: &str| tar(&["--to-stdout", "-x", name, "-f"], Path::new(&first));
    // Returns what a reference leads to, after its digest and its size were checked.
    let blob = |reference: &Value| -> Vec<u8> {
        let digest = reference["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
        tar(&["-C", &path(""), "-x", &format!("blobs/sha256/{digest}"), "-f"], Path::new(&first));
        let file = home.path().join("blobs/sha256").join(&digest);
        let sum = Command::new("sha256sum").arg(&file).output().unwrap();
        assert!(String::from_utf8(sum.stdout).unwrap().starts_with(&digest));
        let bytes = fs::read(file).unwrap();
        assert_eq!(reference["size"], bytes.len());
        bytes
    };
    let object = |reference: &Value| -> Value { serde_json::from_slice(&blob(reference)).unwrap() };
    assert_eq!(read("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#);
    let top: Value = serde_json::from_str(&read("index.json")).unwrap();
    assert_eq!(top["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"], "1.2.3");
    assert_eq!(name_in_containerd(&first), "docker.io/library/weft:1.2.3");
    let index = object(&top["manifests"][0]);
    let platforms: Vec<&Value> = index["manifests"].as_array().unwrap().iter().map(|one| &one["platform"]).collect();
    let wanted = [
        json!({"architecture": "amd64", "os": "linux"}),
        json!({"architecture": "arm", "variant": "v7", "os": "linux"}),
    ];
    assert_eq!(platforms, wanted.iter().collect::<Vec<_>>());
    for manifest in index["manifests"].as_array().unwrap() {
        let (platform, manifest) = (&manifest["platform"], object(manifest));
        let config = object(&manifest["config"]);
        assert_eq!(config["architecture"], platform["architecture"]);
        assert_eq!(config["config"]["Entrypoint"], json!(["/weft"]));
        assert!(blob(&manifest["layers"][0]).starts_with(&[0x1f, 0x8b]), "the layer is not compressed");
    }
    let refusal = tool("image-index", &[&path("c.tar"), "weft:1", "/none", &amd]).unwrap_err();
    assert!(refusal.contains("has no /none") && !Path::new(&path("c.tar")).exists(), "{refusal}");
}

/// Returns the name that containerd gives to the image of an index when it imports the archive.
fn name_in_containerd(archive: &str) -> String {
    let index = tar(&["--to-stdout", "-x", "index.json", "-f"], Path::new(archive));
    let index: Value = serde_json::from_str(&index).unwrap();
    index["manifests"][0]["annotations"]["io.containerd.image.name"].as_str().unwrap().to_owned()
}

/// containerd takes the name of an index as it is written, while the kubelet asks for the complete name. An image with a short name would be
/// imported, and no pod would find it.
#[test]
fn the_name_of_an_index_is_the_one_that_the_kubelet_asks_for() {
    let home = tempfile::tempdir().unwrap();
    let root = format!("amd64={}", root(home.path(), &["weft"], 0o755, 0).display());
    let archive = home.path().join("a.tar").to_str().unwrap().to_owned();
    for (name, complete) in [
        ("weft:1", "docker.io/library/weft:1"),
        ("owner/weft:1", "docker.io/owner/weft:1"),
        ("owner/net.d/weft:1", "docker.io/owner/net.d/weft:1"),
        ("registry.test/owner/weft:1", "registry.test/owner/weft:1"),
        ("registry:5000/weft:1", "registry:5000/weft:1"),
        ("localhost/weft:1", "localhost/weft:1"),
    ] {
        tool("image-index", &[&archive, name, "/weft", &root]).unwrap();
        assert_eq!(name_in_containerd(&archive), complete);
    }
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
