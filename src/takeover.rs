// SPDX-License-Identifier: Apache-2.0
//! The first start of weft on a node where flannel ran: the routes that flannel wrote for nodes that are gone are on no device of
//! ours and bear no mark, and nobody else would remove them. They are taken for flannel's once, when weft looks for the first time:
//! a route of the same form that appears later is somebody else's.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use weft_backends::diff::Op;
use weft_backends::owner::{self, PROTOCOL};
use weft_backends::state::{Key, Observed, Seen, Value};
use weft_subnet::cidr::family;

use crate::files;
use crate::plan::Plan;

const MARK: &str =
    "weft wrote the subnet file beside this mark, as the inode and the time below say: the routes are not flannel's\n";

/// Who wrote subnet.env as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Author {
    /// weft did.
    Weft,
    /// Nobody says so: there is no mark. weft's entries in the kernel may tell.
    Unknown,
    /// Another program, flannel, after weft: the mark is about another file.
    Another,
}

/// What tells a file from the one that takes its place: inode, and time of the last write in seconds and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId(u64, i64, i64);

impl FileId {
    fn of(meta: &Metadata) -> FileId {
        FileId(meta.ino(), meta.mtime(), meta.mtime_nsec())
    }

    fn of_file(path: &Path) -> Option<FileId> {
        fs::metadata(path).ok().map(|meta| FileId::of(&meta))
    }

    fn parse(line: &str) -> Option<FileId> {
        let mut words = line.strip_prefix("file ")?.split(' ');
        let id = FileId(words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        words.next().is_none().then_some(id)
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file {} {} {}", self.0, self.1, self.2)
    }
}

/// Stands beside subnet.env and lives as long: whatever removes the one at a reboot removes the other.
fn mark_of(subnet_file: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(subnet_file.file_name().unwrap_or_default());
    name.push(".weft");
    subnet_file.with_file_name(name)
}

/// The files that the mark names. Empty for the mark of an older weft, which names none.
fn marked(subnet_file: &Path) -> io::Result<Vec<FileId>> {
    let text = fs::read_to_string(mark_of(subnet_file))?;
    Ok(text.lines().filter_map(FileId::parse).collect())
}

/// Who wrote this subnet.env. A mark that cannot be read, or that an older weft wrote, is taken for ours: nothing is removed then.
pub fn author(subnet_file: &Path) -> Author {
    match (marked(subnet_file), FileId::of_file(subnet_file)) {
        (Err(error), _) if error.kind() == io::ErrorKind::NotFound => Author::Unknown,
        (Ok(marked), Some(now)) if !marked.is_empty() && !marked.contains(&now) => Author::Another,
        _ => Author::Weft,
    }
}

/// Makes subnet.env say this, and marks it as weft's. True when it was written, false when it said so already.
///
/// The mark is written before the new file takes the place of the old one, and names both: so it is right whenever weft is killed.
pub fn write_env(subnet_file: &Path, contents: &[u8]) -> io::Result<bool> {
    if fs::read(subnet_file).is_ok_and(|there| there == contents) {
        let now = FileId::of_file(subnet_file);
        if let Some(now) = now.filter(|now| !marked(subnet_file).is_ok_and(|marked| marked.contains(now))) {
            put_mark(subnet_file, &[now])?;
        }
        return Ok(false);
    }
    let old = FileId::of_file(subnet_file).filter(|_| author(subnet_file) == Author::Weft);
    files::replace_with(subnet_file, 0o644, |aside| {
        aside.write_all(contents)?;
        let new = FileId::of(&aside.metadata()?);
        put_mark(subnet_file, &old.into_iter().chain([new]).collect::<Vec<_>>())
    })?;
    Ok(true)
}

fn put_mark(subnet_file: &Path, files: &[FileId]) -> io::Result<()> {
    let lines: String = files.iter().map(|file| format!("{file}\n")).collect();
    files::replace(&mark_of(subnet_file), format!("{MARK}{lines}").as_bytes(), 0o644)
}

/// What flannel left, until it is removed.
#[derive(Debug, Default)]
pub enum Takeover {
    /// Nothing was looked at yet; subnet.env was flannel's, for certain (`true`) or unless entries of ours say otherwise.
    Undecided(bool),
    /// Routes that were there at the first look.
    Left(HashMap<Key, Value>),
    /// There is nothing to remove, or not any more.
    #[default]
    Over,
}

impl Takeover {
    /// `author`: who wrote subnet.env as it was found at the start, where it names our Network.
    pub fn new(author: Author) -> Takeover {
        match author {
            Author::Weft => Takeover::Over,
            Author::Unknown => Takeover::Undecided(false),
            Author::Another => Takeover::Undecided(true),
        }
    }

    /// The first look decides. Where there is no mark, entries of ours say that weft ran here last. Where the mark says that another
    /// program wrote subnet.env after weft, they say nothing: flannel leaves weft's entries where they are.
    pub fn look(&mut self, observed: &Observed, plan: &Plan) {
        let certain = match self {
            Takeover::Undecided(certain) => *certain,
            Takeover::Left(left) => {
                // One that went by itself, or was removed, is not flannel's when it comes again.
                left.retain(|key, value| observed.get(key).is_some_and(|seen| seen.value == *value));
                if left.is_empty() {
                    *self = Takeover::Over;
                }
                return;
            }
            Takeover::Over => return,
        };
        let (network, own, on_link) = (plan.network(), plan.own().subnets, &plan.host().routes);
        let inside = |net: &ipnet::IpNet| network.networks.of(family(net)).is_some_and(|all| all.contains(net));
        let ours = |(key, seen): (&Key, &Seen)| match key {
            Key::Link(_) => seen.mark,
            Key::Route(net, _) => seen.protocol == PROTOCOL && inside(net),
            // In the place of routes that an earlier version wrote.
            Key::Fence(_) | Key::Open(_) => true,
            _ => false,
        };
        if !certain && observed.iter().any(ours) {
            *self = Takeover::Over;
            return;
        }
        let left = observed.iter().filter(|(key, seen)| {
            plan.desired(key).is_none() && owner::is_flannels(network, &own, on_link, (key, seen))
        });
        *self = Takeover::Left(left.map(|(key, seen)| (*key, seen.value.clone())).collect());
    }

    /// True for a route that flannel left, as it was at the first look.
    pub fn left(&self, key: &Key, seen: &Seen) -> bool {
        matches!(self, Takeover::Left(left) if left.get(key) == Some(&seen.value))
    }

    /// These are about to be written. What flannel left and is not removed now is wanted by a lease; what the kernel refuses to remove
    /// is tried again, see [`Takeover::removed`].
    pub fn removing(&mut self, ops: &[Op]) {
        let Takeover::Left(left) = self else { return };
        let removed = ops.iter().filter_map(|op| {
            let Op::Remove(key, _) = op else { return None };
            let (key, value) = left.remove_entry(key)?;
            tracing::info!(%op, "flannel left this route, and no lease asks for it");
            Some((key, value))
        });
        *left = removed.collect();
    }

    /// The kernel has removed this entry: the same written later is somebody else's. The takeover ends with the last one.
    pub fn removed(&mut self, key: &Key) {
        if let Takeover::Left(left) = self {
            left.remove(key);
            if left.is_empty() {
                *self = Takeover::Over;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As flannel and editors write: aside, then renamed.
    fn replaced(file: &Path, text: &str) {
        let aside = file.with_file_name("aside");
        fs::write(&aside, text).unwrap();
        fs::rename(aside, file).unwrap();
    }

    #[test]
    fn the_mark_says_who_wrote_the_file_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run/subnet.env");
        assert_eq!(author(&file), Author::Unknown);
        assert!(write_env(&file, b"A=1\n").unwrap());
        assert!(dir.path().join("run/.subnet.env.weft").exists());
        assert_eq!(author(&dir.path().join("run/other.env")), Author::Unknown, "another agent's file");
        for text in ["A=1\n", "A=22\n", "A=3\n"] {
            write_env(&file, text.as_bytes()).unwrap();
            assert_eq!(author(&file), Author::Weft, "{text}");
        }
        assert!(!write_env(&file, b"A=3\n").unwrap(), "it says so already");
        // flannel writes the same content, and another one.
        for text in ["A=3\n", "A=4\n"] {
            replaced(&file, text);
            assert_eq!(author(&file), Author::Another, "{text}");
        }
        assert!(!write_env(&file, b"A=4\n").unwrap());
        assert_eq!(author(&file), Author::Weft, "taken over as it is");
        fs::write(&file, "A=5\n").unwrap();
        assert_eq!(author(&file), Author::Another, "written in place");
    }

    #[test]
    fn a_kill_between_mark_and_file_makes_nothing_flannels() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subnet.env");
        write_env(&file, b"A=1\n").unwrap();
        let old = FileId::of_file(&file).unwrap();
        write_env(&file, b"A=2\n").unwrap();
        // Killed between mark and file, the old file would still be there, and the mark names it.
        assert_eq!(marked(&file).unwrap(), [old, FileId::of_file(&file).unwrap()]);
        // Of flannel's file nothing is remembered: killed here, weft still knows it for flannel's at the next start.
        replaced(&file, "A=2\n");
        write_env(&file, b"A=3\n").unwrap();
        assert_eq!(marked(&file).unwrap(), [FileId::of_file(&file).unwrap()]);
    }

    #[test]
    fn a_mark_that_names_no_file_counts_for_any() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subnet.env");
        fs::write(&file, "A=1\n").unwrap();
        for text in
            ["weft writes the subnet file beside this mark: the routes here are not flannel's\n", "", "file 1 2\n"]
        {
            fs::write(mark_of(&file), text).unwrap();
            assert_eq!(author(&file), Author::Weft, "{text:?}, as an older weft wrote it, or damaged");
        }
        write_env(&file, b"A=1\n").unwrap();
        replaced(&file, "A=1\n");
        assert_eq!(author(&file), Author::Another, "the next run made the mark a new one");
    }
}
