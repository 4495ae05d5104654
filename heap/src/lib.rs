// SPDX-License-Identifier: Apache-2.0
//! The agent's heap (docs/adr/003-heap.md): small blocks from dlmalloc, large ones from the C library.
//!
//! This is the only crate of the agent that contains unsafe code, because a global allocator cannot be written without it.
#![expect(unsafe_code, reason = "the trait of a global allocator is unsafe")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::copy_nonoverlapping;

use dlmalloc::GlobalDlmalloc as Small;

/// Blocks of at least this many bytes are large ones, which the C library allocates. musl puts such a block into a mapping of its own, or
/// into one that two or three blocks share, and unmaps it when they are freed. Most large blocks are vectors that live for a short time.
pub const LARGE: usize = 16 << 10;

/// The allocator, for `#[global_allocator]`. The size of a block decides which of the two allocators it belongs to.
#[derive(Debug)]
pub struct Heap;

fn small(layout: Layout) -> bool {
    layout.size() < LARGE
}

// SAFETY: both allocators fulfil the requirements of the trait, and each block returns to the one that allocated it. `dealloc` and
// `realloc` get the current layout of the block, and the size in this layout is the one that chose the allocator.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises that the layout is not empty, and both allocators require no more than that.
        unsafe { if small(layout) { Small.alloc(layout) } else { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        unsafe { if small(layout) { Small.alloc_zeroed(layout) } else { System.alloc_zeroed(layout) } }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the block came from `alloc` with this layout, so from the allocator that its size chooses.
        unsafe { if small(layout) { Small.dealloc(block, layout) } else { System.dealloc(block, layout) } }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that this size, rounded up to the alignment, does not overflow.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (small(layout), small(new)) {
            // SAFETY: this allocator made the block, as in `dealloc`, and the new size is one of its own, too.
            (true, true) => unsafe { Small.realloc(block, layout, size) },
            // SAFETY: the same.
            (false, false) => unsafe { System.realloc(block, layout, size) },
            // SAFETY: the two blocks do not overlap, and each is as long as its layout. The old one is freed as in `dealloc`.
            (true, false) | (false, true) => unsafe {
                let moved = self.alloc(new);
                if !moved.is_null() {
                    copy_nonoverlapping(block, moved, size.min(layout.size()));
                    self.dealloc(block, layout);
                }
                moved
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All tests of this module allocate with it.
    #[global_allocator]
    static HEAP: Heap = Heap;

    fn pattern(len: usize) -> impl Iterator<Item = u8> {
        (0..len).map(|at| (at % 251) as u8)
    }

    #[test]
    fn a_block_keeps_its_contents_when_it_grows_and_shrinks_across_the_limit() {
        let mut bytes: Vec<u8> = pattern(LARGE - 1).collect();
        bytes.shrink_to_fit();
        for len in [LARGE, LARGE - 1, 4 * LARGE, LARGE, 17, LARGE + 1, 3 * LARGE, LARGE / 2] {
            let kept = len.min(bytes.len());
            bytes.truncate(len);
            bytes.shrink_to_fit();
            bytes.reserve_exact(len - bytes.len());
            assert_eq!(bytes.capacity(), len);
            assert!(bytes.iter().copied().eq(pattern(kept)), "the first {kept} of {len} bytes");
            bytes = bytes.into_iter().chain(pattern(len).skip(kept)).collect();
            bytes.shrink_to_fit();
            assert!(bytes.iter().copied().eq(pattern(len)), "{len} bytes");
        }
    }

    #[test]
    fn zeroed_blocks_are_zero_and_blocks_are_aligned_as_asked() {
        // The next block may get this memory, which is not zero.
        drop(vec![0xff_u8; LARGE / 2]);
        assert!(vec![0_u8; LARGE / 2].iter().all(|byte| *byte == 0));
        assert!(vec![0_u8; 2 * LARGE].iter().all(|byte| *byte == 0));

        #[repr(align(4096))]
        struct Page([u8; 4096]);
        for pages in [1, LARGE / 4096 - 1, LARGE / 4096, 3 * LARGE / 4096] {
            let mut block: Vec<Page> = Vec::with_capacity(pages);
            block.extend((0..pages).map(|page| Page([page as u8; 4096])));
            assert_eq!(block.as_ptr().addr() % 4096, 0);
            block.push(Page([1; 4096]));
            assert_eq!(block.as_ptr().addr() % 4096, 0);
            assert!(block.iter().take(pages).enumerate().all(|(page, block)| block.0 == [page as u8; 4096]));
        }
    }

    #[test]
    fn blocks_of_many_threads_do_not_touch_each_other() {
        let work = |seed: usize| {
            let mut held: Vec<Vec<u8>> = Vec::new();
            for round in 0..2_000_usize {
                let len = ((round * 7919 + seed * 104_729) % (LARGE + LARGE / 8)) >> (round % 12);
                let mut block = vec![seed as u8; len];
                block.extend_from_slice(&[seed as u8; 24]);
                held.push(block);
                if held.len() > 32 {
                    let gone = held.swap_remove(round % 32);
                    assert!(gone.iter().all(|byte| *byte == seed as u8), "thread {seed}, round {round}");
                }
            }
        };
        std::thread::scope(|scope| (1..=4).for_each(|seed| drop(scope.spawn(move || work(seed)))));
    }
}
