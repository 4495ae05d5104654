// SPDX-License-Identifier: Apache-2.0
//! The registers in which the instructions of a rule put what they test.

use super::instruction::Comparison;
use crate::kernel::rules::Matches;

/// The bytes of all registers together.
const REGISTERS: usize = 64;

/// The registers, byte by byte. `None` is a byte that is not known.
pub(super) struct Registers([Option<u8>; REGISTERS]);

impl Registers {
    /// Returns registers of which nothing is known, as at the beginning of a rule.
    pub(super) fn unknown() -> Registers {
        Registers([None; REGISTERS])
    }

    /// Returns the bytes at a place. A place outside has no bytes.
    pub(super) fn get(&self, at: usize, len: usize) -> &[Option<u8>] {
        self.0.get(at..at + len).unwrap_or_default()
    }

    /// Returns the bytes at a place, if all of them are known.
    pub(super) fn known(&self, at: usize, len: usize) -> Option<Vec<u8>> {
        self.0.get(at..at + len)?.iter().copied().collect()
    }

    /// Writes bytes, and zeros up to the next multiple of four.
    pub(super) fn put(&mut self, at: usize, len: usize, data: Option<&[u8]>) {
        let data: Option<Vec<Option<u8>>> = data.map(|data| data.iter().copied().map(Some).collect());
        self.put_some(at, len, data.as_deref());
    }

    /// As [`Registers::put`], with bytes of which some may not be known.
    pub(super) fn put_some(&mut self, at: usize, len: usize, data: Option<&[Option<u8>]>) {
        let places = self.0.iter_mut().skip(at).take(len.next_multiple_of(4));
        for (number, place) in places.enumerate() {
            *place = data.and_then(|data| data.get(number).copied().unwrap_or(Some(0)));
        }
    }

    /// Applies a mask to bytes, and then an exclusive or.
    pub(super) fn mask(&mut self, from: usize, to: usize, mask: &[u8], xor: &[u8]) {
        let masked = |(number, mask): (usize, &u8)| {
            let xor = xor.get(number).copied().unwrap_or(0);
            // A byte that is masked away is known.
            let byte = self.0.get(from + number).copied().flatten();
            if *mask == 0 { Some(xor) } else { byte.map(|byte| (byte & mask) ^ xor) }
        };
        let bytes: Vec<Option<u8>> = mask.iter().enumerate().map(masked).collect();
        for (place, byte) in self.0.iter_mut().skip(to).zip(bytes) {
            *place = byte;
        }
    }

    /// Reverses the bytes of each part of this size, on a little-endian machine.
    pub(super) fn reverse(&mut self, from: usize, to: usize, len: usize, size: usize) {
        let mut bytes = self.get(from, len).to_vec();
        if cfg!(target_endian = "little") && size > 0 {
            bytes.chunks_mut(size).for_each(<[Option<u8>]>::reverse);
        }
        for (place, byte) in self.0.iter_mut().skip(to).zip(bytes) {
            *place = byte;
        }
    }

    /// Returns whether a comparison of the bytes at a place with a value holds.
    pub(super) fn compare(&self, at: usize, comparison: Comparison, data: &[u8]) -> Matches {
        if let Some(known) = self.known(at, data.len()) {
            return Matches::from(comparison.holds(known.as_slice().cmp(data)));
        }
        let differs =
            self.get(at, data.len()).iter().zip(data).any(|(byte, wanted)| byte.is_some_and(|b| b != *wanted));
        match comparison {
            Comparison::Equal if differs => Matches::No,
            Comparison::NotEqual if differs => Matches::Yes,
            _ => Matches::Unknown,
        }
    }
}
