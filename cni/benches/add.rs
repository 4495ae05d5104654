// SPDX-License-Identifier: Apache-2.0
//! Measures ADD and DEL of weft's plugin and of flannel's (the file that `FLANNEL_CNI` names) in turns, with a delegate that does nothing, and
//! with Debian's bridge and host-local. `WEFT_CNI` names weft's binary; by default it is the one of this build.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a measurement prints, and ends where it cannot go on"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::site::{Site, on_a_node};

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/plugin/site.rs"]
mod site;

/// A delegate that prints a result and ends. No delegate can be faster.
const NOOP: &str = r#"#include <unistd.h>
int main(void) {
    static const char text[] = "{\"cniVersion\":\"0.3.1\",\"ips\":[]}";
    return write(1, text, sizeof text - 1) < 0;
}
"#;
const ROUNDS: usize = 300;
const REAL_ROUNDS: usize = 60;

/// The name of the row where a delegate does nothing.
const EMPTY: &str = "empty delegate";

fn main() {
    // `cargo test` runs benches without this argument, and expects that they measure nothing.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    on_a_node(|site| {
        let ours = std::env::var_os("WEFT_CNI").map_or_else(|| env!("CARGO_BIN_EXE_weft-cni").into(), PathBuf::from);
        let theirs = std::env::var_os("FLANNEL_CNI").map(PathBuf::from);
        let size = |path: &Path| fs::metadata(path).unwrap().len() as f64 / 1e6;
        println!("weft-cni {:.2} MB", size(&ours));
        let mut plugins = vec![("weft", ours)];
        match theirs {
            Some(path) => {
                println!("flannel's plugin {:.2} MB", size(&path));
                plugins.push(("flannel", path));
            }
            None => println!("skipped: no FLANNEL_CNI to compare with"),
        }
        let source = site.path("noop.c");
        fs::write(&source, NOOP).unwrap();
        let made = Command::new("cc").args(["-O2", "-static", "-o"]).arg(site.path("bin/noop")).arg(&source).status();
        assert!(made.unwrap().success(), "cc");
        site.pod("p1");
        let floor = median((0..ROUNDS).map(|_| timed(Command::new(site.path("bin/noop")), &json!({}))).collect());
        println!("bare start of the empty delegate: {}", shown(floor));
        let noop = site.conf(json!({"cniVersion": "0.3.1", "delegate": {"type": "noop"}}));
        compare(&site, &plugins, EMPTY, ROUNDS, &noop);
        let real = site.conf(json!({"cniVersion": "0.3.1"}));
        compare(&site, &plugins, "bridge and host-local", REAL_ROUNDS, &real);
    });
}

/// Measures the plugins in turns, so that a busy moment of the machine slows all of them.
fn compare(site: &Site, plugins: &[(&str, PathBuf)], what: &str, rounds: usize, conf: &Value) {
    let mut adds = vec![Vec::new(); plugins.len()];
    let mut dels = adds.clone();
    for _ in 0..rounds {
        for (number, (_, path)) in plugins.iter().enumerate() {
            site.install(path);
            adds[number].push(timed(site.command("ADD", "p1", "eth0"), conf));
            dels[number].push(timed(site.command("DEL", "p1", "eth0"), conf));
        }
    }
    // The plugin itself must take at most half of the time of flannel's.
    report(&format!("ADD, {what}"), plugins, adds, (what == EMPTY).then_some(0.5));
    report(&format!("DEL, {what}"), plugins, dels, None);
}

fn timed(mut command: Command, conf: &Value) -> Duration {
    use std::io::Write;
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let text = conf.to_string();
    let begin = Instant::now();
    let mut child = command.spawn().unwrap();
    // The empty delegate does not read its input, so writing may fail.
    let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
    assert!(child.wait().unwrap().success());
    begin.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn shown(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

fn report(what: &str, plugins: &[(&str, PathBuf)], times: Vec<Vec<Duration>>, most: Option<f64>) {
    let medians: Vec<_> = times.into_iter().map(median).collect();
    let each: Vec<_> =
        plugins.iter().zip(&medians).map(|((name, _), time)| format!("{name} {}", shown(*time))).collect();
    let ratio = medians.get(1).map(|theirs| medians[0].as_secs_f64() / theirs.as_secs_f64());
    let verdict = ratio
        .zip(most)
        .map(|(ratio, most)| format!(" (at most {most:.2}: {})", if ratio <= most { "met" } else { "MISSED" }));
    let ratio = ratio.map(|ratio| format!(", ratio {ratio:.2}")).unwrap_or_default();
    println!("{what}: {}{ratio}{}", each.join(", "), verdict.unwrap_or_default());
}
