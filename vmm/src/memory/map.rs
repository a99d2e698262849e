//! The physical memory map, and what the hypervisor takes of it.
//!
//! The boot loader's list may overlap, wrap or end within a page; [`MemoryMap::normalise`]
//! makes a sorted list of whole pages from it in which each page has one owner. The
//! hypervisor then takes its own region, the cell pool and what it was loaded into out of
//! the usable RAM, and what is left is the root cell's ([`MemoryMap::root_map`]).

use super::address::{Hpa, PAGE_SIZE};
use alloc::vec::Vec;
use core::fmt;
use thiserror::Error;

/// The first byte above 4 GiB.
pub const FOUR_GIB: u64 = 1 << 32;
/// Below it lie tables of the firmware and real-mode start-up code: never taken.
const LOW_MEMORY: u64 = 1 << 20;
/// Physical addresses end here (AMD APM vol. 2, 5.1).
const PHYSICAL_END: u64 = 1 << 52;

/// A range of whole pages, not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRange {
    start: u64,
    end: u64,
}

impl PageRange {
    /// The pages that hold `len` bytes at `base`, the first and the last perhaps in part;
    /// `None` when there are none or they leave the 52 bits of physical addresses.
    pub fn covering(base: Hpa, len: u64) -> Option<Self> {
        let end = base.checked_add(len)?.raw().checked_next_multiple_of(PAGE_SIZE)?;
        (len > 0 && end <= PHYSICAL_END).then_some(Self { start: base.page_base().raw(), end })
    }

    /// The first byte.
    pub const fn start(self) -> Hpa {
        Hpa::new(self.start)
    }

    /// The byte after the last.
    pub const fn end(self) -> Hpa {
        Hpa::new(self.end)
    }

    /// Length in bytes.
    pub const fn size(self) -> u64 {
        self.end - self.start
    }

    /// Whether all of `other` is in here.
    pub const fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// What lies in both.
    pub fn intersection(self, other: Self) -> Option<Self> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start < end).then_some(Self { start, end })
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

/// What a range is, or who owns it. The numbers of the firmware's kinds are those of E820
/// (ACPI 6.5, table 15.4); the hypervisor's own lie above them all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind(pub u32);

impl Kind {
    /// RAM that nobody owns yet, or that is the root cell's.
    pub const USABLE: Self = Self(1);
    /// Not to be used.
    pub const RESERVED: Self = Self(2);
    /// RAM with ACPI tables, usable once they are read.
    pub const ACPI_TABLES: Self = Self(3);
    /// RAM that the firmware keeps.
    pub const ACPI_NVS: Self = Self(4);
    /// RAM with errors.
    pub const UNUSABLE: Self = Self(5);
    /// The image, as it was loaded.
    pub const IMAGE: Self = Self(0xb000_0000);
    /// The bundle.
    pub const BUNDLE: Self = Self(0xb000_0001);
    /// The hypervisor's region: heap, page tables, stacks.
    pub const HYPERVISOR: Self = Self(0xb000_0002);
    /// Memory for guest cells.
    pub const POOL: Self = Self(0xb000_0003);

    /// Where a page has two owners, the one with the higher rank gets it.
    const fn rank(self) -> u8 {
        match self {
            Self::USABLE => 0,
            Self::ACPI_TABLES => 1,
            Self::ACPI_NVS => 2,
            Self::RESERVED => 4,
            Self::UNUSABLE => 5,
            _ => 3,
        }
    }

    /// Whether it is RAM, which may be mapped write-back.
    pub const fn is_ram(self) -> bool {
        matches!(self, Self::USABLE | Self::ACPI_TABLES | Self::ACPI_NVS) || self.is_own()
    }

    /// Whether it is one of the hypervisor's own kinds.
    const fn is_own(self) -> bool {
        matches!(self, Self::IMAGE | Self::BUNDLE | Self::HYPERVISOR | Self::POOL)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::USABLE => "usable",
            Self::RESERVED => "reserved",
            Self::ACPI_TABLES => "ACPI tables",
            Self::ACPI_NVS => "ACPI NVS",
            Self::UNUSABLE => "unusable",
            Self::IMAGE => "image",
            Self::BUNDLE => "bundle",
            Self::HYPERVISOR => "hypervisor",
            Self::POOL => "cell pool",
            Self(number) => return write!(f, "kind {number}"),
        })
    }
}

/// A range as the boot loader reported it, unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawEntry {
    /// Where it begins, in bytes.
    pub base: u64,
    /// How long it is, in bytes.
    pub len: u64,
    /// Its kind.
    pub kind: Kind,
}

/// A range of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Which pages.
    pub range: PageRange,
    /// What they are.
    pub kind: Kind,
}

/// Something odd in the boot loader's list, and what was done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Oddity {
    /// An entry that is empty or leaves the physical address space: left out.
    #[error("memory map entry {:#x}+{:#x} ({}) is empty or out of range: left out", .0.base, .0.len, .0.kind)]
    OutOfRange(RawEntry),
    /// An entry that overlaps one of another kind: the more restrictive kind wins.
    #[error("memory map entry {:#x}+{:#x} ({}) overlaps {other} ({kind})", .entry.base, .entry.len, .entry.kind)]
    Overlap {
        /// The entry that came later.
        entry: RawEntry,
        /// What it overlaps.
        other: PageRange,
        /// The kind of that.
        kind: Kind,
    },
}

/// Memory that was asked for and is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TakeError {
    /// Not that much usable memory in one piece, or in 2 MiB pieces for the pool.
    #[error("{size:#x} bytes for the {kind} are not to be had: {available:#x} are usable there")]
    NotEnough {
        /// What was asked for, in bytes.
        size: u64,
        /// What for.
        kind: Kind,
        /// The most that could be had, in bytes.
        available: u64,
    },
    /// What the loader says it has put into memory is not in usable memory.
    #[error("the {kind} at {range} is not in usable memory")]
    NotUsable {
        /// Where it is said to be.
        range: PageRange,
        /// What it is.
        kind: Kind,
    },
}

/// Which range [`MemoryMap::take`] takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Exactly(u64),
    AtMost(u64),
}

/// The map: sorted, without overlaps, neighbours of one kind merged. Holes belong to
/// nobody, or to devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryMap {
    regions: Vec<Region>,
}

impl MemoryMap {
    /// The map of what the boot loader reported. Usable entries lose the pages that they
    /// fill only in part, others gain them. `report` hears of what is odd.
    pub fn normalise(entries: &[RawEntry], mut report: impl FnMut(Oddity)) -> Self {
        let mut map = Self::default();
        for &entry in entries {
            let Some(range) = whole_pages(entry) else {
                report(Oddity::OutOfRange(entry));
                continue;
            };
            for other in map.regions.clone() {
                if other.kind != entry.kind && other.range.intersection(range).is_some() {
                    report(Oddity::Overlap { entry, other: other.range, kind: other.kind });
                }
            }
            map.assign(range, entry.kind, |old| entry.kind.rank() > old.rank());
        }
        map
    }

    /// All regions, in order of address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// How many bytes there are of `kind`.
    pub fn size_of(&self, kind: Kind) -> u64 {
        self.regions.iter().filter(|r| r.kind == kind).map(|r| r.range.size()).sum()
    }

    /// Whether all of `range` is RAM.
    pub fn is_ram(&self, range: PageRange) -> bool {
        let parts = self.regions.iter().filter(|r| r.kind.is_ram());
        parts.filter_map(|r| r.range.intersection(range)).map(PageRange::size).sum::<u64>() == range.size()
    }

    /// Notes that `range` of the usable memory holds `kind`: the image, the bundle.
    ///
    /// # Errors
    /// When not all of it is usable; nothing changes then.
    pub fn occupy(&mut self, range: PageRange, kind: Kind) -> Result<(), TakeError> {
        let usable = self.regions.iter().filter(|r| r.kind == Kind::USABLE);
        if usable.filter_map(|r| r.range.intersection(range)).map(PageRange::size).sum::<u64>()
            != range.size()
        {
            return Err(TakeError::NotUsable { range, kind });
        }
        self.assign(range, kind, |_| true);
        Ok(())
    }

    /// Takes the hypervisor's region: `size` bytes (rounded up to 2 MiB) in one piece, as
    /// high as possible below 4 GiB, so that 32-bit start-up code and device addresses
    /// reach it.
    ///
    /// # Errors
    /// When there is no such piece; nothing changes then.
    pub fn take_hypervisor_region(&mut self, size: u64) -> Result<PageRange, TakeError> {
        let error = |available| TakeError::NotEnough { size, kind: Kind::HYPERVISOR, available };
        let rounded = size.checked_next_multiple_of(LARGE_PAGE).ok_or(error(0))?;
        self.take(Size::Exactly(rounded), LOW_MEMORY, FOUR_GIB, Kind::HYPERVISOR)
            .ok_or_else(|| error(self.largest(LOW_MEMORY, FOUR_GIB)))
    }

    /// Takes the cell pool: `size` bytes (rounded up to 2 MiB) in as few pieces as can be,
    /// multiples of 2 MiB, from memory above 4 GiB first.
    ///
    /// # Errors
    /// When there is not that much; nothing changes then.
    pub fn take_pool(&mut self, size: u64) -> Result<Vec<PageRange>, TakeError> {
        let error = |available| TakeError::NotEnough { size, kind: Kind::POOL, available };
        let mut missing = size.checked_next_multiple_of(LARGE_PAGE).ok_or(error(0))?;
        let mut map = self.clone();
        let mut taken = Vec::new();
        for (from, to) in [(FOUR_GIB, PHYSICAL_END), (LOW_MEMORY, FOUR_GIB)] {
            while missing > 0 {
                let Some(range) = map.take(Size::AtMost(missing), from, to, Kind::POOL) else { break };
                missing -= range.size();
                taken.push(range);
            }
        }
        if missing > 0 {
            return Err(error(size - missing.min(size)));
        }
        *self = map;
        Ok(taken)
    }

    /// The map that the root cell gets: the same, but what is the hypervisor's, and what
    /// is of a kind unknown here, is reserved.
    pub fn root_map(&self) -> Vec<Region> {
        let mut root = Self::default();
        for &Region { range, kind } in &self.regions {
            let known = (Kind::USABLE.0..=Kind::UNUSABLE.0).contains(&kind.0);
            root.assign(range, if known { kind } else { Kind::RESERVED }, |_| true);
        }
        root.regions
    }

    /// Takes usable memory in `from..to`: the highest piece of exactly that size, or else
    /// the largest piece up to that size.
    fn take(&mut self, size: Size, from: u64, to: u64, kind: Kind) -> Option<PageRange> {
        let pieces = self.usable_pieces(from, to);
        let range = match size {
            Size::Exactly(size) => pieces.filter(|p| p.size() >= size).last().map(|p| (p, size)),
            Size::AtMost(size) => {
                pieces.max_by_key(|p| (p.size().min(size), p.start)).map(|p| (p, p.size().min(size)))
            }
        };
        let (piece, size) = range?;
        let range = PageRange { start: piece.end - size, end: piece.end };
        self.assign(range, kind, |_| true);
        Some(range)
    }

    fn largest(&self, from: u64, to: u64) -> u64 {
        self.usable_pieces(from, to).map(PageRange::size).max().unwrap_or(0)
    }

    /// The usable memory in `from..to`, as multiples of 2 MiB, in order of address.
    fn usable_pieces(&self, from: u64, to: u64) -> impl Iterator<Item = PageRange> {
        let window = PageRange { start: from, end: to };
        self.regions.iter().filter(|r| r.kind == Kind::USABLE).filter_map(move |r| {
            let part = r.range.intersection(window)?;
            let start = part.start.next_multiple_of(LARGE_PAGE);
            let end = part.end / LARGE_PAGE * LARGE_PAGE;
            (start < end).then_some(PageRange { start, end })
        })
    }

    /// Makes `range` of `kind`, except for what is there already and `replaces` denies.
    fn assign(&mut self, range: PageRange, kind: Kind, replaces: impl Fn(Kind) -> bool) {
        let mut regions = Vec::with_capacity(self.regions.len() + 3);
        // What of the new range no kept region covers.
        let mut rest = Some(range);
        for &old in &self.regions {
            let Some(common) = old.range.intersection(range) else {
                regions.push(old);
                continue;
            };
            if !replaces(old.kind) {
                regions.push(old);
                if let Some(r) = rest {
                    if r.start < common.start {
                        regions.push(Region { range: PageRange { start: r.start, end: common.start }, kind });
                    }
                    rest = (common.end < r.end).then_some(PageRange { start: common.end, end: r.end });
                }
                continue;
            }
            if old.range.start < common.start {
                let range = PageRange { start: old.range.start, end: common.start };
                regions.push(Region { range, kind: old.kind });
            }
            if common.end < old.range.end {
                let range = PageRange { start: common.end, end: old.range.end };
                regions.push(Region { range, kind: old.kind });
            }
        }
        regions.extend(rest.map(|range| Region { range, kind }));
        regions.sort_by_key(|r| r.range.start);
        regions.dedup_by(|next, previous| {
            let joins = previous.range.end == next.range.start && previous.kind == next.kind;
            if joins {
                previous.range.end = next.range.end;
            }
            joins
        });
        self.regions = regions;
    }
}

const LARGE_PAGE: u64 = 2 << 20;

/// The pages of an entry: usable ones that it fills, other ones that it touches.
fn whole_pages(entry: RawEntry) -> Option<PageRange> {
    if entry.kind != Kind::USABLE {
        return PageRange::covering(Hpa::new(entry.base), entry.len);
    }
    let start = entry.base.checked_next_multiple_of(PAGE_SIZE)?;
    let end = entry.base.checked_add(entry.len)? / PAGE_SIZE * PAGE_SIZE;
    (start < end && end <= PHYSICAL_END).then_some(PageRange { start, end })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn raw(base: u64, len: u64, kind: Kind) -> RawEntry {
        RawEntry { base, len, kind }
    }

    fn range(start: u64, end: u64) -> PageRange {
        PageRange { start, end }
    }

    /// QEMU's q35 with 6 GiB, as SeaBIOS reports it.
    fn q35() -> MemoryMap {
        let entries = [
            raw(0, 0x9fc00, Kind::USABLE),
            raw(0x9fc00, 0x400, Kind::RESERVED),
            raw(0xf0000, 0x10000, Kind::RESERVED),
            raw(0x10_0000, 0x7fee_0000, Kind::USABLE),
            raw(0x7ffe_0000, 0x2_0000, Kind::RESERVED),
            raw(0xb000_0000, 0x1000_0000, Kind::RESERVED),
            raw(0x1_0000_0000, 4 * GIB, Kind::USABLE),
        ];
        MemoryMap::normalise(&entries, |o| panic!("{o}"))
    }

    #[test]
    fn partial_pages_are_lost_when_usable_and_kept_when_not() {
        let regions = q35();
        assert_eq!(regions.regions()[0], Region { range: range(0, 0x9f000), kind: Kind::USABLE });
        assert_eq!(regions.regions()[1], Region { range: range(0x9f000, 0xa0000), kind: Kind::RESERVED });
    }

    #[test]
    fn odd_entries_are_reported_and_the_restrictive_kind_wins() {
        let entries = [
            raw(0, 4 * MIB, Kind::USABLE),
            raw(MIB, MIB, Kind::RESERVED),
            raw(u64::MAX - 4095, 8192, Kind::USABLE),
            raw(5 * MIB, 0, Kind::RESERVED),
            raw(3 * MIB, 2 * MIB, Kind::USABLE),
        ];
        let mut odd = vec![];
        let map = MemoryMap::normalise(&entries, |o| odd.push(o));
        assert_eq!(
            odd,
            [
                Oddity::Overlap { entry: entries[1], other: range(0, 4 * MIB), kind: Kind::USABLE },
                Oddity::OutOfRange(entries[2]),
                Oddity::OutOfRange(entries[3]),
            ]
        );
        let region = |start, end, kind| Region { range: range(start, end), kind };
        assert_eq!(
            map.regions(),
            [
                region(0, MIB, Kind::USABLE),
                region(MIB, 2 * MIB, Kind::RESERVED),
                region(2 * MIB, 5 * MIB, Kind::USABLE)
            ]
        );
    }

    #[test]
    fn regions_go_where_they_should() {
        let mut map = q35();
        map.occupy(range(2 * MIB, 4 * MIB), Kind::IMAGE).unwrap();
        map.occupy(range(0x7fa0_0000, 0x7ffe_0000), Kind::BUNDLE).unwrap();
        let own = map.take_hypervisor_region(64 * MIB + 1).unwrap();
        assert_eq!(own, range(0x7fa0_0000 - 66 * MIB, 0x7fa0_0000));
        let pool = map.take_pool(5 * GIB).unwrap();
        assert_eq!(pool, [range(4 * GIB, 8 * GIB), range(own.start - GIB, own.start)]);
        assert_eq!(map.size_of(Kind::POOL), 5 * GIB);
        let root = map.root_map();
        let covered = |address: u64, kind| {
            root.iter().any(|r| r.kind == kind && r.range.contains(range(address, address + 4096)))
        };
        assert!(covered(MIB, Kind::USABLE) && covered(2 * MIB, Kind::RESERVED));
        assert!(covered(4 * GIB, Kind::RESERVED) && covered(own.start, Kind::RESERVED));
    }

    #[test]
    fn what_is_not_there_is_refused_and_nothing_changes() {
        let mut map = q35();
        let before = map.clone();
        let error = map.take_hypervisor_region(3 * GIB).unwrap_err();
        let available = 0x7fe0_0000 - 2 * MIB;
        assert_eq!(error, TakeError::NotEnough { size: 3 * GIB, kind: Kind::HYPERVISOR, available });
        let available = 4 * GIB + available;
        let error = map.take_pool(7 * GIB).unwrap_err();
        assert_eq!(error, TakeError::NotEnough { size: 7 * GIB, kind: Kind::POOL, available });
        assert!(map.occupy(range(0x9e000, 0xa0000), Kind::BUNDLE).is_err());
        assert!(map.take_pool(u64::MAX).is_err());
        assert_eq!(map, before);
    }

    fn any_kind() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(1), Just(2), Just(3), Just(4), Just(5), Just(7)].prop_map(Kind)
    }

    proptest! {
        #[test]
        fn each_page_gets_its_most_restrictive_kind(
            entries in proptest::collection::vec((0..64u64 * 4096, 0..32u64 * 4096, any_kind()), 0..12)
        ) {
            let entries: Vec<_> = entries.into_iter().map(|(b, l, k)| raw(b, l, k)).collect();
            let map = MemoryMap::normalise(&entries, |_| {});
            for pair in map.regions().windows(2) {
                prop_assert!(pair[0].range.end <= pair[1].range.start);
            }
            for page in 0..100u64 {
                let page = range(page * 4096, page * 4096 + 4096);
                let kinds = entries.iter().filter(|e| whole_pages(**e).is_some_and(|r| r.contains(page)));
                let expected = kinds.map(|e| e.kind).max_by_key(|k| k.rank()).map(Kind::rank);
                let found = map.regions().iter().find(|r| r.range.contains(page)).map(|r| r.kind.rank());
                prop_assert_eq!(found, expected);
            }
        }

        #[test]
        fn what_is_taken_was_usable_and_is_the_roots_no_more(
            sizes in proptest::collection::vec(1..700u64, 1..8)
        ) {
            let mut map = q35();
            let usable = map.size_of(Kind::USABLE);
            let mut taken = vec![];
            for size in sizes {
                if let Ok(ranges) = map.take_pool(size * MIB) {
                    prop_assert_eq!(ranges.iter().map(|r| r.size()).sum::<u64>(), size.next_multiple_of(2) * MIB);
                    taken.extend(ranges);
                }
            }
            for (index, r) in taken.iter().enumerate() {
                prop_assert!(q35().occupy(*r, Kind::POOL).is_ok());
                prop_assert!(r.start().is_aligned(2 * MIB));
                prop_assert!(taken[..index].iter().all(|other| other.intersection(*r).is_none()));
                let root = map.root_map();
                prop_assert!(root.iter().all(|x| x.kind != Kind::USABLE || x.range.intersection(*r).is_none()));
            }
            prop_assert_eq!(map.size_of(Kind::USABLE) + map.size_of(Kind::POOL), usable);
        }
    }
}
