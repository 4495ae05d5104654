// SPDX-License-Identifier: Apache-2.0
//! The order of the modules of this crate, of the files of `src/kernel` and of the modules of the other crates, and tests that imports
//! follow it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of this crate from the lowest to the highest. A module imports only modules that stand before it, so no two
/// modules import each other, not even by way of others.
const ORDER: &[&str] = &[
    // Tools that know nothing of leases.
    "async_socket",
    "debt",
    "files",
    "instance",
    "log",
    "probe",
    "processes",
    // What the operator sees. The modules above hand values to it.
    "observe",
    // The kernel, its firewall, and what the flags say.
    "firewall",
    "options",
    "conflist",
    "subnet_file",
    "kernel",
    // What should be in the kernel, and how it gets there.
    "saved",
    "uplink",
    "plan",
    "conflicts",
    "pass",
    "sysctls",
    "offload",
    "data_path",
    "extension",
    // The own lease, and the node that has one.
    "lease",
    "node",
    "agent",
    // The command line.
    "cli",
    "commands",
    "layers",
    "lib",
    "main",
];

/// The files of `src/kernel` in the same way. A file with a directory of its own counts as one file.
const KERNEL: &[&str] = &[
    "machine",
    "sysctl",
    "errno",
    "wireguard",
    "typed",
    "kinds",
    "link_messages",
    "encode",
    "decode",
    "nexthop",
    "guard",
    "fence",
    "linux",
    "wireguard_port",
    "wireguard_peers",
    "links",
    "observe",
    "batch",
    "replace",
    "write",
    "monitor",
    "fake",
];

/// The modules of the other crates in the same way, each crate with its directory.
const CRATES: &[(&str, &str)] = &[
    (
        "backends",
        "mac name overhead skip commands identity wireguard_key wireguard_peer link state tunnel host family options backend underlay_mtu \
         alloc extension host_gw ipip udp vxlan wireguard register devices index owner diff traffic_rules lib",
    ),
    (
        "benches/converge",
        "peers watch site options about measure targets table plots store process kube docs floor rows shape storm udp main",
    ),
    (
        "cni",
        "spec attachments subnet_env env iptables masquerade conf plugin render bridge wait record hostlocal program veth delegate status gc \
         flannel lib main",
    ),
    (
        "lab",
        "backend_kind process network netns cni store options node ping cluster fault report change measure shell lib",
    ),
    ("netlink", "wire socket generic ethtool hash rt rtnl nftables lib"),
    (
        "sim",
        "chance timeline disk kernel shared wire agent nodes net_conf hostile event scenario api pb etcd server store machine cluster walk \
         check lossless run shrink lib main",
    ),
    (
        "subnet",
        "cidr text json net_conf allocate attrs backend_types connected lease env outside old_defects evidence hold source retry dir etcd \
         kube peers saved_peers lib",
    ),
    ("udp", "counters packet icmp routes error device shared outgoing incoming tunnel lib"),
];

/// The imports between modules, as (importer, imported), with a file that has the import.
type Imports = BTreeMap<(String, String), PathBuf>;

/// Returns all Rust files below this directory.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Returns the module that a file below this directory belongs to: `plan/fence.rs` belongs to `plan`.
fn module(dir: &Path, file: &Path) -> String {
    let first = file.strip_prefix(dir).unwrap().iter().next().unwrap();
    first.to_str().unwrap().trim_end_matches(".rs").to_owned()
}

/// Returns the code without comments and without the module of unit tests, which stands at the end of a file. (If it has a file of its own,
/// there is only its name.) Tests may import what they like.
fn code(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim()).collect();
    let is_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].contains("mod ") && pair[1].ends_with('{');
    let end = lines.windows(2).position(is_tests).unwrap_or(lines.len());
    lines[..end].join(" ")
}

/// Returns the names that the code has after this path: `a` in `crate::a`, and `a` and `b` in `crate::{a, b::{c, d}}`.
fn names_after(code: &str, path: &str) -> BTreeSet<String> {
    let name =
        |text: &str| text.split(|c: char| c != '_' && !c.is_alphanumeric()).next().unwrap_or_default().to_owned();
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices(path) {
        let rest = &code[at + path.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.insert(name(rest));
            continue;
        };
        let (mut depth, mut begins) = (0, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                _ if begins && !c.is_whitespace() => {
                    found.insert(name(&group[at..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    found
}

/// Returns the modules of this crate that the code names.
fn modules_of_crate(code: &str) -> BTreeSet<String> {
    ["crate::", "weft::"].into_iter().flat_map(|root| names_after(code, root)).collect()
}

/// Returns the files of `src/kernel` that the code of a file there names. The file is so deep below `src/kernel` that it has to say
/// `super::` as often.
fn files_of_kernel(code: &str, depth: usize) -> BTreeSet<String> {
    names_below("crate::kernel::", code, depth)
}

/// Returns the modules of another crate that the code of a file there names. The file is so deep below `src` that it has to say `super::` as
/// often.
fn modules_of_other_crate(code: &str, depth: usize) -> BTreeSet<String> {
    names_below("crate::", code, depth)
}

fn names_below(root: &str, code: &str, depth: usize) -> BTreeSet<String> {
    let paths = ["super::".repeat(depth), root.to_owned()];
    paths.iter().flat_map(|path| names_after(code, path)).collect()
}

/// Returns what the modules of this directory import, as `imports` finds it.
fn all_imports(dir: &Path, imports: fn(&str, usize) -> BTreeSet<String>) -> Imports {
    let is_test = |file: &Path| file.iter().any(|part| part == "tests" || part == "tests.rs" || part == "layers.rs");
    let mut all = Imports::new();
    for file in sources(dir) {
        let below = file.strip_prefix(dir).unwrap();
        if is_test(below) {
            continue;
        }
        let importer = module(dir, &file);
        for imported in imports(&code(&fs::read_to_string(&file).unwrap()), below.iter().count()) {
            if imported != importer {
                all.insert((importer.clone(), imported), file.clone());
            }
        }
    }
    all
}

/// Returns the imports that are against this order, one sentence each.
fn faults(all: &Imports, order: &[&str]) -> Vec<String> {
    let place = |name: &str| order.iter().position(|other| *other == name);
    let mut faults = Vec::new();
    for ((importer, imported), file) in all {
        // Other names after `crate::` are items of the root module, and after `weft::` log targets.
        let Some(place_of_imported) = place(imported) else { continue };
        if place(importer).is_none_or(|place| place < place_of_imported) {
            faults.push(format!("{}: {importer} must not import {imported}", file.display()));
        }
    }
    faults
}

/// Checks the modules of a directory, and returns their imports.
fn assert_order(dir: &str, order: &[&str], imports: fn(&str, usize) -> BTreeSet<String>) -> Imports {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir);
    let found: BTreeSet<String> = sources(&dir).iter().map(|file| module(&dir, file)).collect();
    let listed: BTreeSet<String> = order.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(found, listed, "the order must list each module of {}, and no other", dir.display());
    let all = all_imports(&dir, imports);
    assert_eq!(faults(&all, order), [""; 0]);
    all
}

/// Returns true if the imports of one module that imports another one were found.
fn has(all: &Imports, importer: &str, imported: &str) -> bool {
    all.contains_key(&(importer.to_owned(), imported.to_owned()))
}

#[test]
fn modules_import_only_modules_that_stand_below_them() {
    assert!(has(&assert_order("src", ORDER, |code, _| modules_of_crate(code)), "node", "observe"));
}

#[test]
fn files_of_the_kernel_import_only_files_that_stand_below_them() {
    let all = assert_order("src/kernel", KERNEL, files_of_kernel);
    assert!(has(&all, "linux", "encode"));
}

#[test]
fn modules_of_other_crates_import_only_modules_that_stand_below_them() {
    for (name, order) in CRATES {
        let order: Vec<&str> = order.split_whitespace().collect();
        let all = assert_order(&format!("{name}/src"), &order, modules_of_other_crate);
        assert!(!all.is_empty(), "{name}");
    }
}

#[test]
fn imports_in_groups_are_found_and_those_of_comments_and_tests_are_not() {
    let text = "#[cfg(test)]\nmod fake;\nuse crate::{log, node::{Node, peers}, plan};\n// crate::agent\n\
                fn f() -> crate::cli::Task {}\n#[cfg(test)]\nmod tests {\n    use crate::commands;\n}\n";
    assert_eq!(modules_of_crate(&code(text)).into_iter().collect::<Vec<_>>(), ["cli", "log", "node", "plan"]);
}

#[test]
fn imports_of_the_kernel_are_found_in_every_form() {
    let text =
        "use super::Shared;\nuse super::{\n    Other,\n    high::{a, b},\n};\nfn f() { crate::kernel::low::g() }\n";
    assert_eq!(files_of_kernel(&code(text), 1).into_iter().collect::<Vec<_>>(), ["Other", "Shared", "high", "low"]);
    let deeper = "use super::high_part;\nuse super::super::high;\n";
    assert_eq!(
        files_of_kernel(&code(deeper), 2).into_iter().collect::<Vec<_>>(),
        ["high"],
        "its parent is no other file"
    );
}

#[test]
fn an_import_of_a_higher_module_is_a_fault() {
    let import = |importer: &str, imported: &str| ((importer.to_owned(), imported.to_owned()), PathBuf::from("x.rs"));
    let all = Imports::from([import("observe", "node"), import("node", "observe"), import("node", "an_item")]);
    assert_eq!(faults(&all, ORDER), ["x.rs: observe must not import node"]);
}
