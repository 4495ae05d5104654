// SPDX-License-Identifier: Apache-2.0
//! Reads a page of the documentation: its code, its links, its headings and its tables.

use std::fs;
use std::path::{Path, PathBuf};

/// The heads of columns that quote messages.
const MESSAGES: [&str; 3] = ["message", "reason", "problem"];

/// A page of the documentation.
pub struct Page {
    /// The path from the root of the repository.
    pub path: PathBuf,
    text: String,
}

impl Page {
    /// Reads one page. It panics if there is none, because a test names it.
    pub fn read(path: impl Into<PathBuf>) -> Page {
        let path = path.into();
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Page { path, text }
    }

    /// Makes a page of this text, to test the tests.
    pub fn of(text: &str) -> Page {
        Page { path: "docs/no-page.md".into(), text: text.to_owned() }
    }

    /// Reads all pages that people write: the two of the root, and those of docs/ with its directories.
    pub fn all() -> Vec<Page> {
        let mut paths: Vec<PathBuf> = vec!["README.md".into(), "CONTRIBUTING.md".into()];
        for dir in ["docs", "docs/adr"] {
            let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
            paths.extend(files.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
        }
        paths.push("docs/bench/method.md".into());
        paths.sort();
        paths.into_iter().map(Page::read).collect()
    }

    /// Returns each piece of code: what stands between backticks, and each line of the indented blocks. Messages are none.
    pub fn code(&self) -> Vec<String> {
        let mut all: Vec<String> = self.blocks().map(|line| without_comment(line).trim().to_owned()).collect();
        let prose: Vec<&str> = self.text.lines().filter(|line| !is_block(line) && !line.starts_with('|')).collect();
        for paragraph in prose.join("\n").split("\n\n") {
            all.extend(spans(paragraph));
        }
        for (head, cells) in self.rows() {
            let messages = usize::from(MESSAGES.contains(&head));
            all.extend(cells.iter().skip(messages).flat_map(|cell| spans(cell)));
        }
        all
    }

    /// Returns the messages that the page quotes.
    pub fn messages(&self) -> Vec<String> {
        let rows = self.rows().into_iter().filter(|(head, _)| MESSAGES.contains(head));
        rows.flat_map(|(_, cells)| spans(cells[0])).collect()
    }

    /// Returns the lines of the indented blocks.
    fn blocks(&self) -> impl Iterator<Item = &str> {
        self.text.lines().filter(|line| is_block(line))
    }

    /// Returns the targets of the links.
    pub fn links(&self) -> Vec<&str> {
        let targets = self.text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        targets.filter(|target| !target.contains("://")).collect()
    }

    /// Returns the anchors of the headings, as GitHub makes them.
    pub fn anchors(&self) -> Vec<String> {
        let headings = self.text.lines().filter(|line| line.starts_with('#'));
        headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
    }

    /// Returns the rows of every table: the first cell of the table's head, and the cells of the row.
    pub fn rows(&self) -> Vec<(&str, Vec<&str>)> {
        let (mut rows, mut head) = (Vec::new(), None);
        for line in self.text.lines() {
            if !line.starts_with('|') {
                head = None;
                continue;
            }
            let cells: Vec<&str> =
                line.trim_matches('|').split(" | ").map(|cell| cell.trim_matches([' ', '|'])).collect();
            match head {
                None => head = Some(cells[0]),
                Some(_) if line.starts_with("|--") || line.starts_with("|:-") => {}
                Some(head) => rows.push((head, cells)),
            }
        }
        rows
    }

    /// Returns the whole text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

fn is_block(line: &str) -> bool {
    line.starts_with("    ")
}

fn without_comment(line: &str) -> &str {
    line.split("  # ").next().unwrap_or(line)
}

/// Returns what stands between backticks, with single blanks.
pub fn spans(text: &str) -> Vec<String> {
    let inner = text.split('`').skip(1).step_by(2);
    inner.map(|code| code.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Returns all files below this directory, in order.
pub fn files(dir: impl AsRef<Path>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() { found.extend(files(path)) } else { found.push(path) }
    }
    found.sort();
    found
}
