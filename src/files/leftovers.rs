// SPDX-License-Identifier: Apache-2.0
//! Temporary files that a write has left behind, because the agent was killed or the machine lost power in the middle of it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the name of a temporary file begins with.
pub(super) const PREFIX: &str = ".weft-";
/// How many letters and digits follow.
pub(super) const RANDOM: usize = 6;
/// A younger file may be one that another agent, of an earlier version, writes without a lock.
const AGE: Duration = Duration::from_secs(3600);

/// Removes the temporary files in this directory that are an hour old and that no living process writes. Returns those that were removed.
///
/// # Errors
/// The directory cannot be read, or a file cannot be removed.
pub fn remove(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if is_temporary(&entry.file_name()) && entry.file_type()?.is_file() && is_left(&path)? {
            fs::remove_file(&path)?;
            removed.push(path);
        }
    }
    Ok(removed)
}

/// Marks a temporary file as one that this process writes. The mark ends with the process.
pub(super) fn mark_as_written(file: &File) {
    // Some network file systems have no locks. There, only its age protects the file.
    let _ = file.try_lock();
}

fn is_temporary(name: &OsStr) -> bool {
    let random = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
    random.is_some_and(|random| random.len() == RANDOM && random.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

fn is_left(path: &Path) -> io::Result<bool> {
    let file = match super::open(path) {
        // The write has ended meanwhile, and the file has its own name.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    // A file of the future is young, too: the clock was wrong, or is.
    let is_old = file.metadata()?.modified()?.elapsed().is_ok_and(|age| age >= AGE);
    Ok(is_old && file.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::SystemTime;

    use super::*;
    use crate::files::temporary_file;

    fn names(directory: &Path) -> BTreeSet<String> {
        let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    fn make_old(path: &Path) {
        File::open(path).unwrap().set_modified(SystemTime::now() - AGE * 2).unwrap();
    }

    #[test]
    fn only_old_temporary_files_that_nobody_writes_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        // What a write leaves that was interrupted: its name is one that a write gives.
        let left = temporary_file(&at("peers"), 0o644, |_| Ok(())).unwrap();
        let (file, left) = left.keep().unwrap();
        // A process that another test is just starting has a copy of the descriptor, which would keep the lock.
        file.unlock().unwrap();
        drop(file);
        let written = temporary_file(&at("peers"), 0o644, |_| Ok(())).unwrap();
        for name in [".weft-young1", ".weft-future", "peers-00", ".weft-x.conf", ".weft-abcdefg", ".other-abcdef"] {
            fs::write(at(name), "").unwrap();
            make_old(&at(name));
        }
        File::open(at(".weft-young1")).unwrap().set_modified(SystemTime::now()).unwrap();
        File::open(at(".weft-future")).unwrap().set_modified(SystemTime::now() + AGE * 9).unwrap();
        fs::create_dir(at(".weft-folder")).unwrap();
        std::os::unix::fs::symlink(at("peers-00"), at(".weft-link00")).unwrap();
        make_old(&left);
        make_old(written.path());
        let before = names(directory.path());

        assert_eq!(remove(directory.path()).unwrap(), std::slice::from_ref(&left));
        let mut after = before;
        after.remove(left.file_name().unwrap().to_str().unwrap());
        assert_eq!(names(directory.path()), after, "everything else stays");
        assert!(remove(&at("missing")).is_err());
        assert!(!is_left(&at(".weft-ended0")).unwrap(), "a write that has ended is no reason to stop");
    }
}
