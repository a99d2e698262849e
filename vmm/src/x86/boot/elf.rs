//! ELF files of both classes (System V ABI, "Object Files"): segments to load, and notes.

use super::e820::FreeSpace;
use super::image::{array, bytes, check_range};
use super::{BootError, Image, Piece, check_free};
use crate::memory::address::Gpa;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use bulkhead_abi::message::LoadKind;

/// The most program headers that are looked at; kernels have a handful.
const MAX_HEADERS: u64 = 128;
/// How much of a segment of notes is looked at, in bytes.
const MAX_NOTES: u64 = 16 * 1024;
const EM_386: u64 = 3;
const EM_X86_64: u64 = 62;
const PT_LOAD: u64 = 1;
const PT_NOTE: u64 = 4;

/// What an ELF file says of itself.
#[derive(Debug)]
pub(super) struct Elf {
    /// Whether it is one of 32 bits.
    pub(super) is_32_bit: bool,
    /// The entry point, a virtual address.
    pub(super) entry: u64,
    headers: Vec<ProgramHeader>,
}

#[derive(Debug)]
struct ProgramHeader {
    kind: u64,
    offset: u64,
    vaddr: u64,
    paddr: u64,
    filesz: u64,
    memsz: u64,
    align: u64,
}

/// The little-endian number of `size` bytes at `at`.
pub(super) fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    let bytes = bytes.get(at..).unwrap_or_default().iter().take(size);
    bytes.rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

impl Elf {
    /// Reads the headers of `file`; `None` if it is no ELF.
    ///
    /// # Errors
    /// When it is one that is not for x86, or has headers that cannot be.
    pub(super) fn read(file: &dyn Image) -> Result<Option<Self>, BootError> {
        if file.size() < 52 || array::<4>(file, 0)? != *b"\x7fELF" {
            return Ok(None);
        }
        let refuse =
            |field, value, allowed| Err(BootError::Field { part: "ELF header", field, value, allowed });
        let ident: [u8; 6] = array(file, 0)?;
        // Offsets and sizes in the file header, then in program headers.
        let (is_32_bit, size, [phoff, phentsize], entry_size) = match ident[4] {
            1 => (true, 4, [28, 42], 32),
            2 => (false, 8, [32, 54], 56),
            other => return refuse("EI_CLASS", other.into(), "1 (32 bits), 2 (64 bits)"),
        };
        if ident[5] != 1 {
            return refuse("EI_DATA", ident[5].into(), "1 (little-endian)");
        }
        let header = bytes(file, 0, if is_32_bit { 52 } else { 64 })?;
        let machine = number(&header, 18, 2);
        if ![EM_386, EM_X86_64].contains(&machine) {
            return refuse("e_machine", machine, "3 (80386), 62 (x86-64)");
        }
        if number(&header, phentsize, 2) != entry_size {
            return refuse("e_phentsize", number(&header, phentsize, 2), "32 in a file of 32 bits, else 56");
        }
        let count = number(&header, phentsize + 2, 2);
        if !(1..=MAX_HEADERS).contains(&count) {
            return refuse("e_phnum", count, "1 to 128");
        }
        let [kind, offset, vaddr, paddr, filesz, memsz, align] =
            if is_32_bit { [0, 4, 8, 12, 16, 20, 28] } else { [0, 8, 16, 24, 32, 40, 48] };
        let mut headers = Vec::new();
        for index in 0..count {
            let at = number(&header, phoff, size).saturating_add(index * entry_size);
            let entry = bytes(file, at, if is_32_bit { 32 } else { 56 })?;
            headers.push(ProgramHeader {
                kind: number(&entry, kind, 4),
                offset: number(&entry, offset, size),
                vaddr: number(&entry, vaddr, size),
                paddr: number(&entry, paddr, size),
                filesz: number(&entry, filesz, size),
                memsz: number(&entry, memsz, size),
                align: number(&entry, align, size),
            });
        }
        Ok(Some(Self { is_32_bit, entry: number(&header, 24, size), headers }))
    }

    /// Takes the places of what is to be loaded, each at its physical address.
    ///
    /// # Errors
    /// When a segment is impossible, or its place is not free.
    pub(super) fn load(&self, file: &dyn Image, space: &mut FreeSpace) -> Result<VecDeque<Piece>, BootError> {
        let refuse =
            |field, value, allowed| Err(BootError::Field { part: "program headers", field, value, allowed });
        let mut segments: Vec<_> = self.headers.iter().filter(|h| h.kind == PT_LOAD && h.memsz > 0).collect();
        segments.sort_by_key(|segment| segment.paddr);
        let mut end = 0;
        for segment in &segments {
            if segment.filesz > segment.memsz {
                return refuse("p_filesz", segment.filesz, "at most p_memsz");
            }
            check_range(file, segment.offset, segment.filesz)?;
            if segment.paddr < end {
                return refuse("p_paddr", segment.paddr, "memory that no other segment has");
            }
            // Two may share a page, so all are looked at before any is taken.
            end = check_free(space, segment.paddr, segment.memsz)?;
        }
        for segment in &segments {
            space.remove(Gpa::new(segment.paddr), segment.memsz);
        }
        let pieces = segments.into_iter().filter(|segment| segment.filesz > 0).map(|segment| Piece {
            file: LoadKind::KERNEL,
            offset: segment.offset,
            to: Gpa::new(segment.paddr),
            len: segment.filesz,
        });
        Ok(pieces.collect())
    }

    /// Whether the byte at this physical address is loaded.
    pub(super) fn is_loaded(&self, address: u64) -> bool {
        let mut loaded = self.headers.iter().filter(|header| header.kind == PT_LOAD);
        loaded.any(|header| address.checked_sub(header.paddr).is_some_and(|offset| offset < header.filesz))
    }

    /// The physical address of the entry point, which the header has as a virtual one; `None` if
    /// it is not loaded.
    pub(super) fn loaded_entry(&self) -> Option<u64> {
        self.headers.iter().filter(|header| header.kind == PT_LOAD).find_map(|header| {
            let offset = self.entry.checked_sub(header.vaddr).filter(|offset| *offset < header.filesz)?;
            header.paddr.checked_add(offset)
        })
    }

    /// What the first note of this name (with its final zero) and type says. Notes that cannot be
    /// read are none.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn note(
        &self,
        file: &dyn Image,
        name: &[u8],
        kind: u64,
    ) -> Result<Option<Vec<u8>>, BootError> {
        for header in self.headers.iter().filter(|header| header.kind == PT_NOTE) {
            let len = header.filesz.min(MAX_NOTES);
            if check_range(file, header.offset, len).is_err() {
                continue;
            }
            let notes = bytes(file, header.offset, usize::try_from(len).unwrap_or(0))?;
            let found = Notes { rest: &notes, align: if header.align == 8 { 8 } else { 4 } }
                .find(|(this_name, this_kind, _)| *this_name == name && *this_kind == kind);
            if let Some((.., description)) = found {
                return Ok(Some(description.to_vec()));
            }
        }
        Ok(None)
    }
}

/// Goes through a segment of notes: name, type and description.
struct Notes<'a> {
    rest: &'a [u8],
    align: usize,
}

impl<'a> Iterator for Notes<'a> {
    type Item = (&'a [u8], u64, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (header, _) = self.rest.split_at_checked(12)?;
        let size = |at| usize::try_from(number(header, at, 4)).ok();
        let name_end = size(0)?.checked_add(12)?;
        let start = name_end.checked_next_multiple_of(self.align)?;
        let end = start.checked_add(size(4)?)?;
        let note = (self.rest.get(12..name_end)?, number(header, 8, 4), self.rest.get(start..end)?);
        // The last one's padding may be missing.
        let next = end.checked_next_multiple_of(self.align)?;
        self.rest = self.rest.get(next..).unwrap_or_default();
        Some(note)
    }
}

#[cfg(test)]
mod tests;
