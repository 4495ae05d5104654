// SPDX-License-Identifier: Apache-2.0
//! Commands: what clap and the Makefile know is what the pages may show.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use clap::Command;

use crate::page::{Page, files};

/// Flags that a page names by themselves and that belong to another program.
const OTHERS: [(&str, &str); 14] = [
    ("--random-fully", "iptables"),
    ("--bip", "Docker"),
    ("--mtu", "Docker"),
    ("--set", "helm"),
    ("--allocate-node-cidrs", "kube-controller-manager"),
    ("--cluster-cidr", "kube-controller-manager"),
    ("--pod-network-cidr", "kubeadm"),
    ("--quota-backend-bytes", "etcd"),
    ("--no-default-features", "cargo"),
    ("--in-diff", "cargo-mutants"),
    ("--shard", "cargo-mutants"),
    ("--sizes", "the bench"),
    ("--rows", "the bench"),
    ("--backends", "the bench"),
];

/// Names of variables with these beginnings belong to this repository.
const OURS: [&str; 9] = ["FLANNELD_", "WEFT_", "BENCH_", "LAB_", "MUTANTS", "STEP_", "BARE_", "FUZZ_", "FLANNEL_CNI"];

/// Returns the targets of the Makefile.
fn targets() -> BTreeSet<String> {
    let makefile = fs::read_to_string("Makefile").unwrap();
    let heads = makefile.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
    let names = heads.filter(|line| !line.contains(":=")).filter_map(|line| line.split_once(':'));
    names.flat_map(|(names, _)| names.split(' ').map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Returns the targets of make that a page names.
fn named_targets(page: &Page) -> Vec<String> {
    let calls = page.code().into_iter().filter_map(|code| code.strip_prefix("make ").map(str::to_owned));
    let first = calls.filter_map(|rest| rest.split(' ').find(|word| !word.contains('=')).map(str::to_owned));
    first.filter(|word| !word.starts_with('-')).collect()
}

#[test]
fn every_target_that_is_named_exists() {
    let (targets, mut count) = (targets(), 0);
    for page in Page::all() {
        for target in named_targets(&page) {
            assert!(targets.contains(&target), "{}: there is no `make {target}`", page.path.display());
            count += 1;
        }
    }
    assert!(count > 30, "only {count} targets were found");
    assert_eq!(named_targets(&Page::of("`make FOO=x nothing` and `make\nno-such`")), ["nothing", "no-such"]);
    assert!(!targets.contains("no-such"));
}

/// Returns the long flags of a command.
fn flags(command: &Command) -> BTreeSet<String> {
    let long = command.get_arguments().filter_map(|arg| arg.get_long().map(|long| format!("--{long}")));
    long.chain(["--help".to_owned()]).collect()
}

/// Returns the long flags of a command and of all commands below it.
fn all_flags(command: &Command) -> BTreeSet<String> {
    let below = command.get_subcommands().flat_map(all_flags);
    flags(command).into_iter().chain(below).collect()
}

/// Says what is wrong with a call of weft: a sub-command or a flag that does not exist.
fn judge_call(words: &[&str]) -> Option<String> {
    let mut command = weft::cli::command();
    let mut rest = words.iter().skip(1).peekable();
    while let Some(word) = rest.next_if(|word| !word.starts_with('-')) {
        if !command.has_subcommands() || word.chars().all(|c| !c.is_ascii_lowercase()) {
            break;
        }
        match command.find_subcommand(word) {
            Some(next) => command = next.clone(),
            None => return Some(format!("`{}` has no sub-command {word}", command.get_name())),
        }
    }
    let flags = flags(&command);
    let wrong = rest.filter_map(|word| flag(word)).find(|word| !flags.contains(word))?;
    Some(format!("`{}` has no flag {wrong}", command.get_name()))
}

/// Returns the flag that a word begins with. `--no-such[=...]`, and lists and endings of a sentence, are understood.
fn flag(word: &str) -> Option<String> {
    let rest = word.strip_prefix("--")?;
    let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-' || *c == '_').collect();
    (!name.is_empty()).then(|| format!("--{name}"))
}

/// Returns what is wrong with the calls and flags that a page shows, and how many there are.
fn judge(page: &Page, known: &BTreeSet<String>) -> (usize, Vec<String>) {
    let (mut count, mut wrong) = (0, Vec::new());
    for code in page.code() {
        let words: Vec<&str> = code.split(' ').collect();
        let program = words[0].rsplit('/').next().unwrap();
        if program == "weft" && words.len() > 1 {
            count += 1;
            wrong.extend(judge_call(&words).map(|fault| format!("`{code}`: {fault}")));
        }
        if let Some(flag) = flag(words[0]) {
            count += 1;
            if !known.contains(&flag) && !OTHERS.iter().any(|(other, _)| *other == flag) {
                wrong.push(format!("`{code}`: no command has the flag {flag}"));
            }
        }
    }
    (count, wrong)
}

#[test]
fn every_command_and_flag_that_is_named_exists() {
    let known = all_flags(&weft::cli::command());
    let mut count = 0;
    for page in Page::all() {
        let (found, wrong) = judge(&page, &known);
        assert!(wrong.is_empty(), "{}: {wrong:#?}", page.path.display());
        count += found;
    }
    assert!(count > 100, "only {count} commands and flags were found");
    let fault = Page::of("`weft forget`, `weft status --loud`, `--no-such-flag=1`, `weft lease rm ID --stor x`\n");
    assert_eq!(judge(&fault, &known), (4, judge(&fault, &known).1));
    assert_eq!(judge(&fault, &known).1.len(), 4, "what is missing is found");
}

/// Returns the flags of `weft agent`, each with its default.
fn flags_of_the_agent() -> BTreeMap<String, String> {
    let command = weft::cli::command();
    let agent = command.find_subcommand("agent").unwrap();
    let shown = agent.get_arguments().filter(|arg| !arg.is_hide_set());
    let default = |arg: &clap::Arg| arg.get_default_values().iter().map(|value| value.to_str().unwrap()).collect();
    shown.filter_map(|arg| Some((format!("--{}", arg.get_long()?), default(arg)))).collect()
}

#[test]
fn configuration_md_has_every_flag_with_its_default() {
    let page = Page::read("docs/configuration.md");
    let mut rows = BTreeMap::new();
    for (_, cells) in page.rows().into_iter().filter(|(head, _)| *head == "flag") {
        for flag in crate::page::spans(cells[0]) {
            rows.insert(flag, cells[1].to_owned());
        }
    }
    let flags = flags_of_the_agent();
    let documented: BTreeSet<&String> = rows.keys().collect();
    assert_eq!(documented, flags.keys().collect(), "the rows are not the flags of `weft agent`");
    for (flag, default) in &flags {
        let said = &rows[flag];
        // A default that depends on something is a sentence, and not code alone.
        let sentence = default.is_empty() && !said.is_empty() && !said.starts_with('`');
        let expected = if default.is_empty() { String::new() } else { format!("`{default}`") };
        assert!(sentence || *said == expected, "the default of {flag} is {expected:?}, and not {said:?}");
    }
}

/// Returns the variables that a page names and that have one of our beginnings.
fn variables(page: &Page) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for code in page.code() {
        for word in code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            let is_variable = word.len() > 5 && word.chars().all(|c| !c.is_ascii_lowercase());
            if is_variable && OURS.iter().any(|ours| word.starts_with(ours)) {
                found.insert(word.to_owned());
            }
        }
    }
    found
}

/// Whether anything reads this variable: a flag of weft, or a file of the repository that names it.
fn is_read(variable: &str, flags: &BTreeSet<String>, readers: &str) -> bool {
    match variable.strip_prefix("FLANNELD_") {
        Some("") | Some("NAME") => true,
        Some(name) => flags.contains(&format!("--{}", name.to_lowercase().replace('_', "-"))),
        None => readers.contains(variable),
    }
}

#[test]
fn every_variable_that_is_named_is_read() {
    let flags = all_flags(&weft::cli::command());
    let dirs = ["src", "subnet", "cni", "doctor", "lab", "tests", "benches", "tools", "deploy"];
    let paths = dirs.iter().flat_map(files).filter(|path| !path.starts_with("tests/docs"));
    let mut readers: String = paths.filter_map(|path| fs::read_to_string(path).ok()).collect();
    readers += &fs::read_to_string("Makefile").unwrap();
    let mut count = 0;
    for page in Page::all() {
        for variable in variables(&page) {
            assert!(is_read(&variable, &flags, &readers), "{}: nothing reads {variable}", page.path.display());
            count += 1;
        }
    }
    assert!(count > 10, "only {count} variables were found");
    for fault in ["FLANNELD_NO_SUCH", "WEFT_NO_SUCH"] {
        assert!(!is_read(fault, &flags, &readers), "what is missing is found");
    }
}
