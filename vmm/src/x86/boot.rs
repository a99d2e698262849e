//! How a kernel starts: from files to the registers of its first instruction.
//!
//! [`plan`] looks at a kernel's file and decides where everything goes: which bytes of the files
//! are to be copied where ([`Piece`]), what is written for the kernel to read, and its first
//! registers. It checks all and writes nothing, so whoever can read the files can find out
//! whether they fit. Once the pieces are in place, [`Plan::finish`] writes the rest.
//!
//! A file is never trusted: whatever is wrong with it is a [`BootError`].

pub mod e820;
mod elf;
mod entry;
mod image;
mod linux;
mod multiboot;
mod pvh;

pub use entry::Entry;
pub use image::{Image, ImageError};

use crate::memory::address::Gpa;
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use bulkhead_abi::message::LoadKind;
use e820::{E820Entry, FOUR_GIB, FreeSpace};
use elf::Elf;
use thiserror::Error;

/// What a kernel is started with.
#[derive(Debug, Clone, Copy)]
pub struct Handover<'a> {
    /// The memory map.
    pub map: &'a [E820Entry],
    /// The command line, without a final zero.
    pub cmdline: &'a [u8],
    /// How many bytes the initrd has.
    pub initrd: Option<u64>,
    /// Where the ACPI tables' root pointer lies.
    pub rsdp: Option<Gpa>,
}

/// Bytes of a file and their place in the cell's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The file.
    pub file: LoadKind,
    /// Where in it the bytes begin.
    pub offset: u64,
    /// Where they go.
    pub to: Gpa,
    /// How many there are.
    pub len: u64,
}

/// How a kernel is brought into its cell's RAM and started. RAM that nothing is written to is
/// taken to be zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    protocol: &'static str,
    pieces: VecDeque<Piece>,
    /// What the kernel reads besides the files, in one block.
    block: (Gpa, Vec<u8>),
    entry: Entry,
}

/// Plans how `kernel` is started: as a bzImage, by an ELF's note for PVH, or by a multiboot header,
/// whichever it has first in this order.
///
/// # Errors
/// When it is no kernel that could be started, something does not fit into the free RAM of the
/// memory map, or the command line is not one.
pub fn plan(kernel: &dyn Image, handover: &Handover<'_>) -> Result<Plan, BootError> {
    if let Some(at) = handover.cmdline.iter().position(|byte| *byte == 0) {
        return Err(BootError::CommandLineZero { at });
    }
    if let Some(start) = linux::recognise(kernel)? {
        return linux::plan(&start, kernel.size(), handover);
    }
    let elf = Elf::read(kernel);
    if let Ok(Some(elf)) = &elf
        && let Some(entry) = pvh::entry(kernel, elf)?
    {
        return pvh::plan(kernel, elf, entry, handover);
    }
    if let Some(header) = multiboot::recognise(kernel)? {
        return multiboot::plan(kernel, &header, elf.ok().flatten().as_ref(), handover);
    }
    // Where an ELF is wrong comes before what it lacks.
    elf.and(Err(BootError::Unknown))
}

impl Plan {
    /// The boot protocol's name.
    pub const fn protocol(&self) -> &'static str {
        self.protocol
    }

    /// Takes the next bytes to be copied out of the plan, `max` or fewer; `None` when all are
    /// taken.
    pub fn next_piece(&mut self, max: u64) -> Option<Piece> {
        let rest = self.pieces.front_mut()?;
        let piece = Piece { len: rest.len.min(max), ..*rest };
        rest.len -= piece.len;
        match (rest.len, rest.to.checked_add(piece.len)) {
            (1.., Some(to)) => (rest.offset, rest.to) = (rest.offset + piece.len, to),
            _ => drop(self.pieces.pop_front()),
        }
        Some(piece)
    }

    /// Writes what the kernel is handed besides the files, and says how it is entered.
    ///
    /// # Errors
    /// When a place that the memory map calls RAM is none.
    pub fn finish(self, memory: &dyn GuestMemory) -> Result<Entry, BootError> {
        let (at, bytes) = self.block;
        memory.write(at, &bytes)?;
        Ok(self.entry)
    }
}

/// Takes room for the initrd, as high as it may be.
fn take_initrd(
    space: &mut FreeSpace,
    handover: &Handover<'_>,
    below: u64,
) -> Result<Option<Piece>, BootError> {
    let place = "in one piece below 4 GiB and the kernel's initrd_addr_max";
    let Some(len) = handover.initrd else { return Ok(None) };
    let to = space.take_highest(len, below).ok_or(BootError::NoRoom { what: "initrd", size: len, place })?;
    Ok(Some(Piece { file: LoadKind::INITRD, offset: 0, to, len }))
}

/// Sees that the place of a part of the kernel is free. Returns where it ends.
fn check_free(space: &FreeSpace, at: u64, size: u64) -> Result<u64, BootError> {
    space.end_of_free(at, size).map(|_| at + size).ok_or(BootError::Taken { at, size })
}

/// Takes room for what a kernel is handed, `size` bytes. Low memory first: it is free on every
/// board, and no kernel wants it for long.
fn take_block(space: &mut FreeSpace, size: u64) -> Result<Gpa, BootError> {
    space.take_lowest(size, crate::memory::address::PAGE_SIZE, 0..FOUR_GIB).ok_or(BootError::NoRoom {
        what: "boot parameters",
        size,
        place: "in one piece below 4 GiB",
    })
}

/// Why a kernel cannot be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BootError {
    /// It is none that is known.
    #[error(
        "is not a kernel; allowed: Linux as a bzImage (such as /boot/vmlinuz-…), an ELF with a PVH note \
         (XEN_ELFNOTE_PHYS32_ENTRY), a multiboot 1 header in the first 8192 bytes"
    )]
    Unknown,
    /// A field of its file has a value that cannot be used.
    #[error("kernel: field {field} of the {part} is {value:#x}; allowed: {allowed}")]
    Field {
        /// The part of the file.
        part: &'static str,
        /// The field's name in the specification.
        field: &'static str,
        /// What the file has there.
        value: u64,
        /// What could be used.
        allowed: &'static str,
    },
    /// The file ends too early.
    #[error("kernel: the file has {have} bytes, but {need} are needed")]
    Truncated {
        /// How many bytes there are.
        have: u64,
        /// How many there should be at least.
        need: u64,
    },
    /// There is no free RAM of the size and place needed.
    #[error("{what}: no {size} bytes of free RAM {place}")]
    NoRoom {
        /// For what.
        what: &'static str,
        /// How many bytes.
        size: u64,
        /// Where they would have to be.
        place: &'static str,
    },
    /// A part of the kernel that has to lie where there is no free RAM.
    #[error("kernel: {size} bytes at {at:#x} are not free RAM of the cell")]
    Taken {
        /// Where it has to lie.
        at: u64,
        /// How many bytes it has.
        size: u64,
    },
    /// The command line is longer than the kernel takes.
    #[error("command line: {length} bytes; the kernel takes 0 to {max}")]
    CommandLine {
        /// Its length.
        length: u64,
        /// The header's `cmdline_size`.
        max: u32,
    },
    /// The command line has a zero byte in it, where the kernel would stop reading.
    #[error("command line: byte {at} is zero; allowed: any other value")]
    CommandLineZero {
        /// The offset of the first zero byte.
        at: usize,
    },
    /// The memory map does not fit the boot parameters.
    #[error("memory map: {entries} entries are more than the boot protocol takes")]
    MapEntries {
        /// How many entries there are.
        entries: usize,
    },
    /// The file cannot be read.
    #[error("kernel: {0}")]
    Image(#[from] ImageError),
    /// A place that the memory map calls RAM is none.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
}

#[cfg(test)]
mod tests;
