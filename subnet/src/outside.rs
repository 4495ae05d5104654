// SPDX-License-Identifier: Apache-2.0
//! What the agent reads from outside: the wall clock, random bits, and how its writes of files go. Timers use `tokio::time::Instant` instead.
//!
//! The simulator (`sim/`) replaces them, so that one seed decides everything that happens in a simulated cluster. It does so for its own
//! thread only. No other program calls [`simulate`].

use std::cell::Cell;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What takes the place of the real clock and of real random bits.
#[derive(Debug, Clone, Copy)]
pub struct Simulated {
    /// Returns the time since 1970.
    pub wall_clock: fn() -> Duration,
    /// Returns 64 random bits.
    pub random: fn() -> u64,
    /// Is called before and after the steps of a write. An error ends the write.
    pub file_step: fn(FileStep<'_>) -> io::Result<()>,
    /// Returns how long a write beside the loop takes.
    pub write_time: fn() -> Duration,
}

/// A step of a write.
#[derive(Debug, Clone, Copy)]
pub enum FileStep<'a> {
    /// The file of this name is about to be written.
    Begin(&'a Path),
    /// The contents of this file were synced.
    Synced(&'a File),
    /// The names in this directory were synced.
    DirectorySynced(&'a Path),
}

thread_local! {
    static SIMULATED: Cell<Option<Simulated>> = const { Cell::new(None) };
    static IS_BLOCKING_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Replaces the wall clock and the random bits of this thread. With `None` they are the real ones again.
pub fn simulate(simulated: Option<Simulated>) {
    SIMULATED.set(simulated);
}

/// Returns true in a thread of the simulator. There the agent starts no other threads and uses no inotify, because the time at which they
/// answer would depend on the machine. Its CPU time counts as zero, and it leaves the machine's sysctls alone.
pub fn is_simulated() -> bool {
    SIMULATED.get().is_some()
}

/// Tells the simulator of a step of a write. Elsewhere this does nothing.
///
/// # Errors
/// The disk of the simulated machine refuses the write.
pub fn file_step(step: FileStep<'_>) -> io::Result<()> {
    SIMULATED.get().map_or(Ok(()), |simulated| (simulated.file_step)(step))
}

/// Returns how long a write beside the loop takes in the simulator. Elsewhere it takes its own time.
pub fn write_time() -> Duration {
    SIMULATED.get().map_or(Duration::ZERO, |simulated| (simulated.write_time)())
}

/// Runs a function of the simulator that another thread would run elsewhere.
pub fn blocking_task<T>(function: impl FnOnce() -> T) -> T {
    IS_BLOCKING_TASK.set(true);
    let result = function();
    IS_BLOCKING_TASK.set(false);
    result
}

/// Returns true inside [`blocking_task`]. Elsewhere in the simulator, a slow write delays everything that the agent does.
pub fn is_blocking_task() -> bool {
    IS_BLOCKING_TASK.get()
}

/// Returns the time since 1970. A clock that is set before 1970 counts as 1970.
pub fn wall_clock() -> Duration {
    match SIMULATED.get() {
        Some(simulated) => (simulated.wall_clock)(),
        None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
    }
}

/// Returns 64 random bits. They are not fit for cryptography.
pub fn random() -> u64 {
    match SIMULATED.get() {
        Some(simulated) => (simulated.random)(),
        None => std::hash::RandomState::new().build_hasher().finish(),
    }
}

/// In a thread of the simulator, fills the buffer with its random bytes and returns true. Elsewhere it does nothing.
pub fn fill_simulated(buffer: &mut [u8]) -> bool {
    let Some(simulated) = SIMULATED.get() else { return false };
    for chunk in buffer.chunks_mut(8) {
        let bytes = (simulated.random)().to_le_bytes();
        chunk.copy_from_slice(&bytes[..chunk.len()]);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_thread_has_a_clock_and_random_bits_of_its_own() {
        let mut buffer = [1; 11];
        assert!(!is_simulated() && !fill_simulated(&mut buffer) && buffer == [1; 11]);
        assert!(wall_clock() > Duration::from_secs(1_600_000_000));
        simulate(Some(Simulated {
            wall_clock: || Duration::from_secs(7),
            random: || 9,
            file_step: |_| Err(io::ErrorKind::StorageFull.into()),
            write_time: || Duration::from_secs(3),
        }));
        assert_eq!(file_step(FileStep::Begin(Path::new("x"))).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(write_time() == Duration::from_secs(3) && blocking_task(is_blocking_task) && !is_blocking_task());
        assert_eq!((wall_clock(), random(), is_simulated()), (Duration::from_secs(7), 9, true));
        assert!(fill_simulated(&mut buffer));
        assert_eq!(buffer, [9, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0]);
        assert!(!std::thread::spawn(is_simulated).join().unwrap(), "other threads have the real clock");
        simulate(None);
        assert!(!is_simulated() && file_step(FileStep::Begin(Path::new("x"))).is_ok() && write_time().is_zero());
    }
}
