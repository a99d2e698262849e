//! Instructions that exit by themselves, on CPUs that do not tell where the next one is.

use super::EmulateError;
use super::cache::{DecodeCache, Decoded, Form};
use super::fetch::fetch_word;
use super::machine::gpr_of;
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
    /// The encoding without superfluous prefixes as a number, the first byte lowest; its
    /// length in bytes, and the decoder's name.
    const fn encoding(self) -> (u32, u8, Mnemonic) {
        match self {
            Self::Cpuid => (0xa20f, 2, Mnemonic::Cpuid),
            Self::Hlt => (0xf4, 1, Mnemonic::Hlt),
            Self::Invd => (0x080f, 2, Mnemonic::Invd),
            Self::Monitor => (0xc8_010f, 3, Mnemonic::Monitor),
            Self::Mwait => (0xc9_010f, 3, Mnemonic::Mwait),
            Self::Pause => (0x90f3, 2, Mnemonic::Pause),
            Self::Rdmsr => (0x320f, 2, Mnemonic::Rdmsr),
            Self::Rdpmc => (0x330f, 2, Mnemonic::Rdpmc),
            Self::Rdtsc => (0x310f, 2, Mnemonic::Rdtsc),
            Self::Rdtscp => (0xf9_010f, 3, Mnemonic::Rdtscp),
            Self::Vmcall => (0xc1_010f, 3, Mnemonic::Vmcall),
            Self::Vmmcall => (0xd9_010f, 3, Mnemonic::Vmmcall),
            Self::Wbinvd => (0x090f, 2, Mnemonic::Wbinvd),
            Self::Wrmsr => (0x300f, 2, Mnemonic::Wrmsr),
            Self::Xsetbv => (0xd1_010f, 3, Mnemonic::Xsetbv),
        }
    }
}

/// The length in bytes of the instruction at CS:RIP, which exited as `expected`.
///
/// # Errors
/// [`EmulateError::Retry`] when another instruction is there now; else as
/// [`DecodeCache::decode`].
#[inline]
pub fn instruction_length<C: CpuState, M: GuestMemory>(
    cache: &mut DecodeCache,
    cpu: &C,
    memory: &M,
    expected: InstructionKind,
) -> Result<u8, EmulateError> {
    // The common case, without a decoder. All it needs is in the first 8 bytes.
    let (plain, length, _) = expected.encoding();
    match fetch_word(cpu, memory) {
        Some(word) if (word ^ u64::from(plain)) << (64 - 8 * u32::from(length)) == 0 => Ok(length),
        _ => decoded_length(cache, cpu, memory, expected),
    }
}

#[cold]
#[inline(never)]
fn decoded_length<C: CpuState, M: GuestMemory>(
    cache: &mut DecodeCache,
    cpu: &C,
    memory: &M,
    expected: InstructionKind,
) -> Result<u8, EmulateError> {
    let decoded = cache.decode(cpu, memory, None)?;
    match decoded.form {
        Form::Other(i) if i.mnemonic() == expected.encoding().2 => Ok(decoded.length()),
        _ => Err(EmulateError::Retry),
    }
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

/// What `decoded`, the instruction at CS:RIP, which exited for an access to a control register,
/// wants, and its length in bytes. Nothing is carried out.
///
/// # Errors
/// [`EmulateError::Retry`] when another instruction is there now;
/// [`EmulateError::Undecodable`] for SMSW, and LMSW from memory.
pub fn control_access(cpu: &dyn CpuState, decoded: &Decoded) -> Result<(ControlAccess, u8), EmulateError> {
    let Form::Other(i) = decoded.form else { return Err(EmulateError::Retry) };
    let undecodable = decoded.bytes.undecodable(cpu);
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
    Ok((access, decoded.length()))
}

/// The number of a control register.
fn number(register: Register) -> Option<u8> {
    u8::try_from(register.number()).ok()
}
