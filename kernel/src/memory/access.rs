//! Memory that is reached by its physical address: the cell pool, device registers, pages
//! that the root cell sees, and what control blocks need to know of the heap.
// UNSAFETY: writes to memory by its physical address.
#![expect(unsafe_code, reason = "writes to memory by its physical address")]

use super::{DIRECT_MAP, allocate_frames, direct, pointer, with_memory, word};
use bulkhead_arch::x86_64::boot::image_layout;
use bulkhead_vmm::memory::address::{Hpa, Hva, PAGE_SIZE};
use bulkhead_vmm::memory::map::{Kind, PageRange};
use core::ptr;

/// Where heap memory, or anything else in the direct map or the image, is.
pub(crate) fn physical_of(at: Hva) -> Hpa {
    let layout = image_layout();
    if (layout.image_start..layout.image_end).contains(&at.raw()) {
        let image = with_memory(|memory| memory.image);
        return Hpa::new(image.raw() + (at.raw() - layout.image_start));
    }
    match at.raw().checked_sub(DIRECT_MAP) {
        Some(physical) => Hpa::new(physical),
        None => panic!("{at} has no fixed physical address"),
    }
}

/// Whether all of a range is of one kind.
fn is_kind(at: Hpa, len: u64, kind: Kind) -> bool {
    PageRange::covering(at, len).is_some_and(|range| {
        with_memory(|m| m.ram.regions().iter().any(|r| r.kind == kind && r.range.contains(range)))
    })
}

/// Zeroes `len` bytes of the cell pool, multiples of 4 KiB, which no vCPU that is on reaches.
pub(crate) fn zero_pool(at: Hpa, len: u64) {
    assert!(is_kind(at, len, Kind::POOL), "only pool memory is zeroed, not {len:#x} bytes at {at}");
    let start: *mut u64 = pointer(direct(at));
    for index in 0..word(len / 8) {
        // SAFETY: inside the pool, which the direct map covers and nobody uses now.
        let to = unsafe { start.add(index) };
        // SAFETY: as above.
        unsafe { to.write_volatile(0) };
    }
}

/// Copies `bytes` to memory of the cell pool that no guest reaches.
pub(crate) fn write_pool(at: Hpa, bytes: &[u8]) {
    let len = bytes.len() as u64;
    assert!(is_kind(at, len, Kind::POOL), "only the pool is written to, not {len:#x} bytes at {at}");
    let to = pointer(direct(at));
    // SAFETY: inside the pool, which the direct map covers; management has given it to a cell for
    // its files, which nobody else touches.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// Pages for the root cell to see, zeroed: `len` bytes, a multiple of 4 KiB, below 4 GiB.
pub(crate) fn allocate_window(len: u64) -> Option<Hpa> {
    let at = allocate_frames(word(len / PAGE_SIZE))?;
    write_window(at, &alloc::vec![0; word(len)]);
    Some(at)
}

/// Writes to pages of [`allocate_window`].
pub(crate) fn write_window(at: Hpa, bytes: &[u8]) {
    assert!(is_kind(at, bytes.len() as u64, Kind::HYPERVISOR), "{at} is not in the hypervisor's region");
    let to = pointer(direct(at));
    // SAFETY: frames that were allocated for this, mapped for good, and not the heap's.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// Registers of a device, mapped uncached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Registers(Hva);

impl Registers {
    /// The page of registers at `at`.
    pub(crate) fn map(at: Hpa) -> Option<Self> {
        super::map_mmio(at, PAGE_SIZE).ok().map(Self)
    }

    fn at(self, offset: u64) -> *mut u32 {
        assert!(offset < PAGE_SIZE && offset.is_multiple_of(4), "no register at {offset:#x}");
        pointer(Hva::new(self.0.raw() + offset))
    }

    /// Reads a register.
    pub(crate) fn read(self, offset: u64) -> u32 {
        // SAFETY: `map` has mapped the page for good, and `at` keeps to it.
        unsafe { self.at(offset).read_volatile() }
    }

    /// Writes a register.
    pub(crate) fn write(self, offset: u64, value: u32) {
        // SAFETY: as above; what the register does to memory is its driver's to know.
        unsafe { self.at(offset).write_volatile(value) }
    }
}
