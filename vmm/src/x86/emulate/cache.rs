//! Decoded instructions, kept for each vCPU.
//!
//! What an instruction is decoded to depends on its bytes, the width of code and, for operands
//! relative to RIP, where it is; on nothing else. So an entry holds these three, and what was
//! decoded from them. The bytes are fetched anew at each exit and an entry is used only if they
//! are equal: there is nothing that could make it stale, and nobody has to throw it away when
//! the guest writes code or changes its page tables.

use super::EmulateError;
use super::fetch::{InstructionBytes, LONGEST, code_bits, fetch, fetch_quickly, fetch_whole};
use super::predecode::{Move, predecode};
use crate::memory::guest::GuestMemory;
use crate::x86::state::CpuState;
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction};

/// How many instructions are kept. A kernel that runs has fewer places than that which touch
/// a device often.
const ENTRIES: usize = 16;

/// What an instruction is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Form {
    /// One of the common moves.
    Move(Move),
    /// Anything else that is an instruction.
    Other(Instruction),
}

/// A decoded instruction.
#[derive(Debug, Clone, Copy)]
pub struct Decoded {
    pub(super) form: Form,
    /// Its own bytes, without what is behind it.
    pub(super) bytes: InstructionBytes,
}

impl Decoded {
    /// In bytes.
    pub(super) fn length(&self) -> u8 {
        self.bytes.count()
    }

    /// As the decoder for all instructions has it.
    pub(super) fn instruction(&self, cpu: &dyn CpuState) -> Result<Instruction, EmulateError> {
        match self.form {
            Form::Move(_) => {
                decode_all(code_bits(cpu), cpu.rip(), &self.bytes).map_err(|_| self.bytes.undecodable(cpu))
            }
            Form::Other(instruction) => Ok(instruction),
        }
    }
}

fn decode_all(bits: u32, rip: u64, bytes: &InstructionBytes) -> Result<Instruction, DecoderError> {
    let mut decoder = Decoder::try_with_ip(bits, bytes.as_slice(), rip, DecoderOptions::NONE)
        .map_err(|_| DecoderError::InvalidInstruction)?;
    let instruction = decoder.decode();
    if instruction.is_invalid() { Err(decoder.last_error()) } else { Ok(instruction) }
}

/// What `bytes` begin with, and its length.
fn decode_bytes(bits: u32, rip: u64, bytes: &InstructionBytes) -> Result<(Form, usize), DecoderError> {
    match predecode(bits, rip, bytes.as_slice()) {
        Some(found) => Ok((Form::Move(found), usize::from(found.length))),
        None => decode_all(bits, rip, bytes).map(|i| (Form::Other(i), i.len())),
    }
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    rip: u64,
    /// 0 in an entry that holds nothing.
    bits: u32,
    /// Ones where the instruction has bytes.
    mask: u128,
    decoded: Decoded,
}

/// The instructions that made a vCPU exit of late.
#[derive(Debug)]
pub struct DecodeCache {
    entries: [Entry; ENTRIES],
}

impl Default for DecodeCache {
    fn default() -> Self {
        let decoded =
            Decoded { form: Form::Other(Instruction::default()), bytes: InstructionBytes::default() };
        Self { entries: [Entry { rip: 0, bits: 0, mask: 0, decoded }; ENTRIES] }
    }
}

impl DecodeCache {
    /// Decodes the instruction at CS:RIP. `assist` are bytes that the CPU delivered with the
    /// exit; where they are absent or too few, they are fetched.
    ///
    /// # Errors
    /// [`EmulateError::Undecodable`], and what comes of a fetch that the guest's page tables
    /// do not let through.
    #[inline]
    pub fn decode<C: CpuState, M: GuestMemory>(
        &mut self,
        cpu: &C,
        memory: &M,
        assist: Option<&[u8]>,
    ) -> Result<&Decoded, EmulateError> {
        let bytes = match assist {
            Some(delivered @ [_, ..]) => Some(InstructionBytes::new(delivered)),
            _ => fetch_quickly(cpu, memory),
        };
        let entry = self.entry(cpu.rip());
        if bytes.as_ref().is_some_and(|bytes| entry.holds(code_bits(cpu), cpu.rip(), bytes)) {
            Ok(&entry.decoded)
        } else {
            entry.fill(cpu, memory, bytes)
        }
    }

    /// The one entry for an instruction at `rip`.
    fn entry(&mut self, rip: u64) -> &mut Entry {
        // Less than ENTRIES, so that this fits and the index is right.
        &mut self.entries[usize::try_from((rip ^ rip >> 4) % ENTRIES as u64).unwrap_or_default()]
    }
}

impl Entry {
    fn holds(&self, bits: u32, rip: u64, bytes: &InstructionBytes) -> bool {
        let kept = &self.decoded.bytes;
        self.rip == rip
            && self.bits == bits
            && (kept.number() ^ bytes.number()) & self.mask == 0
            && kept.len() <= bytes.len()
    }

    /// Decodes the instruction at CS:RIP, that begins with `bytes`, if this is not it already.
    #[cold]
    fn fill(
        &mut self,
        cpu: &dyn CpuState,
        memory: &dyn GuestMemory,
        bytes: Option<InstructionBytes>,
    ) -> Result<&Decoded, EmulateError> {
        let (bits, rip) = (code_bits(cpu), cpu.rip());
        let mut bytes = match bytes {
            Some(bytes) => bytes,
            None => fetch(cpu, memory)?,
        };
        if !self.holds(bits, rip, &bytes) {
            let mut decoded = decode_bytes(bits, rip, &bytes);
            if decoded.as_ref().is_err_and(|e| *e == DecoderError::NoMoreBytes) && bytes.len() < LONGEST {
                // It goes on in the next page. Only now may that page's absence be a fault.
                bytes = fetch_whole(cpu, memory)?;
                decoded = decode_bytes(bits, rip, &bytes);
            }
            let (form, length) = decoded.map_err(|_| bytes.undecodable(cpu))?;
            let bytes = InstructionBytes::new(bytes.as_slice().get(..length).unwrap_or_default());
            *self = Self { rip, bits, mask: bytes.mask(), decoded: Decoded { form, bytes } };
        }
        Ok(&self.decoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::address::Gpa;
    use crate::memory::guest::fake::FakeMemory;
    use crate::x86::emulate::fake::FakeCpu;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// Instructions that begin alike, end in zeros, differ by mode, or are none.
    const CODE: [&[u8]; 9] = [
        &[0x8b, 0x07],
        &[0x48, 0x8b, 0x07],
        &[0x8b, 0x05, 0, 0, 0, 0],
        &[0xc7, 0x47, 0x10, 0, 0, 0, 0],
        &[0xc7, 0x47, 0x10, 1, 0, 0, 0],
        &[0xf0, 0x0f, 0xba, 0x2f, 0],
        &[0xf3, 0xa5],
        &[0x0f, 0x0b],
        &[0x0f, 0xff, 0xff],
    ];

    fn cpu(bits: u32, rip: u64) -> FakeCpu {
        let mut cpu = if bits == 64 { FakeCpu::bits64(0x1000) } else { FakeCpu::bits32() };
        if bits == 16 {
            cpu = FakeCpu::bits16();
        }
        cpu.rip = rip;
        cpu
    }

    proptest! {
        /// Whatever was decoded before, the answer is that of a cache that is empty.
        #[test]
        fn remembers_nothing_wrong(steps in prop::collection::vec((
            prop::sample::select(&[16u32, 32, 64][..]),
            // Places that share an entry, two of them at the end of a page.
            prop::sample::select(&[0x8000u64, 0x8011, 0x8100, 0x8fff, 0x8ffd][..]),
            prop::sample::select(&CODE[..]),
            prop::option::of(0usize..16),
        ), 1..60)) {
            let memory = FakeMemory::new(0, 0x10000);
            memory.write(Gpa::new(0x1000), &0x2007u64.to_le_bytes()).unwrap();
            memory.write(Gpa::new(0x2000), &0x87u64.to_le_bytes()).unwrap();
            let mut cache = DecodeCache::default();
            for (bits, rip, code, assist) in steps {
                memory.write(Gpa::new(rip), code).unwrap();
                let cpu = cpu(bits, rip);
                let assist: Option<Vec<u8>> = assist.map(|n| code.iter().copied().take(n).collect());
                let got = cache.decode(&cpu, &memory, assist.as_deref());
                let mut empty = DecodeCache::default();
                let want = empty.decode(&cpu, &memory, assist.as_deref());
                prop_assert_eq!(std::format!("{got:?}"), std::format!("{want:?}"));
            }
        }
    }

    #[test]
    fn keeps_what_it_has_decoded() {
        let memory = FakeMemory::new(0, 0x10000);
        memory.write(Gpa::new(0x8000), &[0xf0, 0x0f, 0xba, 0x2f, 0]).unwrap();
        let mut cache = DecodeCache::default();
        let cpu = cpu(32, 0x8000);
        let bytes = fetch(&cpu, &memory).unwrap();
        assert!(!cache.entry(0x8000).holds(32, 0x8000, &bytes));
        cache.decode(&cpu, &memory, None).unwrap();
        let entry = cache.entry(0x8000);
        assert!(entry.holds(32, 0x8000, &bytes));
        assert!(!entry.holds(16, 0x8000, &bytes));
        assert!(!entry.holds(32, 0x8110, &bytes));
        assert!(!entry.holds(32, 0x8000, &InstructionBytes::new(&bytes.as_slice()[..4])));
    }
}
