// SPDX-License-Identifier: Apache-2.0
//! Where randomness comes from. One seed decides everything: what the agents draw, the order of hash maps, and the order in which tokio
//! looks at the branches of a `select!`.
//!
//! The standard library and tokio take their random bits from `getrandom` of the C library. This file replaces that function for the
//! whole program. tokio also counts its runtimes in a static variable, so a process runs one simulation and no second one.

use std::cell::Cell;

use nix::libc;

/// A small generator (splitmix64) whose numbers are the same on every machine.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// Returns the generator of this seed and purpose. Two purposes have independent numbers.
    pub fn new(seed: u64, purpose: u64) -> Chance {
        let mut chance = Chance(seed ^ purpose.wrapping_mul(0xa076_1d64_78bd_642f));
        chance.bits();
        chance
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`, and 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.bits().checked_rem(end as u64).map_or(0, |rest| usize::try_from(rest).unwrap_or(0))
    }

    /// Returns a number from `first` to `last`.
    pub fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.bits() % (last - first + 1)
    }

    /// Returns true in `percent` of 100 cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.bits() % 100 < percent
    }
}

thread_local! {
    static BEGUN: Cell<bool> = const { Cell::new(false) };
    static AGENTS: Cell<u64> = const { Cell::new(0) };
    static SYSTEM: Cell<u64> = const { Cell::new(0) };
}

/// Begins the sequence of random bits of this thread. Other threads have real random bits.
pub fn begin(seed: u64) {
    BEGUN.set(true);
    AGENTS.set(Chance::new(seed, 1).bits());
    SYSTEM.set(Chance::new(seed, 2).bits());
}

fn next(state: &'static std::thread::LocalKey<Cell<u64>>) -> u64 {
    let mut chance = Chance(state.get());
    let bits = chance.bits();
    state.set(chance.0);
    bits
}

/// Returns the next random bits of the agents.
pub fn agents() -> u64 {
    next(&AGENTS)
}

/// Replaces the function of the C library of this name, for all code in this program.
///
/// # Safety
/// The caller gives a buffer of `length` writable bytes, as for the function of the C library.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, flags: u32) -> isize {
    if !BEGUN.get() {
        // SAFETY: the arguments are those of the caller.
        let filled = unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) };
        return isize::try_from(filled).unwrap_or(-1);
    }
    // SAFETY: the caller promises that the buffer has this length.
    let buffer = unsafe { std::slice::from_raw_parts_mut(buffer, length) };
    for chunk in buffer.chunks_mut(8) {
        chunk.copy_from_slice(&next(&SYSTEM).to_le_bytes()[..chunk.len()]);
    }
    isize::try_from(length).unwrap_or(-1)
}
