// SPDX-License-Identifier: Apache-2.0
//! Makes a test machine from Debian's cloud kernel, which is unpacked and never installed, and an initramfs with programs of this machine.

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The package that depends on the current kernel package, whose name changes with every ABI.
const META: &str = "linux-image-cloud-amd64";
/// The modules that are loaded, in this order, each after those on which it depends.
const MODULES: [&str; 12] = [
    "dummy",
    "veth",
    "bridge",
    "ipip",
    "vxlan",
    "wireguard",
    "tun",
    "nf_tables",
    "nft_chain_nat",
    "nft_masq",
    "sch_fq",
    "vmxnet3",
];

/// The scenarios that get flanneld and etcd.
const WITH_FLANNEL: [&str; 3] = ["wireguard-flannel.sh", "wireguard-change-flannel.sh", "wireguard-modes-flannel.sh"];
/// The scenario that gets etcd, and flanneld if `FLANNELD` names it.
const MANY_PEERS: &str = "wireguard-many.sh";

/// The scenario that gets the program nft, for a router with address translation.
const BEHIND_NAT: &str = "wireguard-nat.sh";

/// Returns true for a scenario that gets etcd, and needs memory for it.
pub fn has_etcd(scenario: &str) -> bool {
    scenario == MANY_PEERS || WITH_FLANNEL.contains(&scenario)
}

/// Returns true for a scenario that gets flanneld.
fn has_flanneld(scenario: &str) -> bool {
    let is_named = || std::env::var_os("FLANNELD").is_some_and(|path| !path.is_empty());
    WITH_FLANNEL.contains(&scenario) || (scenario == MANY_PEERS && is_named())
}

/// A kernel and its modules.
pub struct Kernel {
    /// The bootable image.
    pub image: PathBuf,
    modules: PathBuf,
}

/// Returns the standard output of a program. It panics with the program's errors if that fails.
fn tool(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed: {said}");
    output.stdout
}

fn find(dir: &Path, wanted: &dyn Fn(&str) -> bool) -> Option<PathBuf> {
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            if let Some(found) = find(&path, wanted) {
                return Some(found);
            }
        } else if wanted(&entry.file_name().to_string_lossy()) {
            return Some(path);
        }
    }
    None
}

/// Returns the kernel. It is downloaded once into `target/vm`, so that later runs need neither a network nor package lists.
pub fn kernel() -> &'static Kernel {
    static KERNEL: OnceLock<Kernel> = OnceLock::new();
    KERNEL.get_or_init(|| {
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("vm");
        let root = kept(&cache).unwrap_or_else(|| fetch(&cache));
        let image = find(&root.join("boot"), &|n| n.starts_with("vmlinuz-")).expect("the package holds a vmlinuz");
        let base = if root.join("lib/modules").is_dir() { "lib/modules" } else { "usr/lib/modules" };
        Kernel { image, modules: root.join(base) }
    })
}

/// Returns the unpacked kernel of an earlier run.
fn kept(cache: &Path) -> Option<PathBuf> {
    let names = fs::read_dir(cache).ok()?.flatten().map(|e| e.path());
    names.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("linux-image-"))).max()
}

/// Downloads and unpacks the kernel package. apt gets package lists and a cache of its own: those of this machine may be missing (as in
/// containers) or older than the mirror, and a test must not change them.
fn fetch(cache: &Path) -> PathBuf {
    fs::create_dir_all(cache).expect("create cache");
    let aside = tempfile::tempdir_in(cache).expect("temporary directory");
    for dir in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(aside.path().join(dir)).expect("create directory");
    }
    let apt = |program: &str, args: &[&str]| {
        let state = format!("Dir::State::lists={}", aside.path().join("lists").display());
        let archives = format!("Dir::Cache={}", aside.path().join("cache").display());
        // The user _apt may not enter the directories above.
        let options = ["-o", &state, "-o", &archives, "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"];
        tool(Command::new(program).args(options).args(args).current_dir(aside.path()))
    };
    apt("apt-get", &["update", "-q", "--error-on=any"]);
    let depends = String::from_utf8(apt("apt-cache", &["depends", META])).expect("UTF-8");
    let package = depends
        .lines()
        .filter_map(|l| l.trim().strip_prefix("Depends: "))
        .find(|p| p.starts_with("linux-image-"))
        .unwrap_or_else(|| panic!("{META} depends on no kernel:\n{depends}"));
    apt("apt-get", &["download", "-q", package]);
    let deb = find(aside.path(), &|n| n.starts_with("linux-image-") && n.ends_with(".deb"));
    let deb = deb.expect("apt-get download left a package");
    let (tree, root) = (aside.path().join("tree"), cache.join(package));
    tool(Command::new("dpkg-deb").arg("-x").arg(deb).arg(&tree));
    // Rename it at the end, so that an incomplete directory never looks like a kernel.
    if let Err(e) = fs::rename(&tree, &root) {
        assert!(root.is_dir(), "rename to {}: {e}", root.display());
    }
    root
}

impl Kernel {
    /// Returns the unpacked file of a module. `None` if this kernel does not have it, or has it built in.
    fn module(&self, name: &str) -> Option<Vec<u8>> {
        let file = find(&self.modules, &|n| {
            n.split_once(".ko").is_some_and(|(stem, tail)| stem.replace('-', "_") == name && matches!(tail, "" | ".xz"))
        })?;
        Some(match file.extension() {
            Some(x) if x == "xz" => tool(Command::new("xz").arg("-dc").arg(&file)),
            _ => fs::read(&file).expect("read module"),
        })
    }

    /// Appends a module after those on which it depends. The dependencies are read from the module itself, because modules.dep is made when a
    /// kernel is installed.
    fn load(&self, name: &str, done: &mut Vec<(String, Vec<u8>)>, seen: &mut HashSet<String>) {
        if !seen.insert(name.to_owned()) {
            return;
        }
        let Some(image) = self.module(name) else { return };
        for needed in depends(&image) {
            self.load(&needed, done, seen);
        }
        done.push((name.to_owned(), image));
    }
}

/// Returns the names in `depends=a,b` of the section .modinfo.
fn depends(image: &[u8]) -> Vec<String> {
    let tag = b"\0depends=";
    let Some(at) = image.windows(tag.len()).position(|w| w == tag) else { return Vec::new() };
    let list: Vec<u8> = image[at + tag.len()..].iter().copied().take_while(|b| *b != 0).collect();
    let list = String::from_utf8_lossy(&list).replace('-', "_");
    list.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect()
}

/// A directory that becomes the root file system of a machine.
struct Tree(PathBuf);

impl Tree {
    fn put(&self, at: &str, content: &[u8], mode: u32) {
        let path = self.0.join(at.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("parent")).expect("create directory");
        fs::write(&path, content).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
    }

    /// Adds a program of this build without its symbols. With them, two programs would fill the memory of the machine.
    fn own_program(&self, from: &Path, at: &str) {
        let stripped = tempfile::NamedTempFile::new().expect("temporary file").into_temp_path();
        assert!(
            from.is_file(),
            "{} is missing: build it (cargo build --bin weft --example wg --example traffic)",
            from.display()
        );
        tool(Command::new("strip").arg("-o").arg(&stripped).arg(from));
        self.program(&stripped, at);
    }

    /// Adds a program at this path, with the shared libraries that it needs.
    fn program(&self, from: &Path, at: &str) {
        let bytes =
            fs::read(from).unwrap_or_else(|e| panic!("cannot read {} for the test machine: {e}", from.display()));
        self.put(at, &bytes, 0o755);
        // ldd fails for a static program, which needs no libraries.
        let ldd = Command::new("ldd").arg(from).output().expect("run ldd");
        for word in String::from_utf8_lossy(&ldd.stdout).split_whitespace().filter(|w| w.starts_with('/')) {
            if !self.0.join(&word[1..]).exists() {
                self.put(word, &fs::read(word).expect("read library"), 0o755);
            }
        }
    }
}

fn which(name: &str) -> PathBuf {
    let dirs = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    let found = dirs.iter().map(|d| Path::new(d).join(name)).find(|p| p.is_file());
    found.unwrap_or_else(|| panic!("the test machine needs {name} (packages busybox-static, iproute2, iputils-ping)"))
}

/// Packs programs, modules, `/init`, the scenario and its environment into `dir/initrd`.
pub fn initrd(dir: &Path, scenario: &str, env: &str, extra: Option<&Path>) -> PathBuf {
    let tree = Tree(dir.join("root"));
    for empty in ["bin", "dev", "proc", "sys", "run", "tmp", "etc"] {
        fs::create_dir_all(tree.0.join(empty)).expect("create directory");
    }
    symlink("/proc/self/mounts", tree.0.join("etc/mtab")).expect("symlink");
    tree.program(&which("busybox"), "/bin/busybox");
    for name in ["ip", "bridge", "ping"] {
        tree.program(&which(name), &format!("/opt/bin/{name}"));
    }
    tree.own_program(&crate::exe::weft_exe(), "/opt/bin/weft");
    for name in ["wg", "traffic"] {
        let example = Path::new(env!("CARGO_BIN_EXE_weft")).with_file_name("examples").join(name);
        tree.own_program(&example, &format!("/opt/bin/{name}"));
    }
    if let Some(extra) = extra {
        tree.program(extra, "/extra/run");
    }
    let (mut modules, mut seen) = (Vec::new(), HashSet::new());
    let mut names = MODULES.to_vec();
    if has_flanneld(scenario) {
        tree.program(&crate::flanneld::flanneld(), "/opt/bin/flanneld");
    }
    if has_etcd(scenario) {
        for name in ["etcd", "etcdctl"] {
            tree.program(&which(name), &format!("/opt/bin/{name}"));
        }
        tree.put("etc/hosts", b"127.0.0.1 localhost\n", 0o644);
        names.push("br_netfilter");
    }
    if scenario == BEHIND_NAT {
        tree.program(&which("nft"), "/opt/bin/nft");
        names.extend(["nft_nat", "nft_ct"]);
    }
    for name in names {
        kernel().load(name, &mut modules, &mut seen);
    }
    let order: String = modules.iter().map(|(name, _)| format!("{name}.ko\n")).collect();
    for (name, image) in &modules {
        tree.put(&format!("modules/{name}.ko"), image, 0o644);
    }
    tree.put("modules/order", order.as_bytes(), 0o644);
    tree.put("env", env.as_bytes(), 0o644);
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm");
    let libraries = ["lib.sh", "flannel.sh"].map(|name| (name, name, 0o644));
    for (from, at, mode) in [("init", "init", 0o755), (scenario, "scenario.sh", 0o644)].into_iter().chain(libraries) {
        tree.put(at, &fs::read(scripts.join(from)).unwrap_or_else(|e| panic!("{from}: {e}")), mode);
    }
    pack(&tree.0, &dir.join("initrd"))
}

fn pack(root: &Path, out: &Path) -> PathBuf {
    let names = tool(Command::new("find").args([".", "-print0"]).current_dir(root));
    let file = fs::File::create(out).expect("create initrd");
    let mut cpio = Command::new("cpio")
        .args(["--null", "--create", "--format=newc", "--quiet", "--owner=0:0"])
        .current_dir(root)
        .stdin(Stdio::piped())
        .stdout(file)
        .spawn()
        .expect("run cpio (package cpio)");
    cpio.stdin.take().expect("stdin").write_all(&names).expect("feed cpio");
    assert!(cpio.wait().expect("wait for cpio").success(), "cpio failed");
    out.to_owned()
}
