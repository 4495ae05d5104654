// SPDX-License-Identifier: Apache-2.0
//! The documentation says what is there. Every command, flag, variable, file, test and message that README.md, CONTRIBUTING.md or a
//! page of docs/ names must exist, and every promise must name the test that proves it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "docs/commands.rs"]
mod commands;
#[path = "docs/messages.rs"]
mod messages;
#[path = "docs/page.rs"]
mod page;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use messages::Source;
use page::{Page, files};

/// The directories of the repository. What begins with one of them is a path.
const TOP: [&str; 16] = [
    "src", "subnet", "backends", "netlink", "heap", "cni", "doctor", "lab", "udp", "sim", "tests", "benches", "deploy",
    "docs", "tools", ".cargo",
];

/// The pages that quote messages and say what to do about them.
const PAGES_OF_MESSAGES: [&str; 2] = ["docs/messages.md", "docs/operations.md"];

/// Returns the directories of all crates but `weft` itself.
fn crates() -> Vec<String> {
    let manifest = fs::read_to_string("Cargo.toml").unwrap();
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = [")).unwrap();
    members.trim_end_matches(']').split(", ").map(|name| name.trim_matches('"').to_owned()).collect()
}

/// Returns the words of code that name a file or directory of the repository.
fn paths(page: &Page) -> Vec<String> {
    let mut found = Vec::new();
    for code in page.code() {
        for word in code.split_whitespace() {
            let word =
                word.split("::").next().unwrap().trim_end_matches([',', '.', ':', ';', ')']).trim_start_matches('(');
            let top = word.split('/').next().unwrap();
            let pattern = word.contains(['*', '{', '$', '<', '=', '"', '%', '?', '[']) || word.contains("...");
            let in_tree = word.contains('/') && TOP.contains(&top) && !pattern;
            if in_tree || !word.contains('/') && word.ends_with(".rs") {
                found.push(word.to_owned());
            }
        }
    }
    found
}

/// Returns the names of files of Rust code, so that a page may name one without its directory.
fn names_of_sources() -> BTreeSet<String> {
    let dirs = ["src", "tests", "benches"].map(str::to_owned).into_iter().chain(crates());
    let all = dirs.flat_map(files);
    all.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).filter(|name| name.ends_with(".rs")).collect()
}

fn exists(path: &str, names: &BTreeSet<String>) -> bool {
    if path.contains('/') { Path::new(path).exists() } else { names.contains(path) }
}

#[test]
fn every_file_that_is_named_exists() {
    for name in crates() {
        let top = name.split('/').next().unwrap();
        assert!(TOP.contains(&top), "paths below {top} are not checked");
    }
    let names = names_of_sources();
    let mut count = 0;
    for page in Page::all() {
        for path in paths(&page) {
            assert!(exists(&path, &names), "{}: there is no {path}", page.path.display());
            count += 1;
        }
    }
    assert!(count > 200, "only {count} files are named: are they still found?");
    let fault = Page::of("see `src/nothing.rs`, `none_of_all.rs`\n\n    install deploy/none.yml\n");
    assert_eq!(paths(&fault).iter().filter(|path| !exists(path, &names)).count(), 3, "what is missing is found");
}

#[test]
fn every_link_leads_somewhere() {
    let mut count = 0;
    for page in Page::all() {
        let dir = page.path.parent().unwrap();
        for link in page.links() {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.path.clone() } else { dir.join(file) };
            assert!(target.exists(), "{}: the link {link} leads nowhere", page.path.display());
            let known = anchor.is_empty() || Page::read(target).anchors().iter().any(|known| known == anchor);
            assert!(known, "{}: no heading for the link {link}", page.path.display());
            count += 1;
        }
    }
    assert!(count > 40, "only {count} links were found");
}

/// Returns the tests that are named `FILE.rs::NAME`, and whether each exists.
fn tests(page: &Page) -> Vec<(String, bool)> {
    let named = page.code().into_iter().filter(|word| word.contains(".rs::") && !word.contains(' '));
    let exists = |reference: &str| {
        let (file, name) = reference.split_once("::").unwrap();
        let source = fs::read_to_string(file).unwrap_or_default();
        source.contains(&format!("fn {}(", name.rsplit("::").next().unwrap()))
    };
    named.map(|reference| (reference.clone(), exists(&reference))).collect()
}

#[test]
fn every_test_that_is_named_exists() {
    let all: Vec<(String, bool)> = Page::all().iter().flat_map(tests).collect();
    let missing: Vec<&String> = all.iter().filter(|(_, exists)| !exists).map(|(name, _)| name).collect();
    assert!(missing.is_empty(), "the documentation names tests that do not exist: {missing:#?}");
    assert!(all.len() > 100, "only {} tests are named: is the table still there?", all.len());
    let fault = Page::of("`tests/docs.rs::no_such_test` `tests/none.rs::x`");
    assert_eq!(tests(&fault).iter().filter(|(_, exists)| !exists).count(), 2, "what is missing is found");
}

/// Words without marks, so that the two pages may break and mark them differently.
fn words(text: &str) -> Vec<String> {
    let plain = text.replace(['`', '|', '*'], " ");
    plain.split_whitespace().map(str::to_lowercase).collect()
}

/// The first words of each line that promises something.
fn promises(compat: &str) -> Vec<Vec<String>> {
    let rows = compat.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| format"));
    let rows = rows.filter_map(|line| line.split('|').nth(1));
    let (_, different) = compat.split_once("Different on purpose").expect("the list of differences");
    let bullets = different.split("\n- ").skip(1);
    rows.chain(bullets).map(|text| words(text).into_iter().take(6).collect()).collect()
}

#[test]
fn every_promise_of_compat_md_has_a_row() {
    let table: Vec<Vec<String>> =
        Page::read("docs/testing.md").text().lines().filter(|line| line.starts_with("| ")).map(words).collect();
    let promises = promises(Page::read("docs/compat.md").text());
    assert!(promises.len() > 40, "only {} promises were found", promises.len());
    let lost: BTreeSet<String> = promises
        .into_iter()
        .filter(|promise| !table.iter().any(|row| row.starts_with(promise)))
        .map(|promise| promise.join(" "))
        .collect();
    assert!(lost.is_empty(), "docs/testing.md has no row that begins so: {lost:#?}");
}

#[test]
fn every_message_that_is_quoted_is_said_somewhere() {
    let source = Source::read();
    messages::control(&source);
    let messages: Vec<String> = PAGES_OF_MESSAGES.iter().flat_map(|page| Page::read(page).messages()).collect();
    let said = messages.iter().map(|message| (message, source.missing(message)));
    let wrong: Vec<_> = said.filter(|(_, missing)| !missing.is_empty()).collect();
    assert!(wrong.is_empty(), "{PAGES_OF_MESSAGES:?} quote messages that do not exist: {wrong:#?}");
    assert!(messages.len() > 200, "only {} messages were found", messages.len());
}

#[test]
fn every_message_that_is_logged_has_a_row() {
    let page: String = PAGES_OF_MESSAGES.iter().map(|page| Page::read(page).text().to_owned()).collect();
    let logged = messages::logged(&Source::read());
    let lost: Vec<&String> = logged.iter().filter(|message| !messages::has_row(&page, message)).collect();
    assert!(lost.is_empty(), "{PAGES_OF_MESSAGES:?} do not say what to do about these messages: {lost:#?}");
    assert!(logged.len() > 50, "only {} messages are logged: are they still found?", logged.len());
    assert!(!messages::has_row(&page, "the device turned blue"), "what is missing is found");
}

#[test]
fn every_test_program_is_described() {
    let page = Page::read("docs/testing.md");
    let named = page.code();
    let dirs = crates().into_iter().map(|name| format!("{name}/tests")).chain(["tests".to_owned()]);
    for dir in dirs.filter(|dir| Path::new(dir).is_dir()) {
        for file in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
            if file.extension().is_some_and(|extension| extension == "rs") {
                assert!(named.iter().any(|word| Path::new(word) == file), "{} is not described", file.display());
            }
        }
    }
}

/// The first page is read by everybody, so it stays short.
#[test]
fn the_first_page_is_short() {
    let lines = Page::read("README.md").text().lines().count();
    assert!(lines <= 110, "README.md has {lines} lines: move something to docs/");
}
