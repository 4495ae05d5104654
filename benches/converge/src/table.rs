// SPDX-License-Identifier: Apache-2.0
//! The results as text: aligned for a terminal, or as Markdown.

use std::fmt::Write as _;

use crate::measure::{Cell, NAMES, Run, Who};
use crate::targets::Judged;

const HEAD: [&str; 6] = ["", "floor", "weft", "flanneld", "weft / floor", "flanneld / weft"];

/// Adds one answer to a run, and prints it to standard error.
pub fn tell(run: &mut Run, at: (&str, usize), (what, who): (&str, Who), cell: Cell) {
    eprintln!("   {:<9} {what}: {}", format!("{who:?}").to_lowercase(), shown(Some(&cell)));
    run.note(at, what, who, cell);
}

/// Returns the heading of a table.
fn heading((backend, peers): (&str, usize)) -> String {
    format!("{peers} {}, {backend}", if peers == 1 { "peer" } else { "peers" })
}

/// Returns all tables for a terminal.
pub fn text(run: &Run) -> String {
    let mut out = String::new();
    for (name, value) in &run.about {
        let _ = writeln!(out, "{name:<18} {value}");
    }
    for at in run.sites() {
        let _ = writeln!(out, "\n{}", heading(at));
        let mut rows = vec![HEAD.map(str::to_owned)];
        rows.extend(lines(run, at));
        out += &aligned(&rows);
    }
    out
}

/// Returns all tables as Markdown.
pub fn markdown(run: &Run) -> String {
    let mut out = String::new();
    for at in run.sites() {
        let _ = writeln!(out, "\n### {}\n\n| {} |\n|---|--:|--:|--:|--:|--:|", heading(at), HEAD.join(" | "));
        for row in lines(run, at) {
            let _ = writeln!(out, "| {} |", row.join(" | "));
        }
    }
    out
}

/// Returns the verdicts of the promises for a terminal. Those that are broken come first.
pub fn targets(judged: &[Judged]) -> String {
    let mut rows = vec![["target", "", "measured", "bound", ""].map(str::to_owned)];
    rows.extend(target_rows(judged));
    aligned(&rows)
}

/// Returns the verdicts as Markdown.
pub fn targets_markdown(judged: &[Judged]) -> String {
    let mut out = "| where | target | measured | bound | |\n|---|---|--:|--:|---|\n".to_owned();
    for row in target_rows(judged) {
        let _ = writeln!(out, "| {} |", row.join(" | "));
    }
    out
}

fn target_rows(judged: &[Judged]) -> impl Iterator<Item = [String; 5]> {
    let mut sorted: Vec<&Judged> = judged.iter().collect();
    sorted.sort_by_key(|one| (!one.is_bad(), one.verdict.kept()));
    sorted.into_iter().map(|one| {
        let v = &one.verdict;
        let sign = if v.at_least { "at least " } else { "" };
        let shown = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), figure);
        [v.place.clone(), v.what.clone(), shown(v.got), format!("{sign}{}", shown(v.bound)), one.word()]
    })
}

fn lines(run: &Run, at: (&str, usize)) -> Vec<[String; 6]> {
    let mut rows = Vec::new();
    for (what, unit) in NAMES {
        let cells = [Who::Floor, Who::Weft, Who::Flanneld].map(|who| run.cell(at, what, who));
        if cells.iter().all(Option::is_none) {
            continue;
        }
        let [floor, weft, other] = cells.map(|cell| cell.and_then(Cell::value));
        let ratio = |above: Option<f64>, below: Option<f64>| match (above, below) {
            (Some(above), Some(below)) if below > 0.0 => figure(above / below),
            _ => String::new(),
        };
        let name = if unit.is_empty() { (*what).to_owned() } else { format!("{what}, {unit}") };
        let [a, b, c] = cells.map(shown);
        rows.push([name, a, b, c, ratio(weft, floor), ratio(other, weft)]);
    }
    rows
}

/// Returns the text of one cell.
pub fn shown(cell: Option<&Cell>) -> String {
    match cell {
        Some(Cell::Value(value)) => figure(*value),
        Some(Cell::Cut(seconds)) => format!("cut, {seconds} s"),
        Some(Cell::None(why)) => why.clone(),
        None => String::new(),
    }
}

/// Formats a number with three digits. The measurement is not more precise than that.
pub fn figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Aligns the columns. The first one is aligned to the left, and the others to the right.
fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut out = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            let _ = if column == 0 { write!(out, "  {cell:<width$}") } else { write!(out, "  {cell:>width$}") };
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_cut_or_is_missing_has_no_ratio() {
        let mut run = Run::default();
        let at = ("host-gw", 20_000);
        run.note(at, "cold start", Who::Floor, Cell::Value(100.0));
        run.note(at, "cold start", Who::Weft, Cell::Value(250.0));
        run.note(at, "cold start", Who::Flanneld, Cell::Cut(120.0));
        run.note(at, "memory", Who::Weft, Cell::Value(25.04));
        let text = text(&run);
        let row = text.lines().find(|line| line.contains("cold start")).unwrap();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>(),
            ["cold", "start,", "ms", "100", "250", "cut,", "120", "s", "2.50"]
        );
        assert!(markdown(&run).contains("| memory, MB |  | 25.0 |  |  |  |"), "{}", markdown(&run));
    }
}
