// SPDX-License-Identifier: Apache-2.0
//! Keeps the history and writes it to a file. Another thread writes, because the disk may hang. There is never more than one such thread.
//!
//! New records are appended a moment after they were made, without a sync: after a power cut the last ones may be missing. The first
//! write of an agent, and every write with which the file would become too large, replaces the file with what is in memory.

use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::fcntl::OFlag;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::ring::Ring;
use super::{HistoryRecord, Query};
use crate::files;
use crate::instance;
use crate::observe::status::now_ms;
use crate::observe::status::table::duration;

/// Time from a change to its write, so that changes that follow each other are written together.
const DELAY: Duration = Duration::from_secs(2);
/// While a write lasts, the next one is tried again after this time.
const BUSY: Duration = Duration::from_secs(1);
/// How long the start waits for the file, and the end for the last write. A disk that hangs must not keep the node from its work.
const LIMIT: Duration = Duration::from_secs(2);
/// Maximum size of the file in bytes. Of a larger one, only the end is read.
const MAX_FILE: u64 = 1 << 20;
/// What is recorded and said of an agent that left its socket. Why it was killed is in no place that the agent may read.
pub const EARLIER_WAS_KILLED: &str =
    "the agent before this one was killed, crashed, or was ended by a second signal: it left its socket";
/// How long the status shows this, in seconds. The history keeps it for longer.
const SHOWN: u64 = 24 * 3600;
/// How long `weft doctor` finds the reason in the log of the kernel, in seconds.
const IN_KERNEL_LOG: u64 = 3600;

/// What the last write left behind.
#[derive(Debug, Default)]
struct Written {
    /// Size of the file. `None` if the file must be written as a whole, because nothing was written yet or a write failed.
    size: Option<u64>,
    /// A write has failed, which was logged.
    failing: bool,
}

/// Keeps the history.
#[derive(Debug, Default)]
pub struct Recorder {
    ring: Ring,
    file: Option<PathBuf>,
    /// The records up to this number were handed to a write.
    saved: u64,
    /// When to write.
    due: Option<Instant>,
    task: Option<JoinHandle<()>>,
    written: Arc<Mutex<Written>>,
    /// When an agent last recorded that the one before it was killed, in milliseconds since 1970.
    kill_recorded: Option<u64>,
}

/// Returns the path of the file of an instance.
pub fn file(state_dir: &Path, subnet_file: &Path) -> PathBuf {
    instance::state_file(state_dir, "history", subnet_file)
}

/// Removes the file of an instance, if there is one.
///
/// # Errors
/// The file cannot be removed.
pub fn remove(state_dir: &Path, subnet_file: &Path) -> io::Result<()> {
    files::remove(&file(state_dir, subnet_file))
}

impl Recorder {
    /// Returns a recorder that goes on with the records in this file. Without a file the history ends with the agent. A file that cannot
    /// be read is logged, and is replaced at the first change.
    pub async fn open(file: Option<PathBuf>) -> Recorder {
        let mut recorder = Recorder { file, ..Recorder::default() };
        let Some(path) = recorder.file.clone() else { return recorder };
        let name = path.display().to_string();
        let read = files::spawn_blocking(move || read(&path));
        let error = match tokio::time::timeout(LIMIT, read).await {
            Ok(Ok(Ok(text))) => {
                recorder.ring.load(&text);
                recorder.saved = recorder.ring.last();
                recorder.kill_recorded = recorder.ring.newest(EARLIER_WAS_KILLED);
                return recorder;
            }
            Ok(Ok(Err(error))) if error.kind() == io::ErrorKind::NotFound => return recorder,
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s: does its disk hang?", LIMIT.as_secs()),
        };
        tracing::warn!("history: read {name}: {error}: it begins again");
        recorder
    }

    /// Adds a record. Its number and its time are set here.
    pub fn add(&mut self, record: HistoryRecord) {
        self.ring.add(record, now_ms());
        if self.file.is_some() && self.due.is_none() {
            self.due = Some(Instant::now() + DELAY);
        }
    }

    /// Records that the agent before this one was killed. This is written at once, because the agent may end before it has a lease, and the
    /// next one finds no socket then. A disk that hangs is not waited for longer than two seconds.
    pub async fn add_kill(&mut self) {
        self.add(HistoryRecord { cause: "start".into(), event: EARLIER_WAS_KILLED.into(), ..HistoryRecord::default() });
        self.kill_recorded = self.ring.newest(EARLIER_WAS_KILLED);
        self.close().await;
    }

    /// Returns what an operator should know of an agent that was killed, for a day. `now_ms` is the current time in milliseconds since
    /// 1970.
    pub fn remark(&self, now_ms: u64) -> Option<String> {
        let recorded = self.kill_recorded?;
        if now_ms < recorded {
            // The clock was set back, or it is not set yet after a boot.
            return Some(format!("{EARLIER_WAS_KILLED}; its log: journalctl -u weft, kubectl logs --previous"));
        }
        let age = (now_ms - recorded) / 1000;
        let memory = if age < IN_KERNEL_LOG { "`weft doctor` finds out whether memory was short; " } else { "" };
        (age < SHOWN).then(|| {
            format!(
                "recorded {} ago: {EARLIER_WAS_KILLED}; {memory}its log: journalctl -u weft, kubectl logs --previous",
                duration(age)
            )
        })
    }

    /// Returns the records that the query asks for, one line of JSON each.
    pub fn query(&self, query: &Query) -> Vec<Arc<str>> {
        self.ring.query(query)
    }

    /// Returns when [`Recorder::save`] has something to do.
    pub fn next(&self) -> Option<Instant> {
        self.due
    }

    /// Starts a write if one is due and none is running.
    pub fn save(&mut self, now: Instant) {
        let Some(path) = self.file.clone().filter(|_| self.due.is_some_and(|at| at <= now)) else { return };
        if self.task.as_ref().is_some_and(|task| !task.is_finished()) {
            self.due = Some(now + BUSY);
            return;
        }
        self.due = None;
        let size = lock(&self.written).size;
        let new = self.ring.query(&Query { after: self.saved, ..Query::default() });
        let bytes: u64 = new.iter().map(|line| line.len() as u64 + 1).sum();
        let append_to = size.filter(|size| size + bytes <= MAX_FILE);
        let lines = if append_to.is_some() { new } else { self.ring.query(&Query::default()) };
        self.saved = self.ring.last();
        let written = self.written.clone();
        self.task = Some(files::spawn_blocking(move || {
            let result = match append_to {
                Some(size) => append(&path, &lines).map(|()| size + bytes),
                None => replace(&path, &lines),
            };
            note(&path, result, &mut lock(&written));
        }));
    }

    /// Writes what is not written yet, because the agent ends or may end. Returns when it is written, or after two seconds.
    pub async fn close(&mut self) {
        let write = async {
            if let Some(task) = self.task.take() {
                let _ = task.await;
            }
            self.due = self.due.map(|_| Instant::now());
            self.save(Instant::now());
            if let Some(task) = self.task.take() {
                let _ = task.await;
            }
        };
        let _ = tokio::time::timeout(LIMIT, write).await;
    }
}

fn lock(written: &Mutex<Written>) -> std::sync::MutexGuard<'_, Written> {
    written.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = files::open(path)?;
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(MAX_FILE)))?;
    let mut text = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut text)?;
    Ok(text)
}

fn text(lines: &[Arc<str>]) -> String {
    lines.iter().flat_map(|line| [&**line, "\n"]).collect()
}

/// Appends to the file that this agent has written before. Another program may have put something else in its place.
fn append(path: &Path, lines: &[Arc<str>]) -> io::Result<()> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut file = OpenOptions::new().append(true).custom_flags(flags.bits()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file: remove it"));
    }
    file.write_all(text(lines).as_bytes())
}

fn replace(path: &Path, lines: &[Arc<str>]) -> io::Result<u64> {
    let text = text(lines);
    files::replace(path, text.as_bytes(), 0o600)?;
    Ok(text.len() as u64)
}

/// Notes the result of a write. The first failure is logged, and the next write replaces the file.
fn note(path: &Path, result: io::Result<u64>, written: &mut Written) {
    match result {
        Ok(size) => *written = Written { size: Some(size), failing: false },
        Err(error) => {
            if !written.failing {
                tracing::warn!("history: write {}: {error}: after a restart these changes are missing", path.display());
            }
            *written = Written { size: None, failing: true };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn record(event: &str) -> HistoryRecord {
        HistoryRecord { cause: "lease".into(), event: event.into(), ..HistoryRecord::default() }
    }

    fn events(recorder: &Recorder) -> Vec<String> {
        let parse = |line: &Arc<str>| serde_json::from_str::<HistoryRecord>(line).unwrap().event;
        recorder.query(&Query::default()).iter().map(parse).collect()
    }

    async fn reopened(path: &Path) -> Recorder {
        Recorder::open(Some(path.to_owned())).await
    }

    // The clock stands still in most tests, because the end of an agent waits for a slow disk for two seconds only.

    #[tokio::test(start_paused = true)]
    async fn records_survive_a_restart_and_are_appended() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir.path().join("state"), Path::new("/run/flannel/subnet.env"));
        let mut first = reopened(&path).await;
        assert_eq!(first.next(), None, "without a change nothing is written");
        let before = Instant::now();
        first.add(record("a"));
        let due = first.next().unwrap();
        assert!(due >= before + DELAY, "changes that follow each other are written together");
        first.add(record("a2"));
        assert_eq!(first.next(), Some(due), "a change that follows does not make the write later");
        first.close().await;
        let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
        let before = inode(&path);
        first.add(record("b"));
        first.close().await;
        assert_eq!(inode(&path), before, "the second write appends");
        let mut second = reopened(&path).await;
        assert_eq!(events(&second), ["a", "a2", "b"]);
        second.add(record("c"));
        second.close().await;
        assert_eq!(events(&reopened(&path).await), ["a", "a2", "b", "c"]);
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap()) & 0o777, 0o600);
    }

    #[tokio::test(start_paused = true)]
    async fn a_torn_line_is_lost_alone_and_the_file_is_whole_again_after_the_next_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let mut recorder = reopened(&path).await;
        for event in ["a", "b"] {
            recorder.add(record(event));
        }
        recorder.close().await;
        let text = fs::read(&path).unwrap();
        fs::write(&path, &text[..text.len() - 10]).unwrap();
        let mut recorder = reopened(&path).await;
        assert_eq!(events(&recorder), ["a"]);
        recorder.add(record("c"));
        recorder.close().await;
        assert_eq!(events(&reopened(&path).await), ["a", "c"]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_file_has_a_maximum_size_and_of_a_huge_file_only_the_end_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let mut recorder = reopened(&path).await;
        for n in 0..30 {
            for _ in 0..100 {
                recorder.add(record(&format!("{n} {}", "x".repeat(500))));
            }
            recorder.close().await;
            assert!(fs::metadata(&path).unwrap().len() <= MAX_FILE);
        }
        let mut huge = vec![b'{'; 3 << 20];
        huge.push(b'\n');
        huge.extend(fs::read(&path).unwrap());
        fs::write(&path, huge).unwrap();
        assert_eq!(events(&reopened(&path).await), events(&recorder));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_no_file_costs_only_the_history() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut recorder = reopened(&path).await;
        recorder.add(record("a"));
        recorder.close().await;
        assert_eq!(events(&reopened(&path).await), ["a"], "the file takes the place of the FIFO");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        recorder.add(record("b"));
        recorder.close().await;
        assert_eq!(events(&recorder), ["a", "b"], "what cannot be written stays in memory");
        fs::remove_dir(&path).unwrap();
        recorder.add(record("c"));
        recorder.close().await;
        assert_eq!(events(&reopened(&path).await), ["a", "b", "c"], "the next write makes up for the one that failed");
    }

    #[tokio::test]
    async fn a_kill_is_written_at_once_and_shown_for_a_day_by_each_agent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let mut recorder = reopened(&path).await;
        assert_eq!(recorder.remark(now_ms()), None);
        recorder.add_kill().await;
        assert_eq!((events(&recorder), recorder.next()), (vec![EARLIER_WAS_KILLED.to_owned()], None));
        let mut next = reopened(&path).await;
        next.add(record("a"));
        next.close().await;
        let next = reopened(&path).await;
        let at = next.kill_recorded.unwrap();
        assert_eq!(
            (events(&next), recorder.kill_recorded),
            (vec![EARLIER_WAS_KILLED.to_owned(), "a".to_owned()], Some(at))
        );
        for (seconds, words, asks_doctor) in [
            (0, "recorded 0 s ago: ", true),
            (150, "recorded 2 min ago: ", true),
            (3600, "recorded 60 min ago: ", false),
        ] {
            let remark = next.remark(at + seconds * 1000).unwrap();
            assert!(remark.starts_with(words) && remark.contains(EARLIER_WAS_KILLED), "{remark}");
            assert_eq!(remark.contains("weft doctor"), asks_doctor, "{remark}");
        }
        assert_eq!(next.remark(at + SHOWN * 1000), None);
        assert!(next.remark(0).is_some_and(|remark| !remark.contains(" ago")), "the clock was set back");
    }

    /// Another program may have put a link in the place of the file.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_appended_to_a_file_that_a_link_names() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("history"), dir.path().join("other"));
        let mut recorder = reopened(&path).await;
        recorder.add(record("a"));
        recorder.close().await;
        fs::write(&other, "not ours").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        for event in ["b", "c"] {
            recorder.add(record(event));
            recorder.close().await;
        }
        assert_eq!(fs::read_to_string(&other).unwrap(), "not ours");
        assert_eq!(events(&reopened(&path).await), ["a", "b", "c"], "the next write takes the place of the link");
    }

    /// Two threads that write one file at the same time would spoil it.
    #[tokio::test(start_paused = true)]
    async fn a_write_is_put_off_while_another_one_lasts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let mut recorder = reopened(&path).await;
        recorder.task = Some(tokio::spawn(std::future::pending()));
        recorder.add(record("a"));
        let due = recorder.next().unwrap();
        recorder.save(due);
        assert_eq!(recorder.next(), Some(due + BUSY), "it is tried again");
        recorder.task = None;
        recorder.save(due + BUSY);
        assert_eq!(recorder.next(), None);
        recorder.close().await;
        assert_eq!(events(&reopened(&path).await), ["a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_an_agent_does_not_wait_for_a_disk_that_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = reopened(&dir.path().join("history")).await;
        recorder.task = Some(tokio::spawn(std::future::pending()));
        recorder.add(record("a"));
        let closed = tokio::time::timeout(Duration::from_secs(3600), recorder.close()).await;
        assert!(closed.is_ok(), "the agent does not end");
    }

    /// The loop of the agent waits for the time at which something is due.
    #[tokio::test]
    async fn without_a_file_nothing_is_due_and_the_records_are_kept_in_memory() {
        let mut recorder = Recorder::open(None).await;
        recorder.add(record("a"));
        assert_eq!((recorder.next(), events(&recorder)), (None, vec!["a".to_owned()]));
    }

    #[tokio::test]
    async fn the_last_write_waits_for_the_one_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let mut recorder = reopened(&path).await;
        let (end, hangs) = std::sync::mpsc::channel::<()>();
        recorder.task = Some(tokio::task::spawn_blocking(move || hangs.recv().unwrap_or_default()));
        recorder.add(record("a"));
        {
            let mut closing = std::pin::pin!(recorder.close());
            let early = tokio::time::timeout(Duration::from_millis(100), &mut closing).await;
            assert!(early.is_err() && !path.exists(), "two threads must not write one file");
            drop(end);
            closing.await;
        }
        // The end of an agent does not wait for a slow disk.
        let began = Instant::now();
        while !path.exists() {
            assert!(began.elapsed() < Duration::from_secs(60), "it is not written");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(events(&reopened(&path).await), ["a"]);
    }
}
