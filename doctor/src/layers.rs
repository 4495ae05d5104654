// SPDX-License-Identifier: Apache-2.0
//! The order of the modules of this crate, and a test that imports follow it (docs/adr/012-order-of-modules.md).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of a directory from the lowest to the highest. A module imports only modules that stand before it, so no two modules import each
/// other, not even by way of others. A module with a directory of its own counts as one. In a directory below `src`, no file imports what its parent
/// has: the parent stands above all of them.
struct Layers {
    /// The directory.
    dir: &'static str,
    /// Its modules.
    order: &'static [&'static str],
    /// A module that imports another one, by which the test shows that imports are found.
    known: (&'static str, &'static str),
}

const ALL: [Layers; 6] = [
    Layers {
        dir: "src",
        order: &[
            // Tools that know nothing of the node that is examined.
            "finding",
            "processes",
            "programs",
            "sysctl",
            "namespaces",
            // What several of the modules below know of links, files and rules.
            "known_links",
            "subnet_file",
            "saved_rules",
            "remedies",
            "kernel",
            // `weft doctor pods` and `weft explain`.
            "pods",
            "explain",
            // `weft doctor`: what the caller says, what is read, what is decided.
            "sources",
            "facts",
            "checks",
            "layers",
            "lib",
        ],
        known: ("checks", "facts"),
    },
    Layers {
        dir: "src/kernel",
        order: &["entries", "ask", "ipvs", "queues", "rules", "nft", "links"],
        known: ("links", "nft"),
    },
    Layers { dir: "src/pods", order: &["facts", "findings"], known: ("findings", "facts") },
    Layers {
        dir: "src/explain",
        order: &[
            "facts",
            "explanation",
            "pod",
            "read",
            "render",
            "rule_steps",
            "shared_steps",
            "pod_steps",
            "port_steps",
            "route_steps",
            "steps",
            "legacy_tables",
            "rules",
            "pod_rules",
            "ipvs",
            "tests",
        ],
        known: ("steps", "pod_steps"),
    },
    Layers {
        dir: "src/facts",
        order: &[
            "arp_tables",
            "other_networks",
            "certificates",
            "store",
            "cni_plugins",
            "cni_files",
            "filters",
            "ipsec",
            "limits",
            "locks",
            "memory_kills",
            "pod_addresses",
            "port_users",
            "policy_rules",
            // The tables of the kernel are read once, and these read them.
            "tables",
            "forwarding",
            "path_links",
            "offload",
            "duplicates",
            "pod_links",
            "ways",
            "other_rules",
            "tunnel",
            "host_firewalls",
            "tunnel_rules",
            "tunnel_nat",
            "pod_way",
            "peer_port",
            "underlay",
        ],
        known: ("ways", "tables"),
    },
    Layers {
        dir: "src/checks",
        order: &[
            "addresses",
            "agent",
            "arp_rules",
            "br_netfilter",
            "bridge",
            "bridge_subnet",
            "certificates",
            "checksum",
            "clock",
            "cni",
            "conntrack",
            "device",
            "disk",
            "duplicate_address",
            "firewall",
            "forwarding",
            "ipsec",
            "ipv6",
            "kernel",
            "leftovers",
            "limits",
            "locks",
            "managed",
            "masquerade",
            "mtu",
            "neighbours",
            "network",
            "offload",
            "other_agent",
            "port",
            "rp_filter",
            "services",
            "store",
            "subnet_file",
            "traffic_control",
            "underlay",
            "uplink",
        ],
        known: ("clock", "certificates"),
    },
];

/// The imports between modules, as (importer, imported), with a file that has the import.
type Imports = BTreeMap<(String, String), PathBuf>;

/// Returns all Rust files below this directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Returns the code without comments and without the module of unit tests, which stands at the end of a file. Tests may import what they like.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default().trim()).collect::<Vec<_>>().join(" ")
}

/// Returns the names that the code has after this path: `a` in `crate::a`, and `a` and `b` in `crate::{a, b::{c, d}}`.
fn names_after(code: &str, path: &str) -> BTreeSet<String> {
    let name =
        |text: &str| text.split(|c: char| c != '_' && !c.is_alphanumeric()).next().unwrap_or_default().to_owned();
    let mut found = BTreeSet::new();
    // The end of a longer path is another one.
    for (at, _) in code.match_indices(path).filter(|(at, _)| !code[..*at].ends_with("::")) {
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

/// Returns the module that a file below this directory belongs to: `explain/read.rs` belongs to `explain`.
fn module(below: &Path) -> String {
    below.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_owned()
}

impl Layers {
    fn path(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(self.dir)
    }

    /// Returns the names that a file takes from its directory. The file is so deep below the directory that it has to say `super::` as often.
    fn names(&self, code: &str, depth: usize) -> BTreeSet<String> {
        let parent = self.dir.trim_start_matches("src").trim_start_matches('/');
        let from_root = if parent.is_empty() { "crate::".to_owned() } else { format!("crate::{parent}::") };
        ["super::".repeat(depth), from_root].iter().flat_map(|path| names_after(code, path)).collect()
    }

    /// Returns what the modules import from each other and from their parent.
    fn imports(&self) -> Imports {
        let is_test =
            |file: &Path| file.iter().any(|part| part == "tests" || part == "tests.rs" || part == "layers.rs");
        let mut all = Imports::new();
        for file in files(&self.path()) {
            let below = file.strip_prefix(self.path()).unwrap();
            let importer = module(below);
            let code = code(&fs::read_to_string(&file).unwrap());
            for imported in self.names(&code, below.iter().count()) {
                if imported != importer && !is_test(below) {
                    all.insert((importer.clone(), imported), file.clone());
                }
            }
        }
        all
    }

    /// Returns the imports that are against the order, one sentence each.
    fn faults(&self, all: &Imports) -> Vec<String> {
        let place = |name: &str| self.order.iter().position(|other| *other == name);
        let is_fault = |importer: &str, imported: &str| {
            place(imported).is_none_or(|below| place(importer).is_none_or(|above| above < below))
        };
        let faults = all.iter().filter(|((importer, imported), _)| is_fault(importer, imported));
        faults
            .map(|((importer, imported), file)| format!("{}: {importer} must not import {imported}", file.display()))
            .collect()
    }
}

#[test]
fn modules_import_only_modules_that_stand_below_them() {
    for layers in &ALL {
        let found: BTreeSet<String> =
            files(&layers.path()).iter().map(|file| module(file.strip_prefix(layers.path()).unwrap())).collect();
        let listed: BTreeSet<String> = layers.order.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(found, listed, "the order must list each module of {}, and no other", layers.dir);
        let all = layers.imports();
        assert!(all.contains_key(&(layers.known.0.to_owned(), layers.known.1.to_owned())), "imports must be found");
        assert_eq!(layers.faults(&all), [""; 0], "in {}", layers.dir);
    }
}

#[test]
fn imports_are_found_in_every_form_and_those_of_comments_and_tests_are_not() {
    let layers = Layers { dir: "src/part", order: &["low", "high"], known: ("high", "low") };
    let names = |text: &str, depth: usize| layers.names(&code(text), depth).into_iter().collect::<Vec<_>>();
    let text = "use super::{\n    a,\n    b::{c, d},\n};\nuse crate::other::e;\n// super::f\nfn f() { crate::part::g::h() }\n\
                #[cfg(test)]\nmod tests {\n    use super::i;\n}\n";
    assert_eq!(names(text, 1), ["a", "b", "g"]);
    assert_eq!(names("use super::a;\nuse super::super::b;\n", 2), ["b"], "its parent is no other module");
}

#[test]
fn an_import_of_a_higher_module_or_of_the_parent_is_a_fault() {
    let layers = Layers { dir: "src/part", order: &["low", "high"], known: ("high", "low") };
    let import = |importer: &str, imported: &str| ((importer.to_owned(), imported.to_owned()), PathBuf::from("x.rs"));
    let all = Imports::from([import("low", "high"), import("high", "low"), import("low", "Parent")]);
    let wanted = ["x.rs: low must not import Parent", "x.rs: low must not import high"];
    assert_eq!(layers.faults(&all), wanted);
}
