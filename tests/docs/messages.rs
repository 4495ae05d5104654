// SPDX-License-Identifier: Apache-2.0
//! Messages: docs/messages.md and docs/operations.md quote them with X, N or FILE for what varies. The rest of a quoted message must be in
//! the source.

use std::fs;
use std::path::Path;

use crate::page::files;

/// Stands in the source for each `{...}`.
const VARIES: char = '\u{1}';

/// The source code, prepared for a search of messages.
pub struct Source(String);

/// Returns a file up to its module of tests.
fn without_tests(file: &str) -> &str {
    let begins = ["mod tests {", "pub(crate) mod tests {"].map(|module| file.find(&format!("#[cfg(test)]\n{module}")));
    &file[..begins.into_iter().flatten().min().unwrap_or(file.len())]
}

impl Source {
    /// Reads everything that can say something to an operator, without comments and tests.
    pub fn read() -> Source {
        let mut text = String::new();
        for dir in ["src", "subnet/src", "backends/src", "netlink/src", "cni/src", "doctor/src", "udp/src", "deploy"] {
            for path in files(dir).into_iter().filter(|path| !is_test(path)) {
                let file = fs::read_to_string(path).unwrap_or_default();
                text.push_str(&spoken(without_tests(&file)));
            }
        }
        Source(text)
    }

    /// Returns the pieces of a quoted message that nothing in the source says.
    pub fn missing(&self, quoted: &str) -> Vec<String> {
        pieces(quoted).into_iter().filter(|piece| !self.says(piece)).collect()
    }

    /// Whether the source says this piece, at once or in parts: a message may be put together of several literals. Two parts
    /// meet where a literal begins or ends, or where the source has a `{...}`.
    fn says(&self, piece: &str) -> bool {
        let words: Vec<&str> = piece.split(' ').collect();
        let mut from = 0;
        while from < words.len() {
            let whole = words.len() == 1;
            let fits = |to: &usize| {
                whole && self.0.contains(piece) || self.has(&words[from..*to].join(" "), from == 0, *to == words.len())
            };
            let Some(to) = (from + 1..=words.len()).rev().find(fits) else { return false };
            from = to;
        }
        true
    }

    /// Whether the source has this part of a piece. A part that is not the first or the last one must meet its neighbour.
    fn has(&self, part: &str, first: bool, last: bool) -> bool {
        let meets = |c: Option<char>| c.is_none_or(|c| c == VARIES || c == '"');
        let mark = |c: char| " ,:;()-".contains(c);
        self.0.match_indices(part).any(|(at, _)| {
            let (before, after) = (&self.0[..at], &self.0[at + part.len()..]);
            // One word alone says little: it must be a whole literal, or what stands between two `{...}`.
            let loose = part.contains(' ');
            let left = first && loose || meets(before.trim_end_matches(mark).chars().next_back());
            left && (last && loose || meets(after.trim_start_matches(mark).chars().next()))
        })
    }
}

/// Returns the fixed part of each message that is logged for an operator: what `info!`, `warn!` and `error!` say.
pub fn logged(source: &Source) -> Vec<String> {
    let calls = ["info!(", "warn!(", "error!("].iter().flat_map(|call| source.0.split(call).skip(1));
    let literal = |call: &str| {
        let call = call.split(");").next()?;
        call.split('"').skip(1).step_by(2).max_by_key(|literal| literal.len()).map(str::to_owned)
    };
    calls.filter_map(literal).filter(|text| text.contains(' ')).collect()
}

/// Whether the page quotes something of this message.
pub fn has_row(page: &str, message: &str) -> bool {
    let marked = [": ", "; ", ", "].iter().fold(message.to_owned(), |text, mark| text.replace(mark, "\u{1}"));
    let mut parts =
        marked.split(VARIES).map(|part| part.trim_matches([' ', ',', ':', '(', ')'])).filter(|part| part.len() > 6);
    let Some(first) = parts.next() else { return true };
    page.contains(first) || parts.any(|part| page.contains(part))
}

fn is_test(path: &Path) -> bool {
    path.ends_with("tests.rs") || path.components().any(|part| part.as_os_str() == "tests")
}

/// Removes comments, joins literals that continue on the next line, and puts [`VARIES`] for each `{...}`.
fn spoken(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut continues = false;
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        let line = if continues { line.trim_start() } else { line };
        let (line, end) = line.strip_suffix('\\').map_or((line, "\n"), |line| (line, ""));
        continues = end.is_empty();
        let line = line.replace("\\\"", "\"");
        let mut parts = line.split('{');
        plain.push_str(parts.next().unwrap_or_default());
        for part in parts {
            // A brace of the code is not closed so soon.
            let name = |text: &str| text.chars().all(|c| c.is_alphanumeric() || "_:?#.".contains(c));
            match part.split_once('}').filter(|(inside, _)| name(inside)) {
                Some((_, rest)) => plain.extend([VARIES].into_iter().chain(rest.chars())),
                None => plain.push_str(part),
            }
        }
        plain.push_str(end);
    }
    plain
}

/// Whether a word of a quoted message stands for something that varies: `...`, a number, a name in capitals, alternatives.
fn varies(word: &str) -> bool {
    let capitals = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_uppercase());
    word.contains("...")
        || word.contains('/')
        || word.chars().any(|c| c.is_ascii_digit())
        || word.split(|c: char| !c.is_alphanumeric()).any(capitals)
        || word.chars().all(|c| !c.is_alphanumeric())
}

/// Returns the pieces of a quoted message between what varies and between marks.
fn pieces(quoted: &str) -> Vec<String> {
    let marked = [": ", "; ", ", ", " ("].iter().fold(quoted.to_owned(), |text, mark| text.replace(mark, " ... "));
    let words: Vec<&str> = marked.split(' ').collect();
    let runs = words.split(|word| varies(word));
    let text = runs.map(|run| run.join(" ").trim_matches(|c: char| !c.is_alphanumeric() && c != '_').to_owned());
    text.filter(|piece| piece.len() > 3).collect()
}

/// Fails if the search does not see the difference.
pub fn control(source: &Source) {
    assert!(source.missing("interface X has no usable ... address").is_empty(), "a message that exists is found");
    assert_eq!(source.missing("interface X has eaten its only address"), ["has eaten its only address"]);
    let mixed = "address usable no has the interface";
    assert_eq!(source.missing(mixed), [mixed], "words that stand elsewhere do not make a message");
}
