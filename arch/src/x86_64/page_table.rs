//! Page tables of four levels: the hypervisor's own and AMD's nested ones.
//!
//! [`PageTables`] is generic over the entry's bits ([`EntryFormat`]) and over where the
//! tables lie ([`TableMemory`]), so that the same code runs on the machine and, in tests,
//! on the host. It holds no lock and flushes no TLB: whoever changes a live table does
//! both.
//!
//! Each operation first checks all it was asked for and changes nothing when it refuses.
//! Leaves are as large as alignment and [`PageSize`] allow, and are split when a part of
//! one is changed; an emptied table is given back, so that large leaves fit there again.

use bulkhead_vmm::memory::address::{Gpa, Hpa, Hva};
use core::marker::PhantomData;
use thiserror::Error;

const ENTRIES: u64 = 512;
/// The addresses that four levels translate: 0 to 2^48.
const SPAN: u64 = 1 << 48;
/// The level of the root; leaves at level 0 are 4 KiB, at 1 2 MiB, at 2 1 GiB.
const ROOT_LEVEL: u8 = 3;

/// What an access may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permissions {
    /// Loads.
    pub read: bool,
    /// Stores.
    pub write: bool,
    /// Instruction fetches.
    pub execute: bool,
}

impl Permissions {
    /// Loads only.
    pub const READ: Self = Self { read: true, write: false, execute: false };
    /// Loads and stores.
    pub const READ_WRITE: Self = Self { read: true, write: true, execute: false };
    /// Loads and fetches.
    pub const READ_EXECUTE: Self = Self { read: true, write: false, execute: true };
    /// All.
    pub const ALL: Self = Self { read: true, write: true, execute: true };
}

/// How a mapping is cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryType {
    /// Write-back: RAM.
    WriteBack,
    /// Uncached: device registers.
    Uncached,
}

/// Sizes of leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageSize {
    /// 4 KiB.
    Size4K,
    /// 2 MiB.
    Size2M,
    /// 1 GiB. Not every CPU has it.
    Size1G,
}

impl PageSize {
    const fn level(self) -> u8 {
        self as u8
    }

    const fn of_level(level: u8) -> Self {
        match level {
            0 => Self::Size4K,
            1 => Self::Size2M,
            _ => Self::Size1G,
        }
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        bytes_of(self.level())
    }
}

/// How many bytes an entry at `level` translates.
const fn bytes_of(level: u8) -> u64 {
    4096 << (9 * level)
}

/// An address that tables translate.
pub trait InputAddress: Copy {
    /// The address as a number in 0..2^48, or `None` when four levels cannot translate it.
    fn to_index(self) -> Option<u64>;
    /// The address with that number.
    fn from_index(index: u64) -> Self;
    /// The address as it is written.
    fn to_raw(self) -> u64;
}

impl InputAddress for Gpa {
    fn to_index(self) -> Option<u64> {
        (self.raw() < SPAN).then_some(self.raw())
    }

    fn from_index(index: u64) -> Self {
        Self::new(index)
    }

    fn to_raw(self) -> u64 {
        self.raw()
    }
}

impl InputAddress for Hva {
    fn to_index(self) -> Option<u64> {
        let index = self.raw() % SPAN;
        (Self::from_index(index) == self).then_some(index)
    }

    /// Bits 63:48 repeat bit 47 (AMD APM vol. 2, 5.3.1).
    fn from_index(index: u64) -> Self {
        Self::new(if index >= SPAN / 2 { index | !(SPAN - 1) } else { index })
    }

    fn to_raw(self) -> u64 {
        self.raw()
    }
}

/// The bits of an entry.
pub trait EntryFormat {
    /// What the tables translate.
    type Input: InputAddress;

    /// A leaf at `level` (0 to 2), or `None` when the format cannot express the
    /// permissions.
    fn leaf(to: Hpa, level: u8, permissions: Permissions, memory_type: MemoryType) -> Option<u64>;
    /// An entry that leads to the table at `table`, and limits nothing.
    fn table(table: Hpa) -> u64;
    /// Whether the entry translates anything.
    fn is_present(entry: u64) -> bool;
    /// Whether a present entry at `level` (0 to 3) is a leaf.
    fn is_leaf(entry: u64, level: u8) -> bool;
    /// Where a present entry leads.
    fn address(entry: u64) -> Hpa;
    /// What a leaf permits.
    fn permissions(entry: u64) -> Permissions;
    /// A leaf's memory type.
    fn memory_type(entry: u64) -> MemoryType;
    /// The leaf `entry` with other permissions; `None` as for [`leaf`](Self::leaf).
    fn with_permissions(entry: u64, permissions: Permissions) -> Option<u64>;
    /// The leaf at the level below that `split`, a leaf at `level` (1 or 2), gives at its
    /// beginning.
    fn split(entry: u64, level: u8) -> u64;
}

const PRESENT: u64 = 1;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// PWT and PCD: the entry 3 of the PAT, which is uncached after reset (AMD APM vol. 2,
/// 7.8.2).
const UNCACHED: u64 = 3 << 3;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = (1 << 52) - 4096;

/// Entries of long mode (AMD APM vol. 2, 5.3). `USER_BIT` is or'ed into each.
struct LongMode<const USER_BIT: u64>;

impl<const USER_BIT: u64> LongMode<USER_BIT> {
    fn bits(permissions: Permissions) -> Option<u64> {
        permissions.read.then_some(
            PRESENT
                | USER_BIT
                | if permissions.write { WRITE } else { 0 }
                | if permissions.execute { 0 } else { NO_EXECUTE },
        )
    }

    fn leaf(to: Hpa, level: u8, permissions: Permissions, memory_type: MemoryType) -> Option<u64> {
        let large = if level > 0 { LARGE } else { 0 };
        let cache = if memory_type == MemoryType::Uncached { UNCACHED } else { 0 };
        Some(to.raw() & ADDRESS | large | cache | Self::bits(permissions)?)
    }

    fn with_permissions(entry: u64, permissions: Permissions) -> Option<u64> {
        Some(entry & !(WRITE | NO_EXECUTE) | Self::bits(permissions)?)
    }
}

macro_rules! long_mode {
    ($name:ident, $input:ty, $user:expr) => {
        impl EntryFormat for $name {
            type Input = $input;

            fn leaf(to: Hpa, level: u8, permissions: Permissions, memory_type: MemoryType) -> Option<u64> {
                LongMode::<{ $user }>::leaf(to, level, permissions, memory_type)
            }

            fn table(table: Hpa) -> u64 {
                table.raw() & ADDRESS | PRESENT | WRITE | $user
            }

            fn is_present(entry: u64) -> bool {
                entry & PRESENT != 0
            }

            fn is_leaf(entry: u64, level: u8) -> bool {
                level == 0 || entry & LARGE != 0
            }

            fn address(entry: u64) -> Hpa {
                Hpa::new(entry & ADDRESS)
            }

            fn permissions(entry: u64) -> Permissions {
                Permissions { read: true, write: entry & WRITE != 0, execute: entry & NO_EXECUTE == 0 }
            }

            fn memory_type(entry: u64) -> MemoryType {
                if entry & UNCACHED == 0 { MemoryType::WriteBack } else { MemoryType::Uncached }
            }

            fn with_permissions(entry: u64, permissions: Permissions) -> Option<u64> {
                LongMode::<{ $user }>::with_permissions(entry, permissions)
            }

            fn split(entry: u64, level: u8) -> u64 {
                if level == 1 { entry & !LARGE } else { entry }
            }
        }
    };
}

/// The hypervisor's own tables: supervisor pages.
#[derive(Debug)]
pub struct HostFormat;
/// AMD nested tables: long-mode entries, all of them user pages, as nested walks are user
/// accesses (AMD APM vol. 2, 15.25.5).
#[derive(Debug)]
pub struct NestedFormat;

long_mode!(HostFormat, Hva, 0);
long_mode!(NestedFormat, Gpa, USER);

/// Where tables lie.
pub trait TableMemory {
    /// A new table of 4 KiB, zeroed, or `None` when there is no memory.
    fn allocate(&mut self) -> Option<Hpa>;
    /// Takes back a table that no entry leads to any more. A CPU may still walk it from
    /// its caches: it must not be used for anything else before they are flushed.
    fn free(&mut self, table: Hpa);
    /// The entry at `at`, a multiple of 8 inside a table of this memory.
    fn read(&self, at: Hpa) -> u64;
    /// Replaces the entry at `at`, at once for CPUs that walk the table.
    fn write(&mut self, at: Hpa, entry: u64);
}

/// Why a change of page tables was refused. Addresses are in the terms of the tables'
/// input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PageTableError {
    /// The range is empty, not a multiple of 4 KiB, or leaves what can be translated.
    #[error("{len:#x} bytes at {at:#x} are no range of whole pages that can be translated")]
    Range {
        /// Where the range begins.
        at: u64,
        /// How long it is.
        len: u64,
    },
    /// The target is not a multiple of 4 KiB or lies beyond 2^52.
    #[error("{0} is no physical address of whole pages")]
    Target(Hpa),
    /// The entry format cannot express these permissions.
    #[error("{0:?} can't be expressed in these page tables")]
    Permissions(Permissions),
    /// Something is mapped there already.
    #[error("{0:#x} is mapped already")]
    AlreadyMapped(u64),
    /// Nothing is mapped there.
    #[error("{0:#x} is not mapped")]
    NotMapped(u64),
    /// No memory for tables.
    #[error("no memory for page tables")]
    OutOfMemory,
}

/// What an address translates to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Translation {
    /// The physical address of that very byte.
    pub to: Hpa,
    /// What its page permits.
    pub permissions: Permissions,
    /// How it is cached.
    pub memory_type: MemoryType,
    /// The size of the leaf.
    pub size: PageSize,
}

/// Page tables, see the [module](self). They give all their memory back when they are dropped:
/// no CPU may walk them any more.
#[derive(Debug)]
pub struct PageTables<F: EntryFormat, M: TableMemory> {
    root: Hpa,
    memory: M,
    largest: PageSize,
    format: PhantomData<F>,
}

/// A range of input addresses: 0..=2^48, multiples of 4 KiB.
#[derive(Clone, Copy)]
struct Span {
    start: u64,
    end: u64,
}

impl<F: EntryFormat, M: TableMemory> PageTables<F, M> {
    /// Empty tables, whose leaves will be at most `largest`.
    ///
    /// # Errors
    /// When there is no memory for the root.
    pub fn new(mut memory: M, largest: PageSize) -> Result<Self, PageTableError> {
        let root = memory.allocate().ok_or(PageTableError::OutOfMemory)?;
        Ok(Self { root, memory, largest, format: PhantomData })
    }

    /// The root, for CR3 or the VMCB's N_CR3.
    pub fn root(&self) -> Hpa {
        self.root
    }

    /// The memory that the tables lie in.
    pub fn memory(&mut self) -> &mut M {
        &mut self.memory
    }

    /// Maps `len` bytes at `at` to those at `to`. All are multiples of 4 KiB.
    ///
    /// # Errors
    /// Anything but [`PageTableError::NotMapped`]; nothing is mapped then.
    pub fn map(
        &mut self,
        at: F::Input,
        to: Hpa,
        len: u64,
        permissions: Permissions,
        memory_type: MemoryType,
    ) -> Result<(), PageTableError> {
        let span = Self::span(at, len)?;
        if !to.is_aligned(4096) || to.raw().checked_add(len).is_none_or(|end| end > ADDRESS + 4096) {
            return Err(PageTableError::Target(to));
        }
        if F::leaf(to, 0, permissions, memory_type).is_none() {
            return Err(PageTableError::Permissions(permissions));
        }
        if let Some(at) = self.find(self.root, ROOT_LEVEL, 0, span, true) {
            return Err(PageTableError::AlreadyMapped(F::Input::from_index(at).to_raw()));
        }
        let leaf = |at: u64, level: u8| {
            let to = Hpa::new(to.raw() + (at - span.start));
            if to.is_aligned(bytes_of(level)) { F::leaf(to, level, permissions, memory_type) } else { None }
        };
        self.fill(self.root, ROOT_LEVEL, 0, span, &leaf).inspect_err(|_| {
            // Nothing was mapped in the range before, so all that is there is from now.
            let _ = self.clear(self.root, ROOT_LEVEL, 0, span);
        })
    }

    /// Unmaps `len` bytes at `at`, both multiples of 4 KiB. What is not mapped stays so.
    ///
    /// # Errors
    /// [`PageTableError::Range`], and [`PageTableError::OutOfMemory`] when a leaf would
    /// have to be split; nothing is unmapped then.
    pub fn unmap(&mut self, at: F::Input, len: u64) -> Result<(), PageTableError> {
        let span = Self::span(at, len)?;
        self.split_ends(span)?;
        self.clear(self.root, ROOT_LEVEL, 0, span);
        Ok(())
    }

    /// Changes what `len` bytes at `at` permit. All of it must be mapped.
    ///
    /// # Errors
    /// Anything but [`PageTableError::AlreadyMapped`]; nothing is changed then.
    pub fn protect(
        &mut self,
        at: F::Input,
        len: u64,
        permissions: Permissions,
    ) -> Result<(), PageTableError> {
        let span = Self::span(at, len)?;
        if F::leaf(Hpa::new(0), 0, permissions, MemoryType::WriteBack).is_none() {
            return Err(PageTableError::Permissions(permissions));
        }
        if let Some(at) = self.find(self.root, ROOT_LEVEL, 0, span, false) {
            return Err(PageTableError::NotMapped(F::Input::from_index(at).to_raw()));
        }
        self.split_ends(span)?;
        self.update(self.root, ROOT_LEVEL, 0, span, permissions);
        Ok(())
    }

    /// What `at` translates to, if it is mapped.
    pub fn translate(&self, at: F::Input) -> Option<Translation> {
        let at = at.to_index()?;
        let mut table = self.root;
        let mut level = ROOT_LEVEL;
        loop {
            let entry = self.memory.read(slot(table, at / bytes_of(level) % ENTRIES));
            if !F::is_present(entry) {
                return None;
            }
            if level < ROOT_LEVEL && F::is_leaf(entry, level) {
                return Some(Translation {
                    to: Hpa::new(F::address(entry).raw() + at % bytes_of(level)),
                    permissions: F::permissions(entry),
                    memory_type: F::memory_type(entry),
                    size: PageSize::of_level(level),
                });
            }
            table = F::address(entry);
            level -= 1;
        }
    }

    fn span(at: F::Input, len: u64) -> Result<Span, PageTableError> {
        let error = PageTableError::Range { at: at.to_raw(), len };
        let start = at.to_index().ok_or(error)?;
        let end = start.checked_add(len).ok_or(error)?;
        let last = F::Input::from_index(end.wrapping_sub(1));
        // A range must not reach over the hole between the halves of virtual addresses.
        let whole = last.to_raw().wrapping_sub(at.to_raw()) == len.wrapping_sub(1);
        if len == 0 || end > SPAN || !(start | end).is_multiple_of(4096) || !whole {
            return Err(error);
        }
        Ok(Span { start, end })
    }

    /// The first address of `span` whose page is mapped (or is not, as `mapped` says),
    /// under the table of `level` that begins at `base`.
    fn find(&self, table: Hpa, level: u8, base: u64, span: Span, mapped: bool) -> Option<u64> {
        entries(level, base, span).find_map(|(index, part)| {
            let entry = self.memory.read(slot(table, index));
            if !F::is_present(entry) {
                return (!mapped).then_some(part.start);
            }
            if level < ROOT_LEVEL && F::is_leaf(entry, level) {
                return mapped.then_some(part.start);
            }
            self.find(F::address(entry), level - 1, base + index * bytes_of(level), part, mapped)
        })
    }

    /// Enters leaves for all of `span`, where nothing is mapped. `leaf(at, level)` makes
    /// one, or is `None` when its target isn't aligned for the level.
    fn fill(
        &mut self,
        table: Hpa,
        level: u8,
        base: u64,
        span: Span,
        leaf: &impl Fn(u64, u8) -> Option<u64>,
    ) -> Result<(), PageTableError> {
        for (index, part) in entries(level, base, span) {
            let at = slot(table, index);
            let entry = self.memory.read(at);
            let whole = part.end - part.start == bytes_of(level);
            if whole
                && level <= self.largest.level()
                && !F::is_present(entry)
                && let Some(leaf) = leaf(part.start, level)
            {
                self.memory.write(at, leaf);
                continue;
            }
            let child = if F::is_present(entry) {
                F::address(entry)
            } else {
                let child = self.memory.allocate().ok_or(PageTableError::OutOfMemory)?;
                self.memory.write(at, F::table(child));
                child
            };
            self.fill(child, level - 1, base + index * bytes_of(level), part, leaf)?;
        }
        Ok(())
    }

    /// Removes all leaves in `span`, none of which reaches beyond it, and the tables that
    /// are empty then. Says whether this table is empty.
    fn clear(&mut self, table: Hpa, level: u8, base: u64, span: Span) -> bool {
        for (index, part) in entries(level, base, span) {
            let at = slot(table, index);
            let entry = self.memory.read(at);
            if !F::is_present(entry) {
                continue;
            }
            if level == ROOT_LEVEL || !F::is_leaf(entry, level) {
                let child = F::address(entry);
                if !self.clear(child, level - 1, base + index * bytes_of(level), part) {
                    continue;
                }
                self.memory.write(at, 0);
                self.memory.free(child);
            } else {
                self.memory.write(at, 0);
            }
        }
        (0..ENTRIES).all(|index| !F::is_present(self.memory.read(slot(table, index))))
    }

    /// Gives all leaves in `span`, none of which reaches beyond it, other permissions.
    fn update(&mut self, table: Hpa, level: u8, base: u64, span: Span, permissions: Permissions) {
        for (index, part) in entries(level, base, span) {
            let at = slot(table, index);
            let entry = self.memory.read(at);
            if !F::is_present(entry) {
                continue;
            }
            if level == ROOT_LEVEL || !F::is_leaf(entry, level) {
                self.update(F::address(entry), level - 1, base + index * bytes_of(level), part, permissions);
            } else if let Some(entry) = F::with_permissions(entry, permissions) {
                self.memory.write(at, entry);
            }
        }
    }

    /// Splits the leaves that reach beyond the ends of `span`.
    fn split_ends(&mut self, span: Span) -> Result<(), PageTableError> {
        self.split_at(span.start)?;
        self.split_at(span.end)
    }

    /// Splits leaves until one begins at `at`, if anything is mapped there.
    fn split_at(&mut self, at: u64) -> Result<(), PageTableError> {
        let mut table = self.root;
        for level in (0..=ROOT_LEVEL).rev() {
            if at.is_multiple_of(bytes_of(level)) {
                return Ok(());
            }
            let slot = slot(table, at / bytes_of(level) % ENTRIES);
            let entry = self.memory.read(slot);
            if !F::is_present(entry) {
                return Ok(());
            }
            table = F::address(entry);
            if level < ROOT_LEVEL && F::is_leaf(entry, level) {
                table = self.memory.allocate().ok_or(PageTableError::OutOfMemory)?;
                let first = F::split(entry, level);
                for index in 0..ENTRIES {
                    self.memory.write(self::slot(table, index), first + index * bytes_of(level - 1));
                }
                self.memory.write(slot, F::table(table));
            }
        }
        Ok(())
    }
}

impl<F: EntryFormat, M: TableMemory> Drop for PageTables<F, M> {
    fn drop(&mut self) {
        self.clear(self.root, ROOT_LEVEL, 0, Span { start: 0, end: SPAN });
        self.memory.free(self.root);
    }
}

/// Where entry `index` of `table` lies.
fn slot(table: Hpa, index: u64) -> Hpa {
    Hpa::new(table.raw() + index * 8)
}

/// The entries of the table of `level` from `base` that `span`, which lies in it,
/// touches: index, and the part of the span.
fn entries(level: u8, base: u64, span: Span) -> impl Iterator<Item = (u64, Span)> {
    let size = bytes_of(level);
    let first = (span.start - base) / size;
    let last = (span.end - 1 - base) / size;
    (first..=last).map(move |index| {
        let start = base + index * size;
        (index, Span { start: span.start.max(start), end: span.end.min(start + size) })
    })
}

#[cfg(test)]
mod tests;
