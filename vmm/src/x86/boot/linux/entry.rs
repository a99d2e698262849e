//! What a kernel is handed, and its first registers.

use super::header::{HEADER_END, HEADER_START};
use super::{LinuxError, LoadedKernel};
use crate::memory::address::{Gpa, PAGE_SIZE};
use crate::memory::guest::GuestMemory;
use crate::x86::boot::e820::{E820Entry, FOUR_GIB};
use crate::x86::state::{
    CR0_ET, CR0_NE, CR0_PE, CR0_PG, CR4_PAE, ControlRegister, CpuState, EFER_LMA, EFER_LME, Gpr, Segment,
    SegmentName,
};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

/// What the kernel is told besides the memory map's free places.
#[derive(Debug, Clone, Copy)]
pub struct Handover<'a> {
    /// The memory map, at most 128 entries.
    pub map: &'a [E820Entry],
    /// The command line, without a final zero.
    pub cmdline: &'a [u8],
    /// Where the initrd lies and how many bytes it has.
    pub initrd: Option<(Gpa, u64)>,
    /// Where the ACPI tables' root pointer lies.
    pub rsdp: Option<Gpa>,
}

/// The registers of a kernel's first instruction (boot.rst, "64-bit Boot Protocol").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinuxEntry {
    /// The 64-bit entry point.
    pub rip: Gpa,
    /// The boot parameters, the kernel's RSI.
    pub boot_params: Gpa,
    /// The end of a small stack.
    pub rsp: Gpa,
    /// The page tables' root: the first 4 GiB, virtual = physical.
    pub cr3: Gpa,
    /// The GDT.
    pub gdt: Gpa,
}

/// `__BOOT_CS`.
const CODE: u16 = 0x10;
/// `__BOOT_DS`.
const DATA: u16 = 0x18;
/// A task-state segment's selector. The kernel needs none, but neither VMRUN nor VMX
/// enters 64-bit mode without one.
const TASK: u16 = 0x20;
/// Execute/read, accessed, present, long, pages.
const CODE_ATTRIBUTES: u16 = 0xa9b;
/// Read/write, accessed, present, 32-bit, pages.
const DATA_ATTRIBUTES: u16 = 0xc93;
/// Busy 64-bit TSS, present.
const TASK_ATTRIBUTES: u16 = 0x8b;
const TASK_LIMIT: u32 = 0x67;
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

pub(super) fn build(
    mut kernel: LoadedKernel,
    handover: &Handover<'_>,
    memory: &dyn GuestMemory,
) -> Result<LinuxEntry, LinuxError> {
    let cmdline = handover.cmdline;
    let length = cmdline.len() as u64;
    if length > u64::from(kernel.header.cmdline_size) {
        return Err(LinuxError::CommandLine { length, max: kernel.header.cmdline_size });
    }
    if let Some(at) = cmdline.iter().position(|byte| *byte == 0) {
        return Err(LinuxError::CommandLineZero { at });
    }
    // Low memory first: it is free on every board, and no kernel wants it for long.
    let size = CMDLINE + length + 1;
    let block = kernel.space.take_lowest(size, PAGE_SIZE, 0..FOUR_GIB).ok_or(LinuxError::NoRoom {
        what: "boot parameters",
        size,
        place: "in one piece below 4 GiB",
    })?;
    let at = |offset: u64| Gpa::new(block.raw() + offset);

    let params = boot_params(&kernel, handover, at(CMDLINE))?;
    memory.write(at(BOOT_PARAMS), &params)?;
    memory.write(at(GDT), &descriptors(at(TASK_STATE)))?;
    memory.write(at(TASK_STATE), &[0; TASK_LIMIT as usize + 1])?;
    memory.write(at(TABLES), &page_tables(at(TABLES)))?;
    memory.write(at(CMDLINE), cmdline)?;
    memory.write(at(CMDLINE + length), &[0])?;
    Ok(LinuxEntry {
        rip: Gpa::new(kernel.kernel.raw() + 0x200),
        boot_params: at(BOOT_PARAMS),
        rsp: at(TABLES),
        cr3: at(TABLES),
        gdt: at(GDT),
    })
}

/// The "zero page" (boot.rst and Documentation/arch/x86/zero-page.rst).
fn boot_params(kernel: &LoadedKernel, handover: &Handover<'_>, cmdline: Gpa) -> Result<Vec<u8>, LinuxError> {
    let mut page = vec![0; 4096];
    let mut put = |offset: usize, bytes: &[u8]| {
        for (to, from) in page.iter_mut().skip(offset).zip(bytes) {
            *to = *from;
        }
    };
    // The header says itself where it ends: 0x202 plus the byte at 0x201. What lies
    // behind belongs to other fields and has to be zero.
    let end = 0x202 + kernel.first_bytes.get(0x201).copied().map_or(0, usize::from);
    put(HEADER_START, kernel.first_bytes.get(HEADER_START..end.min(HEADER_END)).unwrap_or_default());
    put(0x210, &[LOADER_UNDEFINED]);
    put(0x214, &low(kernel.kernel.raw()));
    put(0x228, &low(cmdline.raw()));
    if let Some((address, size)) = handover.initrd {
        put(0x218, &low(address.raw()));
        put(0x21c, &low(size));
        put(0xc0, &low(address.raw() >> 32));
        put(0xc4, &low(size >> 32));
    }
    if let Some(rsdp) = handover.rsdp {
        put(0x70, &rsdp.raw().to_le_bytes());
    }
    let entries = handover.map.len();
    let count = u8::try_from(entries).ok().filter(|_| entries <= MAX_E820);
    put(0x1e8, &[count.ok_or(LinuxError::MapEntries { entries })?]);
    for (i, entry) in handover.map.iter().enumerate() {
        let offset = 0x2d0 + i * 20;
        put(offset, &entry.base.raw().to_le_bytes());
        put(offset + 8, &entry.size.to_le_bytes());
        put(offset + 16, &entry.kind.0.to_le_bytes());
    }
    Ok(page)
}

/// The low half, for the fields that come in halves and for addresses below 4 GiB.
fn low(value: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = value.to_le_bytes();
    [a, b, c, d]
}

fn descriptors(task_state: Gpa) -> Vec<u8> {
    let code = descriptor(0, 0xf_ffff, CODE_ATTRIBUTES);
    let data = descriptor(0, 0xf_ffff, DATA_ATTRIBUTES);
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

impl LinuxEntry {
    /// Sets all registers of `cpu` that the protocol, VMRUN or VMX asks for.
    pub fn apply(&self, cpu: &mut dyn CpuState) {
        for register in Gpr::ALL {
            cpu.set_gpr(register, 0);
        }
        cpu.set_gpr(Gpr::Rsi, self.boot_params.raw());
        cpu.set_gpr(Gpr::Rsp, self.rsp.raw());
        cpu.set_rip(self.rip.raw());
        // Bit 1 is always set; interrupts are off.
        cpu.set_rflags(2);
        cpu.set_control(ControlRegister::Cr3, self.cr3.raw());
        cpu.set_control(ControlRegister::Cr4, CR4_PAE);
        cpu.set_efer(EFER_LME | EFER_LMA);
        cpu.set_control(ControlRegister::Cr0, CR0_PE | CR0_ET | CR0_NE | CR0_PG);
        let flat = |selector, attributes| Segment { selector, attributes, limit: u32::MAX, base: 0 };
        cpu.set_segment(SegmentName::Cs, flat(CODE, CODE_ATTRIBUTES));
        for name in [SegmentName::Ds, SegmentName::Es, SegmentName::Ss] {
            cpu.set_segment(name, flat(DATA, DATA_ATTRIBUTES));
        }
        for name in [SegmentName::Fs, SegmentName::Gs, SegmentName::Ldtr, SegmentName::Idtr] {
            cpu.set_segment(name, Segment::default());
        }
        let gdt = self.gdt.raw();
        let gdtr = Segment { selector: 0, attributes: 0, limit: GDT_LIMIT, base: gdt };
        cpu.set_segment(SegmentName::Gdtr, gdtr);
        let task = Segment {
            selector: TASK,
            attributes: TASK_ATTRIBUTES,
            limit: TASK_LIMIT,
            base: gdt + (TASK_STATE - GDT),
        };
        cpu.set_segment(SegmentName::Tr, task);
        cpu.set_cpl(0);
    }
}
