// SPDX-License-Identifier: Apache-2.0
//! Plots of cold start and memory over the number of peers, as SVG. Both axes are logarithmic, so a straight line of slope one grows in
//! proportion to the number of peers.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::coord::combinators::IntoLogRange;
use plotters::element::{Circle, PathElement};
use plotters::prelude::{Color, IntoDrawingArea, RGBColor, SVGBackend, WHITE};
use plotters::series::LineSeries;

use crate::measure::{Run, Who};
use crate::targets::memory_bound;

const SIZE: (u32, u32) = (720, 420);
const WEFT: RGBColor = RGBColor(200, 60, 30);
const FLANNELD: RGBColor = RGBColor(40, 90, 180);
const FLOOR: RGBColor = RGBColor(90, 90, 90);

/// One line of a plot.
struct Line {
    name: &'static str,
    color: RGBColor,
    points: Vec<(f64, f64)>,
}

/// Draws every plot that has at least two points, such as `cold-vxlan.svg`, and returns the names.
///
/// # Errors
/// A file cannot be written.
pub fn draw(run: &Run, dir: &Path) -> Result<Vec<String>> {
    let mut drawn = Vec::new();
    for backend in ["vxlan", "host-gw"] {
        for (file, what, unit) in [("cold", "cold start", "ms"), ("memory", "memory", "MB")] {
            let mut lines = vec![
                line(run, backend, what, (Who::Floor, "floor: the bare kernel", FLOOR)),
                line(run, backend, what, (Who::Weft, "weft", WEFT)),
                line(run, backend, what, (Who::Flanneld, "flanneld", FLANNELD)),
            ];
            if what == "memory" {
                let bound = lines[1].points.iter().map(|(peers, _)| (*peers, memory_bound(*peers))).collect();
                lines[0] = Line { name: "weft's bound", color: FLOOR, points: bound };
            }
            lines.retain(|line| !line.points.is_empty());
            if lines.iter().all(|line| line.points.len() < 2) {
                continue;
            }
            let name = format!("{file}-{backend}.svg");
            // The error borrows from the drawing, so only its text can be returned.
            plot(&dir.join(&name), &format!("{backend}: {what}, {unit}"), &lines)
                .map_err(|error| anyhow!("draw {name}: {error}"))?;
            drawn.push(name);
        }
    }
    Ok(drawn)
}

fn line(run: &Run, backend: &str, what: &str, (who, name, color): (Who, &'static str, RGBColor)) -> Line {
    let sites = run.sites();
    let peers = sites.iter().filter(|at| at.0 == backend).map(|at| at.1);
    let mut points: Vec<(f64, f64)> =
        peers.filter_map(|n| run.value((backend, n), what, who).map(|value| (n as f64, value))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    Line { name, color, points }
}

fn plot(path: &Path, title: &str, lines: &[Line]) -> Result<(), Box<dyn std::error::Error>> {
    let all = || lines.iter().flat_map(|line| line.points.iter());
    let range = |values: Vec<f64>| {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        low / 1.5..high * 1.5
    };
    let (x, y) = (range(all().map(|p| p.0).collect()), range(all().map(|p| p.1).collect()));
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(x.log_scale(), y.log_scale())?;
    chart
        .configure_mesh()
        .x_desc("peers")
        .y_desc(title.rsplit_once(' ').map_or("", |(_, unit)| unit))
        .x_label_formatter(&|v| format!("{v:.0}"))
        .y_label_formatter(&|v| crate::table::figure(*v))
        .label_style(("sans-serif", 14))
        .light_line_style(WHITE)
        .draw()?;
    for line in lines {
        let color = line.color;
        chart
            .draw_series(LineSeries::new(line.points.iter().copied(), color.stroke_width(2)))?
            .label(line.name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2)));
        chart.draw_series(line.points.iter().map(|point| Circle::new(*point, 3, color.filled())))?;
    }
    let mut labels = chart.configure_series_labels();
    labels.position(SeriesLabelPosition::UpperLeft).background_style(WHITE).label_font(("sans-serif", 14)).draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Cell;

    #[test]
    fn a_plot_has_a_line_for_each_that_was_measured() {
        let mut run = Run::default();
        for (peers, value) in [(1000, 30.0), (5000, 120.0), (20_000, 500.0)] {
            run.note(("vxlan", peers), "cold start", Who::Weft, Cell::Value(value));
            run.note(("vxlan", peers), "cold start", Who::Floor, Cell::Value(value / 3.0));
        }
        run.note(("vxlan", 1000), "cold start", Who::Flanneld, Cell::Value(700.0));
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(draw(&run, dir.path()).unwrap(), ["cold-vxlan.svg"]);
        let svg = std::fs::read_to_string(dir.path().join("cold-vxlan.svg")).unwrap();
        assert_eq!(svg.matches("<circle").count(), 7);
        for name in ["weft", "flanneld", "floor: the bare kernel", "20000"] {
            assert!(svg.contains(name), "{name}");
        }
    }
}
