// SPDX-License-Identifier: Apache-2.0
//! The explanation as text for people.

use std::fmt::Write;

use super::explanation::{Explanation, State};

impl Explanation {
    /// Formats the explanation for people.
    pub fn render(&self) -> String {
        let mut text = format!("{} ({}) -> {} ({})\n\n", self.from, self.from_is, self.to, self.to_is);
        let width = self.steps.iter().map(|step| step.step.len()).max().unwrap_or_default();
        for step in &self.steps {
            let state = match step.state {
                State::Ok => "ok",
                State::Broken => "BROKEN",
                State::Unknown | State::Doubt => "?",
            };
            let mtu = step.mtu.map(|mtu| format!(" (MTU {mtu})")).unwrap_or_default();
            let _ = writeln!(text, "{state:<6} {:<width$}  {}{mtu}", step.step, step.is);
            if let Some(should_be) = &step.should_be {
                let _ = writeln!(text, "       {:<width$}  should be: {should_be}", "");
            }
        }
        let _ = writeln!(text, "\n{}", self.sentence);
        if let Some(remedy) = &self.remedy {
            let _ = writeln!(text, "    {remedy}");
        }
        text
    }
}
