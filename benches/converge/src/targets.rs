// SPDX-License-Identifier: Apache-2.0
//! Compares the promises with the results. All promises are ratios within one run, or sizes.
//!
//! A promise is kept if the first run keeps it. Otherwise it is measured again, at most twice, and it is broken if two of three runs miss
//! it. It is an error if there is no number for a promise whose row was wanted.

use crate::measure::{Cell, Run, Who};
use crate::options::Row;

/// How often a promise that was missed is measured in total.
pub const RUNS: usize = 3;

/// A promise and the result of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The backend and the number of peers.
    pub place: String,
    /// The line with its unit.
    pub what: String,
    /// The number. `None` if nothing was measured.
    pub got: Option<f64>,
    /// The largest number that keeps the promise, or the smallest one if `at_least`. `None` if that was not measured.
    pub bound: Option<f64>,
    /// True if the bound is a lower bound.
    pub at_least: bool,
    /// What has to be measured again for a second number, and at which other place. `None` if the second number would be the same.
    pub again: Option<(Row, Vec<String>)>,
}

impl Verdict {
    /// Returns whether the promise is kept. `None` if there is no number.
    pub fn kept(&self) -> Option<bool> {
        let (got, bound) = (self.got?, self.bound?);
        Some(if self.at_least { got >= bound } else { got <= bound })
    }
}

/// The result of all runs for a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stand {
    /// The first run kept it.
    Kept,
    /// The first run missed it, two later ones kept it.
    Noise,
    /// It was missed, and must be measured again.
    Open,
    /// Two runs missed it, or it cannot be measured again.
    Broken,
    /// There is no number.
    Unmeasured,
}

/// A promise with the verdicts of the first run and of later ones.
#[derive(Debug, Clone)]
pub struct Judged {
    /// The verdict of the first run.
    pub verdict: Verdict,
    /// Whether each run kept it. A later run without a number did not.
    pub runs: Vec<bool>,
}

impl Judged {
    /// Returns the result of all runs.
    pub fn stand(&self) -> Stand {
        let kept = self.runs.iter().filter(|kept| **kept).count();
        let missed = self.runs.len() - kept;
        match self.verdict.kept() {
            None => Stand::Unmeasured,
            Some(true) => Stand::Kept,
            Some(false) if missed >= 2 || self.verdict.again.is_none() => Stand::Broken,
            Some(false) if kept >= 2 => Stand::Noise,
            Some(false) => Stand::Open,
        }
    }

    /// Returns true if the bench must fail because of it.
    pub fn is_bad(&self) -> bool {
        !matches!(self.stand(), Stand::Kept | Stand::Noise)
    }

    /// Returns the text for people.
    pub fn word(&self) -> String {
        match self.stand() {
            Stand::Kept => "kept".to_owned(),
            Stand::Noise => format!("kept, {} of {} runs", self.runs.len() - 1, self.runs.len()),
            Stand::Open => "MISSED".to_owned(),
            Stand::Broken => {
                format!("BROKEN, {} of {} runs", self.runs.iter().filter(|kept| !**kept).count(), self.runs.len())
            }
            Stand::Unmeasured => "NOT MEASURED".to_owned(),
        }
    }
}

/// Combines the verdicts of a first run with those of later runs, which contain what was measured again.
pub fn judge(first: Vec<Verdict>, later: &[Vec<Verdict>]) -> Vec<Judged> {
    let all = |verdict: Verdict| {
        let same = |other: &&Verdict| other.place == verdict.place && other.what == verdict.what;
        let again = later.iter().filter_map(|run| run.iter().find(same)).map(|other| other.kept() == Some(true));
        let runs = verdict.kept().into_iter().chain(again).collect();
        Judged { verdict, runs }
    };
    first.into_iter().map(all).collect()
}

/// Judges a run together with its later runs. A later run counts only for what was measured again in it.
pub fn judged(run: &Run) -> Vec<Judged> {
    let later: Vec<Vec<Verdict>> = run
        .again
        .iter()
        .map(|again| check(again).into_iter().filter(|v| again.doubtful.contains(&v.name())).collect())
        .collect();
    judge(check(run), &later)
}

/// Returns the promises that must be measured once more.
pub fn open(judged: &[Judged]) -> Vec<&Verdict> {
    judged.iter().filter(|one| one.stand() == Stand::Open).map(|one| &one.verdict).collect()
}

/// Returns why the bench fails, as text. It is empty if every promise is kept.
pub fn complaints(judged: &[Judged]) -> Vec<String> {
    let bad = judged.iter().filter(|one| one.is_bad());
    bad.map(|one| format!("{}: {}", one.verdict.name(), one.word())).collect()
}

impl Verdict {
    /// The place and the promise.
    pub fn name(&self) -> String {
        format!("{} {}", self.place, self.what)
    }
}

/// Returns the bound for the resident memory in MB: 12.5 with 1,000 peers, 16.5 with 5,000, 65 with 50,000, and linear between these.
pub fn memory_bound(peers: f64) -> f64 {
    let between = |(x0, y0): (f64, f64), (x1, y1): (f64, f64)| y0 + (peers - x0) / (x1 - x0) * (y1 - y0);
    if peers <= 1000.0 {
        12.5
    } else if peers <= 5000.0 {
        between((1000.0, 12.5), (5000.0, 16.5))
    } else {
        between((5000.0, 16.5), (50_000.0, 65.0))
    }
}

/// Returns all promises about the rows of this run.
pub fn check(run: &Run) -> Vec<Verdict> {
    let mut all = Vec::new();
    for at in run.sites() {
        all.extend(Place { run, at }.promises());
    }
    for backend in ["vxlan", "host-gw"] {
        let measured = |peers| run.sites().contains(&(backend, peers));
        if measured(5000) && measured(50_000) {
            let cold = |peers| run.value((backend, peers), "cold start", Who::Weft);
            all.push(Verdict {
                place: format!("{backend} 50000"),
                what: "cold start, times that of 5000".to_owned(),
                got: cold(5000).zip(cold(50_000)).map(|(small, large)| large / small),
                bound: Some(12.0),
                at_least: false,
                again: Some((Row::Cold, vec![format!("{backend} 5000")])),
            });
        }
    }
    if run.binary_mb > 0.0 {
        all.push(Verdict {
            place: "binary".to_owned(),
            what: "static, without Kubernetes, MB".to_owned(),
            got: Some(run.binary_mb),
            bound: Some(12.0),
            at_least: false,
            again: None,
        });
    }
    all
}

/// A backend with a number of peers.
struct Place<'a> {
    run: &'a Run,
    at: (&'a str, usize),
}

impl Place<'_> {
    fn weft(&self, what: &str) -> Option<f64> {
        self.run.value(self.at, what, Who::Weft)
    }

    fn floor(&self, what: &str) -> Option<f64> {
        self.run.value(self.at, what, Who::Floor)
    }

    /// Adds the promise that `got` is at most `bound`.
    fn most(&self, row: Row, what: &str, got: Option<f64>, bound: Option<f64>) -> Verdict {
        let place = format!("{} {}", self.at.0, self.at.1);
        Verdict { place, what: what.to_owned(), got, bound, at_least: false, again: Some((row, Vec::new())) }
    }

    fn promises(&self) -> Vec<Verdict> {
        let all = match self.at.0 {
            "udp" => self.packets(),
            "wireguard" => self.wireguard(),
            _ => [self.starts(), self.events(), self.repairs(), self.costs()].concat(),
        };
        let asked = |verdict: &Verdict| verdict.again.as_ref().is_none_or(|(row, _)| self.run.asked(*row));
        all.into_iter().filter(asked).collect()
    }

    /// The promises of udp. A flow of UDP packets is compared, too, but nothing is promised for it (docs/bench/method.md).
    fn packets(&self) -> Vec<Verdict> {
        let Some(other) = self.run.cell(self.at, "TCP", Who::Flanneld) else { return Vec::new() };
        let times = self.weft("TCP").zip(other.value()).map(|(weft, other)| weft / other);
        let verdict = self.most(Row::Packets, "TCP, times more than flanneld", times, Some(3.0));
        vec![Verdict { at_least: true, ..verdict }]
    }

    fn wireguard(&self) -> Vec<Verdict> {
        let (lost, audit) = ("packets lost over a restart", "CPU of a comparison of all peers");
        vec![
            self.most(Row::Vm, lost, self.weft(lost), Some(0.0)),
            // The agent compares every 5 s or more often, with at most 0.1 % of a core. The kernel needs a fifth of that.
            self.most(Row::Audit, "CPU of a comparison of all peers, ms", self.weft(audit), Some(4.0)),
        ]
    }

    fn starts(&self) -> Vec<Verdict> {
        let cold = self.floor("cold start").zip(self.floor("list")).map(|(entries, list)| 2.0 * entries + list + 30.0);
        let writes = "restart in place, writes";
        let end = "end after SIGTERM";
        let mut all = vec![
            self.most(Row::Cold, "cold start, ms", self.weft("cold start"), cold),
            self.most(Row::Restart, writes, self.weft(writes), Some(0.0)),
            self.most(Row::Restart, "end after SIGTERM, ms", self.weft(end), Some(1000.0)),
        ];
        // flanneld's own time differs between machines: 3.5 s and 6.0 s were measured for vxlan, with one time of weft (135 and 137 ms).
        let faster = [(("vxlan", 5000), 20.0), (("host-gw", 5000), 200.0)].into_iter().find(|bound| bound.0 == self.at);
        // Without flanneld there is nothing to compare with, so there is no promise.
        if let (Some((_, bound)), Some(other)) = (faster, self.run.cell(self.at, "cold start", Who::Flanneld)) {
            let took = match other {
                Cell::Value(ms) => Some(*ms),
                // It took at least this time.
                Cell::Cut(seconds) => Some(seconds * 1e3),
                Cell::None(_) => None,
            };
            let times = self.weft("cold start").zip(took).map(|(weft, other)| other / weft);
            let verdict = self.most(Row::Cold, "cold start, times faster than flanneld", times, Some(bound));
            all.push(Verdict { at_least: true, ..verdict });
        }
        all
    }

    fn events(&self) -> Vec<Verdict> {
        let mut all = Vec::new();
        for what in ["add", "change", "remove"] {
            for (part, slack) in [("p50", 0.3), ("p99", 2.0)] {
                let row = format!("{what} {part}");
                let bound = self.floor(&row).map(|floor| floor + slack);
                all.push(self.most(Row::Event, &format!("{row}, ms"), self.weft(&row), bound));
            }
        }
        all
    }

    fn repairs(&self) -> Vec<Verdict> {
        let has_device = self.at.0 != "host-gw";
        let kinds: &[&str] = if has_device { &["route", "FDB", "neighbour"] } else { &["route"] };
        let mut all = Vec::new();
        for what in kinds {
            for (part, bound) in [("p50", 3.0), ("p99", 20.0)] {
                let row = format!("{what} repaired {part}");
                all.push(self.most(Row::Repair, &format!("{row}, ms"), self.weft(&row), Some(bound)));
            }
        }
        if has_device {
            let bound = self.floor("device deleted").map(|floor| 2.0 * floor + 20.0);
            all.push(self.most(Row::Device, "device deleted, ms", self.weft("device deleted"), bound));
        }
        all
    }

    fn costs(&self) -> Vec<Verdict> {
        // A peer with two families has twice as many entries.
        let families = if self.at.0 == "vxlan-dual" { 2.0 } else { 1.0 };
        let memory = memory_bound(families * self.at.1 as f64);
        let mut all = vec![self.most(Row::Cold, "memory, MB", self.weft("memory"), Some(memory))];
        if let Some((_, bound)) = [(5000, 0.1), (50_000, 0.5)].into_iter().find(|bound| bound.0 == self.at.1) {
            all.push(self.most(Row::Idle, "CPU idle, %", self.weft("CPU idle"), Some(bound)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: (&str, usize) = ("vxlan", 5000);

    /// Returns a run of the cold start alone, with a bound of 100 ms.
    fn cold(weft: Cell) -> Run {
        let mut run = Run { rows: vec![Row::Cold], ..Run::default() };
        run.note(AT, "list", Who::Floor, Cell::Value(20.0));
        run.note(AT, "cold start", Who::Floor, Cell::Value(25.0));
        run.note(AT, "cold start", Who::Weft, weft);
        run.note(AT, "memory", Who::Weft, Cell::Value(13.0));
        run
    }

    fn again(weft: f64) -> Run {
        Run { doubtful: vec!["vxlan 5000 cold start, ms".to_owned()], ..cold(Cell::Value(weft)) }
    }

    fn stand(run: &Run) -> Stand {
        let all = judged(run);
        let one = all.iter().find(|one| one.verdict.what == "cold start, ms").unwrap();
        assert_eq!(complaints(&all).is_empty(), !one.is_bad(), "{:?}", complaints(&all));
        one.stand()
    }

    #[test]
    fn bounds_are_those_promised() {
        assert_eq!([1000.0, 5000.0, 50_000.0].map(memory_bound), [12.5, 16.5, 65.0]);
        let mut run = cold(Cell::Value(101.0));
        run.rows.push(Row::Event);
        run.note(AT, "cold start", Who::Flanneld, Cell::Value(3030.0));
        for what in ["add", "change", "remove"] {
            for part in ["p50", "p99"] {
                run.note(AT, &format!("{what} {part}"), Who::Floor, Cell::Value(1.0));
                run.note(AT, &format!("{what} {part}"), Who::Weft, Cell::Value(1.4));
            }
        }
        let all: Vec<(String, Option<f64>, Option<bool>)> =
            check(&run).iter().map(|v| (v.what.clone(), v.bound, v.kept())).collect();
        let row = |what: &str, bound: f64, kept: bool| (what.to_owned(), Some(bound), Some(kept));
        assert_eq!(
            all,
            [
                row("cold start, ms", 100.0, false),
                row("cold start, times faster than flanneld", 20.0, true),
                row("add p50, ms", 1.3, false),
                row("add p99, ms", 3.0, true),
                row("change p50, ms", 1.3, false),
                row("change p99, ms", 3.0, true),
                row("remove p50, ms", 1.3, false),
                row("remove p99, ms", 3.0, true),
                row("memory, MB", 16.5, true),
            ]
        );
    }

    #[test]
    fn both_families_of_a_peer_have_a_bound_for_memory() {
        let mut run = Run { rows: vec![Row::Cold], ..Run::default() };
        run.note(("vxlan-dual", 5000), "memory", Who::Weft, Cell::Value(22.0));
        let verdict = check(&run).into_iter().find(|v| v.what == "memory, MB").unwrap();
        assert_eq!((verdict.bound, verdict.kept()), (Some(memory_bound(10_000.0)), Some(false)));
    }

    #[test]
    fn what_one_run_keeps_is_kept_and_what_two_miss_is_broken() {
        assert_eq!(stand(&cold(Cell::Value(99.0))), Stand::Kept);
        let mut run = cold(Cell::Value(101.0));
        assert_eq!(stand(&run), Stand::Open, "missed once");
        assert_eq!(open(&judged(&run)).len(), 1);
        run.again.push(again(99.0));
        assert_eq!(stand(&run), Stand::Open, "one against one");
        run.again.push(again(99.0));
        assert_eq!(stand(&run), Stand::Noise);
        run.again[1] = again(101.0);
        assert_eq!(stand(&run), Stand::Broken);
        run.again = vec![again(101.0)];
        assert_eq!(stand(&run), Stand::Broken, "no third run is needed");
        assert!(open(&judged(&run)).is_empty());
        assert_eq!(complaints(&judged(&run)), ["vxlan 5000 cold start, ms: BROKEN, 2 of 2 runs"]);
    }

    /// A later run contains rows that were not in doubt, and it must not count for them.
    #[test]
    fn a_later_run_speaks_of_what_was_in_doubt_alone() {
        let mut run = cold(Cell::Value(101.0));
        let mut later = again(99.0);
        later.doubtful.clear();
        run.again = vec![later.clone(), later];
        assert_eq!(stand(&run), Stand::Open);
    }

    #[test]
    fn what_measured_nothing_is_an_error_and_no_pass() {
        for nothing in [Cell::Cut(0.0), Cell::Cut(120.0), Cell::None("why".to_owned())] {
            let run = cold(nothing);
            assert_eq!(stand(&run), Stand::Unmeasured);
            assert!(open(&judged(&run)).is_empty(), "it is an error at once");
        }
        // Without the floor there is no bound.
        let mut run = Run { rows: vec![Row::Cold], ..Run::default() };
        run.note(AT, "cold start", Who::Weft, Cell::Value(1.0));
        assert_eq!(stand(&run), Stand::Unmeasured);
        // Every row was wanted, and there are only starts.
        let run = Run { rows: Vec::new(), ..cold(Cell::Value(99.0)) };
        let said = complaints(&judged(&run));
        for what in
            ["add p50", "FDB repaired p99", "device deleted", "restart in place, writes", "end after", "CPU idle"]
        {
            assert!(said.iter().any(|one| one.contains(what) && one.contains("NOT MEASURED")), "{what}: {said:?}");
        }
        // host-gw has no device that could be deleted.
        let mut run = Run::default();
        run.note(("host-gw", 1000), "list", Who::Floor, Cell::Value(1.0));
        assert!(!complaints(&judged(&run)).iter().any(|one| one.contains("device") || one.contains("FDB")));
    }

    #[test]
    fn udp_is_compared_with_flanneld_and_wireguard_loses_nothing() {
        let mut run = Run::default();
        run.note(("udp", 1), "TCP", Who::Weft, Cell::Value(590.0));
        run.note(("udp", 5000), "cold start", Who::Weft, Cell::Value(145.0));
        assert!(check(&run).is_empty(), "without flanneld there is no promise for udp: {:?}", check(&run));
        run.note(("udp", 1), "TCP", Who::Flanneld, Cell::Value(200.0));
        run.note(("wireguard", 1000), "packets lost over a restart", Who::Weft, Cell::Value(1.0));
        run.note(("wireguard", 1000), "CPU of a comparison of all peers", Who::Weft, Cell::Value(3.9));
        let kept = |run: &Run| check(run).iter().map(|v| (v.name(), v.kept())).collect::<Vec<_>>();
        let row = |name: &str, is_kept| (name.to_owned(), Some(is_kept));
        assert_eq!(
            kept(&run),
            [
                row("udp 1 TCP, times more than flanneld", false),
                row("wireguard 1000 packets lost over a restart", false),
                row("wireguard 1000 CPU of a comparison of all peers, ms", true),
            ]
        );
        run.note(("udp", 1), "TCP", Who::Weft, Cell::Value(600.0));
        run.note(("wireguard", 1000), "packets lost over a restart", Who::Weft, Cell::Value(0.0));
        assert!(check(&run).iter().all(|verdict| verdict.kept() == Some(true)), "{:?}", check(&run));
        // A promise about udp must not be missing because a flanneld that was measured carried nothing.
        run.note(("udp", 1), "TCP", Who::Flanneld, Cell::None("why".to_owned()));
        assert!(complaints(&judged(&run)).iter().any(|one| one.contains("udp 1") && one.contains("NOT MEASURED")));
    }

    #[test]
    fn what_cannot_change_is_broken_at_once() {
        let run = Run { binary_mb: 12.1, ..Run::default() };
        assert_eq!(complaints(&judged(&run)), ["binary static, without Kubernetes, MB: BROKEN, 1 of 1 runs"]);
        assert!(complaints(&judged(&Run { binary_mb: 11.9, ..Run::default() })).is_empty());
    }

    /// If flanneld was cut, it took at least this time.
    #[test]
    fn a_cut_flanneld_counts_with_the_time_it_was_given() {
        for (seconds, kept) in [(120.0, true), (1.5, false)] {
            let mut run = cold(Cell::Value(99.0));
            run.note(AT, "cold start", Who::Flanneld, Cell::Cut(seconds));
            let verdict = check(&run).into_iter().find(|v| v.at_least).unwrap();
            assert_eq!(verdict.kept(), Some(kept), "{seconds}");
        }
    }
}
