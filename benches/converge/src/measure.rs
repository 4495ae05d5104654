// SPDX-License-Identifier: Apache-2.0
//! What was measured: one line per question, three answers. Written as JSON, read by table, plots and documents.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::options::Row;

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cell {
    /// A figure in the line's unit.
    Value(f64),
    /// Ended after so many seconds without a result.
    Cut(f64),
    /// There is none, and why.
    None(String),
}

impl Cell {
    /// The figure.
    pub fn value(&self) -> Option<f64> {
        match self {
            Cell::Value(value) => Some(*value),
            Cell::Cut(_) | Cell::None(_) => None,
        }
    }

    /// Milliseconds, or that it was cut.
    pub fn time(took: Option<Duration>, limit: Duration) -> Cell {
        took.map_or(Cell::Cut(limit.as_secs_f64()), |took| Cell::Value(took.as_secs_f64() * 1e3))
    }
}

/// Whose answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Who {
    /// The bare kernel and store.
    Floor,
    /// weft.
    Weft,
    /// flanneld.
    Flanneld,
}

/// One line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Line {
    /// `vxlan`, `host-gw`, `vxlan-dual`.
    pub backend: String,
    /// Number of peers.
    pub peers: usize,
    /// What: one of [`NAMES`].
    pub what: String,
    /// The answers.
    pub cells: BTreeMap<Who, Cell>,
}

/// A run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Run {
    /// Machine, kernel, versions: name and value.
    pub about: Vec<(String, String)>,
    /// Size of the static binary without Kubernetes, MB; 0 when it is one with it.
    pub binary_mb: f64,
    /// What was asked for; empty: every row.
    #[serde(default)]
    pub rows: Vec<Row>,
    /// Everything measured.
    pub lines: Vec<Line>,
    /// Later runs of what this one missed.
    #[serde(default)]
    pub again: Vec<Run>,
    /// In a later run: the promises that it was made for.
    #[serde(default)]
    pub doubtful: Vec<String>,
}

/// Every line that there is, in the order of the table, with its unit.
pub const NAMES: &[(&str, &str)] = &[
    ("list", "ms"),
    ("cold start", "ms"),
    ("cold start, first entry", "ms"),
    ("cold start, CPU", "ms"),
    ("restart in place", "ms"),
    ("restart in place, writes", ""),
    ("end after SIGTERM", "ms"),
    ("add p50", "ms"),
    ("add p99", "ms"),
    ("change p50", "ms"),
    ("change p99", "ms"),
    ("remove p50", "ms"),
    ("remove p99", "ms"),
    ("1,000 adds at once", "ms"),
    ("1,000 removals at once", "ms"),
    ("route repaired p50", "ms"),
    ("route repaired p99", "ms"),
    ("FDB repaired p50", "ms"),
    ("FDB repaired p99", "ms"),
    ("neighbour repaired p50", "ms"),
    ("neighbour repaired p99", "ms"),
    ("device deleted", "ms"),
    ("memory", "MB"),
    ("memory, peak", "MB"),
    ("CPU idle", "%"),
    ("CPU, 100 renewals/s", "%"),
    ("CPU for a status update of another node", "ms"),
];

impl Run {
    /// Whether this row was asked for.
    pub fn asked(&self, row: Row) -> bool {
        row == Row::Cold || self.rows.is_empty() || self.rows.contains(&row)
    }

    /// Notes one answer.
    pub fn note(&mut self, (backend, peers): (&str, usize), what: &str, who: Who, cell: Cell) {
        let same = |line: &&mut Line| line.backend == backend && line.peers == peers && line.what == what;
        let line = match self.lines.iter_mut().find(same) {
            Some(line) => line,
            None => {
                let cells = BTreeMap::new();
                self.lines.push(Line { backend: backend.to_owned(), peers, what: what.to_owned(), cells });
                let last = self.lines.len() - 1;
                &mut self.lines[last]
            }
        };
        line.cells.insert(who, cell);
    }

    /// One answer.
    pub fn cell(&self, (backend, peers): (&str, usize), what: &str, who: Who) -> Option<&Cell> {
        let same = |line: &&Line| line.backend == backend && line.peers == peers && line.what == what;
        self.lines.iter().find(same)?.cells.get(&who)
    }

    /// One figure.
    pub fn value(&self, at: (&str, usize), what: &str, who: Who) -> Option<f64> {
        self.cell(at, what, who)?.value()
    }

    /// Backends and numbers of peers that were measured, in order.
    pub fn sites(&self) -> Vec<(&str, usize)> {
        let mut sites: Vec<(&str, usize)> = Vec::new();
        for line in &self.lines {
            if !sites.contains(&(&line.backend, line.peers)) {
                sites.push((&line.backend, line.peers));
            }
        }
        sites
    }
}

/// A quantile of some durations, the nearest rank.
pub fn quantile(times: &[Duration], part: f64) -> Option<Duration> {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let times: Vec<Duration> = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(quantile(&times, 0.5), Some(Duration::from_millis(100)));
        assert_eq!(quantile(&times, 0.99), Some(Duration::from_millis(198)));
        assert_eq!(quantile(&times[..1], 0.99), Some(Duration::from_millis(200)));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn answers_to_one_question_share_a_line() {
        let mut run = Run::default();
        run.note(("vxlan", 5), "memory", Who::Weft, Cell::Value(7.0));
        run.note(("vxlan", 5), "memory", Who::Flanneld, Cell::Cut(120.0));
        run.note(("vxlan", 6), "memory", Who::Weft, Cell::None("off".into()));
        assert_eq!((run.lines.len(), run.sites()), (2, vec![("vxlan", 5), ("vxlan", 6)]));
        assert_eq!(run.value(("vxlan", 5), "memory", Who::Weft), Some(7.0));
        assert_eq!(run.value(("vxlan", 5), "memory", Who::Flanneld), None);
    }
}
