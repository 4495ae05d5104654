// SPDX-License-Identifier: Apache-2.0
//! The results as a page of the documentation.

use super::results::Results;

/// Returns the page.
pub fn render(results: &Results) -> String {
    let mut out = String::new();
    for run in &results.runs {
        out += &format!("\n{} {}\n", run.size, run.who.name());
        for phase in &run.phases {
            out += &phase.line();
            out.push('\n');
        }
    }
    out
}
