// SPDX-License-Identifier: Apache-2.0
//! Whether imports follow the order of modules (docs/adr/012-order-of-modules.md). tests/layers/orders.rs has the order.

#![allow(clippy::unwrap_used, reason = "a test says what it expected")]

#[path = "layers/orders.rs"]
mod orders;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of a directory from the lowest to the highest. A module imports only modules that stand before it, so no two modules import each
/// other, not even by way of others. A module with a directory of its own counts as one.
pub struct Layers {
    /// The directory, such as `src` or `doctor/src/facts`.
    dir: &'static str,
    /// No file imports what its parent has, which stands above all of them. Otherwise the parent may have items for all.
    parent_is_above: bool,
    /// The names of the modules. What follows a # is a comment.
    order: &'static str,
}

/// The imports between modules, as (importer, imported), with a file that has the import.
type Imports = BTreeMap<(String, String), PathBuf>;

/// Returns all Rust files below this directory.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Returns the module that a file belongs to, which has this path in its directory: `plan/fence.rs` belongs to `plan`.
fn module(below: &Path) -> String {
    below.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_owned()
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

impl Layers {
    fn path(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(self.dir)
    }

    fn order(&self) -> Vec<&'static str> {
        self.order.lines().flat_map(|line| line.split('#').next().unwrap_or_default().split_whitespace()).collect()
    }

    /// Returns the paths with which code names what is in this directory. The file is so deep below it that it has to say `super::` as often.
    fn prefixes(&self, depth: usize) -> [String; 3] {
        let (name, below) = self.dir.split_once("src").unwrap();
        let below = below.trim_start_matches('/');
        let below = if below.is_empty() { String::new() } else { format!("{}::", below.replace('/', "::")) };
        // A program names its library by the name of the crate.
        let library = match name.trim_end_matches('/') {
            "" => "weft".to_owned(),
            name => format!("weft_{name}"),
        };
        ["super::".repeat(depth), format!("crate::{below}"), format!("{library}::{below}")]
    }

    /// Returns the names that a file takes from its directory.
    fn names(&self, code: &str, depth: usize) -> BTreeSet<String> {
        self.prefixes(depth).iter().flat_map(|path| names_after(code, path)).collect()
    }

    /// Returns what the modules import from each other and from their parent.
    fn imports(&self) -> Imports {
        let is_test = |file: &Path| file.iter().any(|part| part == "tests" || part == "tests.rs");
        let mut all = Imports::new();
        for file in sources(&self.path()) {
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
        let order = self.order();
        let place = |name: &str| order.iter().position(|other| *other == name);
        let is_fault = |importer: &str, imported: &str| match place(imported) {
            Some(below) => place(importer).is_none_or(|above| above < below),
            // An item of the parent, or the target of a log line.
            None => self.parent_is_above,
        };
        let faults = all.iter().filter(|((importer, imported), _)| is_fault(importer, imported));
        faults
            .map(|((importer, imported), file)| format!("{}: {importer} must not import {imported}", file.display()))
            .collect()
    }
}

#[test]
fn modules_import_only_modules_that_stand_below_them() {
    for layers in orders::ALL {
        let found: BTreeSet<String> =
            sources(&layers.path()).iter().map(|file| module(file.strip_prefix(layers.path()).unwrap())).collect();
        let listed: BTreeSet<String> = layers.order().into_iter().map(str::to_owned).collect();
        assert_eq!(found, listed, "the order must list each module of {}, and no other", layers.dir);
        let all = layers.imports();
        assert!(!all.is_empty(), "imports in {} must be found", layers.dir);
        assert_eq!(layers.faults(&all), [""; 0], "in {}", layers.dir);
    }
}

#[test]
fn every_crate_has_an_order() {
    let manifest = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).unwrap();
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = [")).unwrap();
    let crates: Vec<&str> = members.trim_end_matches(']').split(", ").map(|name| name.trim_matches('"')).collect();
    assert!(crates.contains(&"subnet"), "{crates:?}");
    // The allocator is one file.
    for name in crates.into_iter().filter(|name| *name != "heap") {
        assert!(orders::ALL.iter().any(|layers| layers.dir == format!("{name}/src")), "{name}");
    }
}

#[test]
fn imports_are_found_in_every_form_and_those_of_comments_and_tests_are_not() {
    let layers = Layers { dir: "src/part", parent_is_above: true, order: "low high" };
    let names = |text: &str, depth: usize| layers.names(&code(text), depth).into_iter().collect::<Vec<_>>();
    let text = "#[cfg(test)]\nmod fake;\nuse super::{\n    a,\n    b::{c, d},\n};\nuse crate::other::e;\n// super::f\n\
                fn f() { crate::part::g::h() }\nfn j() { weft::part::k() }\n#[cfg(test)]\nmod tests {\n    use super::i;\n}\n";
    assert_eq!(names(text, 1), ["a", "b", "g", "k"]);
    assert_eq!(names("use super::a;\nuse super::super::b;\n", 2), ["b"], "its parent is no other module");
    let inner = Layers { dir: "src/part/inner", ..layers };
    assert_eq!(Vec::from_iter(inner.names("use crate::part::inner::a; use crate::part::b;", 1)), ["a"]);
}

#[test]
fn an_import_of_a_higher_module_is_a_fault_and_one_of_the_parent_only_if_it_stands_above() {
    let layers = |parent_is_above| Layers { dir: "src/part", parent_is_above, order: "low # a comment\nhigh" };
    let import = |importer: &str, imported: &str| ((importer.to_owned(), imported.to_owned()), PathBuf::from("x.rs"));
    let all = Imports::from([import("low", "high"), import("high", "low"), import("low", "Parent")]);
    assert_eq!(layers(false).faults(&all), ["x.rs: low must not import high"]);
    assert_eq!(layers(true).faults(&all), ["x.rs: low must not import Parent", "x.rs: low must not import high"]);
}
