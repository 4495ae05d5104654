// SPDX-License-Identifier: Apache-2.0
//! Writes the subnet file (subnet.env), and tells whether weft or another program wrote the one that is there.
//!
//! flannel writes the same file at the same path. weft therefore puts a mark beside it, which names the file that weft wrote by its
//! inode and the time of its last write. If the mark names another file than the one that is there, flannel has run since. The first
//! start of weft after that removes the routes that flannel left (`src/pass/takeover.rs`).

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::files;

/// First line of the mark, for people who find the file.
const MARK: &str =
    "weft wrote the subnet file beside this mark, as the inode and the time below say: the routes are not flannel's\n";

/// Which program wrote the subnet file that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Author {
    /// weft wrote it.
    Weft,
    /// There is no mark, so the file does not say. weft's own entries in the kernel may tell.
    Unknown,
    /// Another program, most likely flannel, wrote it after weft: the mark names another file.
    Another,
}

/// Identifies one state of a file: its inode, and the time of the last write in seconds and nanoseconds. A file that replaces it, or
/// the same file after an edit, differs in at least one of them.
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

/// Returns the path of the mark. It is in the directory of the subnet file, so a reboot that clears `/run` removes both.
fn mark_of(subnet_file: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(subnet_file.file_name().unwrap_or_default());
    name.push(".weft");
    subnet_file.with_file_name(name)
}

/// Returns the files that the mark names. The list is empty if an older weft wrote the mark, because it named none.
fn marked_files(subnet_file: &Path) -> io::Result<Vec<FileId>> {
    let text = files::read_text(&mark_of(subnet_file))?;
    Ok(text.lines().filter_map(FileId::parse).collect())
}

/// Returns which program wrote this subnet file. If the mark cannot be read, or if it names no file, the answer is [`Author::Weft`],
/// because then nothing is removed.
pub fn author(subnet_file: &Path) -> Author {
    match (marked_files(subnet_file), FileId::of_file(subnet_file)) {
        (Err(error), _) if error.kind() == io::ErrorKind::NotFound => Author::Unknown,
        (Ok(marked), Some(now)) if !marked.is_empty() && !marked.contains(&now) => Author::Another,
        _ => Author::Weft,
    }
}

/// Writes `contents` into the subnet file and marks the file as weft's. Returns true if the file was written, and false if it had
/// these contents already.
///
/// The mark is written before the new file replaces the old one, and it names both. So it is true at each moment at which weft may
/// be killed.
///
/// # Errors
/// The mark or the file cannot be written.
pub fn write(subnet_file: &Path, contents: &[u8]) -> io::Result<bool> {
    if files::read(subnet_file).is_ok_and(|present| present == contents) {
        let now = FileId::of_file(subnet_file);
        if let Some(now) = now.filter(|now| !marked_files(subnet_file).is_ok_and(|marked| marked.contains(now))) {
            write_mark(subnet_file, &[now])?;
        }
        return Ok(false);
    }
    let old = FileId::of_file(subnet_file).filter(|_| author(subnet_file) == Author::Weft);
    files::replace_with(subnet_file, 0o644, |temporary| {
        temporary.write_all(contents)?;
        let new = FileId::of(&temporary.metadata()?);
        write_mark(subnet_file, &old.into_iter().chain([new]).collect::<Vec<_>>())
    })?;
    Ok(true)
}

fn write_mark(subnet_file: &Path, files: &[FileId]) -> io::Result<()> {
    let lines: String = files.iter().map(|file| format!("{file}\n")).collect();
    files::replace(&mark_of(subnet_file), format!("{MARK}{lines}").as_bytes(), 0o644)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replaces the file as flannel and editors do: by a rename.
    fn replace_as_flannel(file: &Path, text: &str) {
        let temporary = file.with_file_name("temporary");
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, file).unwrap();
    }

    #[test]
    fn the_mark_tells_which_program_wrote_the_present_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run/subnet.env");
        assert_eq!(author(&file), Author::Unknown);
        assert!(write(&file, b"A=1\n").unwrap());
        assert!(dir.path().join("run/.subnet.env.weft").exists());
        assert_eq!(author(&dir.path().join("run/other.env")), Author::Unknown, "the file of another agent");
        for text in ["A=1\n", "A=22\n", "A=3\n"] {
            write(&file, text.as_bytes()).unwrap();
            assert_eq!(author(&file), Author::Weft, "{text}");
        }
        assert!(!write(&file, b"A=3\n").unwrap(), "equal contents must not be written again");
        // flannel writes the same contents, and then others.
        for text in ["A=3\n", "A=4\n"] {
            replace_as_flannel(&file, text);
            assert_eq!(author(&file), Author::Another, "{text}");
        }
        assert!(!write(&file, b"A=4\n").unwrap());
        assert_eq!(author(&file), Author::Weft, "weft marks a file that has the wanted contents");
        fs::write(&file, "A=5\n").unwrap();
        assert_eq!(author(&file), Author::Another, "another program wrote into the same inode");
    }

    #[test]
    fn the_mark_is_true_if_weft_is_killed_between_mark_and_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subnet.env");
        write(&file, b"A=1\n").unwrap();
        let old = FileId::of_file(&file).unwrap();
        write(&file, b"A=2\n").unwrap();
        // If weft had been killed after the mark, the old file would still be there. The mark names it.
        assert_eq!(marked_files(&file).unwrap(), [old, FileId::of_file(&file).unwrap()]);
        // The mark never names flannel's file. If weft is killed here, its next start still finds that flannel wrote the file.
        replace_as_flannel(&file, "A=2\n");
        write(&file, b"A=3\n").unwrap();
        assert_eq!(marked_files(&file).unwrap(), [FileId::of_file(&file).unwrap()]);
    }

    /// If the mark named only the old file, the new one would look as if flannel had written it.
    #[test]
    fn a_file_that_cannot_be_marked_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subnet.env");
        fs::write(&file, "A=1\n").unwrap();
        fs::create_dir(mark_of(&file)).unwrap();
        assert!(write(&file, b"A=2\n").is_err());
        assert_eq!(fs::read(&file).unwrap(), b"A=1\n");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary file must be left behind");
        assert!(write(&file, b"A=1\n").is_err(), "the file has the wanted contents, and cannot be marked, either");
    }

    #[test]
    fn a_mark_without_a_file_id_means_that_weft_wrote_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subnet.env");
        fs::write(&file, "A=1\n").unwrap();
        for text in
            ["weft writes the subnet file beside this mark: the routes here are not flannel's\n", "", "file 1 2\n"]
        {
            fs::write(mark_of(&file), text).unwrap();
            assert_eq!(author(&file), Author::Weft, "{text:?} is the mark of an older weft, or it is damaged");
        }
        write(&file, b"A=1\n").unwrap();
        replace_as_flannel(&file, "A=1\n");
        assert_eq!(author(&file), Author::Another, "the write above renewed the mark");
    }
}
