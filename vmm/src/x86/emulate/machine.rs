//! Operands: where they are, and reading and writing them.
//!
//! All operands of an instruction are found, and every fault they may raise is known,
//! before the first of them is read: a device register's read can't be taken back.

use super::fetch::{InstructionBytes, is_64_bit, linear};
use super::predecode::set_part;
use super::{EmulateError, MmioBus};
use crate::device::bus::Width;
use crate::memory::address::{Gpa, Gva, PAGE_SIZE};
use crate::memory::guest::GuestMemory;
use crate::x86::paging::{Access, translate};
use crate::x86::state::{CpuState, Gpr, SegmentName};
use iced_x86::{Instruction, OpKind, Register};

/// Where an operand is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// In a general-purpose register, `shift` bits up.
    Register { gpr: Gpr, shift: u32, width: Width },
    /// In the instruction.
    Immediate(u64),
    /// In the device page.
    Device { gpa: Gpa, width: Width },
    /// In RAM: `in_first` bytes at `first`, what is left of `width` at `second`.
    Ram { first: Gpa, in_first: usize, second: Gpa, width: Width },
}

/// The state that one instruction works on.
pub(super) struct Machine<'a> {
    pub(super) cpu: &'a mut dyn CpuState,
    pub(super) memory: &'a dyn GuestMemory,
    pub(super) bus: &'a mut dyn MmioBus,
    /// The page whose access made the exit.
    pub(super) device_page: Gpa,
    /// Whether an operand was found in it.
    pub(super) touches_device: bool,
    pub(super) bytes: InstructionBytes,
    /// What RSP has grown by when a memory operand's address is formed (POP).
    pub(super) popped: u64,
}

/// The general-purpose register that `register` is or is part of, how many bits up it
/// lies, and its width.
pub(super) fn gpr_of(register: Register) -> Option<(Gpr, u32, Width)> {
    if !register.is_gpr() {
        return None;
    }
    let gpr = *Gpr::ALL.get(register.full_register().number())?;
    let high = matches!(register, Register::AH | Register::BH | Register::CH | Register::DH);
    Some((gpr, if high { 8 } else { 0 }, Width::from_bytes(register.size() as u64)?))
}

fn segment_of(register: Register) -> Option<SegmentName> {
    Some(match register {
        Register::ES => SegmentName::Es,
        Register::CS => SegmentName::Cs,
        Register::SS => SegmentName::Ss,
        Register::DS => SegmentName::Ds,
        Register::FS => SegmentName::Fs,
        Register::GS => SegmentName::Gs,
        _ => return None,
    })
}

impl Machine<'_> {
    /// The error for an instruction that this emulator does not know.
    pub(super) fn undecodable(&self) -> EmulateError {
        self.bytes.undecodable(self.cpu)
    }

    /// Finds operand `index` of `instruction`.
    pub(super) fn operand(
        &mut self,
        instruction: &Instruction,
        index: u32,
        access: Access,
    ) -> Result<Place, EmulateError> {
        match instruction.op_kind(index) {
            OpKind::Register => {
                let register = instruction.op_register(index);
                if let Some((gpr, shift, width)) = gpr_of(register) {
                    return Ok(Place::Register { gpr, shift, width });
                }
                // A selector can be stored; loading one is more than a move.
                match segment_of(register) {
                    Some(name) if access == Access::Read => {
                        Ok(Place::Immediate(u64::from(self.cpu.segment(name).selector)))
                    }
                    _ => Err(self.undecodable()),
                }
            }
            OpKind::Memory
            | OpKind::MemorySegSI
            | OpKind::MemorySegESI
            | OpKind::MemorySegRSI
            | OpKind::MemoryESDI
            | OpKind::MemoryESEDI
            | OpKind::MemoryESRDI => self.memory_operand(instruction, index, 0, access),
            _ => match instruction.try_immediate(index) {
                Ok(value) => Ok(Place::Immediate(value)),
                Err(_) => Err(self.undecodable()),
            },
        }
    }

    /// Finds the memory operand `index` of `instruction`, `displacement` bytes further on.
    pub(super) fn memory_operand(
        &mut self,
        instruction: &Instruction,
        index: u32,
        displacement: u64,
        access: Access,
    ) -> Result<Place, EmulateError> {
        let width =
            Width::from_bytes(instruction.memory_size().size() as u64).ok_or_else(|| self.undecodable())?;
        let address = instruction
            .virtual_address(index, 0, |register, _, _| {
                if let Some(name) = segment_of(register) {
                    return Some(self.segment_base(name));
                }
                let (gpr, _, width) = gpr_of(register)?;
                let grown = if gpr == Gpr::Rsp { self.popped } else { 0 };
                Some(self.cpu.gpr(gpr).wrapping_add(grown) & width.all_ones())
            })
            .ok_or_else(|| self.undecodable())?;
        let stack = instruction.memory_segment() == Register::SS;
        self.locate(address.wrapping_add(displacement), width, access, stack)
    }

    /// Finds the place on the stack `offset` bytes above RSP.
    pub(super) fn stack_operand(
        &mut self,
        offset: u64,
        width: Width,
        access: Access,
    ) -> Result<Place, EmulateError> {
        let rsp = self.cpu.gpr(Gpr::Rsp).wrapping_add(offset) & self.stack_width().all_ones();
        let address = self.segment_base(SegmentName::Ss).wrapping_add(rsp);
        self.locate(address, width, access, true)
    }

    /// The width of the stack pointer.
    pub(super) fn stack_width(&self) -> Width {
        if is_64_bit(self.cpu) {
            Width::Qword
        } else if self.cpu.segment(SegmentName::Ss).is_big() {
            Width::Dword
        } else {
            Width::Word
        }
    }

    fn segment_base(&self, name: SegmentName) -> u64 {
        if is_64_bit(self.cpu) && !matches!(name, SegmentName::Fs | SegmentName::Gs) {
            0
        } else {
            self.cpu.segment(name).base
        }
    }

    fn locate(
        &mut self,
        address: u64,
        width: Width,
        access: Access,
        stack: bool,
    ) -> Result<Place, EmulateError> {
        let at = Gva::new(linear(self.cpu, address));
        let find =
            |at| translate(self.cpu, self.memory, at, access).map_err(|e| EmulateError::at(at, stack, e));
        let first = find(at)?;
        let in_first = width.bytes().min(PAGE_SIZE - at.page_offset());
        let second = if in_first < width.bytes() {
            find(Gva::new(linear(self.cpu, at.raw().wrapping_add(in_first))))?
        } else {
            first
        };
        match (first.page_base() == self.device_page, second.page_base() == self.device_page) {
            (true, true) if in_first == width.bytes() => {
                self.touches_device = true;
                Ok(Place::Device { gpa: first, width })
            }
            (false, false) => {
                let in_first = usize::try_from(in_first).map_err(|_| self.undecodable())?;
                Ok(Place::Ram { first, in_first, second, width })
            }
            // Half in a device: no driver does that.
            _ => Err(self.undecodable()),
        }
    }

    /// To be called when all operands are found and before the first is read: whether the
    /// instruction touches the page it was said to touch.
    pub(super) fn confirm(&self) -> Result<(), EmulateError> {
        if self.touches_device { Ok(()) } else { Err(EmulateError::Retry) }
    }

    /// Reads an operand, zero-extended.
    pub(super) fn load(&mut self, place: Place) -> Result<u64, EmulateError> {
        match place {
            Place::Register { gpr, shift, width } => Ok(self.cpu.gpr(gpr) >> shift & width.all_ones()),
            Place::Immediate(value) => Ok(value),
            Place::Device { gpa, width } => Ok(self.bus.read(gpa, width) & width.all_ones()),
            Place::Ram { first, in_first, second, width } => {
                let mut bytes = [0; 8];
                let (low, high) = halves(&mut bytes, width, in_first);
                self.memory.read(first, low)?;
                if !high.is_empty() {
                    self.memory.read(second, high)?;
                }
                Ok(u64::from_le_bytes(bytes))
            }
        }
    }

    /// Writes an operand, cut to its width.
    pub(super) fn store(&mut self, place: Place, value: u64) -> Result<(), EmulateError> {
        match place {
            Place::Register { gpr, shift, width } => {
                set_part(self.cpu, gpr, shift, width, value);
            }
            Place::Immediate(_) => return Err(self.undecodable()),
            Place::Device { gpa, width } => self.bus.write(gpa, width, value & width.all_ones()),
            Place::Ram { first, in_first, second, width } => {
                let mut bytes = value.to_le_bytes();
                let (low, high) = halves(&mut bytes, width, in_first);
                self.memory.write(first, low)?;
                if !high.is_empty() {
                    self.memory.write(second, high)?;
                }
            }
        }
        Ok(())
    }
}

/// The first `in_first` of the `width` bytes, and the rest.
fn halves(bytes: &mut [u8; 8], width: Width, in_first: usize) -> (&mut [u8], &mut [u8]) {
    let (low, rest) = bytes.split_at_mut(in_first.min(8));
    let len = (width as usize).saturating_sub(in_first).min(rest.len());
    (low, rest.split_at_mut(len).0)
}

/// The width of an operand; `None` for an immediate, which takes that of its partner.
pub(super) fn width_of(place: Place) -> Option<Width> {
    match place {
        Place::Register { width, .. } | Place::Device { width, .. } | Place::Ram { width, .. } => Some(width),
        Place::Immediate(_) => None,
    }
}
