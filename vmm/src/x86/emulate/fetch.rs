//! The bytes at CS:RIP.

use super::EmulateError;
use crate::memory::address::{Gpa, Gva, PAGE_SIZE};
use crate::memory::guest::GuestMemory;
use crate::x86::paging::{Access, four_levels, translate};
use crate::x86::state::{CpuState, EFER_LMA, SegmentName};
use core::fmt;

/// The longest instruction, in bytes.
pub(super) const LONGEST: usize = 15;

/// The first bytes at an instruction pointer, 15 at most.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct InstructionBytes {
    /// Zero from `len` on. One more than there can be, so that they are two words.
    bytes: [u8; 16],
    len: u8,
}

impl InstructionBytes {
    /// The first 15 of `bytes`.
    pub(super) fn new(bytes: &[u8]) -> Self {
        let mut found = Self::default();
        for (to, from) in found.bytes.iter_mut().zip(bytes).take(LONGEST) {
            *to = *from;
            found.len += 1;
        }
        found
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len()).unwrap_or(&[])
    }

    pub(super) fn count(&self) -> u8 {
        self.len
    }

    pub(super) fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// The bytes as a number, the first one lowest.
    pub(super) fn number(&self) -> u128 {
        u128::from_le_bytes(self.bytes)
    }

    /// Ones where [`number`](Self::number) has bytes.
    pub(super) fn mask(&self) -> u128 {
        u128::MAX.checked_shr(128 - 8 * u32::from(self.len)).unwrap_or(0)
    }

    /// The error for these bytes at CS:RIP.
    pub(super) fn undecodable(&self, cpu: &dyn CpuState) -> EmulateError {
        EmulateError::Undecodable { bytes: *self, rip: cpu.rip() }
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
pub(super) fn is_64_bit<C: CpuState + ?Sized>(cpu: &C) -> bool {
    cpu.efer() & EFER_LMA != 0 && cpu.segment(SegmentName::Cs).is_long()
}

/// The width of code at CS: 16, 32 or 64.
pub(super) fn code_bits<C: CpuState + ?Sized>(cpu: &C) -> u32 {
    if is_64_bit(cpu) {
        64
    } else if cpu.segment(SegmentName::Cs).is_big() {
        32
    } else {
        16
    }
}

/// Cuts a linear address to the 32 bits it has outside 64-bit mode.
pub(super) fn linear<C: CpuState + ?Sized>(cpu: &C, address: u64) -> u64 {
    if is_64_bit(cpu) { address } else { address & 0xffff_ffff }
}

/// Where the first `len` bytes at CS:RIP are in 64-bit mode, if they are in one page that the
/// short way through the page tables leads to.
#[inline]
fn quick_place(cpu: &impl CpuState, memory: &impl GuestMemory, len: u64) -> Option<Gpa> {
    let at = Gva::new(cpu.rip());
    if at.page_offset() > PAGE_SIZE - len || !is_64_bit(cpu) {
        return None;
    }
    four_levels(cpu, memory, at, Access::Execute)
}

/// The first 8 bytes at CS:RIP as a number, the first one lowest, if they are quickly found.
#[inline]
pub(super) fn fetch_word(cpu: &impl CpuState, memory: &impl GuestMemory) -> Option<u64> {
    memory.read_u64_quickly(quick_place(cpu, memory, 8)?)
}

/// The first 15 bytes at CS:RIP, if they are quickly found.
#[inline]
pub(super) fn fetch_quickly(cpu: &impl CpuState, memory: &impl GuestMemory) -> Option<InstructionBytes> {
    let gpa = quick_place(cpu, memory, 16)?;
    let low = memory.read_u64_quickly(gpa)?;
    let high = memory.read_u64_quickly(Gpa::new(gpa.raw() + 8))?;
    let bytes = (u128::from(high & u64::MAX >> 8) << 64 | u128::from(low)).to_le_bytes();
    Some(InstructionBytes { bytes, len: 15 })
}

/// The bytes at CS:RIP, or those of them that are in its page. Segment limits are not looked
/// at: the CPU has begun this instruction.
pub(super) fn fetch(cpu: &dyn CpuState, memory: &dyn GuestMemory) -> Result<InstructionBytes, EmulateError> {
    let at = start(cpu);
    let room = usize::try_from(PAGE_SIZE - at.page_offset()).unwrap_or(LONGEST);
    let mut bytes = [0; LONGEST];
    let bytes = bytes.get_mut(..room.min(LONGEST)).unwrap_or_default();
    memory.read(find(cpu, memory, at)?, bytes)?;
    Ok(InstructionBytes::new(bytes))
}

/// All 15 bytes at CS:RIP, be they in two pages.
pub(super) fn fetch_whole(
    cpu: &dyn CpuState,
    memory: &dyn GuestMemory,
) -> Result<InstructionBytes, EmulateError> {
    let first = fetch(cpu, memory)?;
    let mut bytes = first.bytes;
    if let Some(rest @ [_, ..]) = bytes.get_mut(first.len()..LONGEST) {
        let next = start(cpu).raw().wrapping_add(first.len() as u64);
        memory.read(find(cpu, memory, Gva::new(linear(cpu, next)))?, rest)?;
    }
    Ok(InstructionBytes::new(&bytes))
}

/// The linear address of CS:RIP.
fn start<C: CpuState + ?Sized>(cpu: &C) -> Gva {
    let base = if is_64_bit(cpu) { 0 } else { cpu.segment(SegmentName::Cs).base };
    Gva::new(linear(cpu, base.wrapping_add(cpu.rip())))
}

fn find(cpu: &dyn CpuState, memory: &dyn GuestMemory, at: Gva) -> Result<Gpa, EmulateError> {
    translate(cpu, memory, at, Access::Execute).map_err(|e| EmulateError::at(at, false, e))
}
