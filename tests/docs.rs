// SPDX-License-Identifier: Apache-2.0
//! docs/testing.md names a test for every promise: the tests that it names exist, and no promise of docs/compat.md is left out.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What stands between backticks, in order.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Words without marks, so that the two pages may break and mark them differently.
fn words(text: &str) -> Vec<String> {
    let plain = text.replace(['`', '|', '*'], " ");
    plain.split_whitespace().map(str::to_lowercase).collect()
}

/// Tests that are named `FILE.rs::NAME` and do not exist.
fn missing(text: &str) -> Vec<String> {
    let mut missing = Vec::new();
    for reference in quoted(text).filter(|word| word.contains(".rs::")) {
        let (file, name) = reference.split_once("::").unwrap();
        let source = fs::read_to_string(file).unwrap_or_default();
        let last = name.rsplit("::").next().unwrap();
        if !source.contains(&format!("fn {last}(")) {
            missing.push(reference.to_owned());
        }
    }
    missing
}

#[test]
fn every_test_that_is_named_exists() {
    let text = read("docs/testing.md");
    assert_eq!(missing(&text), [""; 0], "docs/testing.md names tests that do not exist");
    let named = quoted(&text).filter(|word| word.contains(".rs::")).count();
    assert!(named > 100, "only {named} tests are named: is the table still there?");
    assert_eq!(missing("`tests/docs.rs::no_such_test` `tests/none.rs::x`").len(), 2, "what is missing is found");
}

#[test]
fn every_path_that_is_named_exists() {
    for page in ["docs/testing.md", "docs/compat.md"] {
        let text = read(page);
        let paths = quoted(&text).filter(|word| word.contains('/') && !word.contains(' ') && !word.contains("::"));
        for path in paths.filter(|path| path.ends_with(".rs") || path.ends_with(".sh") || path.ends_with('/')) {
            // `kube/` and the like stand behind the directory that they are in.
            let base = path.split('/').next().unwrap();
            if Path::new(base).is_dir() && base != "kube" {
                assert!(Path::new(path).exists(), "{page}: there is no {path}");
            }
        }
    }
}

/// The first words of each line that promises something.
fn promises(compat: &str) -> Vec<Vec<String>> {
    let rows = compat.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| format"));
    let rows = rows.filter_map(|line| line.split('|').nth(1));
    let (_, different) = compat.split_once("Different on purpose:").expect("the list of differences");
    let bullets = different.split("\n- ").skip(1);
    rows.chain(bullets).map(|text| words(text).into_iter().take(6).collect()).collect()
}

#[test]
fn every_promise_of_compat_md_has_a_row() {
    let table: Vec<Vec<String>> =
        read("docs/testing.md").lines().filter(|line| line.starts_with("| ")).map(words).collect();
    let promises = promises(&read("docs/compat.md"));
    assert!(promises.len() > 40, "only {} promises were found", promises.len());
    let lost: BTreeSet<String> = promises
        .into_iter()
        .filter(|promise| !table.iter().any(|row| row.starts_with(promise)))
        .map(|promise| promise.join(" "))
        .collect();
    assert!(lost.is_empty(), "docs/testing.md has no row that begins so: {lost:#?}");
}

#[test]
fn every_target_that_is_named_exists() {
    let makefile = read("Makefile");
    for page in ["docs/testing.md", "docs/mutants.md", "docs/bench/method.md", "README.md"] {
        let text = read(page);
        for target in quoted(&text).filter_map(|word| word.strip_prefix("make ")) {
            let target = target.split_whitespace().next().unwrap();
            assert!(makefile.lines().any(|line| line.starts_with(&format!("{target}:"))), "{page}: make {target}");
        }
    }
}

#[test]
fn every_test_program_is_described() {
    let text = read("docs/testing.md");
    for dir in ["tests", "subnet/tests", "cni/tests", "backends/tests"] {
        for file in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
            if file.extension().is_some_and(|extension| extension == "rs") {
                assert!(quoted(&text).any(|word| Path::new(word) == file), "{} is not described", file.display());
            }
        }
    }
}
