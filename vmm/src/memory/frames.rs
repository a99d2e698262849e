//! The frame allocator: pages of one region, for page tables, stacks and control blocks.

use super::address::{Hpa, PAGE_SIZE};
use super::map::PageRange;
use alloc::vec;
use alloc::vec::Vec;

/// Gives out the pages of a region, one bit each.
#[derive(Debug)]
pub struct Frames {
    range: PageRange,
    /// A set bit is a page in use.
    used: Vec<bool>,
    /// No free page lies below this one.
    first_free: usize,
}

impl Frames {
    /// All pages of `range` are free.
    pub fn new(range: PageRange) -> Self {
        let pages = usize::try_from(range.size() / PAGE_SIZE).unwrap_or(usize::MAX);
        Self { range, used: vec![false; pages], first_free: 0 }
    }

    /// Takes `count` pages in a row, or `None` when there are no such.
    pub fn allocate(&mut self, count: usize) -> Option<Hpa> {
        let mut start = self.first_free;
        loop {
            let window = self.used.get(start..start.checked_add(count)?)?;
            match window.iter().rposition(|&used| used) {
                Some(last) => start += last + 1,
                None => break,
            }
        }
        self.used.get_mut(start..start + count)?.fill(true);
        if start == self.first_free {
            self.first_free += count;
        }
        self.range.start().checked_add(start as u64 * PAGE_SIZE)
    }

    /// Takes back `count` pages from `at` on. What was not given out is left alone.
    pub fn free(&mut self, at: Hpa, count: usize) {
        let Some(offset) = at.checked_offset_from(self.range.start()) else { return };
        let Ok(start) = usize::try_from(offset / PAGE_SIZE) else { return };
        for page in self.used.iter_mut().skip(start).take(count) {
            *page = false;
        }
        self.first_free = self.first_free.min(start);
    }

    /// How many pages are free.
    pub fn free_pages(&self) -> usize {
        self.used.iter().filter(|&&used| !used).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const BASE: u64 = 0x10_0000;

    proptest! {
        #[test]
        fn frames_have_one_owner(ops in proptest::collection::vec((any::<bool>(), 1..6usize), 1..80)) {
            let mut frames = Frames::new(PageRange::covering(Hpa::new(BASE), 32 * 4096).unwrap());
            let mut free: BTreeSet<u64> = (0..32).collect();
            let mut given = Vec::new();
            for (allocate, n) in ops {
                if allocate {
                    let fits = (0..32).any(|s| (s..s + n as u64).all(|p| free.contains(&p)));
                    let got = frames.allocate(n);
                    prop_assert_eq!(got.is_some(), fits);
                    if let Some(at) = got {
                        let first = (at.raw() - BASE) / 4096;
                        for page in first..first + n as u64 {
                            prop_assert!(free.remove(&page));
                        }
                        given.push((at, n));
                    }
                } else if !given.is_empty() {
                    let (at, count) = given.swap_remove(n % given.len());
                    frames.free(at, count);
                    let first = (at.raw() - BASE) / 4096;
                    free.extend(first..first + count as u64);
                }
                prop_assert_eq!(frames.free_pages(), free.len());
            }
        }
    }
}
