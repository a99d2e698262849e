//! Instructions that exit by themselves, on CPUs that do not tell where the next one is.

use super::fetch::{decode, fetch};
use super::machine::gpr_of;
use super::{EmulateError, InstructionBytes};
use crate::memory::guest::GuestMemory;
use crate::x86::state::{ControlRegister, CpuState, Gpr};
use iced_x86::{Mnemonic, Register};

/// An instruction that exits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the manual's")]
pub enum InstructionKind {
    Cpuid,
    Hlt,
    Invd,
    Monitor,
    Mwait,
    Pause,
    Rdmsr,
    Rdpmc,
    Rdtsc,
    Rdtscp,
    Vmcall,
    Vmmcall,
    Wbinvd,
    Wrmsr,
    Xsetbv,
}

impl InstructionKind {
    /// The encoding without superfluous prefixes, and the decoder's name.
    const fn encoding(self) -> (&'static [u8], Mnemonic) {
        match self {
            Self::Cpuid => (&[0x0f, 0xa2], Mnemonic::Cpuid),
            Self::Hlt => (&[0xf4], Mnemonic::Hlt),
            Self::Invd => (&[0x0f, 0x08], Mnemonic::Invd),
            Self::Monitor => (&[0x0f, 0x01, 0xc8], Mnemonic::Monitor),
            Self::Mwait => (&[0x0f, 0x01, 0xc9], Mnemonic::Mwait),
            Self::Pause => (&[0xf3, 0x90], Mnemonic::Pause),
            Self::Rdmsr => (&[0x0f, 0x32], Mnemonic::Rdmsr),
            Self::Rdpmc => (&[0x0f, 0x33], Mnemonic::Rdpmc),
            Self::Rdtsc => (&[0x0f, 0x31], Mnemonic::Rdtsc),
            Self::Rdtscp => (&[0x0f, 0x01, 0xf9], Mnemonic::Rdtscp),
            Self::Vmcall => (&[0x0f, 0x01, 0xc1], Mnemonic::Vmcall),
            Self::Vmmcall => (&[0x0f, 0x01, 0xd9], Mnemonic::Vmmcall),
            Self::Wbinvd => (&[0x0f, 0x09], Mnemonic::Wbinvd),
            Self::Wrmsr => (&[0x0f, 0x30], Mnemonic::Wrmsr),
            Self::Xsetbv => (&[0x0f, 0x01, 0xd1], Mnemonic::Xsetbv),
        }
    }
}

/// The length in bytes of the instruction at CS:RIP, which exited as `expected`.
///
/// # Errors
/// [`EmulateError::Retry`] when another instruction is there now; else as
/// [`emulate_mmio`](super::emulate_mmio).
pub fn instruction_length(
    cpu: &dyn CpuState,
    memory: &dyn GuestMemory,
    expected: InstructionKind,
) -> Result<u8, EmulateError> {
    let (plain, mnemonic) = expected.encoding();
    // The common case, without the decoder's cost.
    let bytes = fetch(cpu, memory, false)?;
    if bytes.as_slice().starts_with(plain) {
        return length(plain.len(), &bytes, cpu);
    }
    let (instruction, bytes) = decode(cpu, memory, Some(bytes.as_slice()))?;
    if instruction.mnemonic() != mnemonic {
        return Err(EmulateError::Retry);
    }
    length(instruction.len(), &bytes, cpu)
}

fn length(len: usize, bytes: &InstructionBytes, cpu: &dyn CpuState) -> Result<u8, EmulateError> {
    u8::try_from(len).map_err(|_| EmulateError::Undecodable { bytes: *bytes, rip: cpu.rip() })
}

/// What an instruction does to a control register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlAccess {
    /// It writes it: MOV, and for CR0 also CLTS and LMSW.
    Write {
        /// The number of the control register, 0..16.
        register: u8,
        /// What it writes; the upper half is 0 outside 64-bit mode.
        value: u64,
    },
    /// It reads it by MOV.
    Read {
        /// The number of the control register, 0..16.
        register: u8,
        /// Where to.
        to: Gpr,
    },
}

/// What the instruction at CS:RIP, which exited for an access to a control register, wants,
/// and its length in bytes. Nothing is carried out.
///
/// # Errors
/// [`EmulateError::Retry`] when another instruction is there now; else as
/// [`emulate_mmio`](super::emulate_mmio). SMSW and LMSW
/// from memory are not known.
pub fn control_access(
    cpu: &dyn CpuState,
    memory: &dyn GuestMemory,
    instruction_bytes: Option<&[u8]>,
) -> Result<(ControlAccess, u8), EmulateError> {
    let (i, bytes) = decode(cpu, memory, instruction_bytes)?;
    let len = length(i.len(), &bytes, cpu)?;
    let undecodable = EmulateError::Undecodable { bytes, rip: cpu.rip() };
    let cr0 = cpu.control(ControlRegister::Cr0);
    let access = match i.mnemonic() {
        Mnemonic::Mov if i.op0_register().is_cr() => {
            let (gpr, _, width) = gpr_of(i.op1_register()).ok_or(undecodable)?;
            let register = number(i.op0_register()).ok_or(undecodable)?;
            ControlAccess::Write { register, value: cpu.gpr(gpr) & width.all_ones() }
        }
        Mnemonic::Mov if i.op1_register().is_cr() => {
            let (to, _, _) = gpr_of(i.op0_register()).ok_or(undecodable)?;
            ControlAccess::Read { register: number(i.op1_register()).ok_or(undecodable)?, to }
        }
        Mnemonic::Clts => ControlAccess::Write { register: 0, value: cr0 & !(1 << 3) },
        Mnemonic::Lmsw => {
            let (gpr, _, _) = gpr_of(i.op0_register()).ok_or(undecodable)?;
            // PE, MP, EM and TS; PE can be set but not cleared (AMD APM vol. 3, LMSW).
            ControlAccess::Write { register: 0, value: cr0 & !0xe | cpu.gpr(gpr) & 0xf }
        }
        _ => return Err(EmulateError::Retry),
    };
    Ok((access, len))
}

/// The number of a control register.
fn number(register: Register) -> Option<u8> {
    u8::try_from(register.number()).ok()
}
