// SPDX-License-Identifier: Apache-2.0
//! The last run as documents: docs/bench/README.md and the plots beside it.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::measure::Run;
use crate::{plots, table, targets};

/// Writes them.
///
/// # Errors
/// When there was no run, or a file cannot be written.
pub fn write(out: &Path, docs: &Path) -> Result<()> {
    let path = out.join("results.json");
    let text =
        fs::read_to_string(&path).with_context(|| format!("read {} (`make bench` writes it)", path.display()))?;
    let run: Run = serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))?;
    fs::create_dir_all(docs).with_context(|| format!("create {}", docs.display()))?;
    let drawn = plots::draw(&run, docs)?;
    let page = docs.join("README.md");
    fs::write(&page, render(&run, &drawn)).with_context(|| format!("write {}", page.display()))
}

fn render(run: &Run, plots: &[String]) -> String {
    let mut page = "<!-- Written by `make bench-docs` from the last `make bench`. -->\n# Measured\n\n".to_owned();
    page += "Floor: the same entries as prepared batches through a bare netlink socket; for events a bare etcd watcher that\n\
             writes one batch for what it hears; for repairs a bare netlink watcher that writes back what was deleted. All three\n\
             columns come from the same run: trust ratios and growth, not digits. How each row is measured:\n\
             [method.md](method.md).\n\n";
    for (name, value) in &run.about {
        let _ = writeln!(page, "- {name}: {value}");
    }
    page.push('\n');
    for plot in plots {
        let _ = writeln!(page, "![{}]({plot})", plot.trim_end_matches(".svg"));
    }
    page += "\n## Targets\n\n";
    page += &table::targets_markdown(&targets::check(run));
    page += "\n## Everything\n";
    page += &table::markdown(run);
    page
}
