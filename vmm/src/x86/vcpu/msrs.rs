//! `RDMSR` and `WRMSR`.

use super::{Board, Failure, Vcpu, apply, kvmclock, low};
use crate::hal::Role;
use crate::x86::emulate::{InstructionKind, advance};
use crate::x86::exit::VirtualCpu;
use crate::x86::local_apic::{Effect, Fault};
use crate::x86::msr::{Emulated, MsrAction, msr_action, pat_is_valid};
use crate::x86::posted::Posted;
use crate::x86::state::{CR0_PG, ControlRegister, EFER_LMA, EFER_LME, EFER_NXE, GENERAL_PROTECTION, Gpr};
use core::num::NonZeroU64;

/// EFER.SCE.
const EFER_SCE: u64 = 1;
impl Vcpu {
    pub(super) fn read_msr<H: VirtualCpu, B: Board>(&mut self, hw: &mut H, board: &B) -> Result<(), Failure> {
        let Some(length) = self.length(hw, board, InstructionKind::Rdmsr)? else { return Ok(()) };
        let msr = low(hw.gpr(Gpr::Rcx));
        let now = board.host_counter().wrapping_add(hw.counter_offset());
        let value = match msr_action(msr, board.role()) {
            MsrAction::Pass | MsrAction::ReadOnly => Ok(board.machine_msr(msr)),
            MsrAction::Fixed(value) => Ok(value),
            MsrAction::Emulated(model) => match model {
                Emulated::Counter => Ok(now),
                Emulated::ApicBase => Ok(self.apic.base()),
                Emulated::Deadline => Ok(self.apic.tsc_deadline(now)),
                Emulated::X2apic => self.apic.read_msr(msr, now),
                Emulated::Efer => Ok(hw.efer()),
                Emulated::Pat => Ok(hw.pat()),
                Emulated::KvmSystemTime => Ok(self.system_time_msr),
                Emulated::KvmWallClock => Ok(self.wall_clock_msr),
            },
            MsrAction::Fault => Err(Fault),
        };
        match value {
            Ok(value) => {
                advance(hw, length);
                hw.set_gpr(Gpr::Rax, u64::from(low(value)));
                hw.set_gpr(Gpr::Rdx, value >> 32);
            }
            Err(Fault) => {
                self.msr_faults += 1;
                hw.inject(GENERAL_PROTECTION);
            }
        }
        Ok(())
    }

    pub(super) fn write_msr<H: VirtualCpu, B: Board>(
        &mut self,
        hw: &mut H,
        board: &B,
        posted: &Posted,
    ) -> Result<(), Failure> {
        let Some(length) = self.length(hw, board, InstructionKind::Wrmsr)? else { return Ok(()) };
        let msr = low(hw.gpr(Gpr::Rcx));
        let value = u64::from(low(hw.gpr(Gpr::Rax))) | u64::from(low(hw.gpr(Gpr::Rdx))) << 32;
        let now = board.host_counter().wrapping_add(hw.counter_offset());
        let written = match msr_action(msr, board.role()) {
            MsrAction::ReadOnly | MsrAction::Fixed(_) => Ok(Effect::None),
            MsrAction::Emulated(model) => match model {
                Emulated::Counter => {
                    if board.role() == Role::Guest {
                        hw.set_counter_offset(value.wrapping_sub(now).wrapping_add(hw.counter_offset()));
                        self.apic.tsc_jumped(now, value);
                    }
                    Ok(Effect::None)
                }
                Emulated::ApicBase => self.apic.write_base(value).map(|()| {
                    // Disabled, it has forgotten what was in service.
                    if !self.apic.is_enabled() {
                        board.vcpu_reset(self.id);
                    }
                    Effect::IdentityChanged
                }),
                Emulated::Deadline => {
                    self.apic.set_tsc_deadline(value, now);
                    Ok(Effect::None)
                }
                Emulated::X2apic => self.apic.write_msr(msr, value, now),
                Emulated::Efer => write_efer(hw, value).map(|()| Effect::None),
                Emulated::Pat if pat_is_valid(value) => {
                    hw.set_pat(value);
                    Ok(Effect::None)
                }
                Emulated::Pat => Err(Fault),
                Emulated::KvmSystemTime => {
                    self.system_time_msr = value;
                    kvmclock::write_system_time(board.memory(), value, scale(board))
                        .map(|()| Effect::None)
                        .map_err(|_| Fault)
                }
                Emulated::KvmWallClock => {
                    self.wall_clock_msr = value;
                    kvmclock::write_wall_clock(board.memory(), value, board.wall_clock_base_ns())
                        .map(|()| Effect::None)
                        .map_err(|_| Fault)
                }
            },
            // A write that passes makes no exit.
            MsrAction::Pass | MsrAction::Fault => Err(Fault),
        };
        match written {
            Ok(effect) => {
                advance(hw, length);
                apply(&self.apic, self.id, board, posted, effect);
            }
            Err(Fault) => {
                self.msr_faults += 1;
                hw.inject(GENERAL_PROTECTION);
            }
        }
        Ok(())
    }
}

/// How the cell's clock counts: the counter's frequency is never 0, it was measured.
fn scale<B: Board>(board: &B) -> kvmclock::Scale {
    kvmclock::Scale::from_hz(NonZeroU64::new(board.counter_hz()).unwrap_or(NonZeroU64::MIN))
}

/// Writes EFER by its rules (AMD APM vol. 2, 3.1.7): LME must not change while paging is on,
/// LMA is the CPU's, everything not known here is reserved.
fn write_efer<H: VirtualCpu>(hw: &mut H, value: u64) -> Result<(), Fault> {
    let old = hw.efer();
    if value & !(EFER_SCE | EFER_LME | EFER_LMA | EFER_NXE) != 0 {
        return Err(Fault);
    }
    let paging = hw.control(ControlRegister::Cr0) & CR0_PG != 0;
    if paging && (old ^ value) & EFER_LME != 0 {
        return Err(Fault);
    }
    hw.set_efer(value & !EFER_LMA | old & EFER_LMA);
    Ok(())
}
