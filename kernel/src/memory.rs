//! The hypervisor's own memory: page tables, frames, stacks, heap, device registers.
//!
//! Layout of virtual addresses, each in a PML4 slot of its own:
//!
//! | from | what |
//! | --- | --- |
//! | [`DIRECT_MAP`] | all RAM but the image, at its physical address; writable, not executable |
//! | `STACKS` | stacks, each above an unmapped page |
//! | `WINDOW` | device registers, and firmware tables outside RAM |
//! | `0xffffffff80000000` | the image: read-only data, code, data, each with its own permissions |
//!
//! Nothing is mapped at the lower half, but for the start-up code of other CPUs while it
//! runs. Mappings are only ever added, so no TLB has to be flushed.
//!
//! Lock order: `MEMORY`, `FRAMES`, heap.
// UNSAFETY: makes physical memory accessible.
#![expect(unsafe_code, reason = "switches page tables and writes to them")]

pub(crate) mod access;
pub(crate) mod heap;

use bulkhead_arch::x86_64::boot::{ImageLayout, image_layout};
use bulkhead_arch::x86_64::ops;
use bulkhead_arch::x86_64::page_table::{
    HostFormat, MemoryType, PageSize, PageTableError, PageTables, Permissions, TableMemory,
};
use bulkhead_vmm::memory::address::{Hpa, Hva, PAGE_SIZE};
use bulkhead_vmm::memory::frames::Frames;
use bulkhead_vmm::memory::map::{Kind, MemoryMap, PageRange};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, Ordering};
use spin::Once;
use spin::mutex::SpinMutex;

/// Where the direct map begins: the byte at physical address `a` is at `DIRECT_MAP + a`.
pub(crate) const DIRECT_MAP: u64 = 0xffff_8880_0000_0000;
const STACKS: u64 = 0xffff_9000_0000_0000;
const WINDOW: u64 = 0xffff_a000_0000_0000;
/// Size of a PML4 slot, and so of the ranges above at most.
const SLOT: u64 = 1 << 39;
/// Bytes of the main heap.
pub(crate) const HEAP_SIZE: u64 = 64 << 20;
/// Bytes for frames: page tables, stacks, control blocks.
const FRAMES_SIZE: u64 = 16 << 20;
/// How deep a CPU's stack is.
pub(crate) const STACK_SIZE: u64 = 64 << 10;

/// Added to a physical address gives where it is mapped: 0 while the first page tables are
/// in use.
static OFFSET: AtomicU64 = AtomicU64::new(0);
static FRAMES: Once<SpinMutex<Frames>> = Once::new();
/// The pages that [`FRAMES`] hands out.
static FRAME_RANGE: Once<PageRange> = Once::new();
static MEMORY: Once<SpinMutex<Memory>> = Once::new();

struct Memory {
    tables: PageTables<HostFormat, TableFrames>,
    ram: MemoryMap,
    /// Where the image was loaded.
    image: Hpa,
    next_stack: u64,
    next_window: u64,
}

/// Page tables in the hypervisor's frames.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableFrames;

impl TableFrames {
    fn entry(at: Hpa) -> *mut u64 {
        let frames = FRAME_RANGE.get();
        let inside = frames.is_some_and(|r| at >= r.start() && at < r.end());
        assert!(inside && at.is_aligned(8), "no page table entry at {at}");
        pointer(Hva::new(at.raw() + OFFSET.load(Ordering::Relaxed)))
    }
}

impl TableMemory for TableFrames {
    fn allocate(&mut self) -> Option<Hpa> {
        let table = allocate_frames(1)?;
        for entry in (0..PAGE_SIZE).step_by(8) {
            self.write(Hpa::new(table.raw() + entry), 0);
        }
        Some(table)
    }

    fn free(&mut self, table: Hpa) {
        free_frames(table, 1);
    }

    fn read(&self, at: Hpa) -> u64 {
        // SAFETY: `entry` has checked that this is a frame, and frames are mapped for good.
        unsafe { Self::entry(at).read_volatile() }
    }

    fn write(&mut self, at: Hpa, entry: u64) {
        // SAFETY: as above; whoever holds the frame's address owns it.
        unsafe { Self::entry(at).write_volatile(entry) }
    }
}

/// A number of bytes or an address, as the CPU's own integer.
#[expect(clippy::cast_possible_truncation, reason = "the hypervisor runs in 64-bit mode only")]
pub(crate) const fn word(number: u64) -> usize {
    number as usize
}

/// A pointer to what is mapped at `at`.
pub(crate) fn pointer<T>(at: Hva) -> *mut T {
    ptr::with_exposed_provenance_mut(word(at.raw()))
}

/// Takes `count` frames in a row, below 4 GiB. What is in them is undefined.
pub(crate) fn allocate_frames(count: usize) -> Option<Hpa> {
    FRAMES.get()?.lock().allocate(count)
}

/// Gives frames back.
pub(crate) fn free_frames(at: Hpa, count: usize) {
    if let Some(frames) = FRAMES.get() {
        frames.lock().free(at, count);
    }
}

/// The largest page that the CPU has (CPUID 8000_0001h EDX.26).
pub(crate) fn largest_page() -> PageSize {
    if ops::cpuid(0x8000_0001, 0).edx & 1 << 26 != 0 { PageSize::Size1G } else { PageSize::Size2M }
}

/// Where RAM at `at` is mapped.
pub(crate) fn direct(at: Hpa) -> Hva {
    Hva::new(DIRECT_MAP + at.raw())
}

/// Takes the hypervisor's region out of `map`, and goes on with page tables of its own.
///
/// # Errors
/// What there is not enough of.
///
/// # Safety
/// Called once, with the first page tables in use, `image` where the image was loaded, and
/// a map that tells the truth about RAM.
pub(crate) unsafe fn init(map: &mut MemoryMap, image: Hpa) -> Result<(), InitError> {
    let region = map.take_hypervisor_region(FRAMES_SIZE + HEAP_SIZE)?;
    log::info!("hypervisor region {region}");
    let frames = PageRange::covering(region.start(), FRAMES_SIZE).ok_or(PageTableError::OutOfMemory)?;
    FRAME_RANGE.call_once(|| frames);
    FRAMES.call_once(|| SpinMutex::new(Frames::new(frames)));

    let mut tables = PageTables::new(TableFrames, largest_page())?;
    map_image(&mut tables, image)?;
    let mut ram = map.regions().iter().filter(|r| r.kind.is_ram() && r.kind != Kind::IMAGE).peekable();
    while let Some(first) = ram.next() {
        let mut end = first.range.end();
        while let Some(next) = ram.next_if(|next| next.range.start() == end) {
            end = next.range.end();
        }
        let start = first.range.start();
        let len = end.raw() - start.raw();
        tables.map(direct(start), start, len, Permissions::READ_WRITE, MemoryType::WriteBack)?;
    }
    // SAFETY: the image is mapped as it was, and RAM where `OFFSET` says from now on.
    unsafe { ops::set_page_table_root(tables.root()) };
    OFFSET.store(DIRECT_MAP, Ordering::Relaxed);
    let memory = Memory { tables, ram: map.clone(), image, next_stack: STACKS, next_window: WINDOW };
    MEMORY.call_once(|| SpinMutex::new(memory));
    // SAFETY: the region is mapped, and this half of it is given out only here.
    unsafe { heap::add_main(direct(frames.end()), word(HEAP_SIZE)) };
    Ok(())
}

fn map_image(tables: &mut PageTables<HostFormat, TableFrames>, image: Hpa) -> Result<(), PageTableError> {
    let ImageLayout { image_start, text_start, data_start, image_end } = image_layout();
    for (start, end, permissions) in [
        (image_start, text_start, Permissions::READ),
        (text_start, data_start, Permissions::READ_EXECUTE),
        (data_start, image_end, Permissions::READ_WRITE),
    ] {
        let to = Hpa::new(image.raw() + (start - image_start));
        tables.map(Hva::new(start), to, end - start, permissions, MemoryType::WriteBack)?;
    }
    Ok(())
}

/// Why there is no memory to run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InitError {
    #[error(transparent)]
    Take(#[from] bulkhead_vmm::memory::map::TakeError),
    #[error(transparent)]
    Tables(#[from] PageTableError),
}

/// With the memory that [`init`] has set up.
fn with_memory<T>(f: impl FnOnce(&mut Memory) -> T) -> T {
    f(&mut MEMORY.get().expect("memory::init runs first").lock())
}

/// Notes that memory has changed its owner: what was usable is now the cell pool's.
pub(crate) fn note_map(map: &MemoryMap) {
    with_memory(|memory| memory.ram = map.clone());
}

/// A new stack with an unmapped page below it; its upper end.
///
/// # Errors
/// When there is no memory.
pub(crate) fn allocate_stack(size: u64) -> Result<Hva, PageTableError> {
    with_memory(|memory| {
        let bottom = memory.next_stack + PAGE_SIZE;
        let frames = allocate_frames(word(size / PAGE_SIZE)).ok_or(PageTableError::OutOfMemory)?;
        let (permissions, kind) = (Permissions::READ_WRITE, MemoryType::WriteBack);
        memory.tables.map(Hva::new(bottom), frames, size, permissions, kind)?;
        memory.next_stack = bottom + size;
        Ok(Hva::new(bottom + size))
    })
}

/// Whether `at` may lie on a stack of [`allocate_stack`].
pub(crate) fn is_stack(at: u64) -> bool {
    (STACKS..STACKS + SLOT).contains(&at)
}

/// Maps `len` bytes of device registers at `at`, uncached, for good. Other than RAM they
/// may be mapped twice.
///
/// # Errors
/// When the range is none or there is no memory.
pub(crate) fn map_mmio(at: Hpa, len: u64) -> Result<Hva, PageTableError> {
    with_memory(|memory| memory.map_window(at, len, Permissions::READ_WRITE, MemoryType::Uncached))
}

/// Readable memory of `len` bytes at `at`: RAM in the direct map, else a new mapping.
pub(crate) fn map_firmware(at: Hpa, len: usize) -> Option<NonNull<u8>> {
    let len = len as u64;
    let start = with_memory(|memory| {
        let range = PageRange::covering(at, len)?;
        let own = memory
            .ram
            .regions()
            .iter()
            .any(|r| r.kind == Kind::IMAGE && r.range.intersection(range).is_some());
        if memory.ram.is_ram(range) && !own {
            return Some(direct(at));
        }
        memory.map_window(at, len, Permissions::READ, MemoryType::WriteBack).ok()
    })?;
    NonNull::new(pointer(start))
}

/// The bundle, `len` bytes at `at`, which the memory map reserves for good. Empty when it
/// is not RAM.
pub(crate) fn bundle(at: Hpa, len: u64) -> &'static [u8] {
    let reserved = PageRange::covering(at, len).is_some_and(|range| {
        with_memory(|m| m.ram.regions().iter().any(|r| r.kind == Kind::BUNDLE && r.range.contains(range)))
    });
    if !reserved {
        return &[];
    }
    // SAFETY: the pages are mapped, reserved for the bundle and never written.
    unsafe { core::slice::from_raw_parts(pointer(direct(at)), word(len)) }
}

/// Maps the page at `at` below 1 MiB onto itself, executable, while `f` runs.
///
/// # Errors
/// When there is no memory.
pub(crate) fn with_identity_page<T>(at: Hpa, f: impl FnOnce() -> T) -> Result<T, PageTableError> {
    let here = Hva::new(at.raw());
    let (permissions, kind) = (Permissions::READ_EXECUTE, MemoryType::WriteBack);
    with_memory(|memory| memory.tables.map(here, at, PAGE_SIZE, permissions, kind))?;
    let result = f();
    with_memory(|memory| memory.tables.unmap(here, PAGE_SIZE))?;
    ops::flush_page(here);
    Ok(result)
}

impl Memory {
    fn map_window(
        &mut self,
        at: Hpa,
        len: u64,
        permissions: Permissions,
        kind: MemoryType,
    ) -> Result<Hva, PageTableError> {
        let range = PageRange::covering(at, len).ok_or(PageTableError::Target(at))?;
        let start = self.next_window;
        self.tables.map(Hva::new(start), range.start(), range.size(), permissions, kind)?;
        self.next_window += range.size();
        Ok(Hva::new(start + at.page_offset()))
    }
}
