//! PVH: an ELF file with a note that has its 32-bit entry point (Xen, docs/misc/pvh.pandoc; the
//! structures are in xen/include/public/arch-x86/hvm/start_info.h).

use super::e820::{FOUR_GIB, FreeSpace};
use super::elf::{Elf, number};
use super::{BootError, Entry, Handover, Image, Plan, take_block, take_initrd};
use crate::memory::address::Gpa;
use crate::x86::state::Gpr;
use alloc::vec::Vec;

/// The note: `XEN_ELFNOTE_PHYS32_ENTRY`.
const NOTE_NAME: &[u8] = b"Xen\0";
const NOTE_TYPE: u64 = 18;

/// `XEN_HVM_START_MAGIC_VALUE`.
const MAGIC: u32 = 0x336e_c578;
const VERSION: u32 = 1;

/// Parts of the block that is handed over: `hvm_start_info`, `hvm_modlist_entry`,
/// `hvm_memmap_table_entry`s, the command line.
const MODULE: u64 = 56;
const MAP: u64 = MODULE + 32;
const MAP_ENTRY: u64 = 24;

/// The entry point, if the file has such a note.
///
/// # Errors
/// When the note has one that cannot be.
pub(super) fn entry(kernel: &dyn Image, elf: &Elf) -> Result<Option<u64>, BootError> {
    let Some(note) = elf.note(kernel, NOTE_NAME, NOTE_TYPE)? else { return Ok(None) };
    let entry = number(&note, 0, 8);
    if ![4, 8].contains(&note.len()) || u32::try_from(entry).is_err() || !elf.is_loaded(entry) {
        return Err(BootError::Field {
            part: "PVH note",
            field: "XEN_ELFNOTE_PHYS32_ENTRY",
            value: entry,
            allowed: "4 or 8 bytes with an address below 4 GiB that is loaded from the file",
        });
    }
    Ok(Some(entry))
}

pub(super) fn plan(
    kernel: &dyn Image,
    elf: &Elf,
    entry: u64,
    handover: &Handover<'_>,
) -> Result<Plan, BootError> {
    let mut space = FreeSpace::new(handover.map);
    let mut pieces = elf.load(kernel, &mut space)?;
    let initrd = take_initrd(&mut space, handover, FOUR_GIB)?;
    pieces.extend(initrd);

    let entries = handover.map.len();
    let count = u32::try_from(entries).map_err(|_| BootError::MapEntries { entries })?;
    let cmdline = MAP + u64::from(count) * MAP_ENTRY;
    let base = take_block(&mut space, cmdline + handover.cmdline.len() as u64 + 1)?;
    let at = |offset: u64| base.raw() + offset;

    let mut block = Vec::new();
    let modules = [at(MODULE), at(cmdline), handover.rsdp.map_or(0, Gpa::raw), at(MAP)];
    block.extend([MAGIC, VERSION, 0, u32::from(initrd.is_some())].iter().flat_map(|word| word.to_le_bytes()));
    block.extend(modules.iter().flat_map(|word| word.to_le_bytes()));
    block.extend([count, 0].iter().flat_map(|word| word.to_le_bytes()));
    let module = initrd.map_or([0; 4], |initrd| [initrd.to.raw(), initrd.len, 0, 0]);
    block.extend(module.iter().flat_map(|word| word.to_le_bytes()));
    for entry in handover.map {
        // The types are those of E820.
        let words = [entry.base.raw(), entry.size, entry.kind.0.into()];
        block.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }
    block.extend(handover.cmdline);
    block.push(0);
    Ok(Plan {
        protocol: "PVH",
        pieces,
        block: (base, block),
        entry: Entry::flat(entry, [(Gpr::Rax, 0), (Gpr::Rbx, base.raw())]),
    })
}

#[cfg(test)]
mod tests;
