//! From CS:RIP to a decoded instruction.

use super::EmulateError;
use crate::memory::address::{Gva, PAGE_SIZE};
use crate::memory::guest::GuestMemory;
use crate::x86::paging::{Access, translate};
use crate::x86::state::{CpuState, EFER_LMA, SegmentName};
use core::fmt;
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction};

/// The longest instruction, in bytes.
const LONGEST: usize = 15;

/// The first bytes at an instruction pointer, 15 at most.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct InstructionBytes {
    bytes: [u8; LONGEST],
    len: usize,
}

impl InstructionBytes {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }

    fn push(&mut self, more: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(self.len).zip(more) {
            *to = *from;
            self.len += 1;
        }
    }
}

impl fmt::Display for InstructionBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, byte) in self.as_slice().iter().enumerate() {
            write!(f, "{}{byte:02x}", if n == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

impl fmt::Debug for InstructionBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{self}]")
    }
}

/// Whether the vCPU is in 64-bit mode.
pub(super) fn is_64_bit(cpu: &dyn CpuState) -> bool {
    cpu.efer() & EFER_LMA != 0 && cpu.segment(SegmentName::Cs).is_long()
}

/// The width of code at CS: 16, 32 or 64.
fn code_bits(cpu: &dyn CpuState) -> u32 {
    if is_64_bit(cpu) {
        64
    } else if cpu.segment(SegmentName::Cs).is_big() {
        32
    } else {
        16
    }
}

/// Cuts a linear address to the 32 bits it has outside 64-bit mode.
pub(super) fn linear(cpu: &dyn CpuState, address: u64) -> u64 {
    if is_64_bit(cpu) { address } else { address & 0xffff_ffff }
}

/// The bytes at CS:RIP: with `whole` all 15, else those in the first page. Segment limits
/// are not looked at: the CPU has begun this instruction.
pub(super) fn fetch(
    cpu: &dyn CpuState,
    memory: &dyn GuestMemory,
    whole: bool,
) -> Result<InstructionBytes, EmulateError> {
    let base = if is_64_bit(cpu) { 0 } else { cpu.segment(SegmentName::Cs).base };
    let start = linear(cpu, base.wrapping_add(cpu.rip()));
    let mut found = InstructionBytes::default();
    while found.len < LONGEST {
        let at = Gva::new(linear(cpu, start.wrapping_add(found.len as u64)));
        let gpa = translate(cpu, memory, at, Access::Execute).map_err(|e| EmulateError::at(at, false, e))?;
        let mut bytes = [0; LONGEST];
        let len = usize::try_from(PAGE_SIZE - at.page_offset())
            .map_or(LONGEST, |room| room.min(LONGEST - found.len));
        let bytes = bytes.get_mut(..len).unwrap_or_default();
        memory.read(gpa, bytes)?;
        found.push(bytes);
        if !whole {
            break;
        }
    }
    Ok(found)
}

/// The instruction at CS:RIP. `assist` are bytes that the CPU delivered with the exit; where
/// they are absent or too few, they are fetched.
pub(super) fn decode(
    cpu: &dyn CpuState,
    memory: &dyn GuestMemory,
    assist: Option<&[u8]>,
) -> Result<(Instruction, InstructionBytes), EmulateError> {
    let mut bytes = InstructionBytes::default();
    match assist {
        Some(delivered) if !delivered.is_empty() => bytes.push(delivered),
        _ => bytes = fetch(cpu, memory, false)?,
    }
    let (mut instruction, error) = decode_bytes(cpu, &bytes)?;
    if error == DecoderError::NoMoreBytes && bytes.len < LONGEST {
        // It goes on in the next page. Only now may that page's absence be a fault.
        bytes = fetch(cpu, memory, true)?;
        instruction = decode_bytes(cpu, &bytes)?.0;
    }
    if instruction.is_invalid() {
        return Err(EmulateError::Undecodable { bytes, rip: cpu.rip() });
    }
    Ok((instruction, bytes))
}

fn decode_bytes(
    cpu: &dyn CpuState,
    bytes: &InstructionBytes,
) -> Result<(Instruction, DecoderError), EmulateError> {
    let mut decoder = Decoder::try_with_ip(code_bits(cpu), bytes.as_slice(), cpu.rip(), DecoderOptions::NONE)
        .map_err(|_| EmulateError::Undecodable { bytes: *bytes, rip: cpu.rip() })?;
    let instruction = decoder.decode();
    Ok((instruction, decoder.last_error()))
}
