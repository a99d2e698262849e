//! What the world switch leaves in a CPU, put back before the CPU runs another cell.
//!
//! A vCPU has its CPU to itself, so no switch saves extended state, debug registers and the
//! MSRs that pass. When the CPU changes hands they would show the next cell what the one
//! before has left: [`scrub_cpu`] gives them their values after reset. The rest of a vCPU's
//! state begins anew with its control block.

// UNSAFETY: writes registers by privileged instructions.
#![expect(unsafe_code, reason = "debug registers, XCR0, extended state, MSRs")]

use super::svm::write_xcr0;
use bulkhead_vmm::x86::cpuid::XCR0_ALLOWED;
use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count};
use x86_64::registers::control::{Cr4, Cr4Flags};
use x86_64::registers::model_specific::Msr;

const SPEC_CTRL: u32 = 0x48;
const PRED_CMD: u32 = 0x49;
const TSC_AUX: u32 = 0xc000_0103;

/// An area of XRSTOR and FXRSTOR that holds the state after FNINIT: XSTATE_BV is 0, so that
/// XRSTOR puts each component into its initial state. MXCSR it takes from the area all the
/// same (Intel SDM vol. 1, 13.8.1).
#[repr(C, align(64))]
struct Area([u8; 576]);

static INITIAL: Area = {
    let mut area = [0; 576];
    [area[0], area[1]] = 0x037f_u16.to_le_bytes();
    [area[24], area[25]] = 0x1f80_u16.to_le_bytes();
    Area(area)
};

/// Clears what a cell may have left in this CPU: x87, vector and PKRU state, XCR0, DR0 to DR3,
/// DR6, DR7, TSC_AUX, SPEC_CTRL, and what its branches have taught the predictors.
pub fn scrub_cpu() {
    // DR7 first, so that nothing is watched while the others change.
    // SAFETY: all are off afterwards, and the hypervisor does not use them.
    unsafe {
        asm!("mov dr7, {off}", "mov dr0, {zero}", "mov dr1, {zero}", "mov dr2, {zero}", "mov dr3, {zero}",
            "mov dr6, {status}", off = in(reg) 0x400u64, zero = in(reg) 0u64,
            status = in(reg) 0xffff_0ff0u64, options(nomem, nostack, preserves_flags));
    }
    let cr4 = Cr4::read();
    if cr4.contains(Cr4Flags::OSXSAVE) {
        // Components that XCR0 leaves out would keep what they hold.
        write_xcr0(u64::from(__cpuid_count(0xd, 0).eax) & XCR0_ALLOWED);
        // SAFETY: the area is large and aligned enough for a state without components, and the
        // hypervisor, which is compiled without vector registers, has none to lose.
        unsafe {
            asm!("xrstor64 [{}]", in(reg) &raw const INITIAL, in("eax") u32::MAX, in("edx") u32::MAX,
                options(readonly, nostack, preserves_flags));
        }
        write_xcr0(1);
    } else {
        // SAFETY: the bit makes FXRSTOR restore XMM registers too.
        unsafe { Cr4::write(cr4 | Cr4Flags::OSFXSR) };
        // SAFETY: as above; the first 512 bytes are FXRSTOR's.
        unsafe {
            asm!("fxrstor64 [{}]", in(reg) &raw const INITIAL, options(readonly, nostack, preserves_flags));
        }
        // SAFETY: as it was.
        unsafe { Cr4::write(cr4) };
    }
    // On AMD neither of the two clears the pointers to the last x87 instruction and operand
    // (APM vol. 2, 11.4.4); this does.
    // SAFETY: as above.
    unsafe { asm!("fninit", options(nomem, nostack, preserves_flags)) };

    let leaf7 = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 };
    for (msr, value) in msrs(leaf7, __cpuid(0x8000_0001).edx, __cpuid(0x8000_0008).ebx) {
        // SAFETY: CPUID shows these registers, none of which has an effect on memory.
        unsafe { Msr::new(msr).write(value) };
    }
}

/// The MSRs to be written, and with what, on a CPU that shows these leaves of CPUID: EDX of 7,
/// EDX of 8000_0001, EBX of 8000_0008 (AMD APM vol. 3, appendix E; Intel SDM vol. 2A, CPUID).
fn msrs(leaf7_edx: u32, extended1_edx: u32, extended8_ebx: u32) -> impl Iterator<Item = (u32, u64)> {
    // IBRS, STIBP, SSBD.
    let spec_ctrl =
        leaf7_edx & (1 << 26 | 1 << 27 | 1 << 31) != 0 || extended8_ebx & (1 << 14 | 1 << 15 | 1 << 24) != 0;
    let ibpb = leaf7_edx & 1 << 26 != 0 || extended8_ebx & 1 << 12 != 0;
    let rdtscp = extended1_edx & 1 << 27 != 0;
    [(rdtscp, (TSC_AUX, 0)), (spec_ctrl, (SPEC_CTRL, 0)), (ibpb, (PRED_CMD, 1))]
        .into_iter()
        .filter_map(|(there, write)| there.then_some(write))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn only_msrs_that_the_cpu_shows_are_written() {
        let of = |leaf7, extended1, extended8| msrs(leaf7, extended1, extended8).collect::<Vec<_>>();
        assert_eq!(of(0, 0, 0), []);
        assert_eq!(of(0, 1 << 27, 0), [(TSC_AUX, 0)]);
        assert_eq!(of(1 << 26, 0, 0), [(SPEC_CTRL, 0), (PRED_CMD, 1)], "Intel: one bit for both");
        assert_eq!(of(0, 0, 1 << 12), [(PRED_CMD, 1)], "AMD: IBPB alone");
        for bit in [14, 15, 24] {
            assert_eq!(of(0, 0, 1 << bit), [(SPEC_CTRL, 0)], "AMD, EBX.{bit}");
        }
        assert_eq!(of(1 << 31, 0, 0), [(SPEC_CTRL, 0)], "Intel: SSBD alone");
    }

    #[test]
    fn the_initial_state_is_that_of_fninit_and_of_reset() {
        // XRSTOR faults on a set bit of MXCSR 31:16, and on any of XSTATE_BV and XCOMP_BV here.
        assert_eq!(INITIAL.0[24..32], [0x80, 0x1f, 0, 0, 0, 0, 0, 0]);
        assert!(INITIAL.0[512..].iter().all(|byte| *byte == 0));
        assert_eq!(core::mem::align_of::<Area>(), 64);
    }
}
