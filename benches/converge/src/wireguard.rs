// SPDX-License-Identifier: Apache-2.0
//! Measures the backend wireguard: a cluster in a virtual machine, whose kernel has the module, and the CPU time of a comparison of all peers
//! ([`audit`]), which needs no module.
//!
//! tests/vm/wireguard-many.sh is what happens in the machine. It prints a line for each figure: `figure: WHO VALUE ROW`.

mod audit;

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::measure::{Cell, NAMES, Run, Who};
use crate::options::{Options, Row};
use crate::peers::Backend;
use crate::table;

/// Builds and runs the scenario. `make bench` has fetched the kernel before, because the namespace of the bench has no way to a mirror.
const SCENARIO: &str =
    "test --quiet --workspace --locked --test vm -- --ignored --exact bench::wireguard_with_many_peers --show-output";

/// One figure of the virtual machine.
#[derive(Debug, PartialEq)]
struct Figure<'a> {
    who: Who,
    value: f64,
    what: &'a str,
}

/// Measures what is wanted with this number of peers.
///
/// # Errors
/// The virtual machine fails, or prints no figures.
pub fn all(peers: usize, options: &Options, run: &mut Run) -> Result<()> {
    let at = (Backend::Wireguard.name(), peers);
    if options.wants(Row::Audit) {
        let cost = audit::cost(peers)?;
        table::tell(run, at, ("CPU of a comparison of all peers", Who::Weft), Cell::time(Some(cost), cost));
    }
    if options.wants(Row::Vm) {
        let output = machine(options)?;
        let figures = figures(&output)?;
        ensure!(!figures.is_empty(), "the virtual machine printed no figures");
        for Figure { who, value, what } in figures {
            table::tell(run, at, (what, who), Cell::Value(value));
        }
    }
    Ok(())
}

/// Runs the scenario, and returns what it printed.
fn machine(options: &Options) -> Result<String> {
    let absolute = |path: &Path| std::path::absolute(path).with_context(|| format!("find {}", path.display()));
    let mut command = Command::new("cargo");
    command.args(SCENARIO.split(' ')).env("WEFT_BIN", absolute(&options.weft)?).env_remove("FLANNELD");
    if let Some(path) = &options.flanneld {
        command.env("FLANNELD", absolute(path)?);
    }
    let out = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("start cargo")?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    if !out.status.success() {
        let last: Vec<&str> = said.lines().rev().take(60).collect();
        bail!("the virtual machine failed:\n{}", last.into_iter().rev().collect::<Vec<_>>().join("\n"));
    }
    Ok(said)
}

/// Returns the figures in what the virtual machine printed.
///
/// # Errors
/// A line of a figure is not as the table needs it.
fn figures(output: &str) -> Result<Vec<Figure<'_>>> {
    let lines = output.lines().filter_map(|line| line.split_once("figure: ").map(|(_, figure)| figure));
    lines.map(|line| figure(line).with_context(|| format!("no figure: {line}"))).collect()
}

fn figure(line: &str) -> Option<Figure<'_>> {
    let (who, rest) = line.split_once(' ')?;
    let (value, what) = rest.split_once(' ')?;
    let who = match who {
        "floor" => Who::Floor,
        "weft" => Who::Weft,
        "flanneld" => Who::Flanneld,
        _ => return None,
    };
    let value = value.parse().ok().filter(|value: &f64| value.is_finite())?;
    NAMES.iter().any(|(name, _)| *name == what).then_some(Figure { who, value, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_among_the_lines_of_the_console() {
        let output = "weft-vm: PASS n1\n\x1b[2Jfigure: floor 730 cold start\nfigure: weft 12.50 memory\n\
                      figure: weft 0 packets lost over a restart\n";
        let found = |who, value, what| Figure { who, value, what };
        let wanted = [
            found(Who::Floor, 730.0, "cold start"),
            found(Who::Weft, 12.5, "memory"),
            found(Who::Weft, 0.0, "packets lost over a restart"),
        ];
        assert_eq!(figures(output).unwrap(), wanted);
    }

    /// A row that the table does not have would be lost.
    #[test]
    fn a_figure_that_the_table_cannot_show_is_an_error() {
        for line in ["weft 1 colder start", "weft  cold start", "weft nan cold start", "nobody 1 cold start", "weft"] {
            let error = figures(&format!("figure: {line}")).unwrap_err();
            assert!(error.to_string().contains(line), "{error}");
        }
    }

    /// The scenario is a script, so no compiler compares its rows with those of the table.
    #[test]
    fn the_table_has_each_row_of_the_scenario() {
        let script = std::fs::read_to_string("../../tests/vm/wireguard-many.sh").unwrap();
        let rows: Vec<&str> = script.lines().filter_map(|line| line.trim().strip_prefix("figure ")).collect();
        assert!(rows.len() >= 8, "{rows:?}");
        for row in rows {
            let name = row.rsplit('"').nth(1).unwrap_or_default();
            assert!(NAMES.iter().any(|(known, _)| *known == name), "{row}");
        }
    }
}
