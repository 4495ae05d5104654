// SPDX-License-Identifier: Apache-2.0
//! The result of a run. It is read from ginkgo's report, kept as JSON, and judged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::selection::{KNOWN, LeftOut, Selection};

/// The directory of the results of network policies, below that of the other results.
pub const POLICIES: &str = "netpol";

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
    /// The commit of the sources. Results of earlier versions have none.
    #[serde(default)]
    pub commit: String,
    /// The day of the run in UTC, such as `2026-11-23`.
    pub day: String,
    pub seconds: f64,
    pub tests: Vec<Test>,
    /// Only complete runs are kept, so this is not part of the file.
    #[serde(skip)]
    pub ending: Ending,
}

/// How a run ended as a whole, which the results of its tests do not show.
#[derive(Debug, Default)]
pub struct Ending {
    /// The number of tests that were chosen and never begun, as after an interrupt.
    pub not_begun: u64,
    /// What failed beside tests: an interrupt, a deadline, or the steps before and after all tests.
    pub faults: Vec<String>,
}

impl Ending {
    /// Finds out how the run ended.
    pub fn of(suites: &[Value]) -> Ending {
        let chosen = suites.iter().filter_map(|suite| suite["PreRunStats"]["SpecsThatWillRun"].as_u64());
        let begun = specs(suites).filter(|spec| is_test(spec) && was_begun(spec)).count() as u64;
        let reasons = suites.iter().flat_map(|suite| suite["SpecialSuiteFailureReasons"].as_array()).flatten();
        let mut faults: Vec<String> = reasons.filter_map(Value::as_str).map(str::to_owned).collect();
        let failed = specs(suites).filter(|spec| has_failed(spec));
        let (tests, steps): (Vec<&Value>, Vec<&Value>) = failed.partition(|spec| is_test(spec));
        faults.extend(steps.iter().map(|step| format!("{}: {}", text(&step["LeafNodeType"]), first_line(step))));
        if faults.is_empty() && tests.is_empty() && suites.iter().any(|suite| suite["SuiteSucceeded"] != true) {
            faults.push("ginkgo reports a failure and gives no reason".to_owned());
        }
        Ending { not_begun: chosen.sum::<u64>().saturating_sub(begun), faults }
    }

    /// Returns true if all tests that were chosen had their turn, and nothing beside them failed.
    pub fn is_complete(&self) -> bool {
        self.not_begun == 0 && self.faults.is_empty()
    }
}

impl Report {
    /// Writes the report into the directory from which [`read_all`] reads.
    pub fn save(&self, dir: &Path) {
        fs::create_dir_all(dir).expect("the directory of results is made");
        let file = dir.join(format!("{}.json", self.name.replace(' ', "-")));
        fs::write(file, serde_json::to_string_pretty(self).unwrap()).expect("the report is written");
    }

    /// Returns the number of tests with this outcome.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.tests.iter().filter(|test| test.outcome == outcome).count()
    }

    /// Prints the result. Returns false if the run is not complete, if no test passed, or if one failed that is not expected to fail.
    pub fn judge(&self, tests: Selection) -> bool {
        self.ending.faults.iter().for_each(|fault| println!("THE RUN FAILED: {fault}"));
        if self.ending.not_begun > 0 {
            println!("THE RUN FAILED: {} tests were never begun", self.ending.not_begun);
        }
        let [passed, failed, known, skipped, left_out] =
            [Outcome::Passed, Outcome::Failed, Outcome::KnownFailure, Outcome::Skipped, Outcome::LeftOut]
                .map(|outcome| self.count(outcome));
        let is_sound = self.ending.is_complete() && passed > 0;
        if tests == Selection::Netpol {
            println!(
                "{}: {passed} passed, {failed} failed, {skipped} skipped themselves, in {:.0} s; failures are expected, \
                 because weft has no policy engine",
                self.name, self.seconds
            );
            return is_sound;
        }
        for test in self.tests.iter().filter(|test| test.outcome == Outcome::Failed) {
            println!("FAILED: {}\n    {}", test.name, test.reason);
        }
        println!(
            "{}: {passed} passed, {failed} failed, {known} failed as with flannel, {skipped} skipped themselves, \
             {left_out} left out, in {:.0} s",
            self.name, self.seconds
        );
        is_sound && failed == 0
    }
}

/// Reads the report of ginkgo, which has an object for each program of tests.
pub fn read(ginkgo: &Path) -> Vec<Value> {
    let text = fs::read_to_string(ginkgo).expect("ginkgo writes its report");
    serde_json::from_str(&text).expect("ginkgo's report is JSON")
}

/// Returns the tests of a run in a cluster with this backend, by their names. Tests that were not begun and are not in `left_out` do not
/// belong to them: [`Ending`] counts those that were chosen.
pub fn tests_of(suites: &[Value], backend: &str, left_out: &[&LeftOut]) -> Vec<Test> {
    let mut tests: Vec<Test> = specs(suites).filter_map(|spec| test(spec, backend, left_out)).collect();
    tests.sort_by(|a, b| a.name.cmp(&b.name));
    tests
}

fn specs(suites: &[Value]) -> impl Iterator<Item = &Value> {
    suites.iter().flat_map(|suite| suite["SpecReports"].as_array()).flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn first_line(spec: &Value) -> String {
    text(&spec["Failure"]["Message"]).lines().next().unwrap_or_default().to_owned()
}

/// The other parts of the report are steps before and after all tests.
fn is_test(spec: &Value) -> bool {
    spec["LeafNodeType"] == "It"
}

fn was_skipped(spec: &Value) -> bool {
    matches!(text(&spec["State"]), "skipped" | "pending")
}

fn has_failed(spec: &Value) -> bool {
    text(&spec["State"]) != "passed" && !was_skipped(spec)
}

/// Returns false for a test that was not chosen, and for one whose turn never came. ginkgo skips both without an attempt and a message.
fn was_begun(spec: &Value) -> bool {
    let attempts = spec["NumAttempts"].as_u64().unwrap_or_default();
    !was_skipped(spec) || attempts > 0 || !text(&spec["Failure"]["Message"]).is_empty()
}

fn test(spec: &Value, backend: &str, left_out: &[&LeftOut]) -> Option<Test> {
    if !is_test(spec) {
        return None;
    }
    let texts = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten().chain([&spec["LeafNodeText"]]);
    let name = texts.filter_map(Value::as_str).collect::<Vec<_>>().join(" ");
    let (outcome, reason) = if !was_begun(spec) {
        let out = left_out.iter().find(|out| name.starts_with("[sig-network]") && name.contains(out.name))?;
        (Outcome::LeftOut, out.reason.to_owned())
    } else if was_skipped(spec) {
        (Outcome::Skipped, first_line(spec))
    } else if has_failed(spec) {
        match KNOWN.iter().find(|known| known.backend == backend && name.contains(known.name)) {
            Some(known) => (Outcome::KnownFailure, known.reason.to_owned()),
            None => (Outcome::Failed, first_line(spec)),
        }
    } else {
        (Outcome::Passed, String::new())
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns a test as ginkgo reports it. An attempt is counted where a test was begun.
    fn spec(name: &str, state: &str, attempts: u64, message: &str) -> Value {
        json!({
            "LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeText": name,
            "State": state, "NumAttempts": attempts, "Failure": {"Message": message}, "RunTime": 2e9,
        })
    }

    fn suite(chosen: u64, succeeded: bool, reasons: &[&str], specs: Vec<Value>) -> Vec<Value> {
        vec![json!({
            "SuiteSucceeded": succeeded, "SpecialSuiteFailureReasons": reasons,
            "PreRunStats": {"TotalSpecs": 100, "SpecsThatWillRun": chosen}, "SpecReports": specs,
        })]
    }

    fn report(backend: &str, suites: &[Value]) -> Report {
        let left_out = LeftOut { name: "[Feature:Ingress]", reason: "needs an Ingress controller" };
        Report {
            name: format!("ipv4 {backend}"),
            kubernetes: "v1".to_owned(),
            weft: "0.1.0".to_owned(),
            commit: "0123456789ab".to_owned(),
            day: "2026-11-23".to_owned(),
            seconds: 1.0,
            tests: tests_of(suites, backend, &[&left_out]),
            ending: Ending::of(suites),
        }
    }

    fn counts(report: &Report) -> [usize; 5] {
        [Outcome::Passed, Outcome::Failed, Outcome::KnownFailure, Outcome::Skipped, Outcome::LeftOut]
            .map(|outcome| report.count(outcome))
    }

    #[test]
    fn a_skipped_test_is_never_counted_as_passed() {
        let specs = vec![
            spec("serves", "passed", 1, ""),
            spec("has zones", "skipped", 1, "Requires >= 3 zones\nmore"),
            spec("says nothing", "skipped", 1, ""),
            spec("waits", "pending", 0, ""),
            spec("[Feature:Ingress] routes", "skipped", 0, ""),
        ];
        let report = report("vxlan", &suite(3, true, &[], specs));
        assert_eq!(counts(&report), [1, 0, 0, 2, 1]);
        let zones = report.tests.iter().find(|test| test.name.ends_with("has zones")).unwrap();
        assert_eq!((zones.outcome, zones.reason.as_str()), (Outcome::Skipped, "Requires >= 3 zones"));
        assert!(report.judge(Selection::All));
    }

    #[test]
    fn a_run_in_which_all_tests_skipped_themselves_is_not_good() {
        let all = suite(1, true, &[], vec![spec("has zones", "skipped", 1, "Requires >= 3 zones")]);
        assert!(!report("vxlan", &all).judge(Selection::All));
        assert!(!report("vxlan", &[]).judge(Selection::All));
    }

    #[test]
    fn a_run_that_was_broken_off_is_not_good() {
        let begun_and_not = || vec![spec("serves", "passed", 1, ""), spec("waits", "skipped", 0, "")];
        let interrupted = report("vxlan", &suite(2, false, &["Interrupted by User"], begun_and_not()));
        assert_eq!((interrupted.ending.not_begun, counts(&interrupted)), (1, [1, 0, 0, 0, 0]));
        assert!(!interrupted.judge(Selection::All) && !interrupted.judge(Selection::Netpol));
        // A process of tests that died leaves no tests in the report.
        let died = report("vxlan", &suite(2, true, &[], vec![spec("serves", "passed", 1, "")]));
        assert!(!died.judge(Selection::All));
        let too_late = report("vxlan", &suite(1, false, &["Suite Timeout Elapsed"], begun_and_not()));
        assert!(!too_late.judge(Selection::All));
        let without_reason = report("vxlan", &suite(1, false, &[], begun_and_not()));
        assert!(!without_reason.judge(Selection::All));
        let chosen = report("vxlan", &suite(1, true, &[], begun_and_not()));
        assert!(chosen.judge(Selection::All), "the other test was not chosen");
    }

    #[test]
    fn a_step_before_or_after_the_tests_may_not_fail() {
        let step = json!({"LeafNodeType": "SynchronizedAfterSuite", "State": "failed", "Failure": {"Message": "no"}});
        let report = report("vxlan", &suite(1, false, &[], vec![spec("serves", "passed", 1, ""), step]));
        assert_eq!(report.ending.faults, ["SynchronizedAfterSuite: no"]);
        assert!(!report.judge(Selection::All));
    }

    #[test]
    fn a_known_failure_is_expected_with_its_backend_alone() {
        let specs = || vec![spec("serves", "passed", 1, ""), spec(KNOWN[0].name, "failed", 1, "timed out")];
        let vxlan = report("vxlan", &suite(2, false, &[], specs()));
        assert_eq!(counts(&vxlan), [1, 0, 1, 0, 0]);
        assert!(vxlan.judge(Selection::All));
        let host_gw = report("host-gw", &suite(2, false, &[], specs()));
        assert_eq!(counts(&host_gw), [1, 1, 0, 0, 0]);
        assert!(!host_gw.judge(Selection::All));
    }

    #[test]
    fn failures_are_expected_of_network_policies_alone() {
        let specs = vec![spec("allows", "passed", 1, ""), spec("denies", "failed", 1, "it was reached")];
        let report = report("vxlan", &suite(2, false, &[], specs));
        assert!(report.judge(Selection::Netpol) && !report.judge(Selection::All));
    }

    #[test]
    fn results_without_a_commit_can_be_read() {
        let old = json!({"name": "a", "kubernetes": "v1", "weft": "0.1.0", "day": "x", "seconds": 1.0, "tests": []});
        assert_eq!(serde_json::from_value::<Report>(old).unwrap().commit, "");
    }
}
