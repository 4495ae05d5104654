// SPDX-License-Identifier: Apache-2.0
//! Writes docs/conformance.md from the results of the last runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::report::{Outcome, POLICIES, Report, read_all};

/// Writes the page.
pub fn write(results: &Path, page: &Path) {
    let reports = read_all(results);
    assert!(!reports.is_empty(), "no results in {}: run `make kube-conformance` first", results.display());
    let policies = results.join(POLICIES);
    let policies = if policies.is_dir() { read_all(&policies) } else { BTreeMap::new() };
    fs::write(page, render(&reports, &policies)).expect("the page is written");
    println!("{} is written from {} runs", page.display(), reports.len());
}

fn render(reports: &BTreeMap<String, Report>, policies: &BTreeMap<String, Report>) -> String {
    let first = reports.values().next().unwrap();
    let mut page = format!(
        "<!-- Written by `make conformance-docs` from the last `make kube-conformance`. -->\n\
         # Conformance\n\n\
         Kubernetes' own network tests (`[sig-network]` of e2e.test {}) in clusters of three nodes with weft {}, on one machine. Each row is one\n\
         cluster: the families of addresses, the backend, how pods are connected, and the mode of kube-proxy.\n\n\
         | cluster | passed | failed | fail with flannel, too | skipped themselves | left out | seconds | day | commit |\n\
         |---|--:|--:|--:|--:|--:|--:|---|---|\n",
        first.kubernetes, first.weft
    );
    for (name, report) in reports {
        let counts = [Outcome::Passed, Outcome::Failed, Outcome::KnownFailure, Outcome::Skipped, Outcome::LeftOut]
            .map(|outcome| report.count(outcome).to_string());
        let (counts, when) = (counts.join(" | "), when(report));
        let _ = writeln!(page, "| {name} | {counts} | {:.0} | {when} |", report.seconds);
    }
    section(&mut page, reports, Outcome::Failed, "Failed");
    section(&mut page, reports, Outcome::KnownFailure, "Failed as with flannel");
    section(&mut page, reports, Outcome::Skipped, "Skipped by the test itself");
    left_out(&mut page, reports);
    network_policies(&mut page, policies);
    section(&mut page, reports, Outcome::Passed, "Passed");
    page
}

/// Lists the tests with this outcome, each with its reason, and with the names of the clusters unless it was so in all of them.
fn section(page: &mut String, reports: &BTreeMap<String, Report>, outcome: Outcome, title: &str) {
    let mut tests: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for report in reports.values() {
        for test in report.tests.iter().filter(|test| test.outcome == outcome) {
            tests.entry((&test.name, &test.reason)).or_default().insert(&report.name);
        }
    }
    if tests.is_empty() {
        return;
    }
    let _ = writeln!(page, "\n## {title}\n");
    for ((name, reason), clusters) in tests {
        let name = name.trim_start_matches("[sig-network] ");
        let reason = if reason.is_empty() { String::new() } else { format!(": {}", escaped(reason)) };
        let clusters: Vec<&str> = clusters.into_iter().collect();
        let places =
            if clusters.len() == reports.len() { String::new() } else { format!(" ({})", clusters.join("; ")) };
        let _ = writeln!(page, "- {}{reason}{places}", escaped(name));
    }
}

/// Returns the cells that say what was tested: the day and the commit.
fn when(report: &Report) -> String {
    let commit = if report.commit.is_empty() { "not recorded" } else { report.commit.as_str() };
    format!("{} | {commit}", report.day)
}

/// Lists the tests that were left out in at least one cluster, by reason.
fn left_out(page: &mut String, reports: &BTreeMap<String, Report>) {
    let mut reasons: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for test in reports.values().flat_map(|report| &report.tests).filter(|test| test.outcome == Outcome::LeftOut) {
        reasons.entry(&test.reason).or_default().insert(&test.name);
    }
    let _ = writeln!(page, "\n## Left out");
    for (reason, tests) in reasons {
        let _ = writeln!(page, "\n### {reason} ({})\n", tests.len());
        for name in tests {
            let _ = writeln!(page, "- {}", escaped(name.trim_start_matches("[sig-network] ")));
        }
    }
}

/// Shows the results of the tests of NetworkPolicy, if there are some.
fn network_policies(page: &mut String, policies: &BTreeMap<String, Report>) {
    if policies.is_empty() {
        return;
    }
    let _ = writeln!(
        page,
        "\n## Network policies\n\n\
         `CONFORMANCE_ARGS='--tests netpol'` runs these tests. Those of enforcement are expected to fail, because weft has no policy engine.\n\n\
         | cluster | passed | failed | day | commit |\n\
         |---|--:|--:|---|---|"
    );
    for (name, report) in policies {
        let [passed, failed] = [Outcome::Passed, Outcome::Failed].map(|outcome| report.count(outcome));
        let _ = writeln!(page, "| {name} | {passed} | {failed} | {} |", when(report));
    }
}

/// Escapes characters that have a meaning in Markdown.
fn escaped(text: &str) -> String {
    text.replace('<', "&lt;").replace('|', "\\|").replace('*', "\\*")
}
