// SPDX-License-Identifier: Apache-2.0
//! `weft install-conf` and `cp`: the init containers of flannel's manifests copy the CNI configuration and the plugin with them. The image
//! of weft has no shell and no other program, so weft copies the files itself.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Context;

use crate::files;

/// Copies a regular file with its permissions. If `to` is a directory, the copy gets the name of `from` in it. The copy replaces whatever
/// is at its place by a rename, so a program that reads the old file, or runs it, is not disturbed, and no reader sees a part of the new
/// file. A symbolic link at that place is replaced, and the file behind it stays as it is.
///
/// # Errors
/// `from` is not a regular file or cannot be read, or the copy cannot be written.
pub fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let name = from.file_name().with_context(|| format!("{} is not the name of a file", from.display()))?;
    let to = if to.is_dir() { to.join(name) } else { to.to_owned() };
    let mut source = files::open(from).with_context(|| format!("read {}", from.display()))?;
    let mode = source.metadata().with_context(|| format!("read {}", from.display()))?.mode() & 0o777;
    files::replace_with(&to, mode, |file| io::copy(&mut source, file).map(drop)).map_err(|error| {
        let remedy = files::remedy(&error, to.parent().unwrap_or(Path::new("/")));
        anyhow::Error::new(error)
            .context(format!("write {}: is its directory mounted read-write, with room?{remedy}", to.display()))
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn the_copy_has_the_content_and_the_permissions() {
        let home = tempfile::tempdir().unwrap();
        let (from, to) = (home.path().join("flannel"), home.path().join("bin/flannel"));
        fs::write(&from, "program").unwrap();
        fs::set_permissions(&from, Permissions::from_mode(0o755)).unwrap();
        copy(&from, &to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"program");
        assert_eq!(fs::metadata(&to).unwrap().mode() & 0o7777, 0o755);
        fs::write(&from, "newer").unwrap();
        copy(&from, &home.path().join("bin")).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"newer", "a directory gets a file of the same name");
        assert_eq!(fs::read_dir(home.path().join("bin")).unwrap().count(), 1, "no temporary file must remain");
    }

    /// Earlier versions of weft published the CNI configuration as a link to a file of the running agent.
    #[test]
    fn a_link_is_replaced_and_the_file_behind_it_stays() {
        let home = tempfile::tempdir().unwrap();
        let (from, to, behind) = (home.path().join("new"), home.path().join("link"), home.path().join("behind"));
        fs::write(&from, "new").unwrap();
        fs::write(&behind, "of the agent").unwrap();
        symlink(&behind, &to).unwrap();
        copy(&from, &to).unwrap();
        assert!(!to.is_symlink());
        assert_eq!((fs::read(&to).unwrap(), fs::read(&behind).unwrap()), (b"new".into(), b"of the agent".into()));
    }

    /// A ConfigMap is mounted as links to the files of its current version.
    #[test]
    fn a_source_that_is_a_link_is_followed() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("data"), "{}").unwrap();
        symlink("data", home.path().join("cni-conf.json")).unwrap();
        let to = home.path().join("10-flannel.conflist");
        copy(&home.path().join("cni-conf.json"), &to).unwrap();
        assert!(!to.is_symlink());
        assert_eq!(fs::read(to).unwrap(), b"{}");
    }

    #[test]
    fn errors_name_the_file_and_leave_the_old_one() {
        let home = tempfile::tempdir().unwrap();
        let (from, to) = (home.path().join("from"), home.path().join("to"));
        fs::write(&to, "old").unwrap();
        let refusal = |from: &Path, to: &Path| format!("{:#}", copy(from, to).unwrap_err());
        assert!(refusal(&from, &to).contains("read "), "{}", refusal(&from, &to));
        assert!(refusal(home.path(), &to).contains("not a regular file"));
        assert!(refusal(Path::new("/"), &to).contains("is not the name of a file"));
        fs::write(&from, "new").unwrap();
        assert!(refusal(&from, &to.join("below")).contains("is its directory mounted read-write"));
        assert_eq!(fs::read(to).unwrap(), b"old");
    }
}
