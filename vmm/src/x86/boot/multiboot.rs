//! Multiboot 1 (Multiboot Specification version 0.6.96, chapter 3).

use super::e820::{FOUR_GIB, FreeSpace};
use super::elf::{Elf, number};
use super::image::{bytes, check_range};
use super::{BootError, Entry, Handover, Image, Piece, Plan, check_free, take_block, take_initrd};
use crate::memory::address::{Gpa, PAGE_SIZE};
use crate::x86::state::Gpr;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use bulkhead_abi::message::LoadKind;

/// The header has to be whole within so many bytes of the file (3.1).
const SEARCHED: u64 = 8192;
const HEADER_MAGIC: u64 = 0x1bad_b002;
/// In EAX, tells a kernel that it was started this way (3.2).
const LOADER_MAGIC: u64 = 0x2bad_b002;
/// Modules on page boundaries; memory information: what is done in any case (3.1.2).
const KNOWN_FLAGS: u64 = 0b11;
/// A kernel that is not started without what these ask for.
const REQUIRED_FLAGS: u64 = 0xffff;
/// The header has the addresses to load by.
const ADDRESSES: u64 = 1 << 16;

/// What the information structure has (3.3): memory sizes, command line, modules, memory map,
/// the boot loader's name.
const INFO_FLAGS: u32 = 1 | 1 << 2 | 1 << 3 | 1 << 6 | 1 << 9;
/// Parts of the block that is handed over: information, module, name, memory map, command line.
const MODULE: u32 = 116;
const NAME: u32 = MODULE + 16;
const NAME_TEXT: &[u8; 12] = b"Bulkhead\0\0\0\0";
const MAP: u32 = NAME + 12;
/// With the field that says how much follows it.
const MAP_ENTRY: u32 = 24;
const ONE_MIB: u64 = 1 << 20;
/// The most that the memory from 0 on can be.
const LOW_MEMORY: u64 = 640 << 10;

/// A header and where in the file it is.
#[derive(Debug)]
pub(super) struct Header {
    offset: u64,
    flags: u64,
    bytes: Vec<u8>,
}

/// Finds the header.
///
/// # Errors
/// When the file cannot be read.
pub(super) fn recognise(kernel: &dyn Image) -> Result<Option<Header>, BootError> {
    let len = kernel.size().min(SEARCHED);
    let start = bytes(kernel, 0, usize::try_from(len).unwrap_or(0))?;
    let mut rest = &start[..];
    let mut offset = 0;
    while rest.len() >= 12 {
        let [magic, flags, checksum] = [0, 4, 8].map(|at| number(rest, at, 4));
        if magic == HEADER_MAGIC && (magic + flags + checksum).is_multiple_of(FOUR_GIB) {
            return Ok(Some(Header { offset, flags, bytes: rest.iter().copied().take(32).collect() }));
        }
        rest = rest.get(4..).unwrap_or_default();
        offset += 4;
    }
    Ok(None)
}

impl Header {
    fn refuse<T>(field: &'static str, value: u64, allowed: &'static str) -> Result<T, BootError> {
        Err(BootError::Field { part: "multiboot header", field, value, allowed })
    }

    /// Takes the place of the kernel. Returns what is copied, and the entry point.
    fn load(
        &self,
        kernel: &dyn Image,
        elf: Option<&Elf>,
        space: &mut FreeSpace,
    ) -> Result<(VecDeque<Piece>, u64), BootError> {
        if self.flags & ADDRESSES != 0 {
            return self.load_by_addresses(kernel, space);
        }
        let Some(elf) = elf.filter(|elf| elf.is_32_bit) else {
            let allowed = "bit 16 set (addresses in the header), for the file is no 32-bit ELF";
            return Self::refuse("flags", self.flags, allowed);
        };
        let entry = elf.loaded_entry().ok_or(BootError::Field {
            part: "ELF header",
            field: "e_entry",
            value: elf.entry,
            allowed: "what is loaded",
        })?;
        Ok((elf.load(kernel, space)?, entry))
    }

    /// The same by the addresses in the header (3.1.3).
    fn load_by_addresses(
        &self,
        kernel: &dyn Image,
        space: &mut FreeSpace,
    ) -> Result<(VecDeque<Piece>, u64), BootError> {
        let need = self.offset + 32;
        if self.bytes.len() < 32 {
            return Err(BootError::Truncated { have: kernel.size().min(SEARCHED), need });
        }
        let [header, load, load_end, bss_end, entry] =
            [12, 16, 20, 24, 28].map(|at| number(&self.bytes, at, 4));
        let offset = header.checked_sub(load).and_then(|skip| self.offset.checked_sub(skip));
        let Some(offset) = offset else {
            let allowed = "header_addr or less, by no more than the file has before the header";
            return Self::refuse("load_addr", load, allowed);
        };
        // 0 means all there is.
        let load_end = if load_end == 0 { load + (kernel.size() - offset).min(FOUR_GIB) } else { load_end };
        let Some(len) = load_end.checked_sub(load) else {
            return Self::refuse("load_end_addr", load_end, "0, load_addr or more");
        };
        check_range(kernel, offset, len)?;
        let bss_end = if bss_end == 0 { load_end } else { bss_end };
        if bss_end < load_end {
            return Self::refuse("bss_end_addr", bss_end, "0, load_end_addr or more");
        }
        if !(load..load_end).contains(&entry) {
            return Self::refuse("entry_addr", entry, "what is loaded");
        }
        check_free(space, load, bss_end - load)?;
        space.remove(Gpa::new(load), bss_end - load);
        Ok(([Piece { file: LoadKind::KERNEL, offset, to: Gpa::new(load), len }].into(), entry))
    }
}

/// Plans the start of a kernel with this header.
pub(super) fn plan(
    kernel: &dyn Image,
    header: &Header,
    elf: Option<&Elf>,
    handover: &Handover<'_>,
) -> Result<Plan, BootError> {
    if header.flags & REQUIRED_FLAGS & !KNOWN_FLAGS != 0 {
        let allowed = "bits 0, 1, 16 (and none that may be ignored); there is no video mode, bit 2";
        return Header::refuse("flags", header.flags, allowed);
    }
    let mut space = FreeSpace::new(handover.map);
    let free_from = |start: u64| space.end_of_free(start, 1).map_or(0, |end| end - start);
    // Page 0 is memory, but nobody's to take.
    let low_memory = (free_from(PAGE_SIZE) + PAGE_SIZE).min(LOW_MEMORY);
    let sizes = [low_memory, free_from(ONE_MIB)].map(|size| low(size / 1024));
    let (mut pieces, entry) = header.load(kernel, elf, &mut space)?;
    let initrd = take_initrd(&mut space, handover, FOUR_GIB)?;
    pieces.extend(initrd);

    let entries = handover.map.len();
    let map_size = u32::try_from(entries).ok().and_then(|count| count.checked_mul(MAP_ENTRY));
    let cmdline = map_size.and_then(|size| size.checked_add(MAP)).ok_or(BootError::MapEntries { entries })?;
    let base = take_block(&mut space, u64::from(cmdline) + handover.cmdline.len() as u64 + 1)?;
    let at = |offset: u32| low(base.raw()) + offset;

    let mut info = [0; MODULE as usize / 4];
    // boot_device, the symbols, drives and what comes behind the name are not there.
    info[..3].copy_from_slice(&[INFO_FLAGS, sizes[0], sizes[1]]);
    info[4..7].copy_from_slice(&[at(cmdline), initrd.is_some().into(), at(MODULE)]);
    info[11..13].copy_from_slice(&[cmdline - MAP, at(MAP)]);
    info[16] = at(NAME);
    let module = initrd.map_or([0; 4], |initrd| {
        let start = initrd.to.raw();
        [low(start), low(start + initrd.len), 0, 0]
    });
    let mut block: Vec<u8> = info.into_iter().chain(module).flat_map(u32::to_le_bytes).collect();
    block.extend(NAME_TEXT);
    for entry in handover.map {
        // The size does not count itself. The types are those of E820.
        block.extend((MAP_ENTRY - 4).to_le_bytes());
        block.extend(entry.base.raw().to_le_bytes());
        block.extend(entry.size.to_le_bytes());
        block.extend(entry.kind.0.to_le_bytes());
    }
    block.extend(handover.cmdline);
    block.push(0);
    Ok(Plan {
        protocol: "multiboot 1",
        pieces,
        block: (base, block),
        entry: Entry::flat(entry, [(Gpr::Rax, LOADER_MAGIC), (Gpr::Rbx, base.raw())]),
    })
}

/// A number that fits: of what lies below 4 GiB.
fn low(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
