// SPDX-License-Identifier: Apache-2.0
//! Files that other programs read or edit. A file is written under a temporary name, synced and renamed, so that no reader sees a part of
//! it. [`watch`] notices when another program deletes or edits a file.

pub mod leftovers;
pub mod watch;

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use tempfile::NamedTempFile;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use weft_subnet::outside::{self, FileStep, is_simulated};

/// Maximum size of a file that [`read`] accepts, in bytes. The files in question have a few lines.
const MAX_SIZE: u64 = 1 << 20;

/// Opens a file for reading, without waiting for another program. Opening a FIFO would wait for its writer, so only a regular file is
/// accepted.
///
/// # Errors
/// The file cannot be opened, or it is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits() | OFlag::O_NOCTTY.bits()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file: remove it")) }
}

/// Reads a small file, as [`open`] opens it.
///
/// # Errors
/// The file cannot be opened or read, or it is larger than 1 MiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut contents = Vec::new();
    open(path)?.take(MAX_SIZE + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 > MAX_SIZE {
        return Err(io::Error::other("it is larger than 1 MiB: remove it"));
    }
    Ok(contents)
}

/// As [`read`], for a file of text.
///
/// # Errors
/// The file cannot be read, or its contents are not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::other("it is not UTF-8"))
}

/// As [`read`], for a file that an earlier run wrote. If there is none, there is nothing to know. `parse` returns `None` for a damaged file.
///
/// # Errors
/// The file cannot be read, or it is damaged.
pub fn read_parsed<T: Default>(path: &Path, parse: impl FnOnce(&[u8]) -> Option<T>) -> io::Result<T> {
    match read(path) {
        Ok(contents) => parse(&contents).ok_or_else(|| io::Error::other("it is damaged")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        Err(error) => Err(error),
    }
}

/// Writes `contents` into the file, unless it has these contents already. The file gets the mode 0644, and a missing directory is made
/// with the mode 0755. Returns true if the file was written.
///
/// # Errors
/// The directory or the file cannot be written.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<bool> {
    if read(path).is_ok_and(|present| present == contents) {
        return Ok(false);
    }
    replace(path, contents, 0o644)?;
    Ok(true)
}

/// Replaces the file with a new one that has these contents and this mode. A missing directory is made with the mode 0755. A reader sees
/// either the old file or the whole new one, also after a power cut.
///
/// # Errors
/// The directory or the file cannot be written.
pub fn replace(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    replace_with(path, mode, |file| file.write_all(contents))
}

/// As [`replace`], with the contents that `write` writes into a temporary file.
///
/// # Errors
/// The directory or the file cannot be written, or `write` fails. Then the old file stays.
pub fn replace_with(path: &Path, mode: u32, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    temporary_file(path, mode, write)?.persist(path).map_err(|failed| failed.error)?;
    sync_directory(path)
}

/// Makes a file with these contents and this mode. A missing directory is made with the mode 0755. A reader sees either no file or the
/// whole one, also after a power cut.
///
/// # Errors
/// The directory or the file cannot be written, or there is a file of this name, which stays as it is.
pub fn create(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let temporary = temporary_file(path, mode, |file| file.write_all(contents))?;
    temporary.persist_noclobber(path).map_err(|failed| failed.error)?;
    sync_directory(path)
}

/// Removes the file, if there is one. It stays removed after a power cut.
///
/// # Errors
/// The file cannot be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => sync_directory(path),
    }
}

/// Writes a file under a temporary name in the directory of `path`, and syncs it. It is removed when the returned value is dropped.
fn temporary_file(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<NamedTempFile> {
    outside::file_step(FileStep::Begin(path))?;
    make_directory(path)?;
    let mut builder = tempfile::Builder::new();
    let mut temporary = builder.prefix(leftovers::PREFIX).rand_bytes(leftovers::RANDOM).tempfile_in(directory(path))?;
    leftovers::mark_as_written(temporary.as_file());
    write(temporary.as_file_mut())?;
    temporary.as_file().set_permissions(Permissions::from_mode(mode))?;
    temporary.as_file().sync_all()?;
    outside::file_step(FileStep::Synced(temporary.as_file()))?;
    Ok(temporary)
}

/// Syncs the directory of this file. Only then is a file renamed or removed after a power cut, too.
///
/// # Errors
/// The directory cannot be opened or synced.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    let dir = directory(path);
    File::open(dir)?.sync_all()?;
    outside::file_step(FileStep::DirectorySynced(dir))
}

/// Makes the directory of this file with the mode 0755, if it is missing.
///
/// # Errors
/// The directory cannot be made.
pub fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(directory(path))
}

/// Runs a function that reads or writes files in another thread, because a disk may hang. In the simulator it runs in this thread, after the time
/// that a write takes there.
pub fn spawn_blocking<T: Send + 'static>(function: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    if !is_simulated() {
        return tokio::task::spawn_blocking(function);
    }
    let time = outside::write_time();
    task(async move {
        if !time.is_zero() {
            sleep(time).await;
        }
        outside::blocking_task(function)
    })
}

/// Starts a task that waits for files. In the simulator it ends with its agent, as the threads of a process do.
pub fn task<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    if is_simulated() { tokio::task::spawn_local(future) } else { tokio::spawn(future) }
}

/// Returns what an operator can do if root may not write into a directory. The text is empty for other errors.
pub fn remedy(error: &io::Error, dir: &Path) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!(
                " (another user than root owns it: chown root {}, or give the container DAC_OVERRIDE)",
                dir.display()
            )
        }
        _ => String::new(),
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    use nix::errno::Errno;

    use super::*;

    #[test]
    fn a_file_is_written_once_with_its_mode_and_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/flannel/subnet.env");
        assert!(write(&path, b"A=1\n").unwrap());
        assert!(!write(&path, b"A=1\n").unwrap(), "equal contents must not be written again");
        assert!(write(&path, b"A=2\n").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"A=2\n");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file must be left behind");
    }

    /// Makes a FIFO at this path, and returns what the function returns. Opening a FIFO for reading waits for a writer, and the agent has
    /// one thread, so it would hang: the function must end anyway.
    pub(crate) fn with_fifo<T: Send + 'static>(path: &Path, function: impl FnOnce() -> T + Send + 'static) -> T {
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || send.send(function()));
        receive.recv_timeout(Duration::from_secs(20)).expect("it must not wait for a writer of the FIFO")
    }

    #[test]
    fn a_file_that_is_not_regular_is_refused_at_once_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subnet.env");
        let fifo = path.clone();
        let (read_fifo, written) = with_fifo(&path, move || (read(&fifo), write(&fifo, b"A=1\n")));
        assert_eq!(read_fifo.unwrap_err().to_string(), "it is not a regular file: remove it");
        assert!(written.unwrap());
        assert_eq!(read(&path).unwrap(), b"A=1\n", "the FIFO must be replaced");
        assert_eq!(read(dir.path()).unwrap_err().to_string(), "it is not a regular file: remove it");
        fs::write(&path, vec![b'x'; MAX_SIZE as usize]).unwrap();
        assert_eq!(read(&path).unwrap().len() as u64, MAX_SIZE);
        fs::write(&path, vec![b'x'; MAX_SIZE as usize + 1]).unwrap();
        assert_eq!(read(&path).unwrap_err().to_string(), "it is larger than 1 MiB: remove it");
    }

    /// A pipe cannot be synced, so it stands for a disk that cannot take the contents.
    #[test]
    fn a_file_whose_contents_cannot_be_synced_does_not_replace_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subnet.env");
        replace(&path, b"old", 0o644).unwrap();
        let (_reader, writer) = nix::unistd::pipe().unwrap();
        let error = replace_with(&path, 0o644, |file| {
            *file = writer.into();
            Ok(())
        });
        assert_eq!(error.unwrap_err().raw_os_error(), Some(Errno::EINVAL as i32));
        let error = replace_with(&path, 0o644, |file| file.write_all(b"half").and(Err(io::Error::other("no more"))));
        assert_eq!(error.unwrap_err().to_string(), "no more");
        assert_eq!(read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file must be left behind");
    }

    #[test]
    fn only_a_missing_permission_has_the_owner_of_the_directory_as_its_remedy() {
        let of = |kind: io::ErrorKind| remedy(&kind.into(), Path::new("/opt/cni/bin"));
        assert!(of(io::ErrorKind::PermissionDenied).contains("chown root /opt/cni/bin"));
        assert_eq!(of(io::ErrorKind::StorageFull), "");
    }

    /// The directories of procfs can be opened, and cannot be synced.
    #[test]
    fn a_directory_that_cannot_be_synced_is_an_error() {
        let error = sync_directory(Path::new("/proc/self/status")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::EINVAL as i32));
    }

    #[test]
    fn a_file_is_created_once_and_removed_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/key");
        create(&path, b"first", 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(create(&path, b"second", 0o600).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(read(&path).unwrap(), b"first", "it must not be replaced");
        let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "no temporary file must be left behind");
        remove(&path).unwrap();
        assert!(!path.exists());
        remove(&path).unwrap();
        assert!(remove(dir.path()).is_err(), "a directory is not removed");
    }
}
