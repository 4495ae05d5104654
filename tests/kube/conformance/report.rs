// SPDX-License-Identifier: Apache-2.0
//! The result of a run. It is read from ginkgo's report, kept as JSON, and judged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::selection::{KNOWN, LeftOut};

/// The result of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Passed,
    Failed,
    /// It failed, and it fails with flannel, too.
    KnownFailure,
    /// The test itself reported that it cannot run here.
    Skipped,
    /// It was left out on purpose.
    LeftOut,
}

/// One test.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Test {
    pub name: String,
    pub outcome: Outcome,
    /// Why it did not run or how it failed, in one line.
    pub reason: String,
    pub seconds: f64,
}

/// A run in one cluster.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// The name of the cluster.
    pub name: String,
    pub kubernetes: String,
    pub weft: String,
    /// The day of the run in UTC, such as `2026-11-23`.
    pub day: String,
    pub seconds: f64,
    pub tests: Vec<Test>,
}

impl Report {
    /// Reads the report of ginkgo. Tests that neither ran nor are in `left_out` do not belong to the run.
    pub fn tests(ginkgo: &Path, left_out: &[&LeftOut]) -> Vec<Test> {
        let text = fs::read_to_string(ginkgo).expect("ginkgo writes its report");
        let suites: Value = serde_json::from_str(&text).expect("ginkgo's report is JSON");
        let specs = suites.as_array().into_iter().flatten().flat_map(|suite| suite["SpecReports"].as_array());
        let mut tests: Vec<Test> = specs.flatten().filter_map(|spec| test(spec, left_out)).collect();
        tests.sort_by(|a, b| a.name.cmp(&b.name));
        tests
    }

    /// Writes the report into the directory from which [`read_all`] reads.
    pub fn save(&self, dir: &Path) {
        let file = dir.join(format!("{}.json", self.name.replace(' ', "-")));
        fs::write(file, serde_json::to_string_pretty(self).unwrap()).expect("the report is written");
    }

    /// Returns the number of tests with this outcome.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.tests.iter().filter(|test| test.outcome == outcome).count()
    }

    /// Prints the result. Returns false if a test failed that does not fail with flannel, or if none passed.
    pub fn judge(&self) -> bool {
        for test in self.tests.iter().filter(|test| test.outcome == Outcome::Failed) {
            println!("FAILED: {}\n    {}", test.name, test.reason);
        }
        let [passed, failed, known, skipped, left_out] =
            [Outcome::Passed, Outcome::Failed, Outcome::KnownFailure, Outcome::Skipped, Outcome::LeftOut]
                .map(|outcome| self.count(outcome));
        println!(
            "{}: {passed} passed, {failed} failed, {known} failed as with flannel, {skipped} skipped themselves, \
             {left_out} left out, in {:.0} s",
            self.name, self.seconds
        );
        failed == 0 && passed > 0
    }
}

fn test(spec: &Value, left_out: &[&LeftOut]) -> Option<Test> {
    if spec["LeafNodeType"] != "It" {
        return None;
    }
    let texts = spec["ContainerHierarchyTexts"].as_array()?.iter().chain([&spec["LeafNodeText"]]);
    let name = texts.filter_map(Value::as_str).collect::<Vec<_>>().join(" ");
    if !name.starts_with("[sig-network]") {
        return None;
    }
    let message = spec["Failure"]["Message"].as_str().unwrap_or_default();
    let first = message.lines().next().unwrap_or_default().to_owned();
    let (outcome, reason) = match spec["State"].as_str()? {
        "passed" => (Outcome::Passed, String::new()),
        "skipped" | "pending" if message.is_empty() => {
            // The focus of the run does not contain this test.
            let out = left_out.iter().find(|out| name.contains(out.name))?;
            (Outcome::LeftOut, out.reason.to_owned())
        }
        "skipped" | "pending" => (Outcome::Skipped, first),
        _ => match KNOWN.iter().find(|known| name.contains(known.name)) {
            Some(known) => (Outcome::KnownFailure, known.reason.to_owned()),
            None => (Outcome::Failed, first),
        },
    };
    let seconds = spec["RunTime"].as_f64().unwrap_or_default() / 1e9;
    Some(Test { name, outcome, reason, seconds })
}

/// Returns all runs that were kept, by the name of their cluster.
pub fn read_all(dir: &Path) -> BTreeMap<String, Report> {
    let files = fs::read_dir(dir).expect("there are results: run `make kube-conformance` first");
    let json =
        files.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|ext| ext == "json"));
    let reports = json.map(|path| serde_json::from_str::<Report>(&fs::read_to_string(path).unwrap()).unwrap());
    reports.map(|report| (report.name.clone(), report)).collect()
}
