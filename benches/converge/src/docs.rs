// SPDX-License-Identifier: Apache-2.0
//! Writes the last runs as documents: docs/bench/README.md with its plots, and docs/bench/kubernetes.md.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::measure::{Run, Who};
use crate::{kube, plots, table, targets};

/// The first page shows the last run between these two lines.
const BEGIN: &str = "<!-- bench -->";
const END: &str = "<!-- /bench -->";

/// Writes the documents, and an excerpt into the project's first page.
///
/// # Errors
/// There was no run, or a file cannot be written.
pub fn write(out: &Path, docs: &Path, readme: &Path) -> Result<()> {
    let run = read(&out.join("results.json")).context("`make bench` writes it")?;
    fs::create_dir_all(docs).with_context(|| format!("create {}", docs.display()))?;
    let (results, page) = (out.join(kube::RESULTS), docs.join("kubernetes.md"));
    if results.exists() {
        fs::write(&page, render_kube(&read(&results)?)).with_context(|| format!("write {}", page.display()))?;
    }
    let drawn = plots::draw(&run, docs)?;
    let page = docs.join("README.md");
    fs::write(&page, render(&run, &drawn)).with_context(|| format!("write {}", page.display()))?;
    let text = fs::read_to_string(readme).with_context(|| format!("read {}", readme.display()))?;
    let text =
        filled(&text, &excerpt(&run, &drawn, docs)).with_context(|| format!("no {BEGIN} in {}", readme.display()))?;
    fs::write(readme, text).with_context(|| format!("write {}", readme.display()))
}

fn read(path: &Path) -> Result<Run> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))
}

/// Returns the page with this text between its marks.
fn filled(text: &str, between: &str) -> Option<String> {
    let (head, rest) = text.split_once(BEGIN)?;
    let (_, tail) = rest.split_once(END)?;
    Some(format!("{head}{BEGIN}\n{between}{END}{tail}"))
}

/// The place and the plot that the first page shows.
const FIRST: (&str, usize) = ("vxlan", 5000);
const PLOT: &str = "cold-vxlan.svg";

/// Returns the excerpt for the first page: one cold start in a sentence, and one plot.
fn excerpt(run: &Run, plots: &[String], docs: &Path) -> String {
    let who = [("floor", Who::Floor), ("weft", Who::Weft), ("flanneld", Who::Flanneld)];
    let shown = who.map(|(name, who)| (name, table::shown(run.cell(FIRST, "cold start", who))));
    let figures = shown.iter().filter(|(_, figure)| !figure.is_empty()).map(|(name, figure)| {
        // The result may be a number, or text if the run was cut.
        let unit = if figure.parse::<f64>().is_ok() { " ms" } else { "" };
        format!("{name} {figure}{unit}")
    });
    let figures = figures.collect::<Vec<_>>().join(", ");
    let about = |name: &str| run.about.iter().find(|(n, _)| n == name).map_or("", |(_, value)| value.as_str());
    let mut text = format!("\nCold start of a {} node with 5,000 peers: {figures}.\n", FIRST.0);
    let _ = writeln!(text, "({}, {}.)\n", about("machine"), about("kernel"));
    if plots.iter().any(|plot| plot == PLOT) {
        let _ = writeln!(text, "![{}]({})\n", PLOT.trim_end_matches(".svg"), docs.join(PLOT).display());
    }
    text
}

fn render(run: &Run, plots: &[String]) -> String {
    let mut page = "<!-- Written by `make bench-docs` from the last `make bench`. -->\n# Measured\n\n".to_owned();
    page += "The floor is what the kernel and the store need with any program. [method.md](method.md) says what it is, and how each row is measured.\n\
             All columns come from the same run. Trust the ratios, and how a figure grows with the number of peers, more than its digits.\n\
             In the table of udp with one peer, the floor is the kernel's vxlan, and larger figures are better. \
             The times of wireguard, except the comparison of peers, are those of an emulated processor.\n\n";
    page += &about(run);
    for plot in plots {
        let _ = writeln!(page, "![{}]({plot})", plot.trim_end_matches(".svg"));
    }
    page += "\n## Targets\n\n";
    page += &table::targets_markdown(&targets::judged(run));
    page += "\n## Everything\n";
    page += &table::markdown(run);
    page
}

fn render_kube(run: &Run) -> String {
    let mut page =
        "<!-- Written by `make bench-docs` from the last `make bench-kube`. -->\n# Measured over Node objects\n\n\
                    weft and flanneld are measured one after the other with a real kube-apiserver: [method.md](method.md#kubernetes).\n\n"
            .to_owned();
    page += &about(run);
    for (_, nodes) in run.sites() {
        page += "## Targets\n\n";
        page += &table::targets_markdown(&kube::judged(run, nodes));
    }
    page += "\n## Everything\n";
    page += &table::markdown(run);
    page
}

/// Returns the list of the machine and the versions.
fn about(run: &Run) -> String {
    let mut text = String::new();
    for (name, value) in &run.about {
        let _ = writeln!(text, "- {name}: {value}");
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Cell;

    #[test]
    fn the_last_run_replaces_the_one_before_on_the_first_page() {
        let dir = tempfile::tempdir().unwrap();
        let (out, docs, readme) = (dir.path().join("out"), dir.path().join("docs"), dir.path().join("README.md"));
        fs::create_dir(&out).unwrap();
        fs::write(&readme, format!("before\n{BEGIN}\nstale\n{END}\nafter\n")).unwrap();
        let mut run = Run { about: vec![("kernel".into(), "Linux 6.18".into())], ..Run::default() };
        for (peers, weft) in [(1000, 30.0), (5000, 120.0)] {
            run.note(("vxlan", peers), "cold start", Who::Weft, Cell::Value(weft));
            run.note(("vxlan", peers), "cold start", Who::Flanneld, Cell::Cut(120.0));
        }
        fs::write(out.join("results.json"), serde_json::to_string(&run).unwrap()).unwrap();
        let mut nodes = Run::default();
        nodes.note(("kube", 5000), "memory", Who::Weft, Cell::Value(19.0));
        fs::write(out.join(kube::RESULTS), serde_json::to_string(&nodes).unwrap()).unwrap();
        write(&out, &docs, &readme).unwrap();
        write(&out, &docs, &readme).unwrap();
        let text = fs::read_to_string(&readme).unwrap();
        assert!(text.starts_with("before\n") && text.ends_with("\nafter\n") && !text.contains("stale"), "{text}");
        let sentence = "Cold start of a vxlan node with 5,000 peers: weft 120 ms, flanneld cut, 120 s.";
        assert_eq!(text.matches(sentence).count(), 1, "{text}");
        let page = fs::read_to_string(docs.join("README.md")).unwrap();
        assert!(page.contains("![cold-vxlan](cold-vxlan.svg)") && docs.join("cold-vxlan.svg").exists());
        assert!(page.contains("- kernel: Linux 6.18"), "{page}");
        let page = fs::read_to_string(docs.join("kubernetes.md")).unwrap();
        assert!(page.contains("| kube 5000 | memory, MB | 19.0 | 24.0 | kept |"), "{page}");
    }
}
