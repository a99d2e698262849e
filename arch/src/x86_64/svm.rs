//! AMD SVM: entering guests with nested paging (AMD APM vol. 2, chapter 15).
//!
//! [`SvmHost`] turns SVM on for one CPU; [`SvmCpu`] is one vCPU: its VMCB and registers. What
//! a guest may reach is fixed when it is made (nested tables, permission maps), so that
//! policy, which changes registers as it likes, can hurt only the guest.
//!
//! An `SvmCpu` belongs to the CPU it was made on: ASID 1 is every guest's, for one CPU runs
//! one vCPU, and the first entry flushes what an earlier one has left behind.

// UNSAFETY: executes VMRUN on blocks in memory and writes MSRs.
#![expect(unsafe_code, reason = "VMRUN and the MSRs of SVM")]

#[cfg(any(debug_assertions, test))]
pub mod checks;
mod enter;
pub mod exits;
pub mod vmcb;

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use bulkhead_vmm::memory::address::{Hpa, Hva};
use bulkhead_vmm::x86::exit::{Exit, VirtualCpu};
use bulkhead_vmm::x86::state::{
    CR0_ET, ControlRegister, CpuState, EFER_SVME, Gpr, Injection, Segment, SegmentName,
};
use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use enter::GuestRegisters;
use thiserror::Error;
use vmcb::{IoPermissionMap, MsrPermissionMap, Vmcb, VmcbSegment, clean, misc1, misc2};
use x86_64::registers::control::{Cr4, Cr4Flags};
use x86_64::registers::model_specific::Msr;

const MSR_EFER: u32 = 0xc000_0080;
const MSR_VM_CR: u32 = 0xc001_0114;
const MSR_VM_HSAVE_PA: u32 = 0xc001_0117;
/// `VM_CR.SVMDIS`.
const VM_CR_SVMDIS: u64 = 1 << 4;
/// `VM_CR.R_INIT`: an INIT that is not intercepted becomes #SX with error code 1.
const VM_CR_R_INIT: u64 = 1 << 1;
/// `VM_CR.LOCK`.
const VM_CR_LOCK: u64 = 1 << 3;

/// Why SVM cannot be used on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SvmUnavailable {
    /// CPUID does not show it.
    #[error("this CPU has no AMD SVM (CPUID 8000_0001 ECX.2 is 0)")]
    NotPresent,
    /// The firmware has turned it off.
    #[error("AMD SVM is locked by the firmware (VM_CR.SVMDIS is 1): enable SVM in its setup")]
    Locked,
    /// There is no nested paging.
    #[error("this CPU's SVM has no nested paging (CPUID 8000_000A EDX.0 is 0)")]
    NoNestedPaging,
}

/// What the CPU's SVM can do beyond the minimum, less what was turned off for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SvmFeatures {
    /// The address after an intercepted instruction is told (8000_000A EDX.3).
    pub next_rip: bool,
    /// VMCB clean bits (EDX.5).
    pub clean_bits: bool,
    /// The TLB can be flushed by ASID (EDX.6).
    pub flush_by_asid: bool,
    /// Instruction bytes and decoded operands are told (EDX.7).
    pub decode_assists: bool,
}

impl SvmFeatures {
    /// The same without those named: `nrips`, `clean`, `decode`.
    ///
    /// # Errors
    /// When a name is none of these.
    pub fn without<'a>(mut self, names: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        for name in names {
            match name {
                "nrips" => self.next_rip = false,
                "clean" => self.clean_bits = false,
                "decode" => self.decode_assists = false,
                other => return Err(alloc::format!("svm.disable={other}: allowed are nrips, clean, decode")),
            }
        }
        Ok(self)
    }
}

/// Reads what this CPU's SVM can do.
///
/// # Errors
/// When there is no usable SVM.
pub fn probe() -> Result<SvmFeatures, SvmUnavailable> {
    if __cpuid_count(0x8000_0000, 0).eax < 0x8000_000a || __cpuid_count(0x8000_0001, 0).ecx & 1 << 2 == 0 {
        return Err(SvmUnavailable::NotPresent);
    }
    // SAFETY: VM_CR exists where CPUID shows SVM (APM 15.30.1); reading changes nothing.
    if unsafe { Msr::new(MSR_VM_CR).read() } & VM_CR_SVMDIS != 0 {
        return Err(SvmUnavailable::Locked);
    }
    let edx = __cpuid_count(0x8000_000a, 0).edx;
    if edx & 1 == 0 {
        return Err(SvmUnavailable::NoNestedPaging);
    }
    Ok(SvmFeatures {
        next_rip: edx & 1 << 3 != 0,
        clean_bits: edx & 1 << 5 != 0,
        flush_by_asid: edx & 1 << 6 != 0,
        decode_assists: edx & 1 << 7 != 0,
    })
}

/// What to write to `VM_CR` so that no INIT resets the CPU (APM 15.30.1 and 15.28), or `None`
/// where the firmware has locked it.
const fn redirect_init(vm_cr: u64) -> Option<u64> {
    if vm_cr & VM_CR_LOCK == 0 { Some(vm_cr | VM_CR_R_INIT) } else { None }
}

/// Finds the physical address of memory of the hypervisor's heap.
pub type PhysicalOf = fn(Hva) -> Hpa;

#[repr(C, align(4096))]
struct Page([u8; 4096]);

fn physical<T>(of: PhysicalOf, object: &T) -> u64 {
    of(Hva::new(core::ptr::from_ref(object).expose_provenance() as u64)).raw()
}

/// SVM, turned on for one CPU.
pub struct SvmHost {
    features: SvmFeatures,
    redirects_init: bool,
    physical_of: PhysicalOf,
    /// Where `VMRUN` keeps the host's state.
    _save_area: Box<Page>,
    /// Where the rest of the host's state was put by `VMSAVE`, once.
    extra_state: Box<Vmcb>,
    #[cfg(debug_assertions)]
    entered: Arc<checks::Entered>,
}

impl SvmHost {
    /// Turns SVM on for the CPU it is called on, which is not to be sent INIT from then on. FS, GS, TR and the system-call MSRs must
    /// have their final values: they are what the host finds after each exit.
    ///
    /// # Safety
    /// - `physical_of` gives the true physical address of heap memory.
    /// - The value is kept for as long as the CPU runs.
    pub unsafe fn enable(features: SvmFeatures, physical_of: PhysicalOf) -> Self {
        let mut host = Self {
            features,
            redirects_init: false,
            physical_of,
            _save_area: Box::new(Page([0; 4096])),
            extra_state: Box::new(Vmcb::zeroed()),
            #[cfg(debug_assertions)]
            entered: Arc::default(),
        };
        if __cpuid_count(1, 0).ecx & 1 << 26 != 0 {
            // SAFETY: the CPU has XSAVE; the bit only makes XSETBV, and the like, defined.
            unsafe { Cr4::update(|cr4| cr4.insert(Cr4Flags::OSXSAVE)) };
        }
        // SAFETY: every CPU of x86-64 has EFER; reading changes nothing.
        let efer = unsafe { Msr::new(MSR_EFER).read() };
        // SAFETY: `probe` found SVM; setting SVME changes nothing but that its instructions
        // are defined (APM 15.4).
        unsafe { Msr::new(MSR_EFER).write(efer | EFER_SVME) };
        // SAFETY: VM_CR exists where CPUID shows SVM; reading changes nothing.
        if let Some(vm_cr) = redirect_init(unsafe { Msr::new(MSR_VM_CR).read() }) {
            // SAFETY: it is not locked, and the one bit changes what an INIT does, nothing else.
            unsafe { Msr::new(MSR_VM_CR).write(vm_cr) };
            // SAFETY: as above. A CPU that ignores the write shows it.
            host.redirects_init = unsafe { Msr::new(MSR_VM_CR).read() } & VM_CR_R_INIT != 0;
        }
        let save_area = physical(physical_of, &*host._save_area);
        // SAFETY: a page of our own, kept as long as the CPU runs (second condition).
        unsafe { Msr::new(MSR_VM_HSAVE_PA).write(save_area) };
        let extra = physical(physical_of, &*host.extra_state);
        // SAFETY: SVME is set, `extra` is the physical address of a page of our own.
        unsafe { asm!("vmsave rax", in("rax") extra, options(nostack, preserves_flags)) };
        host
    }

    /// Whether an INIT message becomes an exception of the hypervisor's instead of resetting
    /// the CPU.
    pub fn redirects_init(&self) -> bool {
        self.redirects_init
    }
}

/// What a guest may touch without an exit: shared by all vCPUs of a cell.
pub struct Permissions {
    /// MSRs.
    pub msrs: Box<MsrPermissionMap>,
    /// Ports.
    pub ports: Box<IoPermissionMap>,
}

/// One vCPU under SVM.
pub struct SvmCpu {
    vmcb: Box<Vmcb>,
    vmcb_physical: u64,
    host_physical: u64,
    registers: GuestRegisters,
    features: SvmFeatures,
    /// The interrupt in `V_IRQ` at the entry, until somebody has asked what became of it.
    offered: Option<u8>,
    #[cfg(debug_assertions)]
    checks: checks::Checks,
    _permissions: Arc<Permissions>,
}

impl SvmCpu {
    /// A vCPU in the state after INIT, to be entered on the CPU of `host` alone.
    ///
    /// # Safety
    /// - `nested_root` is the root of nested tables that live as long as the vCPU and map
    ///   nothing but what the cell may touch.
    /// - `permissions` let through only ports and MSRs by which a cell cannot harm others.
    /// - The vCPU is entered only on the CPU that `host` was enabled on.
    pub unsafe fn new(host: &SvmHost, nested_root: Hpa, permissions: Arc<Permissions>) -> Self {
        let mut vmcb = Box::new(Vmcb::zeroed());
        let control = &mut vmcb.control;
        control.intercept_misc1 = misc1::INTR
            | misc1::NMI
            | misc1::INIT
            | misc1::RDPMC
            | misc1::CPUID
            | misc1::INVD
            | misc1::HLT
            | misc1::INVLPGA
            | misc1::IOIO_PROT
            | misc1::MSR_PROT
            | misc1::SHUTDOWN;
        control.intercept_misc2 = misc2::VMRUN
            | misc2::VMMCALL
            | misc2::VMLOAD
            | misc2::VMSAVE
            | misc2::STGI
            | misc2::CLGI
            | misc2::SKINIT
            | misc2::WBINVD
            | misc2::MONITOR
            | misc2::MWAIT
            | misc2::MWAIT_ARMED
            | misc2::XSETBV;
        // #DB and #AC can be raised without end during their own delivery, with no
        // instruction between at which an interrupt could be taken.
        control.intercept_exceptions = 1 << 1 | 1 << 17;
        control.iopm_base_pa = physical(host.physical_of, &*permissions.ports);
        control.msrpm_base_pa = physical(host.physical_of, &*permissions.msrs);
        control.guest_asid = 1;
        control.v_intr_masking = 1;
        // Whether an interrupt has the priority is decided before it is offered, by the model
        // of the local APIC; a write of CR8 that could change that exits.
        control.v_intr_prio = vmcb::V_IGN_TPR;
        control.np_enable = 1;
        control.n_cr3 = nested_root.raw();
        // PAT after reset (APM 7.8.2).
        vmcb.save.g_pat = 0x0007_0406_0007_0406;
        let mut cpu = Self {
            vmcb_physical: physical(host.physical_of, &*vmcb),
            vmcb,
            host_physical: physical(host.physical_of, &*host.extra_state),
            registers: GuestRegisters::default(),
            features: host.features,
            offered: None,
            #[cfg(debug_assertions)]
            checks: checks::Checks::new(&host.entered),
            _permissions: permissions,
        };
        cpu.reset();
        cpu.flush_translations();
        cpu
    }

    fn dirty(&mut self, group: u32) {
        self.vmcb.control.clean &= !group;
    }

    fn segment_mut(&mut self, name: SegmentName) -> &mut VmcbSegment {
        let save = &mut self.vmcb.save;
        match name {
            SegmentName::Es => &mut save.es,
            SegmentName::Cs => &mut save.cs,
            SegmentName::Ss => &mut save.ss,
            SegmentName::Ds => &mut save.ds,
            SegmentName::Fs => &mut save.fs,
            SegmentName::Gs => &mut save.gs,
            SegmentName::Ldtr => &mut save.ldtr,
            SegmentName::Tr => &mut save.tr,
            SegmentName::Gdtr => &mut save.gdtr,
            SegmentName::Idtr => &mut save.idtr,
        }
    }
}

impl CpuState for SvmCpu {
    fn gpr(&self, register: Gpr) -> u64 {
        match register {
            Gpr::Rax => self.vmcb.save.rax,
            Gpr::Rsp => self.vmcb.save.rsp,
            other => self.registers.0[other as usize],
        }
    }

    fn set_gpr(&mut self, register: Gpr, value: u64) {
        match register {
            Gpr::Rax => self.vmcb.save.rax = value,
            Gpr::Rsp => self.vmcb.save.rsp = value,
            other => self.registers.0[other as usize] = value,
        }
    }

    fn rip(&self) -> u64 {
        self.vmcb.save.rip
    }

    fn set_rip(&mut self, rip: u64) {
        self.vmcb.save.rip = rip;
        self.vmcb.control.interrupt_shadow &= !1;
    }

    fn rflags(&self) -> u64 {
        self.vmcb.save.rflags
    }

    fn set_rflags(&mut self, rflags: u64) {
        self.vmcb.save.rflags = rflags;
    }

    fn control(&self, register: ControlRegister) -> u64 {
        match register {
            ControlRegister::Cr0 => self.vmcb.save.cr0,
            ControlRegister::Cr2 => self.vmcb.save.cr2,
            ControlRegister::Cr3 => self.vmcb.save.cr3,
            ControlRegister::Cr4 => self.vmcb.save.cr4,
        }
    }

    fn set_control(&mut self, register: ControlRegister, value: u64) {
        match register {
            ControlRegister::Cr0 => self.vmcb.save.cr0 = value,
            ControlRegister::Cr2 => self.vmcb.save.cr2 = value,
            ControlRegister::Cr3 => self.vmcb.save.cr3 = value,
            ControlRegister::Cr4 => self.vmcb.save.cr4 = value,
        }
        self.dirty(clean::CRX | clean::CR2);
    }

    fn efer(&self) -> u64 {
        self.vmcb.save.efer & !EFER_SVME
    }

    fn set_efer(&mut self, efer: u64) {
        // VMRUN refuses a guest whose EFER.SVME is 0 (APM 15.5.1).
        self.vmcb.save.efer = efer | EFER_SVME;
        self.dirty(clean::CRX);
    }

    fn segment(&self, name: SegmentName) -> Segment {
        let save = &self.vmcb.save;
        let from = match name {
            SegmentName::Es => &save.es,
            SegmentName::Cs => &save.cs,
            SegmentName::Ss => &save.ss,
            SegmentName::Ds => &save.ds,
            SegmentName::Fs => &save.fs,
            SegmentName::Gs => &save.gs,
            SegmentName::Ldtr => &save.ldtr,
            SegmentName::Tr => &save.tr,
            SegmentName::Gdtr => &save.gdtr,
            SegmentName::Idtr => &save.idtr,
        };
        Segment { selector: from.selector, attributes: from.attributes, limit: from.limit, base: from.base }
    }

    fn set_segment(&mut self, name: SegmentName, segment: Segment) {
        let Segment { selector, attributes, limit, base } = segment;
        *self.segment_mut(name) = VmcbSegment { selector, attributes, limit, base };
        self.dirty(clean::SEG | clean::DT);
    }

    fn cpl(&self) -> u8 {
        self.vmcb.save.cpl
    }

    fn set_cpl(&mut self, cpl: u8) {
        self.vmcb.save.cpl = cpl;
        self.dirty(clean::SEG);
    }

    fn interruptible(&self) -> bool {
        const RFLAGS_IF: u64 = 1 << 9;
        self.vmcb.save.rflags & RFLAGS_IF != 0 && self.vmcb.control.interrupt_shadow & 1 == 0
    }

    fn injection_pending(&self) -> bool {
        self.vmcb.control.eventinj & vmcb::EVENT_VALID != 0
    }

    fn inject(&mut self, event: Injection) {
        self.vmcb.control.eventinj = exits::encode_event(event);
    }
}

impl VirtualCpu for SvmCpu {
    fn enter(&mut self) -> Exit {
        #[cfg(debug_assertions)]
        self.checks.before_entry(&self.vmcb);
        if !self.features.clean_bits {
            self.vmcb.control.clean = 0;
        }
        let registers = &raw mut self.registers;
        // SAFETY:
        // 1. The registers and the VMCB are ours, and we are borrowed mutably.
        // 2. The nested tables and maps are as `new`'s caller has promised, and only this
        //    module writes the fields of the VMCB that name them.
        // 3. `new`'s caller promised that this is the CPU of `host`, on which SVM is enabled.
        unsafe { enter::enter(registers, self.vmcb_physical, self.host_physical) };
        let control = &mut self.vmcb.control;
        control.clean = clean::ALL;
        control.tlb_control = vmcb::TLB_FLUSH_NONE;
        #[cfg(debug_assertions)]
        self.checks.after_exit(&self.vmcb);
        exits::decode(&self.vmcb)
    }

    fn next_rip(&self) -> Option<u64> {
        self.features.next_rip.then_some(self.vmcb.control.nrip)
    }

    fn instruction_bytes(&self) -> Option<&[u8]> {
        let control = &self.vmcb.control;
        let count = usize::from(control.fetched_count & 15);
        (self.features.decode_assists && count != 0).then(|| &control.fetched_bytes[..count])
    }

    fn interrupted_event(&self) -> Option<Injection> {
        exits::decode_event(self.vmcb.control.exitintinfo)
    }

    fn offer_interrupt(&mut self, vector: Option<u8>) {
        let control = &mut self.vmcb.control;
        let (v_irq, v_intr_vector) = (u8::from(vector.is_some()), vector.unwrap_or(0));
        if (control.v_irq, control.v_intr_vector) != (v_irq, v_intr_vector) {
            (control.v_irq, control.v_intr_vector) = (v_irq, v_intr_vector);
            self.dirty(clean::TPR);
        }
        self.offered = vector;
    }

    fn take_taken_interrupt(&mut self) -> Option<u8> {
        let control = &self.vmcb.control;
        let waits = control.v_irq != 0 || exits::is_interrupted_interrupt(control.exitintinfo);
        self.offered.take().filter(|_| !waits)
    }

    fn watch_cr8(&mut self, on: bool) {
        const WRITE_CR8: u16 = 1 << 8;
        let control = &mut self.vmcb.control;
        if on != (control.intercept_cr_write & WRITE_CR8 != 0) {
            control.intercept_cr_write ^= WRITE_CR8;
            self.dirty(clean::I);
        }
    }

    fn request_nmi_return(&mut self, on: bool) {
        if on {
            self.vmcb.control.intercept_misc1 |= misc1::IRET;
        } else {
            self.vmcb.control.intercept_misc1 &= !misc1::IRET;
        }
        self.dirty(clean::I);
    }

    fn cr8(&self) -> u8 {
        self.vmcb.control.v_tpr & 0xf
    }

    fn set_cr8(&mut self, class: u8) {
        if self.vmcb.control.v_tpr != class & 0xf {
            self.vmcb.control.v_tpr = class & 0xf;
            self.dirty(clean::TPR);
        }
    }

    fn set_counter_offset(&mut self, offset: u64) {
        self.vmcb.control.tsc_offset = offset;
        self.dirty(clean::I);
    }

    fn counter_offset(&self) -> u64 {
        self.vmcb.control.tsc_offset
    }

    fn pat(&self) -> u64 {
        self.vmcb.save.g_pat
    }

    fn set_pat(&mut self, pat: u64) {
        self.vmcb.save.g_pat = pat;
        self.dirty(clean::NP);
    }

    fn reset(&mut self) {
        let data = VmcbSegment { selector: 0, attributes: 0x093, limit: 0xffff, base: 0 };
        let table = VmcbSegment { selector: 0, attributes: 0, limit: 0xffff, base: 0 };
        let save = &mut self.vmcb.save;
        save.cs = VmcbSegment { selector: 0xf000, attributes: 0x09b, limit: 0xffff, base: 0xffff_0000 };
        (save.ds, save.es, save.fs, save.gs, save.ss) = (data, data, data, data, data);
        (save.gdtr, save.idtr) = (table, table);
        save.ldtr = VmcbSegment { attributes: 0x082, ..table };
        save.tr = VmcbSegment { attributes: 0x08b, ..table };
        save.cpl = 0;
        // CD and NW are set after INIT on a real CPU; a guest must not run uncached for it.
        save.cr0 = CR0_ET;
        (save.cr2, save.cr3, save.cr4) = (0, 0, 0);
        save.efer = EFER_SVME;
        save.rflags = 2;
        save.rip = 0xfff0;
        (save.rsp, save.rax) = (0, 0);
        (save.dr6, save.dr7) = (0xffff_0ff0, 0x400);
        self.registers = GuestRegisters::default();
        self.registers.0[Gpr::Rdx as usize] = u64::from(__cpuid_count(1, 0).eax);
        let control = &mut self.vmcb.control;
        (control.eventinj, control.exitintinfo, control.interrupt_shadow) = (0, 0, 0);
        control.v_tpr = 0;
        control.clean = 0;
        self.offer_interrupt(None);
        self.watch_cr8(false);
        self.request_nmi_return(false);
    }

    fn flush_translations(&mut self) {
        self.vmcb.control.tlb_control =
            if self.features.flush_by_asid { vmcb::TLB_FLUSH_ASID } else { vmcb::TLB_FLUSH_ALL };
        self.dirty(clean::ASID);
    }

    fn exit_details(&self) -> [u64; 3] {
        let control = &self.vmcb.control;
        [control.exitcode, control.exitinfo1, control.exitinfo2]
    }

    fn set_xcr0(&mut self, xcr0: u64) -> bool {
        let leaf = __cpuid_count(0xd, 0);
        let supported = u64::from(leaf.eax) | u64::from(leaf.edx) << 32;
        if !bulkhead_vmm::x86::msr::xcr0_is_valid(xcr0, supported) {
            return false;
        }
        write_xcr0(xcr0);
        true
    }
}

/// Writes XCR0.
///
/// A value that the CPU does not take raises #GP, which stops the hypervisor; so does a CPU
/// whose CR4.OSXSAVE is 0.
pub(super) fn write_xcr0(xcr0: u64) {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the register")]
    let (low, high) = (xcr0 as u32, (xcr0 >> 32) as u32);
    // SAFETY: it changes which extended state there is, of which the hypervisor has none.
    unsafe {
        asm!("xsetbv", in("ecx") 0, in("eax") low, in("edx") high, options(nomem, nostack, preserves_flags));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_is_redirected_unless_the_firmware_has_locked_it() {
        assert_eq!(redirect_init(0), Some(0b10));
        assert_eq!(redirect_init(0b101), Some(0b111), "what the firmware has set stays");
        assert_eq!(redirect_init(0b1000), None);
    }
}
