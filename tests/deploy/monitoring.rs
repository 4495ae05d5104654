// SPDX-License-Identifier: Apache-2.0
//! The metrics, the alert rules and the dashboard. Needs `promtool` (Debian package `prometheus`) and fails without it.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use weft::observe::metrics::Metrics;
use weft::observe::status::PeerState;

use super::*;

const RULES: &str = "deploy/prometheus/weft-rules.yml";
const RULES_TEST: &str = "deploy/prometheus/weft-rules.test.yml";
const DASHBOARD: &str = "deploy/grafana/weft.json";

fn promtool(args: &[&str], input: &str) -> Output {
    let mut child = Command::new("promtool")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("cannot run promtool (install the package prometheus): {e}"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Returns metrics of which each family has a member.
fn metrics() -> String {
    let (metrics, now) = (Metrics::new(), Instant::now());
    metrics.pass("lease", Duration::from_millis(1));
    metrics.full_pass("audit");
    metrics.operations("route", "done", 1);
    metrics.repairs("kernel", 1);
    metrics.converged(Duration::from_millis(1));
    metrics.peers(PeerState::Programmed, 1);
    metrics.probe(Some(Duration::from_millis(1)));
    metrics.unreachable(&[("tunnel", 0)], None);
    metrics.tunnel(&Arc::default());
    metrics.render_classic(now)
}

#[test]
fn metrics_follow_the_conventions_of_prometheus() {
    let output = promtool(&["check", "metrics"], &metrics());
    assert!(output.status.success() && said(&output).is_empty(), "promtool check metrics:\n{}", said(&output));
    let wrong = promtool(&["check", "metrics"], "# TYPE weft_things counter\nweft_things 1\n");
    assert!(!wrong.status.success(), "what is wrong is found");
}

#[test]
fn each_alert_fires_alone_and_none_on_a_healthy_node() {
    for args in [["check", "rules", RULES], ["test", "rules", RULES_TEST]] {
        let output = promtool(&args, "");
        assert!(output.status.success(), "promtool {}:\n{}", args.join(" "), said(&output));
    }
    let (rules, tests) = (fs::read_to_string(RULES).unwrap(), fs::read_to_string(RULES_TEST).unwrap());
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() >= 10, "{alerts:?}");
    let page = fs::read_to_string("docs/operations.md").unwrap();
    for alert in alerts {
        assert!(tests.contains(&format!("{{alertname=\"{alert}\"}}")), "no test provokes {alert}");
        assert!(page.contains(&format!("`{alert}`")), "docs/operations.md does not say what to do about {alert}");
    }
}

/// Returns the words that begin like the name of a metric.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("weft_") || word.starts_with("process_")).collect()
}

#[test]
fn the_rules_and_the_dashboard_name_only_metrics_that_exist() {
    let metrics = metrics();
    let exist: BTreeSet<&str> = metrics.lines().filter(|line| !line.starts_with('#')).flat_map(named).collect();
    for file in [RULES, RULES_TEST, DASHBOARD] {
        let text = fs::read_to_string(file).unwrap();
        let missing: Vec<&str> = named(&text).into_iter().filter(|name| !exist.contains(name)).collect();
        assert!(
            missing.is_empty() && named(&text).len() >= 7,
            "{file} names {missing:?}, which the agent does not have"
        );
    }
}

/// Returns the queries of the dashboard, for all instances.
fn queries() -> Vec<String> {
    let dashboard: serde_json::Value = serde_json::from_str(&fs::read_to_string(DASHBOARD).unwrap()).unwrap();
    let targets = dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    targets.map(|target| target["expr"].as_str().unwrap().replace("$instance", ".*")).collect()
}

#[test]
fn the_dashboard_shows_every_metric_and_prometheus_understands_its_queries() {
    let metrics = metrics();
    let families = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let text = queries().join("\n");
    let missing: Vec<&str> = families.filter(|family| *family != "weft_build_info" && !text.contains(family)).collect();
    assert!(missing.is_empty(), "the dashboard does not show {missing:?}");
    let check = |queries: &[String]| {
        let rule = |(number, query): (usize, &String)| serde_json::json!({ "record": format!("dashboard:query:{number}"), "expr": query });
        // YAML contains JSON.
        let file = tempfile::NamedTempFile::new().unwrap();
        let rules: Vec<_> = queries.iter().enumerate().map(rule).collect();
        fs::write(&file, serde_json::json!({ "groups": [{ "name": "dashboard", "rules": rules }] }).to_string())
            .unwrap();
        promtool(&["check", "rules", file.path().to_str().unwrap()], "")
    };
    let output = check(&queries());
    assert!(output.status.success(), "{}", said(&output));
    assert!(!check(&["sum by (rate(x[5m])".to_owned()]).status.success(), "a wrong query is found");
}
