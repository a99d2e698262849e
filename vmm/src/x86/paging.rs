//! Walking a guest's page tables.
//!
//! [`translate`] does what the CPU's own walk does for one access (AMD APM vol. 2, chapter
//! 5; Intel SDM vol. 3, chapter 5), in every paging mode. It serves the emulation of
//! instructions that the CPU had begun itself: for the fetch and for the access that exited,
//! accessed and dirty bits are set and protection keys are passed already, so that it deals
//! with neither. A RAM operand beside the device's (MOVS, PUSH, POP) may be reached here
//! first, and then leaves no trace in the tables: setting a bit takes a compare-exchange
//! with the guest's own CPUs. Kernels map what they copy device memory to as dirty.

use super::state::{
    CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PSE, ControlRegister, CpuState, EFER_LMA, EFER_NXE,
};
use crate::memory::address::{Gpa, Gva};
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use thiserror::Error;

const CR4_SMEP: u64 = 1 << 20;
const CR4_SMAP: u64 = 1 << 21;
const RFLAGS_AC: u64 = 1 << 18;

const ENTRY_P: u64 = 1;
const ENTRY_RW: u64 = 1 << 1;
const ENTRY_US: u64 = 1 << 2;
const ENTRY_PS: u64 = 1 << 7;
const ENTRY_NX: u64 = 1 << 63;
/// Physical addresses have at most 52 bits.
const ENTRY_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Page-fault error code: the page was present.
const ERROR_P: u32 = 1;
/// Page-fault error code: a write.
const ERROR_W: u32 = 1 << 1;
/// Page-fault error code: at CPL 3.
const ERROR_U: u32 = 1 << 2;
/// Page-fault error code: a reserved bit was set in an entry.
const ERROR_RSVD: u32 = 1 << 3;
/// Page-fault error code: an instruction fetch.
const ERROR_ID: u32 = 1 << 4;

/// What an access wants to do. A read-modify-write is a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Data read.
    Read,
    /// Data write.
    Write,
    /// Instruction fetch.
    Execute,
}

/// Why an address has no translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TranslateError {
    /// The access raises #PF (vector 14); CR2 is the address.
    #[error("page fault, error code {error_code:#x}")]
    PageFault {
        /// The error code to push (AMD APM vol. 2, 8.4.2).
        error_code: u32,
    },
    /// The address is not canonical: #GP(0), or #SS(0) for a stack access.
    #[error("address {gva} is not canonical")]
    NotCanonical {
        /// The address.
        gva: Gva,
    },
    /// A page table is not in the cell's RAM.
    #[error("page table: {0}")]
    Memory(#[from] GuestMemoryError),
}

/// The shape of the page tables of one paging mode.
struct Mode {
    /// Number of tables on the way.
    levels: u32,
    /// Index bits per level.
    bits: u32,
    /// The part of CR3 that is the address of the first table.
    cr3_mask: u64,
    /// The highest level (0 is the 4 KiB page) at which an entry may map a page.
    largest_leaf: u32,
}

/// Translates `gva` for `access` at the current privilege level. Outside long mode the
/// upper half of `gva` is ignored, as the CPU forms 32-bit linear addresses there.
///
/// # Errors
/// [`TranslateError`]: what the CPU would raise, or that a table is not RAM of the cell.
pub fn translate<C: CpuState + ?Sized, M: GuestMemory + ?Sized>(
    cpu: &C,
    memory: &M,
    gva: Gva,
    access: Access,
) -> Result<Gpa, TranslateError> {
    match four_levels(cpu, memory, gva, access) {
        Some(gpa) => Ok(gpa),
        None => walk(cpu, memory, gva, access),
    }
}

/// The translation in the mode and with the entries that kernels of today have nearly always:
/// four levels, and nothing on the way that has to be looked at twice. `None` says nothing.
#[inline]
pub(super) fn four_levels<C: CpuState + ?Sized, M: GuestMemory + ?Sized>(
    cpu: &C,
    memory: &M,
    gva: Gva,
    access: Access,
) -> Option<Gpa> {
    let (cr4, efer) = (cpu.control(ControlRegister::Cr4), cpu.efer());
    // EFER.LMA is never set without CR0.PG (AMD APM vol. 2, 14.6.1).
    if efer & EFER_LMA == 0 || cr4 & CR4_LA57 != 0 {
        return None;
    }
    let address = gva.raw();
    if (address.cast_signed() << 16 >> 16).cast_unsigned() != address {
        return None;
    }
    let mut table = cpu.control(ControlRegister::Cr3) & ENTRY_ADDRESS;
    // What all entries have, and what any of them has. A table behind one that turns out to be
    // wrong is read for nothing, which does no harm.
    let (mut all, mut any) = (u64::MAX, 0);
    let mut shift = 39;
    let entry = loop {
        let entry = memory.read_u64_quickly(Gpa::new(table | (address >> shift & 0x1ff) << 3))?;
        all &= entry;
        any |= entry;
        if shift == 12 || entry & ENTRY_PS != 0 {
            break entry;
        }
        table = entry & ENTRY_ADDRESS;
        shift -= 9;
    };
    let offset_mask = (1u64 << shift) - 1;
    let needed = if access == Access::Write { ENTRY_P | ENTRY_RW } else { ENTRY_P };
    let refused = if access == Access::Execute || efer & EFER_NXE == 0 { ENTRY_NX } else { 0 };
    let wrong_user = if cpu.cpl() == 3 {
        !all & ENTRY_US
    } else if cr4 & (CR4_SMEP | CR4_SMAP) != 0 {
        all & ENTRY_US
    } else {
        0
    };
    // Between PAT and the address of a large page.
    let reserved = entry & offset_mask & !0x1fff;
    if !all & needed | any & refused | wrong_user | reserved != 0 || shift == 39 {
        return None;
    }
    Some(Gpa::new(entry & ENTRY_ADDRESS & !offset_mask | address & offset_mask))
}

/// The translation in any mode, and why there is none.
#[cold]
fn walk<C: CpuState + ?Sized, M: GuestMemory + ?Sized>(
    cpu: &C,
    memory: &M,
    gva: Gva,
    access: Access,
) -> Result<Gpa, TranslateError> {
    let (cr0, cr4, efer) = (cpu.control(ControlRegister::Cr0), cpu.control(ControlRegister::Cr4), cpu.efer());
    let long = efer & EFER_LMA != 0;
    let address = if long { gva.raw() } else { gva.raw() & 0xffff_ffff };
    if cr0 & CR0_PG == 0 {
        return Ok(Gpa::new(address));
    }
    let pae = long || cr4 & CR4_PAE != 0;
    let mode = if long {
        let levels = if cr4 & CR4_LA57 != 0 { 5 } else { 4 };
        let unused = 64 - (12 + 9 * levels);
        if (address.cast_signed() << unused >> unused).cast_unsigned() != address {
            return Err(TranslateError::NotCanonical { gva });
        }
        Mode { levels, bits: 9, cr3_mask: ENTRY_ADDRESS, largest_leaf: 2 }
    } else if pae {
        Mode { levels: 3, bits: 9, cr3_mask: 0xffff_ffe0, largest_leaf: 1 }
    } else {
        let largest_leaf = u32::from(cr4 & CR4_PSE != 0);
        Mode { levels: 2, bits: 10, cr3_mask: 0xffff_f000, largest_leaf }
    };

    let user = cpu.cpl() == 3;
    let nxe = pae && efer & EFER_NXE != 0;
    let fault = |cause: u32| {
        let mut error_code = cause;
        if access == Access::Write {
            error_code |= ERROR_W;
        }
        if user {
            error_code |= ERROR_U;
        }
        if access == Access::Execute && (nxe || cr4 & CR4_SMEP != 0) {
            error_code |= ERROR_ID;
        }
        TranslateError::PageFault { error_code }
    };

    let mut table = cpu.control(ControlRegister::Cr3) & mode.cr3_mask;
    let (mut writable, mut for_user, mut executable) = (true, true, true);
    let mut level = mode.levels;
    let (entry, shift) = loop {
        level -= 1;
        let shift = 12 + level * mode.bits;
        let index = address >> shift & ((1 << mode.bits) - 1);
        let entry = if pae {
            memory.read_u64(Gpa::new(table + index * 8))?
        } else {
            u64::from(memory.read_u32(Gpa::new(table + index * 4))?)
        };
        if entry & ENTRY_P == 0 {
            return Err(fault(0));
        }
        let leaf = level == 0 || (level <= mode.largest_leaf && entry & ENTRY_PS != 0);
        if entry & reserved(long, pae, nxe, level, leaf) != 0 {
            return Err(fault(ERROR_P | ERROR_RSVD));
        }
        // The four entries at the top of PAE paging carry no rights.
        if long || !pae || level < 2 {
            writable &= entry & ENTRY_RW != 0;
            for_user &= entry & ENTRY_US != 0;
            executable &= !(nxe && entry & ENTRY_NX != 0);
        }
        if leaf {
            break (entry, shift);
        }
        table = entry & ENTRY_ADDRESS;
    };

    let allowed = (for_user || !user)
        && match access {
            Access::Read => user || !for_user || smap_permits(cpu, cr4),
            Access::Write => {
                (writable || (!user && cr0 & CR0_WP == 0)) && (user || !for_user || smap_permits(cpu, cr4))
            }
            Access::Execute => executable && (user || !for_user || cr4 & CR4_SMEP == 0),
        };
    if !allowed {
        return Err(fault(ERROR_P));
    }
    let offset_mask = (1u64 << shift) - 1;
    let mut base = entry & ENTRY_ADDRESS & !offset_mask;
    if !pae && level == 1 {
        // PSE-36: bits 20:13 are bits 39:32 of the address (AMD APM vol. 2, 5.2.3).
        base |= (entry >> 13 & 0xff) << 32;
    }
    Ok(Gpa::new(base | (address & offset_mask)))
}

/// Whether CR4.SMAP lets the supervisor touch a user page's data.
fn smap_permits<C: CpuState + ?Sized>(cpu: &C, cr4: u64) -> bool {
    cr4 & CR4_SMAP == 0 || cpu.rflags() & RFLAGS_AC != 0
}

/// The bits that must be 0 in an entry of `level` (AMD APM vol. 2, 5.2 to 5.4). Bits above
/// the CPU's own address width count as address: what they lead to is not RAM.
fn reserved(long: bool, pae: bool, nxe: bool, level: u32, leaf: bool) -> u64 {
    if !pae {
        return if leaf && level == 1 { 1 << 21 } else { 0 };
    }
    let mut bits = if nxe { 0 } else { ENTRY_NX };
    if !long {
        bits |= 0x7ff0_0000_0000_0000;
        if level == 2 {
            // A PAE directory pointer has only P, PWT, PCD and an address.
            return bits | ENTRY_NX | 0x1e6;
        }
    }
    if leaf && level > 0 {
        // Between PAT (bit 12) and the page's address.
        bits |= ((1 << (12 + 9 * level)) - 1) & !0x1fff;
    }
    if level > 2 {
        bits |= ENTRY_PS;
    }
    bits
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "tests cut numbers on purpose")]
mod tests;
