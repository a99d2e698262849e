//! Linux bzImage by the 64-bit boot protocol (Linux, Documentation/arch/x86/boot.rst).
//!
//! Everything is placed below 4 GiB.

mod handover;
mod header;

use super::e820::{FOUR_GIB, FreeSpace};
use super::image::array;
use super::{BootError, Entry, Handover, Image, Piece, Plan, take_block, take_initrd};
use crate::memory::address::Gpa;
use bulkhead_abi::message::LoadKind;
use header::{HEADER_END, Header};

/// Below this the BIOS' own memory and holes are; kernels go above.
const ONE_MIB: u64 = 1 << 20;

/// The first bytes of a kernel's file, if it is a bzImage.
pub(super) fn recognise(kernel: &dyn Image) -> Result<Option<[u8; HEADER_END]>, BootError> {
    if kernel.size() < HEADER_END as u64 {
        return Ok(None);
    }
    let start = array(kernel, 0)?;
    Ok(header::is_bzimage(&start).then_some(start))
}

/// Plans the start of a kernel whose file has `size` bytes and begins with `start`. What comes
/// behind its protected-mode part (a signature) is not loaded.
pub(super) fn plan(start: &[u8; HEADER_END], size: u64, handover: &Handover<'_>) -> Result<Plan, BootError> {
    let header = Header::parse(start)?;
    let need = header.setup_size + header.payload_size;
    if size < need {
        return Err(BootError::Truncated { have: size, need });
    }
    let mut space = FreeSpace::new(handover.map);
    let kernel = place(&header, &mut space)?;
    let to_load =
        Piece { file: LoadKind::KERNEL, offset: header.setup_size, to: kernel, len: header.payload_size };
    let initrd = take_initrd(&mut space, handover, header.initrd_limit)?;
    let length = handover.cmdline.len() as u64;
    if length > u64::from(header.cmdline_size) {
        return Err(BootError::CommandLine { length, max: header.cmdline_size });
    }
    let block = take_block(&mut space, handover::size(handover.cmdline))?;
    Ok(Plan {
        protocol: "Linux 64-bit",
        pieces: [Some(to_load), initrd].into_iter().flatten().collect(),
        block: (block, handover::block(block, start, kernel, initrd, handover)?),
        entry: handover::entry(block, kernel),
    })
}

/// Finds a place for the kernel: where it likes to be, or the lowest one that will do.
fn place(header: &Header, space: &mut FreeSpace) -> Result<Gpa, BootError> {
    let (preferred, size) = (header.pref_address.raw(), header.init_size);
    let fits = preferred >= ONE_MIB && preferred.checked_add(size).is_some_and(|end| end <= FOUR_GIB);
    let kernel = fits.then(|| space.take_at(preferred, size)).flatten();
    let elsewhere = |space: &mut FreeSpace| {
        header.relocatable.then(|| space.take_lowest(size, header.kernel_alignment, ONE_MIB..FOUR_GIB))?
    };
    kernel.or_else(|| elsewhere(space)).ok_or(BootError::NoRoom {
        what: "kernel",
        size,
        place: if header.relocatable {
            "in one piece between 1 MiB and 4 GiB"
        } else {
            "at its pref_address, and it is not relocatable"
        },
    })
}

#[cfg(test)]
pub(super) mod tests;
