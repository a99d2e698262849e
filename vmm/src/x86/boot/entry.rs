//! The registers of a kernel's first instruction.

use crate::memory::address::Gpa;
use crate::x86::state::{
    CR0_ET, CR0_NE, CR0_PE, CR0_PG, CR4_PAE, ControlRegister, CpuState, EFER_LMA, EFER_LME, Gpr, Segment,
    SegmentName,
};

/// `__BOOT_CS` of Linux.
const CODE: u16 = 0x10;
/// `__BOOT_DS` of Linux.
const DATA: u16 = 0x18;
/// A task-state segment's selector. No kernel needs one, but neither VMRUN nor VMX enters 64-bit
/// mode without.
const TASK: u16 = 0x20;
/// Execute/read, accessed, present, long, pages.
pub(super) const LONG_CODE: u16 = 0xa9b;
/// Execute/read, accessed, present, 32-bit, pages.
const FLAT_CODE: u16 = 0xc9b;
/// Read/write, accessed, present, 32-bit, pages.
pub(super) const FLAT_DATA: u16 = 0xc93;
/// Busy TSS of 32 or 64 bits, present.
pub(super) const TASK_ATTRIBUTES: u16 = 0x8b;
pub(super) const TASK_LIMIT: u32 = 0x67;

/// The registers of a kernel's first instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Where it is.
    rip: Gpa,
    /// General-purpose registers; the others are 0.
    gprs: [(Gpr, u64); 2],
    /// Of the code segment.
    attributes: u16,
    cr0: u64,
    cr3: u64,
    cr4: u64,
    efer: u64,
    gdtr: Segment,
    /// Where the task-state segment is.
    task: u64,
}

impl Entry {
    /// 64-bit mode (Linux, boot.rst, "64-bit Boot Protocol"): page tables at `cr3`, `gdtr` a GDT
    /// with Linux' selectors and a TSS at `task`.
    pub(super) const fn long(rip: Gpa, gprs: [(Gpr, u64); 2], cr3: Gpa, gdtr: Segment, task: Gpa) -> Self {
        Self {
            rip,
            gprs,
            attributes: LONG_CODE,
            cr0: CR0_PE | CR0_ET | CR0_NE | CR0_PG,
            cr3: cr3.raw(),
            cr4: CR4_PAE,
            efer: EFER_LME | EFER_LMA,
            gdtr,
            task: task.raw(),
        }
    }

    /// 32-bit protected mode without paging, all segments flat: what PVH (Xen, docs/misc/pvh.pandoc)
    /// and multiboot (3.2) ask for. Neither says anything of a GDT.
    pub(super) const fn flat(rip: u64, gprs: [(Gpr, u64); 2]) -> Self {
        Self {
            rip: Gpa::new(rip),
            gprs,
            attributes: FLAT_CODE,
            cr0: CR0_PE | CR0_ET,
            cr3: 0,
            cr4: 0,
            efer: 0,
            gdtr: Segment { selector: 0, attributes: 0, limit: 0, base: 0 },
            task: 0,
        }
    }

    /// Sets all registers of `cpu` that the protocol, VMRUN or VMX asks for.
    pub fn apply(&self, cpu: &mut dyn CpuState) {
        for register in Gpr::ALL {
            cpu.set_gpr(register, 0);
        }
        for (register, value) in self.gprs {
            cpu.set_gpr(register, value);
        }
        cpu.set_rip(self.rip.raw());
        // Bit 1 is always set; interrupts are off.
        cpu.set_rflags(2);
        cpu.set_control(ControlRegister::Cr3, self.cr3);
        cpu.set_control(ControlRegister::Cr4, self.cr4);
        cpu.set_efer(self.efer);
        cpu.set_control(ControlRegister::Cr0, self.cr0);
        let flat = |selector, attributes| Segment { selector, attributes, limit: u32::MAX, base: 0 };
        cpu.set_segment(SegmentName::Cs, flat(CODE, self.attributes));
        use SegmentName::{Ds, Es, Fs, Gs, Ss};
        for name in [Ds, Es, Fs, Gs, Ss] {
            cpu.set_segment(name, flat(DATA, FLAT_DATA));
        }
        for name in [SegmentName::Ldtr, SegmentName::Idtr] {
            cpu.set_segment(name, Segment::default());
        }
        cpu.set_segment(SegmentName::Gdtr, self.gdtr);
        let task =
            Segment { selector: TASK, attributes: TASK_ATTRIBUTES, limit: TASK_LIMIT, base: self.task };
        cpu.set_segment(SegmentName::Tr, task);
        cpu.set_cpl(0);
    }
}
