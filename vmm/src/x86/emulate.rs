//! Decoding and carrying out instructions that touch device memory, and finding the length
//! of instructions that exit.
//!
//! A guest's access to a page that is no RAM exits with the guest physical address alone.
//! [`DecodeCache::decode`] fetches the instruction (unless the CPU delivered its bytes) and says
//! what it is: one that it has decoded before, one of the common moves, or what iced-x86 makes
//! of it. [`emulate_mmio`] carries it out on registers, RAM and an [`MmioBus`]: a common move at
//! the place that exited, anything else through the guest's page tables.
//!
//! Between the exit and the fetch another vCPU may have changed the instruction, the
//! registers' targets or the page tables. Nothing here trusts that they are the same:
//! what is found is carried out if one of its operands lies in the page that exited and all
//! its accesses pass the guest's own page rights, or the CPU has let them pass; if none does, the
//! answer is [`EmulateError::Retry`].
//!
//! An instruction is a bounded amount of work: at most two operands, and one iteration of a
//! repeated string instruction, after which the guest is entered again. Not done: the
//! single-step trap (RFLAGS.TF) after an emulated instruction, atomicity of LOCK and XCHG on
//! device registers, SSE and x87 operands, shifts, multiplication, division and branches with
//! an operand in a device, accesses that lie across a page's border in a device.

mod alu;
mod cache;
mod control;
#[cfg(test)]
pub(crate) mod fake;
mod fetch;
mod machine;
mod port;
mod predecode;
#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "tests cut numbers on purpose")]
mod tests;

pub use cache::{DecodeCache, Decoded};
pub use control::{ControlAccess, InstructionKind, control_access, instruction_length};
pub use fetch::InstructionBytes;
pub use port::{PortBus, string_port};

use super::exit::NestedFault;
use super::paging::{Access, TranslateError};
use super::state::{ControlRegister, CpuState, GENERAL_PROTECTION, Gpr, Injection};
use crate::device::bus::Width;
use crate::memory::address::{Gpa, Gva};
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use alu::{Binary, BitOperation, Unary};
use cache::Form;
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind};
use machine::{Machine, Place, width_of};
use thiserror::Error;

const RFLAGS_ZF: u64 = 1 << 6;
const RFLAGS_DF: u64 = 1 << 10;
const RFLAGS_RF: u64 = 1 << 16;
/// #SS(0), stack fault.
const STACK_FAULT: Injection = Injection::Exception { vector: 12, error_code: Some(0) };

/// The devices in a cell's memory.
pub trait MmioBus {
    /// Reads `width` bytes at `gpa`, which may be unaligned but lie in one page.
    fn read(&mut self, gpa: Gpa, width: Width) -> u64;
    /// Writes the low `width` bytes of `value` at `gpa`, which may be unaligned but lie in
    /// one page.
    fn write(&mut self, gpa: Gpa, width: Width, value: u64);
}

/// Why an instruction was not carried out. With `Inject` and `Retry` no register has changed
/// and no device was touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum EmulateError {
    /// The instruction raises an exception in the guest: see [`deliver`](Self::deliver).
    #[error("the instruction raises {event:?}")]
    Inject {
        /// The exception.
        event: Injection,
        /// What CR2 must be, for #PF.
        cr2: Option<u64>,
    },
    /// The instruction there is not (or no longer) one that explains the exit. Entering the
    /// guest again is right.
    #[error("the instruction is not the one that exited")]
    Retry,
    /// Not an instruction this emulator knows: the cell fails.
    #[error("cannot carry out the instruction {bytes} at rip {rip:#x}")]
    Undecodable {
        /// What is there.
        bytes: InstructionBytes,
        /// The instruction pointer.
        rip: u64,
    },
    /// The instruction, a page table or an operand besides the device's is not in the
    /// cell's RAM: the cell fails.
    #[error("instruction emulation: {0}")]
    Memory(#[from] GuestMemoryError),
}

impl EmulateError {
    /// The error for an access at `gva` that could not be translated; `stack` if through SS.
    fn at(gva: Gva, stack: bool, error: TranslateError) -> Self {
        match error {
            TranslateError::PageFault { error_code } => Self::Inject {
                event: Injection::Exception { vector: 14, error_code: Some(error_code) },
                cr2: Some(gva.raw()),
            },
            TranslateError::NotCanonical { .. } => {
                Self::Inject { event: if stack { STACK_FAULT } else { GENERAL_PROTECTION }, cr2: None }
            }
            TranslateError::Memory(error) => Self::Memory(error),
        }
    }

    /// Does what `Inject` and `Retry` ask for; what is left fails the cell.
    ///
    /// # Errors
    /// The error itself, if it is neither of the two.
    pub fn deliver(self, cpu: &mut dyn CpuState) -> Result<(), Self> {
        match self {
            Self::Inject { event, cr2 } => {
                if let Some(cr2) = cr2 {
                    cpu.set_control(ControlRegister::Cr2, cr2);
                }
                cpu.inject(event);
                Ok(())
            }
            Self::Retry => Ok(()),
            Self::Undecodable { .. } | Self::Memory(_) => Err(self),
        }
    }
}

/// Builds the decoder's tables. To be called once at boot, so that no exit has to wait and
/// allocate for them.
pub fn warm_up() {
    let mut decoder = Decoder::new(64, &[0x90], DecoderOptions::NONE);
    core::hint::black_box(decoder.decode());
}

/// Moves RIP over an instruction of `length` bytes that has been carried out. The interrupt
/// shadow and RFLAGS.RF end with it.
pub fn advance<C: CpuState + ?Sized>(cpu: &mut C, length: u8) {
    let rip = cpu.rip().wrapping_add(u64::from(length));
    cpu.set_rip(fetch::linear(cpu, rip));
    cpu.set_rflags(cpu.rflags() & !RFLAGS_RF);
}

/// Carries out `decoded`, the instruction at CS:RIP, which exited as `fault`, and moves RIP on.
/// All accesses to the page of the fault go to `bus`, all others must be RAM.
///
/// # Errors
/// [`EmulateError`]. A repeated string instruction is not an error but moves on only after
/// its last iteration.
pub fn emulate_mmio<C: CpuState, B: MmioBus>(
    cpu: &mut C,
    memory: &dyn GuestMemory,
    decoded: &Decoded,
    fault: &NestedFault,
    bus: &mut B,
) -> Result<(), EmulateError> {
    match &decoded.form {
        Form::Move(common) if common.carry_out(cpu, fault, bus) => Ok(()),
        _ => emulate_any(cpu, memory, decoded, fault.gpa.page_base(), bus),
    }
}

/// Carries out `decoded`, which exited for an access to `device_page`.
#[cold]
fn emulate_any(
    cpu: &mut dyn CpuState,
    memory: &dyn GuestMemory,
    decoded: &Decoded,
    device_page: Gpa,
    bus: &mut dyn MmioBus,
) -> Result<(), EmulateError> {
    let instruction = decoded.instruction(cpu)?;
    let bytes = decoded.bytes;
    let mut machine = Machine { cpu, memory, bus, device_page, touches_device: false, bytes, popped: 0 };
    if execute(&mut machine, &instruction)? {
        advance(cpu, decoded.length());
    }
    Ok(())
}

/// Carries out `i`; the result is whether it is complete.
fn execute(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    match i.mnemonic() {
        Mnemonic::Mov | Mnemonic::Movnti | Mnemonic::Movzx => transfer(m, i, |_, value| value),
        Mnemonic::Movsx | Mnemonic::Movsxd => transfer(m, i, alu::sign_extend),
        Mnemonic::Movbe => transfer(m, i, |width, value| value.swap_bytes() >> (64 - width.bytes() * 8)),
        Mnemonic::Xchg => exchange(m, i),
        Mnemonic::Xadd => exchange_add(m, i),
        Mnemonic::Cmpxchg => compare_exchange(m, i),
        Mnemonic::Cmpxchg8b => compare_exchange_pair(m, i),
        Mnemonic::Add => binary(m, i, Binary::Add, true),
        Mnemonic::Adc => binary(m, i, Binary::Adc, true),
        Mnemonic::Sub => binary(m, i, Binary::Sub, true),
        Mnemonic::Sbb => binary(m, i, Binary::Sbb, true),
        Mnemonic::And => binary(m, i, Binary::And, true),
        Mnemonic::Or => binary(m, i, Binary::Or, true),
        Mnemonic::Xor => binary(m, i, Binary::Xor, true),
        Mnemonic::Cmp => binary(m, i, Binary::Sub, false),
        Mnemonic::Test => binary(m, i, Binary::And, false),
        Mnemonic::Inc => unary(m, i, Unary::Inc),
        Mnemonic::Dec => unary(m, i, Unary::Dec),
        Mnemonic::Neg => unary(m, i, Unary::Neg),
        Mnemonic::Not => unary(m, i, Unary::Not),
        Mnemonic::Bt => bit_test(m, i, BitOperation::Test),
        Mnemonic::Bts => bit_test(m, i, BitOperation::Set),
        Mnemonic::Btr => bit_test(m, i, BitOperation::Reset),
        Mnemonic::Btc => bit_test(m, i, BitOperation::Complement),
        Mnemonic::Push => push(m, i),
        Mnemonic::Pop => pop(m, i),
        _ => match i.code() {
            Code::Movsb_m8_m8
            | Code::Movsw_m16_m16
            | Code::Movsd_m32_m32
            | Code::Movsq_m64_m64
            | Code::Stosb_m8_AL
            | Code::Stosw_m16_AX
            | Code::Stosd_m32_EAX
            | Code::Stosq_m64_RAX
            | Code::Lodsb_AL_m8
            | Code::Lodsw_AX_m16
            | Code::Lodsd_EAX_m32
            | Code::Lodsq_RAX_m64 => string(m, i),
            Code::Cmpsb_m8_m8
            | Code::Cmpsw_m16_m16
            | Code::Cmpsd_m32_m32
            | Code::Cmpsq_m64_m64
            | Code::Scasb_AL_m8
            | Code::Scasw_AX_m16
            | Code::Scasd_EAX_m32
            | Code::Scasq_RAX_m64 => compare_strings(m, i),
            _ => Err(m.undecodable()),
        },
    }
}

/// Copies operand 1 to operand 0 through `convert`, which is told operand 1's width.
fn transfer(
    m: &mut Machine<'_>,
    i: &Instruction,
    convert: impl Fn(Width, u64) -> u64,
) -> Result<bool, EmulateError> {
    let to = m.operand(i, 0, Access::Write)?;
    let from = m.operand(i, 1, Access::Read)?;
    m.confirm()?;
    let value = m.load(from)?;
    m.store(to, convert(width_of(from).unwrap_or(Width::Qword), value))?;
    Ok(true)
}

fn exchange(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    let (a, b) = (m.operand(i, 0, Access::Write)?, m.operand(i, 1, Access::Write)?);
    m.confirm()?;
    let (old_a, old_b) = (m.load(a)?, m.load(b)?);
    m.store(a, old_b)?;
    m.store(b, old_a)?;
    Ok(true)
}

fn exchange_add(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    let (to, from) = (m.operand(i, 0, Access::Write)?, m.operand(i, 1, Access::Write)?);
    let width = width_of(to).ok_or_else(|| m.undecodable())?;
    m.confirm()?;
    let (old, addend) = (m.load(to)?, m.load(from)?);
    let (sum, flags) = alu::binary(Binary::Add, width, old, addend, m.cpu.rflags());
    m.store(from, old)?;
    m.store(to, sum)?;
    m.cpu.set_rflags(flags);
    Ok(true)
}

fn compare_exchange(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    let (to, from) = (m.operand(i, 0, Access::Write)?, m.operand(i, 1, Access::Read)?);
    let width = width_of(to).ok_or_else(|| m.undecodable())?;
    m.confirm()?;
    let accumulator = Place::Register { gpr: Gpr::Rax, shift: 0, width };
    let (expected, old, new) = (m.load(accumulator)?, m.load(to)?, m.load(from)?);
    let (_, flags) = alu::binary(Binary::Sub, width, expected, old, m.cpu.rflags());
    if flags & RFLAGS_ZF != 0 {
        m.store(to, new)?;
    } else {
        // The destination is written in either case (AMD APM vol. 3, CMPXCHG).
        m.store(to, old)?;
        m.store(accumulator, old)?;
    }
    m.cpu.set_rflags(flags);
    Ok(true)
}

/// CMPXCHG8B: EDX:EAX and ECX:EBX are one operand each.
fn compare_exchange_pair(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    let to = m.operand(i, 0, Access::Write)?;
    m.confirm()?;
    let part = |gpr| Place::Register { gpr, shift: 0, width: Width::Dword };
    let old = m.load(to)?;
    let expected = m.load(part(Gpr::Rdx))? << 32 | m.load(part(Gpr::Rax))?;
    let new = m.load(part(Gpr::Rcx))? << 32 | m.load(part(Gpr::Rbx))?;
    // Of the flags only ZF changes (AMD APM vol. 3, CMPXCHG8B).
    let flags = m.cpu.rflags();
    if old == expected {
        m.store(to, new)?;
        m.cpu.set_rflags(flags | RFLAGS_ZF);
    } else {
        m.store(to, old)?;
        m.store(part(Gpr::Rax), old)?;
        m.store(part(Gpr::Rdx), old >> 32)?;
        m.cpu.set_rflags(flags & !RFLAGS_ZF);
    }
    Ok(true)
}

fn binary(m: &mut Machine<'_>, i: &Instruction, op: Binary, keep: bool) -> Result<bool, EmulateError> {
    let to = m.operand(i, 0, if keep { Access::Write } else { Access::Read })?;
    let from = m.operand(i, 1, Access::Read)?;
    let width = width_of(to).ok_or_else(|| m.undecodable())?;
    m.confirm()?;
    let (a, b) = (m.load(to)?, m.load(from)?);
    let (result, flags) = alu::binary(op, width, a, b, m.cpu.rflags());
    if keep {
        m.store(to, result)?;
    }
    m.cpu.set_rflags(flags);
    Ok(true)
}

fn unary(m: &mut Machine<'_>, i: &Instruction, op: Unary) -> Result<bool, EmulateError> {
    let to = m.operand(i, 0, Access::Write)?;
    let width = width_of(to).ok_or_else(|| m.undecodable())?;
    m.confirm()?;
    let old = m.load(to)?;
    let (result, flags) = alu::unary(op, width, old, m.cpu.rflags());
    m.store(to, result)?;
    m.cpu.set_rflags(flags);
    Ok(true)
}

fn bit_test(m: &mut Machine<'_>, i: &Instruction, op: BitOperation) -> Result<bool, EmulateError> {
    let access = if op == BitOperation::Test { Access::Read } else { Access::Write };
    let by = m.operand(i, 1, Access::Read)?;
    let index = m.load(by)?;
    let to = match (i.op0_kind(), width_of(by)) {
        // A register's bit number is signed and reaches beyond the operand.
        (OpKind::Memory, Some(width)) => {
            let bits = width.bytes() * 8;
            let words = alu::sign_extend(width, index).cast_signed().div_euclid(bits.cast_signed());
            m.memory_operand(i, 0, words.cast_unsigned().wrapping_mul(width.bytes()), access)?
        }
        _ => m.operand(i, 0, access)?,
    };
    let width = width_of(to).ok_or_else(|| m.undecodable())?;
    m.confirm()?;
    let old = m.load(to)?;
    let (result, flags) = alu::bit(op, width, old, index, m.cpu.rflags());
    if op != BitOperation::Test {
        m.store(to, result)?;
    }
    m.cpu.set_rflags(flags);
    Ok(true)
}

/// The number of bytes that PUSH and POP move RSP by.
fn stack_slot(m: &Machine<'_>, i: &Instruction) -> Result<Width, EmulateError> {
    Width::from_bytes(i.stack_pointer_increment().unsigned_abs().into()).ok_or_else(|| m.undecodable())
}

fn push(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    let slot = stack_slot(m, i)?;
    let from = m.operand(i, 0, Access::Read)?;
    let to = m.stack_operand(slot.bytes().wrapping_neg(), slot, Access::Write)?;
    m.confirm()?;
    let value = m.load(from)?;
    m.store(to, value)?;
    let stack_width = m.stack_width();
    move_register(m, Gpr::Rsp, stack_width, slot.bytes().wrapping_neg())?;
    Ok(true)
}

fn pop(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    let slot = stack_slot(m, i)?;
    let from = m.stack_operand(0, slot, Access::Read)?;
    // The destination's address is formed after RSP has moved (AMD APM vol. 3, POP).
    m.popped = slot.bytes();
    let to = m.operand(i, 0, Access::Write)?;
    m.confirm()?;
    let value = m.load(from)?;
    let stack_width = m.stack_width();
    move_register(m, Gpr::Rsp, stack_width, slot.bytes())?;
    m.store(to, value)?;
    Ok(true)
}

/// Adds to the low `width` of a register, as an address of that width moves.
fn move_register(m: &mut Machine<'_>, gpr: Gpr, width: Width, by: u64) -> Result<u64, EmulateError> {
    let register = Place::Register { gpr, shift: 0, width };
    let moved = m.load(register)?.wrapping_add(by) & width.all_ones();
    m.store(register, moved)?;
    Ok(moved)
}

/// The width in which a string instruction counts and forms addresses.
fn string_width(i: &Instruction) -> Width {
    let kinds = [i.op0_kind(), i.op1_kind()];
    if kinds.iter().any(|k| matches!(k, OpKind::MemorySegRSI | OpKind::MemoryESRDI)) {
        Width::Qword
    } else if kinds.iter().any(|k| matches!(k, OpKind::MemorySegESI | OpKind::MemoryESEDI)) {
        Width::Dword
    } else {
        Width::Word
    }
}

/// Whether a repeated string instruction has no iteration left: it would touch nothing.
fn string_is_over(m: &Machine<'_>, i: &Instruction) -> bool {
    is_repeated(i) && m.cpu.gpr(Gpr::Rcx) & string_width(i).all_ones() == 0
}

fn is_repeated(i: &Instruction) -> bool {
    i.has_rep_prefix() || i.has_repne_prefix()
}

/// Moves the registers of a string instruction on by one iteration of `bytes`; whether that
/// was the last one.
fn string_step(m: &mut Machine<'_>, i: &Instruction, bytes: u64) -> Result<bool, EmulateError> {
    let address_width = string_width(i);
    let step = if m.cpu.rflags() & RFLAGS_DF != 0 { bytes.wrapping_neg() } else { bytes };
    for kind in [i.op0_kind(), i.op1_kind()] {
        match kind {
            OpKind::MemorySegSI | OpKind::MemorySegESI | OpKind::MemorySegRSI => {
                move_register(m, Gpr::Rsi, address_width, step)?;
            }
            OpKind::MemoryESDI | OpKind::MemoryESEDI | OpKind::MemoryESRDI => {
                move_register(m, Gpr::Rdi, address_width, step)?;
            }
            _ => {}
        }
    }
    Ok(!is_repeated(i) || move_register(m, Gpr::Rcx, address_width, u64::MAX)? == 0)
}

/// One iteration of MOVS, STOS or LODS.
fn string(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    if string_is_over(m, i) {
        return Err(EmulateError::Retry);
    }
    let to = m.operand(i, 0, Access::Write)?;
    let from = m.operand(i, 1, Access::Read)?;
    let bytes = width_of(to).ok_or_else(|| m.undecodable())?.bytes();
    m.confirm()?;
    let value = m.load(from)?;
    m.store(to, value)?;
    string_step(m, i, bytes)
}

/// One iteration of CMPS or SCAS.
fn compare_strings(m: &mut Machine<'_>, i: &Instruction) -> Result<bool, EmulateError> {
    if string_is_over(m, i) {
        return Err(EmulateError::Retry);
    }
    let (a, b) = (m.operand(i, 0, Access::Read)?, m.operand(i, 1, Access::Read)?);
    let width = width_of(a).ok_or_else(|| m.undecodable())?;
    m.confirm()?;
    let (left, right) = (m.load(a)?, m.load(b)?);
    let (_, flags) = alu::binary(Binary::Sub, width, left, right, m.cpu.rflags());
    let over = string_step(m, i, width.bytes())?;
    m.cpu.set_rflags(flags);
    // F3 goes on while equal, F2 while not.
    let stops = is_repeated(i) && i.has_repne_prefix() == (left == right);
    Ok(over || stops)
}
