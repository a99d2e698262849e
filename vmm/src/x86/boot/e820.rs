//! The memory map as kernels are told it, and the places that are free in it.
//!
//! [`E820Entry`] is a line of the map (ACPI 6.5, 15.1); [`FreeSpace`] is what of it a
//! loader may still fill. Maps come from firmware too: entries may overlap, be unsorted
//! and end anywhere, and what is not RAM wins over what is.

use crate::memory::address::{Gpa, PAGE_SIZE};
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

/// The first address that needs more than 32 bits.
pub(crate) const FOUR_GIB: u64 = 1 << 32;

/// What a range of the map is (ACPI 6.5, table 15.2). An open enum: firmware has others.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct E820Kind(pub u32);

impl E820Kind {
    /// RAM for the operating system.
    pub const RAM: Self = Self(1);
    /// Not to be touched.
    pub const RESERVED: Self = Self(2);
    /// ACPI tables; RAM once they have been read.
    pub const ACPI: Self = Self(3);
    /// ACPI memory that keeps its meaning.
    pub const NVS: Self = Self(4);
    /// Broken RAM.
    pub const UNUSABLE: Self = Self(5);
}

impl fmt::Debug for E820Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::RAM => f.write_str("Ram"),
            Self::RESERVED => f.write_str("Reserved"),
            Self::ACPI => f.write_str("Acpi"),
            Self::NVS => f.write_str("Nvs"),
            Self::UNUSABLE => f.write_str("Unusable"),
            Self(other) => write!(f, "E820Kind({other})"),
        }
    }
}

/// One range of the memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct E820Entry {
    /// Where it begins.
    pub base: Gpa,
    /// How many bytes it has.
    pub size: u64,
    /// What it is.
    pub kind: E820Kind,
}

impl E820Entry {
    /// The range `base..end`; empty when `end` lies below `base`.
    pub const fn new(base: u64, end: u64, kind: E820Kind) -> Self {
        Self { base: Gpa::new(base), size: end.saturating_sub(base), kind }
    }

    const fn end(&self) -> u64 {
        self.base.raw().saturating_add(self.size)
    }
}

/// RAM that nobody has taken yet, in whole pages. Page 0 is never part of it: the BIOS
/// data area lies there, and an address of 0 means "none" in the boot protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreeSpace {
    /// Sorted, disjoint, non-empty, page-aligned.
    free: Vec<Range<u64>>,
}

impl FreeSpace {
    /// All whole pages that are RAM and nothing else in `map`.
    pub fn new(map: &[E820Entry]) -> Self {
        let mut ram: Vec<Range<u64>> =
            map.iter().filter(|e| e.kind == E820Kind::RAM).map(|e| e.base.raw()..e.end()).collect();
        ram.sort_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::with_capacity(ram.len());
        for range in ram {
            match joined.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        let free = joined
            .into_iter()
            .filter_map(|r| Some(r.start.checked_next_multiple_of(PAGE_SIZE)?..r.end / PAGE_SIZE * PAGE_SIZE))
            .filter(|range| !range.is_empty())
            .collect();
        let mut space = Self { free };
        space.remove(Gpa::new(0), PAGE_SIZE);
        for entry in map.iter().filter(|e| e.kind != E820Kind::RAM) {
            space.remove(entry.base, entry.size);
        }
        space
    }

    /// Takes every page that `size` bytes at `base` touch out, free or not.
    pub fn remove(&mut self, base: Gpa, size: u64) {
        if size == 0 {
            return;
        }
        let start = base.page_base().raw();
        let end = base.raw().saturating_add(size);
        let end = end.checked_next_multiple_of(PAGE_SIZE).unwrap_or(end);
        self.free = self
            .free
            .iter()
            .flat_map(|r| [r.start..r.end.min(start), r.start.max(end)..r.end])
            .filter(|range| !range.is_empty())
            .collect();
    }

    /// Where the free memory ends that has all of `size` bytes at `base`.
    pub(crate) fn end_of_free(&self, base: u64, size: u64) -> Option<u64> {
        let end = base.checked_add(size)?;
        self.free.iter().find(|range| range.start <= base && end <= range.end).map(|range| range.end)
    }

    /// Takes `size` bytes at `base`, if they are all free.
    pub(crate) fn take_at(&mut self, base: u64, size: u64) -> Option<Gpa> {
        self.end_of_free(base, size).map(|_| self.taken(base, size))
    }

    /// Takes `size` bytes at the lowest free multiple of `align` (a power of two) within
    /// `within`.
    pub(crate) fn take_lowest(&mut self, size: u64, align: u64, within: Range<u64>) -> Option<Gpa> {
        let base = self.free.iter().find_map(|range| {
            let base = range.start.max(within.start).checked_next_multiple_of(align)?;
            (base.checked_add(size)? <= range.end.min(within.end)).then_some(base)
        })?;
        Some(self.taken(base, size))
    }

    /// Takes `size` bytes, from a page's start, at the highest free place below `below`.
    pub(crate) fn take_highest(&mut self, size: u64, below: u64) -> Option<Gpa> {
        let base = self.free.iter().rev().find_map(|range| {
            let base = Gpa::new(range.end.min(below).checked_sub(size)?).page_base().raw();
            (base >= range.start).then_some(base)
        })?;
        Some(self.taken(base, size))
    }

    fn taken(&mut self, base: u64, size: u64) -> Gpa {
        self.remove(Gpa::new(base), size);
        Gpa::new(base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn what_is_not_ram_wins_and_parts_of_pages_do_not_count() {
        let space = FreeSpace::new(&[
            E820Entry::new(0x8000, 0x9c00, E820Kind::RAM),
            E820Entry::new(0, 0x3800, E820Kind::RAM),
            E820Entry::new(0x2000, 0x2001, E820Kind::RESERVED),
            E820Entry::new(0x3800, 0x5000, E820Kind::RAM),
        ]);
        assert_eq!(space.free, [0x1000..0x2000, 0x3000..0x5000, 0x8000..0x9000]);
    }

    #[test]
    fn an_entry_that_ends_past_the_address_space_is_cut() {
        let entry = E820Entry { base: Gpa::new(u64::MAX - 0x2fff), size: u64::MAX, kind: E820Kind::RAM };
        let mut space = FreeSpace::new(&[entry]);
        assert_eq!(space.take_highest(0x1000, u64::MAX), Some(Gpa::new(u64::MAX - 0x1fff)));
    }

    fn entries() -> impl Strategy<Value = Vec<E820Entry>> {
        let entry = (0_u64..0x20, 0_u64..0x10, 1_u32..4).prop_map(|(page, pages, kind)| E820Entry {
            base: Gpa::new(page * PAGE_SIZE),
            size: pages * PAGE_SIZE,
            kind: E820Kind(kind),
        });
        proptest::collection::vec(entry, 0..8)
    }

    proptest! {
        #[test]
        fn takes_what_a_set_of_pages_would(map in entries(), asks in proptest::collection::vec((1_u64..5, 0_u32..3, 0_u64..0x30, any::<bool>()), 0..12)) {
            let pages = |e: &E820Entry| e.base.raw() / PAGE_SIZE..e.end() / PAGE_SIZE;
            let mut model: BTreeSet<u64> = map.iter().filter(|e| e.kind == E820Kind::RAM).flat_map(pages).collect();
            model.remove(&0);
            for page in map.iter().filter(|e| e.kind != E820Kind::RAM).flat_map(pages) {
                model.remove(&page);
            }
            let mut space = FreeSpace::new(&map);
            for (count, align, limit, low) in asks {
                let fits = |page: u64| (page..page + count).all(|p| model.contains(&p));
                let (got, want) = if low {
                    let align = 1 << align;
                    let want = (limit..0x40).find(|p| p % align == 0 && fits(*p));
                    (space.take_lowest(count * PAGE_SIZE, align * PAGE_SIZE, limit * PAGE_SIZE..FOUR_GIB), want)
                } else {
                    let want = (0..0x40).rev().find(|p| p + count <= limit && fits(*p));
                    (space.take_highest(count * PAGE_SIZE, limit * PAGE_SIZE), want)
                };
                prop_assert_eq!(got.map(|gpa| gpa.raw() / PAGE_SIZE), want);
                if let Some(page) = want {
                    for p in page..page + count {
                        model.remove(&p);
                    }
                }
            }
        }
    }
}
