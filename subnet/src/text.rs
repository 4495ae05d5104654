// SPDX-License-Identifier: Apache-2.0
//! Makes text that others wrote safe to log or print.
//!
//! Text in the store, in an annotation or in a file may be anything: megabytes, escape sequences that change the screen, or line breaks
//! that look like another log line. All such text passes through this module before it is kept, logged or printed.

use std::fmt::{self, Write};

/// The greatest number of characters of such a text that is shown, including the mark [`CUT`].
pub const MAX_CHARS: usize = 100;

/// The mark at the end of a text that was cut.
pub const CUT: &str = " [cut]";

/// The greatest number of characters of a whole sentence that quotes such texts, for example why a lease is set aside.
pub const MAX_SENTENCE_CHARS: usize = 400;

/// Displays a text as [`shown`] returns it, without an allocation.
#[derive(Debug, Clone, Copy)]
pub struct Shown<'a>(pub &'a str);

/// Returns a text of others as it may be shown: at most [`MAX_CHARS`] characters, which end with [`CUT`] if there were more. Control
/// characters, line breaks, marks that change the direction of writing, and everything else that a terminal does not print as itself
/// become escapes such as `\n` or `\u{1b}`. Quotes and backslashes stay as they are, so that a text that was shown before does not
/// change.
///
/// ```
/// assert_eq!(weft_subnet::text::shown("vx\u{1b}[2Jlan"), r"vx\u{1b}[2Jlan");
/// ```
pub fn shown(text: &str) -> String {
    Shown(text).to_string()
}

/// Returns a sentence of ours that may quote texts of others. It is treated as in [`shown`], but may have [`MAX_SENTENCE_CHARS`]
/// characters, so that the remedy at its end remains. This also limits quotations that were not shortened before.
pub fn sentence(text: &str) -> String {
    let mut sentence = String::new();
    // Writing to a string does not fail.
    let _ = write_bounded(text, MAX_SENTENCE_CHARS, &mut sentence);
    sentence
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_bounded(self.0, MAX_CHARS, f)
    }
}

/// Writes at most `most` characters. Reads only a few more than that, however long the text is.
fn write_bounded(text: &str, most: usize, out: &mut impl Write) -> fmt::Result {
    // The number of bytes of the text that leave room for the mark.
    let (mut room_beside_mark, mut width) = (0, 0);
    let mut fits = true;
    for c in text.chars() {
        width += escaped(c).count();
        if width > most {
            fits = false;
            break;
        }
        if width + CUT.len() <= most {
            room_beside_mark += c.len_utf8();
        }
    }
    let kept = if fits { text } else { text.get(..room_beside_mark).unwrap_or_default() };
    kept.chars().flat_map(escaped).try_for_each(|c| out.write_char(c))?;
    if fits { Ok(()) } else { out.write_str(CUT) }
}

/// Returns true for a character that a terminal prints as itself.
pub fn is_printable(c: char) -> bool {
    let mut stands_for = escaped(c);
    stands_for.next() == Some(c) && stands_for.next().is_none()
}

/// Returns the characters that are shown for this one.
pub fn escaped(c: char) -> impl Iterator<Item = char> {
    // `escape_debug` knows what is printable. But it also escapes these three, which are.
    let (plain, other) = match c {
        '"' | '\'' | '\\' => (Some(c), None),
        _ => (None, Some(c.escape_debug())),
    };
    plain.into_iter().chain(other.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harmless_text_stays_as_it_is() {
        for text in ["", "vxlan", r#"{"VNI": 1, "Peer": "C:\x"}"#, "Zürich 北京", "node-1.example.org", "it's"] {
            assert_eq!(shown(text), text);
        }
        let longest = "x".repeat(MAX_CHARS);
        assert_eq!(shown(&longest), longest);
    }

    #[test]
    fn long_text_is_cut_and_marked() {
        let text = shown(&"é".repeat(200_000));
        assert_eq!(text.chars().count(), MAX_CHARS);
        assert!(text.starts_with("éé") && text.ends_with("é [cut]"), "{text}");
        // An escape counts with its full length, and is never cut in half.
        let text = shown(&"\u{1b}".repeat(50));
        assert!(text.chars().count() <= MAX_CHARS && text.ends_with("\\u{1b} [cut]"), "{text}");
    }

    #[test]
    fn nothing_that_a_terminal_obeys_gets_through() {
        let table = [
            ("a\u{1b}]0;title\u{7}b", r"a\u{1b}]0;title\u{7}b"),
            ("one\ntwo\r\tthree\0", r"one\ntwo\r\tthree\0"),
            ("\u{9b}2J\u{7f}", r"\u{9b}2J\u{7f}"),
            ("left\u{202e}thgir\u{2028}\u{200b}\u{feff}", r"left\u{202e}thgir\u{2028}\u{200b}\u{feff}"),
        ];
        for (text, wanted) in table {
            assert_eq!(shown(text), wanted);
        }
        for c in (0..=0x10_ffff).filter_map(char::from_u32) {
            let bad = c.is_control()
                || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            assert!(!bad || shown(&c.to_string()).is_ascii(), "{c:?}");
        }
    }

    #[test]
    fn a_sentence_keeps_its_end_unless_it_is_enormous() {
        let usual = format!("node {}: annotation is no address: restart its agent", shown(&"n".repeat(300)));
        assert_eq!(sentence(&usual), usual);
        assert_eq!(sentence(&"\u{1b}x".repeat(1000)).chars().count(), 392 + CUT.len());
    }

    #[test]
    fn what_was_shown_before_does_not_change() {
        for text in ["\u{1b}[31m", "a\\b\"c'", &"x".repeat(300), &"\u{7}".repeat(300), &"\u{301}e".repeat(60)] {
            let once = shown(text);
            assert_eq!(shown(&once), once);
        }
    }
}
