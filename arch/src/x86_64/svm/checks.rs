//! What a build with debug assertions checks at each entry, for emulators forgive it: clean bits
//! that hide a change from the CPU, and a vCPU that finds the translations of another.

use super::vmcb::{TLB_FLUSH_NONE, Vmcb, clean};
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

/// Which vCPU a CPU has entered last, by numbers that are given once.
#[derive(Debug, Default)]
pub(super) struct Entered {
    given: AtomicU64,
    last: AtomicU64,
}

/// The checks of one vCPU.
pub(super) struct Checks {
    number: u64,
    entered: Arc<Entered>,
    /// The block as the CPU left it.
    left: Box<Vmcb>,
}

impl Checks {
    /// Those of a new vCPU on the CPU of `entered`.
    pub(super) fn new(entered: &Arc<Entered>) -> Self {
        let number = entered.given.fetch_add(1, Ordering::Relaxed) + 1;
        Self { number, entered: entered.clone(), left: Box::new(Vmcb::zeroed()) }
    }

    /// Before an entry.
    pub(super) fn before_entry(&self, vmcb: &Vmcb) {
        if let Some(group) = hidden_change(&self.left, vmcb) {
            panic!("the VMCB's clean bit {group} is set, and the group has changed");
        }
        let last = self.entered.last.swap(self.number, Ordering::Relaxed);
        let flushes = vmcb.control.tlb_control != TLB_FLUSH_NONE;
        assert!(last == self.number || flushes, "another vCPU was entered since, and nothing is flushed");
    }

    /// After an exit.
    pub(super) fn after_exit(&mut self, vmcb: &Vmcb) {
        *self.left = *vmcb;
    }
}

/// The first group of fields (APM 15.15.3) that has changed since the CPU left `left`, though
/// `vmcb`'s clean bits say that it has not.
#[must_use]
pub fn hidden_change(left: &Vmcb, vmcb: &Vmcb) -> Option<&'static str> {
    let (a, b) = (&left.control, &vmcb.control);
    let (s, t) = (&left.save, &vmcb.save);
    let intercepts = |c: &super::vmcb::ControlArea| {
        (
            (c.intercept_cr_read, c.intercept_cr_write, c.intercept_dr_read, c.intercept_dr_write),
            (c.intercept_exceptions, c.intercept_misc1, c.intercept_misc2, c.intercept_misc3),
            (c.pause_filter_count, c.pause_filter_threshold, c.tsc_offset),
        )
    };
    let virtual_interrupt =
        |c: &super::vmcb::ControlArea| (c.v_tpr, c.v_irq, c.v_intr_prio, c.v_intr_masking, c.v_intr_vector);
    let changed = [
        (clean::I, "I", intercepts(a) != intercepts(b)),
        (clean::IOPM, "IOPM", (a.iopm_base_pa, a.msrpm_base_pa) != (b.iopm_base_pa, b.msrpm_base_pa)),
        (clean::ASID, "ASID", a.guest_asid != b.guest_asid),
        (clean::TPR, "TPR", virtual_interrupt(a) != virtual_interrupt(b)),
        (clean::NP, "NP", (a.np_enable, a.n_cr3, s.g_pat) != (b.np_enable, b.n_cr3, t.g_pat)),
        (clean::CRX, "CRx", (s.cr0, s.cr3, s.cr4, s.efer) != (t.cr0, t.cr3, t.cr4, t.efer)),
        (clean::DRX, "DRx", (s.dr6, s.dr7) != (t.dr6, t.dr7)),
        (clean::DT, "DT", (s.gdtr, s.idtr) != (t.gdtr, t.idtr)),
        (clean::SEG, "SEG", (s.cs, s.ds, s.ss, s.es, s.cpl) != (t.cs, t.ds, t.ss, t.es, t.cpl)),
        (clean::CR2, "CR2", s.cr2 != t.cr2),
        (clean::LBR, "LBR", s.dbgctl != t.dbgctl),
        (clean::AVIC, "AVIC", a.avic_apic_bar != b.avic_apic_bar),
    ];
    changed.into_iter().find(|(group, _, changed)| *changed && b.clean & group != 0).map(|(_, name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_behind_a_clean_bit_is_named() {
        type Change = fn(&mut Vmcb);
        let changes: [(Change, u32, &str); 12] = [
            (|v| v.control.intercept_misc1 = 1, clean::I, "I"),
            (|v| v.control.msrpm_base_pa = 4096, clean::IOPM, "IOPM"),
            (|v| v.control.guest_asid = 2, clean::ASID, "ASID"),
            (|v| v.control.v_intr_vector = 0x31, clean::TPR, "TPR"),
            (|v| v.save.g_pat = 6, clean::NP, "NP"),
            (|v| v.save.efer = 1, clean::CRX, "CRx"),
            (|v| v.save.dr7 = 1, clean::DRX, "DRx"),
            (|v| v.save.idtr.limit = 1, clean::DT, "DT"),
            (|v| v.save.cpl = 3, clean::SEG, "SEG"),
            (|v| v.save.cr2 = 1, clean::CR2, "CR2"),
            (|v| v.save.dbgctl = 1, clean::LBR, "LBR"),
            (|v| v.control.avic_apic_bar = 1, clean::AVIC, "AVIC"),
        ];
        let left = Vmcb::zeroed();
        for (change, group, name) in changes {
            let mut vmcb = left;
            vmcb.control.clean = clean::ALL;
            assert_eq!(hidden_change(&left, &vmcb), None);
            change(&mut vmcb);
            assert_eq!(hidden_change(&left, &vmcb), Some(name));
            vmcb.control.clean &= !group;
            assert_eq!(hidden_change(&left, &vmcb), None, "{name} is told");
        }
    }

    #[test]
    fn what_is_loaded_at_each_entry_may_change() {
        let left = Vmcb::zeroed();
        let mut vmcb = left;
        vmcb.control.clean = clean::ALL;
        (vmcb.save.rip, vmcb.save.rsp, vmcb.save.rax, vmcb.save.rflags) = (1, 1, 1, 2);
        (vmcb.control.eventinj, vmcb.control.interrupt_shadow, vmcb.control.tlb_control) = (1, 1, 1);
        vmcb.save.fs.base = 1;
        assert_eq!(hidden_change(&left, &vmcb), None);
    }

    fn entry(checks: &mut Checks, tlb_control: u8) {
        let mut vmcb = Vmcb::zeroed();
        vmcb.control.tlb_control = tlb_control;
        checks.before_entry(&vmcb);
        checks.after_exit(&vmcb);
    }

    #[test]
    fn a_vcpu_flushes_when_another_was_there() {
        let entered = Arc::default();
        let (mut one, mut other) = (Checks::new(&entered), Checks::new(&entered));
        entry(&mut one, 1);
        entry(&mut one, 0);
        entry(&mut other, 3);
        entry(&mut one, 1);
    }

    #[test]
    #[should_panic(expected = "nothing is flushed")]
    fn a_vcpu_that_does_not_flush_is_found() {
        let entered = Arc::default();
        let (mut one, mut other) = (Checks::new(&entered), Checks::new(&entered));
        entry(&mut one, 1);
        entry(&mut other, 1);
        entry(&mut one, 0);
    }
}
