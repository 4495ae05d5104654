// SPDX-License-Identifier: Apache-2.0
//! The results: one line for each question, with the answers of floor, weft and flanneld. They are written as JSON, from which tables, plots
//! and documents are made.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::options::Row;

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cell {
    /// A number in the unit of the line.
    Value(f64),
    /// It was ended after this number of seconds without a result.
    Cut(f64),
    /// There is no result. This is the reason.
    None(String),
}

impl Cell {
    /// Returns the number.
    pub fn value(&self) -> Option<f64> {
        match self {
            Cell::Value(value) => Some(*value),
            Cell::Cut(_) | Cell::None(_) => None,
        }
    }

    /// Returns the time in milliseconds, or that it was cut.
    pub fn time(took: Option<Duration>, limit: Duration) -> Cell {
        took.map_or(Cell::Cut(limit.as_secs_f64()), |took| Cell::Value(took.as_secs_f64() * 1e3))
    }
}

/// The subject of an answer.
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
    /// `vxlan`, `host-gw`, `vxlan-dual`, `udp`, `wireguard`.
    pub backend: String,
    /// Number of peers.
    pub peers: usize,
    /// The question: one of [`NAMES`].
    pub what: String,
    /// The answers.
    pub cells: BTreeMap<Who, Cell>,
}

/// A run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Run {
    /// The machine, the kernel and the versions, as names and values.
    pub about: Vec<(String, String)>,
    /// The size of the static binary without Kubernetes in MB, or 0 if the binary has Kubernetes.
    pub binary_mb: f64,
    /// The rows that were wanted. If it is empty, every row was.
    #[serde(default)]
    pub rows: Vec<Row>,
    /// Everything that was measured.
    pub lines: Vec<Line>,
    /// Later runs of what missed its bound in this one.
    #[serde(default)]
    pub again: Vec<Run>,
    /// In a later run: the promises because of which it was made.
    #[serde(default)]
    pub doubtful: Vec<String>,
}

/// All possible lines in the order of the table, with their units.
pub const NAMES: &[(&str, &str)] = &[
    ("TCP", "Mbit/s"),
    ("UDP packets of 1,400 bytes", "Mbit/s"),
    ("list", "ms"),
    ("cold start", "ms"),
    ("cold start, first entry", "ms"),
    ("cold start, first packet through the tunnel", "ms"),
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
    ("packets sent over a restart", ""),
    ("packets lost over a restart", ""),
    ("CPU of a comparison of all peers", "ms"),
];

impl Run {
    /// Returns true if this row was wanted.
    pub fn asked(&self, row: Row) -> bool {
        row == Row::Cold || self.rows.is_empty() || self.rows.contains(&row)
    }

    /// Adds one answer.
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

    /// Returns one answer.
    pub fn cell(&self, (backend, peers): (&str, usize), what: &str, who: Who) -> Option<&Cell> {
        let same = |line: &&Line| line.backend == backend && line.peers == peers && line.what == what;
        self.lines.iter().find(same)?.cells.get(&who)
    }

    /// Returns one number.
    pub fn value(&self, at: (&str, usize), what: &str, who: Who) -> Option<f64> {
        self.cell(at, what, who)?.value()
    }

    /// Returns the backends and numbers of peers that were measured, in order.
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

/// Returns a quantile of some durations, by the nearest rank.
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
