//! The RAM of one cell as the hypervisor reaches it: bounds-checked copies through the
//! direct map.
//!
//! A guest may write while we copy, so accesses are volatile, or fenced where they are not
//! aligned, and no reference into the RAM is ever made. An access of 1, 2, 4 or 8 aligned
//! bytes is a single one; larger copies go by eight bytes.

// UNSAFETY: reaches guest memory through raw pointers.
#![expect(unsafe_code, reason = "volatile copies through raw pointers")]

use alloc::vec::Vec;
use bulkhead_vmm::memory::address::{Gpa, Hpa};
use bulkhead_vmm::memory::guest::{GuestMemory, GuestMemoryError};
use core::sync::atomic::{Ordering, compiler_fence};

/// A piece of a cell's RAM that is contiguous for guest and machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRegion {
    /// Where the guest sees it.
    pub gpa: Gpa,
    /// Where it is.
    pub hpa: Hpa,
    /// Bytes.
    pub len: u64,
}

/// A region as the reader of 8-byte words needs it.
#[derive(Debug, Clone, Copy, Default)]
struct Words {
    gpa: u64,
    /// How many words begin and end in it, be they aligned or not.
    count: u64,
    /// Where the region is for us.
    address: usize,
}

impl Words {
    /// The word at `gpa`, if it is here.
    ///
    /// # Safety
    /// The region is mapped at `address`.
    #[inline]
    unsafe fn read(&self, gpa: Gpa) -> Option<u64> {
        let offset = gpa.raw().wrapping_sub(self.gpa);
        if offset >= self.count {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, reason = "an offset into memory that is mapped")]
        let from: *const u64 = core::ptr::with_exposed_provenance(self.address.wrapping_add(offset as usize));
        if from.is_aligned() {
            // SAFETY: inside of the region, valid by the caller, and aligned as just seen.
            return Some(u64::from_le(unsafe { from.read_volatile() }));
        }
        // SAFETY: as above; this needs no alignment.
        let word = unsafe { from.read_unaligned() };
        // It is not volatile: what follows must use this copy.
        compiler_fence(Ordering::SeqCst);
        Some(u64::from_le(word))
    }
}

/// The RAM of one cell.
#[derive(Debug, Clone)]
pub struct GuestRam {
    /// Ascending by guest address, disjoint.
    regions: Vec<RamRegion>,
    /// The two largest regions, where a word most likely is: on a PC what is below 4 GiB and
    /// what is above.
    largest: [Words; 2],
    /// All regions, the larger the earlier.
    words: Vec<Words>,
    /// What a physical address is to be added to to reach it.
    direct_map: usize,
}

impl GuestRam {
    /// The RAM made of `regions`, reached at `direct_map` + physical address.
    ///
    /// # Safety
    /// Each region is mapped readable and writable there for as long as the value lives, and
    /// is used by nobody in the hypervisor but through such values.
    #[must_use]
    pub unsafe fn new(mut regions: Vec<RamRegion>, direct_map: usize) -> Self {
        regions.sort_by_key(|r| r.gpa);
        let words = regions.iter().filter_map(|r| {
            let address = direct_map.wrapping_add(usize::try_from(r.hpa.raw()).ok()?);
            Some(Words { gpa: r.gpa.raw(), count: r.len.saturating_sub(7), address })
        });
        let mut words: Vec<Words> = words.collect();
        words.sort_by_key(|w| core::cmp::Reverse(w.count));
        let largest = [0, 1].map(|n| words.get(n).copied().unwrap_or_default());
        Self { regions, largest, words, direct_map }
    }

    /// The regions, ascending by guest address.
    #[must_use]
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }

    #[cold]
    fn read_word_anywhere(&self, gpa: Gpa) -> Result<u64, GuestMemoryError> {
        // SAFETY: `new`'s contract.
        if let Some(word) = self.words.iter().find_map(|words| unsafe { words.read(gpa) }) {
            return Ok(word);
        }
        // In two regions, or nowhere.
        let mut bytes = [0; 8];
        self.read(gpa, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Calls `each(pointer, length)` for the pieces of `len` bytes at `gpa`, in order.
    fn pieces(
        &self,
        gpa: Gpa,
        len: usize,
        mut each: impl FnMut(*mut u8, usize),
    ) -> Result<(), GuestMemoryError> {
        let error = GuestMemoryError { gpa, len: len as u64 };
        // First see that all of it is there, so that nothing is done by halves.
        for check in [true, false] {
            let (mut at, mut left) = (gpa, len);
            while left != 0 {
                let next = self.regions.partition_point(|r| r.gpa <= at);
                let region = next.checked_sub(1).and_then(|i| self.regions.get(i)).ok_or(error)?;
                let offset = at.checked_offset_from(region.gpa).ok_or(error)?;
                let room = region.len.checked_sub(offset).filter(|room| *room != 0).ok_or(error)?;
                let piece = usize::try_from(room).unwrap_or(usize::MAX).min(left);
                if !check {
                    let address = self.direct_map.wrapping_add(
                        usize::try_from(region.hpa.raw().wrapping_add(offset)).map_err(|_| error)?,
                    );
                    each(core::ptr::with_exposed_provenance_mut(address), piece);
                }
                left -= piece;
                at = at.checked_add(piece as u64).ok_or(error)?;
            }
        }
        Ok(())
    }
}

impl GuestMemory for GuestRam {
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), GuestMemoryError> {
        let mut done = 0;
        self.pieces(gpa, buf.len(), |pointer, len| {
            let Some(target) = buf.get_mut(done..done + len) else { return };
            // SAFETY: `pieces` gives addresses inside of a region, valid by `new`'s contract.
            unsafe { copy_volatile(pointer, target.as_mut_ptr(), len) };
            done += len;
        })
    }

    #[inline]
    fn read_u64(&self, gpa: Gpa) -> Result<u64, GuestMemoryError> {
        match self.read_u64_quickly(gpa) {
            Some(word) => Ok(word),
            None => self.read_word_anywhere(gpa),
        }
    }

    // The page walks and fetches of exits: as short as can be.
    #[inline]
    fn read_u64_quickly(&self, gpa: Gpa) -> Option<u64> {
        let [first, second] = &self.largest;
        // SAFETY: `new`'s contract.
        let word = unsafe { first.read(gpa) };
        // SAFETY: as above.
        word.or_else(|| unsafe { second.read(gpa) })
    }

    fn write(&self, gpa: Gpa, data: &[u8]) -> Result<(), GuestMemoryError> {
        let mut done = 0;
        self.pieces(gpa, data.len(), |pointer, len| {
            let Some(source) = data.get(done..done + len) else { return };
            // SAFETY: `pieces` gives addresses inside of a region, valid by `new`'s contract.
            unsafe { copy_volatile(source.as_ptr(), pointer, len) };
            done += len;
        })
    }
}

/// Copies `len` bytes by volatile accesses: one access where a size of 1, 2, 4 or 8 and both
/// addresses allow it.
///
/// # Safety
/// `source` is valid for reads and `target` for writes of `len` bytes; they do not overlap.
unsafe fn copy_volatile(source: *const u8, target: *mut u8, len: usize) {
    /// # Safety
    /// As the function around it, for `size_of::<T>()` bytes; `T` is an integer.
    unsafe fn one<T>(source: *const u8, target: *mut u8) {
        let (source, target) = (source.cast::<T>(), target.cast::<T>());
        if source.is_aligned() && target.is_aligned() {
            // SAFETY: valid by the caller, aligned as just seen.
            let value = unsafe { source.read_volatile() };
            // SAFETY: as above.
            unsafe { target.write_volatile(value) };
        } else {
            // One side is a buffer of our own without alignment, or the access crosses a
            // border at which a guest, too, would see two accesses.
            // SAFETY: valid by the caller; these do not need alignment.
            let value = unsafe { source.read_unaligned() };
            // SAFETY: as above.
            unsafe { target.write_unaligned(value) };
        }
    }
    let mut done = 0;
    while done < len {
        let left = len - done;
        // SAFETY: `done` is below `len`.
        let from = unsafe { source.add(done) };
        // SAFETY: as above.
        let to = unsafe { target.add(done) };
        done += match left {
            8.. => {
                // SAFETY: eight bytes remain.
                unsafe { one::<u64>(from, to) };
                8
            }
            4..=7 => {
                // SAFETY: four bytes remain.
                unsafe { one::<u32>(from, to) };
                4
            }
            2..=3 => {
                // SAFETY: two bytes remain.
                unsafe { one::<u16>(from, to) };
                2
            }
            _ => {
                // SAFETY: one byte remains.
                unsafe { one::<u8>(from, to) };
                1
            }
        };
    }
    // Unaligned accesses are not volatile. What follows must use the copy that it checks, and
    // not be compiled to fetch it from the guest's memory once more.
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    /// Two regions that are neighbours for the guest but not in memory, and one apart.
    fn ram(backing: &mut [u64]) -> GuestRam {
        let base = backing.as_mut_ptr().expose_provenance();
        let region = |gpa, offset, len| RamRegion { gpa: Gpa::new(gpa), hpa: Hpa::new(offset), len };
        // SAFETY: the backing outlives its use in the tests below and nobody else touches it.
        unsafe {
            GuestRam::new(
                vec![
                    region(0x3000, 0, 0x1000),
                    region(0x1000, 0x2000, 0x1000),
                    region(0x2000, 0x1000, 0x1000),
                ],
                base,
            )
        }
    }

    #[test]
    fn an_access_that_is_not_all_ram_touches_nothing() {
        let mut backing = vec![0u64; 0x3000 / 8];
        let ram = ram(&mut backing);
        assert!(ram.write(Gpa::new(0x3fff), &[1, 2]).is_err());
        assert!(ram.write(Gpa::new(0xfff), &[1, 2]).is_err());
        assert!(ram.write(Gpa::new(u64::MAX), &[1, 2]).is_err());
        assert!(ram.read(Gpa::new(0x1000), &mut [0; 0x3001]).is_err());
        assert!(ram.read(Gpa::new(0x1000), &mut [0; 0x3000]).is_ok());
        assert!(backing.iter().all(|word| *word == 0));
    }

    proptest! {
        #[test]
        fn behaves_as_one_flat_block(writes in prop::collection::vec((0u64..0x3000, prop::collection::vec(any::<u8>(), 0..70)), 0..40)) {
            let mut backing = vec![0u64; 0x3000 / 8];
            let ram = ram(&mut backing);
            let mut flat = vec![0u8; 0x3000];
            for (offset, data) in &writes {
                let start = usize::try_from(*offset).unwrap();
                let fits = start + data.len() <= flat.len();
                prop_assert_eq!(ram.write(Gpa::new(0x1000 + offset), data).is_ok(), fits);
                if fits {
                    flat[start..start + data.len()].copy_from_slice(data);
                    let mut back = vec![0; data.len()];
                    ram.read(Gpa::new(0x1000 + offset), &mut back).unwrap();
                    prop_assert_eq!(&back, data);
                }
            }
            for offset in writes.iter().map(|w| w.0).chain([0xff9, 0x1fff, 0x2ff8, 0x2ff9]) {
                let at = usize::try_from(offset).unwrap();
                let word = flat.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().unwrap()));
                prop_assert_eq!(ram.read_u64(Gpa::new(0x1000 + offset)).ok(), word);
            }
            let mut all = vec![0; 0x3000];
            ram.read(Gpa::new(0x1000), &mut all).unwrap();
            prop_assert_eq!(all, flat);
        }
    }
}
