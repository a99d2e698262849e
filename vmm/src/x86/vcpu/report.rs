//! What is told of a vCPU when its cell has failed, and of its exits at any time.

use super::{Failure, Vcpu, VcpuCounts};
use crate::x86::exit::{EXIT_KINDS, VirtualCpu};
use crate::x86::state::{ControlRegister, Gpr, SegmentName};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use bulkhead_abi::message::{ExitCount, FailureReport, LastExit, Register};

/// Names of the general-purpose registers, in the order of their numbers.
const GPR_NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
    "r15",
];

impl Vcpu {
    /// The vCPU does not go back to the guest: its last exit counts too. `host_counter` is now.
    pub fn count_last_exit(&mut self, host_counter: u64) {
        if let Some((kind, since)) = self.last_exit.take() {
            self.counts.count(kind, host_counter.saturating_sub(since));
        }
    }

    /// Why the cell failed at this vCPU, with its registers and last exits. `to_ns` turns a
    /// value of the host's counter into nanoseconds since boot.
    pub fn report<H: VirtualCpu>(
        &self,
        hw: &H,
        failure: &Failure,
        to_ns: impl Fn(u64) -> u64,
    ) -> FailureReport {
        let mut registers = Vec::new();
        let mut register = |name: &str, value| registers.push(Register { name: String::from(name), value });
        for (gpr, name) in Gpr::ALL.into_iter().zip(GPR_NAMES) {
            register(name, hw.gpr(gpr));
        }
        register("rip", hw.rip());
        register("rflags", hw.rflags());
        register("cr0", hw.control(ControlRegister::Cr0));
        register("cr2", hw.control(ControlRegister::Cr2));
        register("cr3", hw.control(ControlRegister::Cr3));
        register("cr4", hw.control(ControlRegister::Cr4));
        register("efer", hw.efer());
        register("cs", u64::from(hw.segment(SegmentName::Cs).selector));
        register("cs.base", hw.segment(SegmentName::Cs).base);
        register("ss", u64::from(hw.segment(SegmentName::Ss).selector));
        register("gdtr.base", hw.segment(SegmentName::Gdtr).base);
        register("idtr.base", hw.segment(SegmentName::Idtr).base);
        let exits = self.history().map(|record| LastExit {
            time_ns: to_ns(record.counter),
            reason: EXIT_KINDS.get(usize::from(record.kind)).copied().unwrap_or("unknown").to_string(),
            pc: record.rip,
            detail: record.details[2],
        });
        FailureReport { reason: failure.to_string(), vcpu: self.id.0, registers, exits: exits.collect() }
    }
}

/// The exits counted, for a message; kinds that did not occur are left out.
pub fn exit_counts(counts: &VcpuCounts, to_ns: impl Fn(u64) -> u64) -> Vec<ExitCount> {
    let each = counts.get().into_iter().zip(EXIT_KINDS);
    each.filter(|((count, _), _)| *count != 0)
        .map(|((count, ticks), reason)| ExitCount {
            reason: reason.to_string(),
            count,
            time_ns: to_ns(ticks),
        })
        .collect()
}
