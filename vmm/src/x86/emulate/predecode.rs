//! The common moves, decoded without the decoder for all instructions, and carried out
//! without its operands.
//!
//! Drivers reach device memory by MOV and its extending forms nearly always, for that is what
//! compilers make of a volatile access. [`predecode`] knows those in 32-bit and 64-bit code
//! with no prefixes but 66 and REX; what else there is it leaves to iced-x86, which is slower
//! by a factor of ten or more.

use super::alu::sign_extend;
use super::{MmioBus, advance};
use crate::device::bus::Width;
use crate::memory::address::PAGE_SIZE;
use crate::x86::exit::NestedFault;
use crate::x86::state::{CpuState, Gpr, SegmentName};

/// A move between memory and a register, or of an immediate to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Move {
    /// Of the instruction, in bytes.
    pub(super) length: u8,
    /// Of the memory operand.
    pub(super) width: Width,
    pub(super) address: Address,
    pub(super) partner: Partner,
}

/// The address of a memory operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    /// None in 64-bit code, where those that come here have no base.
    pub(super) segment: Option<SegmentName>,
    pub(super) base: Option<Gpr>,
    /// A register and how many bits it is shifted up.
    pub(super) index: Option<(Gpr, u8)>,
    /// With RIP in it, where the instruction has it so.
    pub(super) displacement: u64,
}

/// The other operand of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Partner {
    /// Memory is loaded to a register's `width` bits from `shift` on, extended to them.
    To { gpr: Gpr, shift: u8, width: Width, signed: bool },
    /// A register from `shift` on is stored.
    From { gpr: Gpr, shift: u8 },
    /// A number is stored.
    Immediate(u64),
}

/// Writes `width` bits of a register from `shift` on. A 32-bit register's upper half becomes 0.
pub(super) fn set_part<C: CpuState + ?Sized>(cpu: &mut C, gpr: Gpr, shift: u32, width: Width, value: u64) {
    let kept = match width {
        Width::Byte | Width::Word => cpu.gpr(gpr) & !width.all_ones().wrapping_shl(shift),
        Width::Dword | Width::Qword => 0,
    };
    cpu.set_gpr(gpr, kept | (value & width.all_ones()).wrapping_shl(shift));
}

impl Move {
    /// Carries the move out at the place of `fault`, if that can be what it was for, and moves
    /// RIP on. If it can not, nothing is done and the answer is false.
    ///
    /// The guest's tables are not walked: the CPU has done that, and has found that the guest
    /// may do there what `fault` says. With the instruction that exited, this is exact. If
    /// another one has taken its place since, it still does no more than read or write, as was
    /// allowed, in the page where it was allowed.
    pub(super) fn carry_out<C: CpuState, B: MmioBus>(
        &self,
        cpu: &mut C,
        fault: &NestedFault,
        bus: &mut B,
    ) -> bool {
        let offset = self.address.page_offset(cpu);
        let writes = !matches!(self.partner, Partner::To { .. });
        if offset != fault.gpa.page_offset()
            || offset > PAGE_SIZE - self.width.bytes()
            || writes != fault.write
        {
            return false;
        }
        let mask = self.width.all_ones();
        match self.partner {
            Partner::To { gpr, shift, width, signed } => {
                let value = bus.read(fault.gpa, self.width) & mask;
                let value = if signed { sign_extend(self.width, value) } else { value };
                set_part(cpu, gpr, shift.into(), width, value);
            }
            Partner::From { gpr, shift } => {
                bus.write(fault.gpa, self.width, cpu.gpr(gpr).wrapping_shr(shift.into()) & mask)
            }
            Partner::Immediate(value) => bus.write(fault.gpa, self.width, value & mask),
        }
        advance(cpu, self.length);
        true
    }
}

impl Address {
    /// The linear address's offset in its page, which is the same for addresses of 32 bits and
    /// of 64.
    fn page_offset<C: CpuState>(&self, cpu: &C) -> u64 {
        let mut address = self.displacement;
        if let Some(base) = self.base {
            address = address.wrapping_add(cpu.gpr(base));
        }
        if let Some((index, shift)) = self.index {
            address = address.wrapping_add(cpu.gpr(index).wrapping_shl(shift.into()));
        }
        if let Some(segment) = self.segment {
            address = address.wrapping_add(cpu.segment(segment).base);
        }
        address % PAGE_SIZE
    }
}

/// Takes numbers from the front of the instruction.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn u8(&mut self) -> Option<u8> {
        let byte = self.bytes.get(self.at).copied();
        self.at += 1;
        byte
    }

    /// A little-endian number of `width`.
    fn number(&mut self, width: Width) -> Option<u64> {
        (0..width.bytes()).try_fold(0, |value, n| Some(value | u64::from(self.u8()?) << (8 * n)))
    }

    /// The same, sign-extended.
    fn signed(&mut self, width: Width) -> Option<u64> {
        self.number(width).map(|value| sign_extend(width, value))
    }
}

/// The register of a field of 3 bits and its extension by REX.
fn gpr(field: u8, extension: bool) -> Option<Gpr> {
    Gpr::ALL.get(usize::from(field & 7 | u8::from(extension) << 3)).copied()
}

/// The move that `bytes` begin with, if it is one of those that are known here. `rip` is where
/// they are; `bits` is the width of code.
pub(super) fn predecode(bits: u32, rip: u64, bytes: &[u8]) -> Option<Move> {
    let long = match bits {
        32 => false,
        64 => true,
        _ => return None,
    };
    let r = &mut Reader { bytes, at: 0 };
    let mut opcode = r.u8()?;
    let narrow = opcode == 0x66;
    if narrow {
        opcode = r.u8()?;
    }
    let rex = if long && opcode & 0xf0 == 0x40 { core::mem::replace(&mut opcode, r.u8()?) } else { 0 };
    let whole = if rex & 8 != 0 {
        Width::Qword
    } else if narrow {
        Width::Word
    } else {
        Width::Dword
    };
    // Bit 0 of most of these opcodes tells bytes from the operand size.
    let by_opcode = |opcode| if opcode & 1 == 0 { Width::Byte } else { whole };
    let (width, kind) = match opcode {
        0x88 | 0x89 | 0xa2 | 0xa3 => (by_opcode(opcode), Kind::Store),
        0x8a | 0x8b | 0xa0 | 0xa1 => {
            (by_opcode(opcode), Kind::Load { width: by_opcode(opcode), signed: false })
        }
        0xc6 | 0xc7 => (by_opcode(opcode), Kind::Immediate),
        0x63 if long && rex & 8 != 0 => (Width::Dword, Kind::Load { width: whole, signed: true }),
        0x0f => {
            let second = r.u8()?;
            let width = if second & 1 == 0 { Width::Byte } else { Width::Word };
            match second {
                0xb6 | 0xb7 => (width, Kind::Load { width: whole, signed: false }),
                0xbe | 0xbf => (width, Kind::Load { width: whole, signed: true }),
                _ => return None,
            }
        }
        _ => return None,
    };

    let (address, field, relative) = if matches!(opcode, 0xa0..=0xa3) {
        let displacement = r.number(if long { Width::Qword } else { Width::Dword })?;
        (
            Address { segment: (!long).then_some(SegmentName::Ds), base: None, index: None, displacement },
            0,
            false,
        )
    } else {
        let modrm = r.u8()?;
        let (address, relative) = memory_operand(r, long, modrm, rex)?;
        (address, modrm >> 3 & 7, relative)
    };
    // Without REX the numbers 4 to 7 are the second bytes of the first four registers.
    let register = |width| match (width, field) {
        (Width::Byte, 4..) if rex == 0 => Some((gpr(field - 4, false)?, 8)),
        _ => Some((gpr(field, rex & 4 != 0 && !matches!(opcode, 0xa0..=0xa3))?, 0)),
    };
    let partner = match kind {
        Kind::Load { width, signed } => {
            let (gpr, shift) = register(width)?;
            Partner::To { gpr, shift, width, signed }
        }
        Kind::Store => {
            let (gpr, shift) = register(width)?;
            Partner::From { gpr, shift }
        }
        Kind::Immediate if field == 0 => {
            Partner::Immediate(r.signed(if width == Width::Qword { Width::Dword } else { width })?)
        }
        Kind::Immediate => return None,
    };
    let length = u8::try_from(r.at).ok()?;
    let next = if relative { rip.wrapping_add(length.into()) } else { 0 };
    let address = Address { displacement: address.displacement.wrapping_add(next), ..address };
    Some(Move { length, width, address, partner })
}

/// What a move's opcode says of its partner.
enum Kind {
    Load { width: Width, signed: bool },
    Store,
    Immediate,
}

/// The memory operand of `modrm`, and whether it is relative to the next instruction (AMD APM
/// vol. 3, 1.4.2 and 1.4.3, table A-35).
fn memory_operand(r: &mut Reader<'_>, long: bool, modrm: u8, rex: u8) -> Option<(Address, bool)> {
    let (mode, rm) = (modrm >> 6, modrm & 7);
    if mode == 3 {
        return None;
    }
    let (mut base, mut index) = (None, None);
    // Base 5 without a displacement is none, with one of 32 bits.
    let mut absolute = mode == 0 && rm == 5;
    let relative = absolute && long;
    if rm == 4 {
        let sib = r.u8()?;
        absolute = mode == 0 && sib & 7 == 5;
        index = gpr(sib >> 3, rex & 2 != 0).filter(|r| *r != Gpr::Rsp).map(|gpr| (gpr, sib >> 6));
        if !absolute {
            base = Some(gpr(sib, rex & 1 != 0)?);
        }
    } else if !absolute {
        base = Some(gpr(rm, rex & 1 != 0)?);
    }
    let displacement = match mode {
        _ if absolute => r.signed(Width::Dword)?,
        1 => r.signed(Width::Byte)?,
        2 => r.signed(Width::Dword)?,
        _ => 0,
    };
    let stack = matches!(base, Some(Gpr::Rsp | Gpr::Rbp));
    let segment = if stack { SegmentName::Ss } else { SegmentName::Ds };
    Some((Address { segment: (!long).then_some(segment), base, index, displacement }, relative))
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "tests cut numbers on purpose")]
mod tests;
