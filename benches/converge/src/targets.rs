// SPDX-License-Identifier: Apache-2.0
//! What was promised, held against what one run has measured. All are ratios within the run, or sizes.

use crate::measure::{Run, Who};

/// A promise and how it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// Where: backend and peers.
    pub place: String,
    /// What.
    pub what: String,
    /// Figure and unit measured.
    pub got: f64,
    /// The most (or, where `at_least`, the least) that keeps the promise.
    pub bound: f64,
    /// The bound is a lower one.
    pub at_least: bool,
}

impl Verdict {
    /// Whether the promise is kept.
    pub fn kept(&self) -> bool {
        if self.at_least { self.got >= self.bound } else { self.got <= self.bound }
    }
}

/// Resident memory at a number of peers, MB: 12 at 1,000, 16 at 5,000, 60 at 50,000, straight lines between.
pub fn memory_bound(peers: f64) -> f64 {
    let between = |(x0, y0): (f64, f64), (x1, y1): (f64, f64)| y0 + (peers - x0) / (x1 - x0) * (y1 - y0);
    if peers <= 1000.0 {
        12.0
    } else if peers <= 5000.0 {
        between((1000.0, 12.0), (5000.0, 16.0))
    } else {
        between((5000.0, 16.0), (50_000.0, 60.0))
    }
}

/// All promises that this run can speak of.
pub fn check(run: &Run) -> Vec<Verdict> {
    let mut all = Vec::new();
    for at in run.sites() {
        all.extend(place(run, at));
    }
    for backend in ["vxlan", "host-gw"] {
        let cold = |peers| run.value((backend, peers), "cold start", Who::Weft);
        if let (Some(small), Some(large)) = (cold(5000), cold(50_000)) {
            all.push(most(&format!("{backend} 50000"), "cold start, times that of 5000", large / small, 12.0));
        }
    }
    if run.binary_mb > 0.0 {
        all.push(most("binary", "static, without Kubernetes, MB", run.binary_mb, 12.0));
    }
    all
}

fn most(place: &str, what: &str, got: f64, bound: f64) -> Verdict {
    Verdict { place: place.to_owned(), what: what.to_owned(), got, bound, at_least: false }
}

fn place(run: &Run, at: (&str, usize)) -> Vec<Verdict> {
    let name = format!("{} {}", at.0, at.1);
    let (weft, floor) = (|what: &str| run.value(at, what, Who::Weft), |what: &str| run.value(at, what, Who::Floor));
    let mut all = Vec::new();
    let mut hold = |what: &str, got: Option<f64>, bound: Option<f64>| {
        if let (Some(got), Some(bound)) = (got, bound) {
            all.push(most(&name, what, got, bound));
        }
    };
    let cold = floor("cold start").zip(floor("list")).map(|(entries, list)| 2.0 * entries + list + 30.0);
    hold("cold start, ms", weft("cold start"), cold);
    for what in ["add", "change", "remove"] {
        for (part, slack) in [("p50", 0.3), ("p99", 2.0)] {
            let row = format!("{what} {part}");
            hold(&format!("{row}, ms"), weft(&row), floor(&row).map(|floor| floor + slack));
        }
    }
    for what in ["route", "FDB", "neighbour"] {
        for (part, bound) in [("p50", 3.0), ("p99", 20.0)] {
            let row = format!("{what} repaired {part}");
            hold(&format!("{row}, ms"), weft(&row), Some(bound));
        }
    }
    hold("device deleted, ms", weft("device deleted"), floor("device deleted").map(|floor| 2.0 * floor + 20.0));
    hold("restart in place, writes", weft("restart in place, writes"), Some(0.0));
    hold("memory, MB", weft("memory"), (at.0 != "vxlan-dual").then(|| memory_bound(at.1 as f64)));
    hold("CPU idle, %", weft("CPU idle"), [(5000, 0.1), (50_000, 0.5)].into_iter().find(|b| b.0 == at.1).map(|b| b.1));
    let ours = weft("cold start").zip(run.value(at, "cold start", Who::Flanneld)).map(|(weft, other)| other / weft);
    let faster = [(("vxlan", 5000), 30.0), (("host-gw", 5000), 300.0)].into_iter().find(|bound| bound.0 == at);
    if let (Some(got), Some((_, bound))) = (ours, faster) {
        let what = "cold start, times faster than flanneld".to_owned();
        all.push(Verdict { place: name, what, got, bound, at_least: true });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Cell;

    #[test]
    fn bounds_are_those_promised() {
        assert_eq!([1000.0, 5000.0, 50_000.0].map(memory_bound), [12.0, 16.0, 60.0]);
        let mut run = Run::default();
        let at = ("vxlan", 5000);
        for (what, who, value) in [
            ("list", Who::Floor, 20.0),
            ("cold start", Who::Floor, 25.0),
            ("cold start", Who::Weft, 101.0),
            ("cold start", Who::Flanneld, 3030.0),
            ("add p50", Who::Floor, 1.0),
            ("add p50", Who::Weft, 1.2),
        ] {
            run.note(at, what, who, Cell::Value(value));
        }
        let kept: Vec<(String, f64, bool)> = check(&run).iter().map(|v| (v.what.clone(), v.bound, v.kept())).collect();
        assert_eq!(
            kept,
            [
                ("cold start, ms".to_owned(), 100.0, false),
                ("add p50, ms".to_owned(), 1.3, true),
                ("cold start, times faster than flanneld".to_owned(), 30.0, true),
            ]
        );
    }
}
