// SPDX-License-Identifier: Apache-2.0
//! Names of network interfaces.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;

/// The name of a network interface: 1 to 15 bytes. They are stored in the value itself, so that keys are small and `Copy`. Linux accepts nearly
/// all bytes in a name, so it may not be UTF-8. [`Name::text`] is the form for people and for paths that are text.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name([u8; 16]);

impl Ord for Name {
    /// Compares the bytes as one number, because names are compared more often than anything else.
    fn cmp(&self, other: &Name) -> Ordering {
        u128::from_be_bytes(self.0).cmp(&u128::from_be_bytes(other.0))
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Name) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Name {
    /// Returns the name, or `None` if Linux would not create an interface with it (`dev_valid_name` in net/core/dev.c): a name has 1 to 15
    /// bytes, contains no `/`, no `:` and no white space, and is neither `.` nor `..`.
    pub fn new(name: &str) -> Option<Name> {
        let bad = |b: u8| b == b'/' || b == b':' || b == 0 || b.is_ascii_whitespace();
        if name == "." || name == ".." || name.bytes().any(bad) {
            return None;
        }
        Name::of_kernel(name.as_bytes())
    }

    /// Returns a name that is part of the program. This is for constants: a name that is empty or longer than 15 bytes does not compile there.
    pub(crate) const fn constant(name: &str) -> Name {
        let bytes = name.as_bytes();
        assert!(!bytes.is_empty() && bytes.len() <= 15);
        let mut inline = [0; 16];
        let mut at = 0;
        while at < bytes.len() {
            inline[at] = bytes[at];
            at += 1;
        }
        Name(inline)
    }

    /// Returns the name of an existing interface, as the kernel reports it. It ends before the first zero byte. Its characters are not
    /// checked, because the kernel has accepted them. Returns `None` if the name is empty or longer than 15 bytes.
    pub fn of_kernel(bytes: &[u8]) -> Option<Name> {
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        let mut inline = [0; 16];
        inline.get_mut(..end).filter(|place| (1..=15).contains(&place.len()))?.copy_from_slice(&bytes[..end]);
        Some(Name(inline))
    }

    /// Returns the bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(16);
        &self.0[..end]
    }

    /// Returns the name as text, which nearly always is the name itself. Bytes that are not UTF-8, control characters (which could be commands
    /// to a terminal) and backslashes become escapes: `\xff`, `\\`. Two different names never have the same text.
    pub fn text(&self) -> Cow<'_, str> {
        let bytes = self.as_bytes();
        let plain = |text: &&str| !text.chars().any(|c| c.is_control() || c == '\\');
        if let Some(text) = std::str::from_utf8(bytes).ok().filter(plain) {
            return Cow::Borrowed(text);
        }
        let mut text = String::new();
        let escape = |text: &mut String, bytes: &[u8]| bytes.iter().for_each(|b| text.push_str(&format!("\\x{b:02x}")));
        for chunk in bytes.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c {
                    '\\' => text.push_str("\\\\"),
                    c if c.is_control() => escape(&mut text, c.encode_utf8(&mut [0; 4]).as_bytes()),
                    c => text.push(c),
                }
            }
            escape(&mut text, chunk.invalid());
        }
        Cow::Owned(text)
    }

    /// Returns true if `text` is the name of this interface, or the name as [`Name::text`] shows it.
    pub fn is(&self, text: &str) -> bool {
        self.as_bytes() == text.as_bytes() || self.text() == text
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::Name;

    #[test]
    fn any_name_of_the_kernel_is_a_name_and_has_a_text_of_its_own() {
        let text = |bytes: &[u8]| Name::of_kernel(bytes).map(|name| name.text().into_owned());
        for (bytes, wanted) in [
            (&b"eth0"[..], "eth0"),
            (b"eth0\0", "eth0"),
            ("größe0".as_bytes(), "größe0"),
            (b"od\xff\x1b0", r"od\xff\x1b0"),
            (br"od\xff", r"od\\xff"),
            (b"\xc3", r"\xc3"),
            (b"fifteen-bytes-0", "fifteen-bytes-0"),
        ] {
            assert_eq!(text(bytes).as_deref(), Some(wanted));
            let name = Name::of_kernel(bytes).unwrap();
            assert!(name.is(wanted) && name.to_string() == wanted && !name.is("eth1"));
            assert_eq!(name.as_bytes(), bytes.strip_suffix(b"\0").unwrap_or(bytes));
        }
        assert!(Name::of_kernel(br"a\b").unwrap().is(r"a\b"), "as it is typed, too");
        const FIXED: [Name; 2] = [Name::constant("eth0"), Name::constant("fifteen-bytes-0")];
        assert_eq!(FIXED.map(Some), ["eth0", "fifteen-bytes-0"].map(Name::new));
        assert_eq!([&b""[..], b"\0eth0", b"sixteen-bytes-00"].map(Name::of_kernel), [None; 3]);
        assert_eq!(["", ".", "..", "a b", "a/b", "a:b", "sixteen-bytes-00"].map(Name::new), [None; 7]);
    }
}
