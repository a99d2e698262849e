//! Descriptor tables: GDT, TSS and IDT.
//!
//! Each CPU has a [`CpuDescriptors`] of its own, as a TSS belongs to one CPU; the IDT is
//! the same for all.
// UNSAFETY: descriptor tables are loaded by privileged instructions.
#![expect(unsafe_code, reason = "loads descriptor tables")]

use super::interrupts::stub_address;
use ::x86_64::instructions::tables::{lidt, load_tss};
use ::x86_64::registers::segmentation::{CS, DS, ES, SS, Segment};
use ::x86_64::structures::DescriptorTablePointer;
use ::x86_64::structures::gdt::{Descriptor, GlobalDescriptorTable, SegmentSelector};
use ::x86_64::structures::tss::TaskStateSegment;
use ::x86_64::{PrivilegeLevel, VirtAddr};
use bulkhead_vmm::memory::address::Hva;

/// The code segment's selector.
pub const CODE_SELECTOR: u16 = 8;
/// Stacks of the interrupt stack table, by what uses them.
pub const IST_DOUBLE_FAULT: usize = 0;
/// See [`IST_DOUBLE_FAULT`].
pub const IST_NMI: usize = 1;
/// See [`IST_DOUBLE_FAULT`].
pub const IST_MACHINE_CHECK: usize = 2;

/// One CPU's GDT and TSS.
#[derive(Debug)]
pub struct CpuDescriptors {
    gdt: GlobalDescriptorTable,
    tss: TaskStateSegment,
}

impl CpuDescriptors {
    /// Descriptors with the stacks for double faults, NMIs and machine checks, given by
    /// their upper ends.
    pub fn new(stacks: [Hva; 3]) -> Self {
        let mut tss = TaskStateSegment::new();
        let mut table = tss.interrupt_stack_table;
        for (entry, stack) in table.iter_mut().zip(stacks) {
            *entry = VirtAddr::new_truncate(stack.raw());
        }
        tss.interrupt_stack_table = table;
        Self { gdt: GlobalDescriptorTable::new(), tss }
    }

    /// Loads GDT, segment registers, TSS and IDT on this CPU.
    ///
    /// # Safety
    /// No other CPU may use these descriptors, and the stacks given to
    /// [`new`](Self::new) must be mapped and used for nothing else.
    pub unsafe fn load(&'static mut self, idt: &'static Idt) {
        self.gdt.append(Descriptor::kernel_code_segment());
        let tss = self.gdt.append(Descriptor::tss_segment(&self.tss));
        self.gdt.load();
        let null = SegmentSelector::new(0, PrivilegeLevel::Ring0);
        // SAFETY: the code segment is the GDT's first.
        unsafe { CS::set_reg(SegmentSelector::new(1, PrivilegeLevel::Ring0)) };
        // SAFETY: data segments may be null in 64-bit mode.
        unsafe { DS::set_reg(null) };
        // SAFETY: as above.
        unsafe { ES::set_reg(null) };
        // SAFETY: as above, for the stack segment in ring 0.
        unsafe { SS::set_reg(null) };
        // SAFETY: `tss` selects the TSS just put into the table.
        unsafe { load_tss(tss) };
        idt.load();
    }
}

/// A gate (AMD APM vol. 2, 4.8.4).
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Gate {
    offset_low: u16,
    selector: u16,
    ist: u8,
    kind: u8,
    offset_middle: u16,
    offset_high: u32,
    reserved: u32,
}

/// The interrupt descriptor table: a gate for every vector, all with interrupts closed.
#[derive(Debug)]
#[repr(C, align(16))]
pub struct Idt([Gate; 256]);

const _: () = assert!(size_of::<Idt>() == 4096);

impl Idt {
    /// A table whose gates lead to the stubs of [`super::interrupts`].
    pub fn new() -> Self {
        let mut table = Self([Gate::default(); 256]);
        for (vector, gate) in (0..=255u8).zip(&mut table.0) {
            let offset = stub_address(vector);
            let ist = match vector {
                8 => IST_DOUBLE_FAULT + 1,
                2 => IST_NMI + 1,
                18 => IST_MACHINE_CHECK + 1,
                _ => 0,
            };
            #[expect(clippy::cast_possible_truncation, reason = "the parts of an address")]
            {
                *gate = Gate {
                    offset_low: offset as u16,
                    selector: CODE_SELECTOR,
                    ist: ist as u8,
                    kind: 0x8e, // present, interrupt gate
                    offset_middle: (offset >> 16) as u16,
                    offset_high: (offset >> 32) as u32,
                    reserved: 0,
                };
            }
        }
        table
    }

    fn load(&'static self) {
        let pointer = DescriptorTablePointer { limit: 4095, base: VirtAddr::from_ptr(self) };
        // SAFETY: the table is static and complete.
        unsafe { lidt(&pointer) };
    }
}

impl Default for Idt {
    fn default() -> Self {
        Self::new()
    }
}
