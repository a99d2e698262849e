//! What Linux is handed, in one block, and its first registers.

use super::header::{HEADER_END, HEADER_START};
use super::{BootError, Entry, FOUR_GIB, Handover, Piece};
use crate::memory::address::{Gpa, PAGE_SIZE};
use crate::x86::boot::entry::{FLAT_DATA, LONG_CODE, TASK_ATTRIBUTES, TASK_LIMIT};
use crate::x86::state::{Gpr, Segment};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

/// Two empty descriptors, code, data, and the TSS, whose descriptor takes two places.
const GDT_LIMIT: u32 = 6 * 8 - 1;

/// Pages of the block that is handed over: boot parameters, then GDT with TSS and stack,
/// then page tables, then the command line.
const BOOT_PARAMS: u64 = 0;
const GDT: u64 = PAGE_SIZE;
const TASK_STATE: u64 = GDT + 0x80;
const TABLES: u64 = 2 * PAGE_SIZE;
/// PML4, page-directory pointers, and a page directory for each of the 4 GiB.
const TABLE_PAGES: u64 = 2 + FOUR_GIB / GIB;
const CMDLINE: u64 = TABLES + TABLE_PAGES * PAGE_SIZE;
const GIB: u64 = 1 << 30;

/// A page-table entry: present, writable.
const TABLE: u64 = 0b11;
/// A page-directory entry: present, writable, 2 MiB.
const LARGE_PAGE: u64 = 1 << 7 | 0b11;

/// `boot_params.e820_table` has this many places.
const MAX_E820: usize = 128;
/// `type_of_loader`: one without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;

/// The size of the block with this command line.
pub(super) const fn size(cmdline: &[u8]) -> u64 {
    CMDLINE + cmdline.len() as u64 + 1
}

/// The registers with which the kernel at `kernel` is entered that is handed the block at `block`.
pub(super) fn entry(block: Gpa, kernel: Gpa) -> Entry {
    let at = |offset: u64| Gpa::new(block.raw() + offset);
    let gdtr = Segment { selector: 0, attributes: 0, limit: GDT_LIMIT, base: at(GDT).raw() };
    // The stack ends where the tables begin.
    let gprs = [(Gpr::Rsi, at(BOOT_PARAMS).raw()), (Gpr::Rsp, at(TABLES).raw())];
    Entry::long(Gpa::new(kernel.raw() + 0x200), gprs, at(TABLES), gdtr, at(TASK_STATE))
}

/// The block at `block` for the kernel at `kernel`, whose file begins with `start`.
pub(super) fn block(
    block: Gpa,
    start: &[u8; HEADER_END],
    kernel: Gpa,
    initrd: Option<Piece>,
    handover: &Handover<'_>,
) -> Result<Vec<u8>, BootError> {
    let at = |offset: u64| Gpa::new(block.raw() + offset);
    let mut bytes = boot_params(start, kernel, initrd, handover, at(CMDLINE))?;
    bytes.extend(descriptors(at(TASK_STATE)));
    let used = bytes.len() as u64;
    // The TSS is all zero.
    bytes.extend((used..TABLES).map(|_| 0));
    bytes.extend(page_tables(at(TABLES)));
    bytes.extend(handover.cmdline);
    bytes.push(0);
    Ok(bytes)
}

/// The "zero page" (boot.rst and Documentation/arch/x86/zero-page.rst).
fn boot_params(
    start: &[u8; HEADER_END],
    kernel: Gpa,
    initrd: Option<Piece>,
    handover: &Handover<'_>,
    cmdline: Gpa,
) -> Result<Vec<u8>, BootError> {
    let mut page = vec![0; 4096];
    let mut put = |offset: usize, bytes: &[u8]| {
        for (to, from) in page.iter_mut().skip(offset).zip(bytes) {
            *to = *from;
        }
    };
    // The header says itself where it ends: 0x202 plus the byte at 0x201. What lies
    // behind belongs to other fields and has to be zero.
    let end = 0x202 + start.get(0x201).copied().map_or(0, usize::from);
    put(HEADER_START, start.get(HEADER_START..end.min(HEADER_END)).unwrap_or_default());
    put(0x210, &[LOADER_UNDEFINED]);
    put(0x214, &low(kernel.raw()));
    put(0x228, &low(cmdline.raw()));
    if let Some(initrd) = initrd {
        put(0x218, &low(initrd.to.raw()));
        put(0x21c, &low(initrd.len));
    }
    if let Some(rsdp) = handover.rsdp {
        put(0x70, &rsdp.raw().to_le_bytes());
    }
    let entries = handover.map.len();
    let count = u8::try_from(entries).ok().filter(|_| entries <= MAX_E820);
    put(0x1e8, &[count.ok_or(BootError::MapEntries { entries })?]);
    for (i, entry) in handover.map.iter().enumerate() {
        let offset = 0x2d0 + i * 20;
        put(offset, &entry.base.raw().to_le_bytes());
        put(offset + 8, &entry.size.to_le_bytes());
        put(offset + 16, &entry.kind.0.to_le_bytes());
    }
    Ok(page)
}

/// The low half, for what lies below 4 GiB.
fn low(value: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = value.to_le_bytes();
    [a, b, c, d]
}

fn descriptors(task_state: Gpa) -> Vec<u8> {
    let code = descriptor(0, 0xf_ffff, LONG_CODE);
    let data = descriptor(0, 0xf_ffff, FLAT_DATA);
    let task = descriptor(task_state.raw(), TASK_LIMIT, TASK_ATTRIBUTES);
    [0, 0, code, data, task, task_state.raw() >> 32].into_iter().flat_map(u64::to_le_bytes).collect()
}

/// A segment descriptor, or the low half of a system descriptor (AMD APM vol. 2, 4.8).
/// `limit` has 20 bits, in the unit that the attributes say.
const fn descriptor(base: u64, limit: u32, attributes: u16) -> u64 {
    let (limit, attributes) = (limit as u64, attributes as u64);
    limit & 0xffff
        | (base & 0xff_ffff) << 16
        | (attributes & 0xff) << 40
        | (limit >> 16 & 0xf) << 48
        | (attributes >> 8 & 0xf) << 52
        | (base >> 24 & 0xff) << 56
}

/// Page tables at `root` that map the first 4 GiB to themselves.
fn page_tables(root: Gpa) -> Vec<u8> {
    let table = |index: u64| (root.raw() + index * PAGE_SIZE) | TABLE;
    let padded = |entries: Range<u64>| entries.map(Some).chain(core::iter::repeat(None)).take(512);
    let top = padded(1..2).map(|page| page.map_or(0, table));
    let pointers = padded(2..TABLE_PAGES).map(|page| page.map_or(0, table));
    let pages = (0..FOUR_GIB >> 21).map(|page| page << 21 | LARGE_PAGE);
    top.chain(pointers).chain(pages).flat_map(u64::to_le_bytes).collect()
}
