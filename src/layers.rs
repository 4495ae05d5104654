// SPDX-License-Identifier: Apache-2.0
//! The order of the modules of this crate, and a test that imports follow it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of this crate from the lowest to the highest. A module imports only modules that stand before it, so no two
/// modules import each other, not even by way of others.
const ORDER: [&str; 29] = [
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
    "lib",
    "main",
];

/// Imports against the order, as (importer, imported). The test fails when one of them is no longer needed.
const EXCEPTIONS: [(&str, &str); 0] = [];

/// Returns all Rust files below this directory.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Returns the module of this crate that a file belongs to: `src/plan/fence.rs` belongs to `plan`.
fn module(src: &Path, file: &Path) -> String {
    let first = file.strip_prefix(src).unwrap().iter().next().unwrap();
    first.to_str().unwrap().trim_end_matches(".rs").to_owned()
}

/// Returns the code without comments and without the module of unit tests, which stands at the end of a file. Tests may
/// import what they like.
fn code(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim()).collect();
    let is_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].contains("mod ");
    let end = lines.windows(2).position(is_tests).unwrap_or(lines.len());
    lines[..end].join(" ")
}

/// Returns the modules of this crate that the code names: by `crate::a`, or by `use crate::{a, b::{c, d}}`.
fn imports(code: &str) -> BTreeSet<String> {
    let name =
        |text: &str| text.split(|c: char| c != '_' && !c.is_alphanumeric()).next().unwrap_or_default().to_owned();
    let mut found = BTreeSet::new();
    for root in ["crate::", "weft::"] {
        for (at, _) in code.match_indices(root) {
            let rest = &code[at + root.len()..];
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
    }
    found
}

/// Returns which modules each module imports, with a file that does so.
fn all_imports(src: &Path) -> BTreeMap<(String, String), PathBuf> {
    let is_test = |file: &Path| file.iter().any(|part| part == "tests" || part == "tests.rs" || part == "layers.rs");
    let files = sources(src).into_iter().filter(|file| !is_test(file.strip_prefix(src).unwrap()));
    let all = files.flat_map(|file| {
        let importer = module(src, &file);
        let imported = imports(&code(&fs::read_to_string(&file).unwrap()));
        let other = imported.into_iter().filter(move |name| *name != importer);
        let importer = module(src, &file);
        other.map(move |imported| ((importer.clone(), imported), file.clone()))
    });
    all.collect()
}

/// Returns what is wrong with these imports, one sentence each.
fn faults(all: &BTreeMap<(String, String), PathBuf>) -> Vec<String> {
    let place = |name: &str| ORDER.iter().position(|other| *other == name);
    let mut faults = Vec::new();
    for ((importer, imported), file) in all {
        // Other names after `crate::` are items of the root module, and after `weft::` log targets.
        let Some(place_of_imported) = place(imported) else { continue };
        let is_exception = EXCEPTIONS.contains(&(importer, imported));
        match place(importer) {
            None => faults.push(format!("{importer} has no place in ORDER")),
            Some(place) if place < place_of_imported && !is_exception => {
                faults.push(format!("{}: {importer} must not import {imported}", file.display()));
            }
            Some(_) => {}
        }
    }
    for (importer, imported) in EXCEPTIONS {
        if !all.contains_key(&(importer.to_owned(), imported.to_owned())) {
            faults.push(format!("the exception that {importer} imports {imported} is no longer needed"));
        }
    }
    faults
}

#[test]
fn modules_import_only_modules_that_stand_below_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let found: BTreeSet<String> = sources(&src).iter().map(|file| module(&src, file)).collect();
    let listed: BTreeSet<String> = ORDER.iter().map(|name| (*name).to_owned()).chain(["layers".to_owned()]).collect();
    assert_eq!(found, listed, "ORDER must list each module of src/");
    let all = all_imports(&src);
    assert!(all.contains_key(&("node".to_owned(), "observe".to_owned())), "the imports must be found");
    assert_eq!(faults(&all), [""; 0]);
}

#[test]
fn imports_in_groups_are_found_and_those_of_comments_and_tests_are_not() {
    let text = "use crate::{log, node::{Node, peers}, plan};\n// crate::agent\nfn f() -> crate::cli::Task {}\n\
                #[cfg(test)]\nmod tests {\n    use crate::commands;\n}\n";
    assert_eq!(imports(&code(text)).into_iter().collect::<Vec<_>>(), ["cli", "log", "node", "plan"]);
}

#[test]
fn an_import_of_a_higher_module_is_a_fault_and_so_is_an_exception_that_nobody_needs() {
    let import = |importer: &str, imported: &str| ((importer.to_owned(), imported.to_owned()), PathBuf::from("x.rs"));
    let needed = EXCEPTIONS.map(|(importer, imported)| import(importer, imported));
    let all = BTreeMap::from_iter(needed.clone().into_iter().chain([import("observe", "node")]));
    assert_eq!(faults(&all), ["x.rs: observe must not import node"]);
    assert_eq!(faults(&needed.into_iter().chain([import("node", "observe")]).collect()), [""; 0]);
    for fault in faults(&BTreeMap::new()) {
        assert!(fault.ends_with("is no longer needed"), "{fault}");
    }
}
