//! Fills in the hypervisor image's table of its own functions, for backtraces.
//!
//! The image reserves the section `.symbols` (its format is described in the kernel's
//! `symbols.rs`); the table is made from the ELF file's symbol table, after linking.

use anyhow::{Context as _, Result, bail, ensure};
use std::ops::Range;

const SECTION_HEADER_SIZE: usize = 64;
const SYMBOL_SIZE: usize = 24;
const TYPE_SYMTAB: u32 = 2;
const SYMBOL_FUNCTION: u8 = 2;
const SYMBOL_NO_TYPE: u8 = 0;
const FLAG_EXECUTABLE: u64 = 4;
const TABLE: &str = ".symbols";

/// Fills in the table of the ELF file `elf`; returns how many functions it names. Doing
/// it again changes nothing.
///
/// # Errors
/// When this is no 64-bit little-endian ELF file, has no symbols or no section
/// `.symbols`, or the table does not fit there.
pub(crate) fn embed(elf: &mut [u8]) -> Result<usize> {
    let (range, table, count) = {
        let file = Elf::new(elf)?;
        let base = file.lowest_address()?;
        let functions = file.functions(base)?;
        let section =
            file.section_named(TABLE).with_context(|| format!("the image has no section {TABLE}"))?;
        (section.range()?, table(&functions)?, functions.len())
    };
    let place = elf.get_mut(range).with_context(|| format!("section {TABLE} lies outside the file"))?;
    ensure!(
        table.len() <= place.len(),
        "the symbols need {} bytes, section {TABLE} has {}",
        table.len(),
        place.len()
    );
    place.fill(0);
    place[..table.len()].copy_from_slice(&table);
    Ok(count)
}

/// A function: where it begins, from the image's beginning, and its name as linked.
type Function<'a> = (u32, &'a str);

/// The table as the kernel reads it.
fn table(functions: &[Function<'_>]) -> Result<Vec<u8>> {
    let mut table = u32::try_from(functions.len())?.to_le_bytes().to_vec();
    let mut names = Vec::new();
    let names_start = 4 + 8 * functions.len();
    for (offset, name) in functions {
        table.extend(offset.to_le_bytes());
        table.extend(u32::try_from(names_start + names.len())?.to_le_bytes());
        names.extend(name.bytes());
        names.push(0);
    }
    table.extend(names);
    Ok(table)
}

/// A section header (System V ABI, chapter 4).
#[derive(Clone, Copy)]
struct Section {
    name: usize,
    kind: u32,
    flags: u64,
    address: u64,
    offset: u64,
    size: u64,
    link: usize,
}

impl Section {
    fn range(&self) -> Result<Range<usize>> {
        let end = self.offset.checked_add(self.size).context("a section wraps")?;
        Ok(usize::try_from(self.offset)?..usize::try_from(end)?)
    }
}

struct Elf<'a> {
    bytes: &'a [u8],
    sections: Vec<Section>,
    names: &'a [u8],
}

impl<'a> Elf<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self> {
        ensure!(bytes.starts_with(b"\x7fELF\x02\x01"), "this is no 64-bit little-endian ELF file");
        let start = usize::try_from(u64_at(bytes, 40)?)?;
        let size = usize::from(u16_at(bytes, 58)?);
        ensure!(size == SECTION_HEADER_SIZE, "section headers have {size} bytes instead of 64");
        let headers = bytes.get(start..).context("the section headers lie outside the file")?;
        let headers = headers.chunks_exact(size).take(usize::from(u16_at(bytes, 60)?));
        let sections = headers.map(|h| {
            Ok(Section {
                name: usize::try_from(u32_at(h, 0)?)?,
                kind: u32_at(h, 4)?,
                flags: u64_at(h, 8)?,
                address: u64_at(h, 16)?,
                offset: u64_at(h, 24)?,
                size: u64_at(h, 32)?,
                link: usize::try_from(u32_at(h, 40)?)?,
            })
        });
        let sections = sections.collect::<Result<Vec<_>>>()?;
        let mut elf = Self { bytes, sections, names: &[] };
        elf.names = elf.contents(usize::from(u16_at(bytes, 62)?))?;
        Ok(elf)
    }

    fn contents(&self, section: usize) -> Result<&'a [u8]> {
        let section = self.sections.get(section).context("a section that is referred to is missing")?;
        self.bytes.get(section.range()?).context("a section lies outside the file")
    }

    fn section_named(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|s| text_at(self.names, s.name) == Some(name))
    }

    /// The address that the image's parts are counted from.
    fn lowest_address(&self) -> Result<u64> {
        let loaded = self.sections.iter().filter(|s| s.address != 0).map(|s| s.address);
        loaded.min().context("no section of the image is loaded")
    }

    /// All named code, sorted, one name for an address.
    fn functions(&self, base: u64) -> Result<Vec<Function<'a>>> {
        let Some(symbols) = self.sections.iter().position(|s| s.kind == TYPE_SYMTAB) else {
            bail!("the image has no symbols: was it stripped?");
        };
        let names = self.contents(self.sections[symbols].link)?;
        let mut functions = Vec::new();
        for symbol in self.contents(symbols)?.chunks_exact(SYMBOL_SIZE) {
            let section = self.sections.get(usize::from(u16_at(symbol, 6)?));
            let executable = section.is_some_and(|s| s.flags & FLAG_EXECUTABLE != 0);
            let name = text_at(names, usize::try_from(u32_at(symbol, 0)?)?).unwrap_or_default();
            // Assembly has labels without a type.
            let kind = symbol[4] & 15;
            if !executable || name.is_empty() || (kind != SYMBOL_FUNCTION && kind != SYMBOL_NO_TYPE) {
                continue;
            }
            if let Some(offset) = u64_at(symbol, 8)?.checked_sub(base) {
                functions.push((u32::try_from(offset)?, name));
            }
        }
        functions.sort_unstable();
        functions.dedup_by_key(|function| function.0);
        Ok(functions)
    }
}

fn bytes_at<const N: usize>(bytes: &[u8], offset: usize) -> Result<[u8; N]> {
    let field = bytes.get(offset..).and_then(|rest| rest.first_chunk());
    field.copied().context("the ELF file is cut short")
}

fn u16_at(bytes: &[u8], offset: usize) -> Result<u16> {
    Ok(u16::from_le_bytes(bytes_at(bytes, offset)?))
}

fn u32_at(bytes: &[u8], offset: usize) -> Result<u32> {
    Ok(u32::from_le_bytes(bytes_at(bytes, offset)?))
}

fn u64_at(bytes: &[u8], offset: usize) -> Result<u64> {
    Ok(u64::from_le_bytes(bytes_at(bytes, offset)?))
}

fn text_at(strings: &[u8], offset: usize) -> Option<&str> {
    let rest = strings.get(offset..)?;
    std::str::from_utf8(rest.split(|&byte| byte == 0).next()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BASE: u64 = 0xffff_ffff_8020_0000;

    /// An ELF file with a code section at `BASE + 0x1000`, a table section of
    /// `table_size` bytes at `BASE`, and the symbols (name, address, type).
    fn elf(table_size: usize, symbols: &[(&str, u64, u8)]) -> Vec<u8> {
        let section_names = b"\0.symbols\0.text\0.symtab\0.strtab\0";
        let mut strings = vec![0];
        let mut symtab = vec![0; SYMBOL_SIZE];
        for (name, address, kind) in symbols {
            symtab.extend(u32::try_from(strings.len()).unwrap().to_le_bytes());
            symtab.extend([*kind, 0, 2, 0]);
            symtab.extend(address.to_le_bytes());
            symtab.extend([0; 8]);
            strings.extend(name.bytes());
            strings.push(0);
        }
        let table = vec![0xaa; table_size];
        /// Name, type, flags, address, content, link.
        type Section<'a> = (usize, u32, u64, u64, &'a [u8], u32);
        let parts: [Section<'_>; 6] = [
            (0, 0, 0, 0, &[], 0),
            (1, 1, 2, BASE, &table, 0),
            (10, 1, 6, BASE + 0x1000, &[0x90; 16], 0),
            (16, TYPE_SYMTAB, 0, 0, &symtab, 4),
            (24, 3, 0, 0, &strings, 0),
            (24, 3, 0, 0, section_names, 0),
        ];
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64, 0);
        let mut headers = Vec::new();
        for (name, kind, flags, address, bytes, link) in parts {
            headers.extend(u32::try_from(name).unwrap().to_le_bytes());
            headers.extend(kind.to_le_bytes());
            for value in [flags, address, file.len() as u64, bytes.len() as u64] {
                headers.extend(value.to_le_bytes());
            }
            headers.extend(link.to_le_bytes());
            headers.extend([0; 20]);
            file.extend(bytes);
        }
        let start = file.len() as u64;
        file[40..48].copy_from_slice(&start.to_le_bytes());
        file[58..64].copy_from_slice(&[64, 0, 6, 0, 5, 0]);
        file.extend(headers);
        file
    }

    #[test]
    fn functions_are_sorted_and_named_once() {
        let symbols = [
            ("later", BASE + 0x1008, 0x12),
            ("first", BASE + 0x1000, 0x02),
            ("also_first", BASE + 0x1000, 0x00),
            ("data", BASE + 0x1004, 0x01),
        ];
        let mut file = elf(64, &symbols);
        assert_eq!(embed(&mut file).unwrap(), 2);
        let table = &file[64..128];
        let numbers: Vec<_> = table[..20].chunks(4).map(|n| u32_at(n, 0).unwrap()).collect();
        assert_eq!(numbers, [2, 0x1000, 20, 0x1008, 31]);
        assert_eq!(text_at(table, 20), Some("also_first"));
        assert_eq!(text_at(table, 31), Some("later"));
        let once = file.clone();
        embed(&mut file).unwrap();
        assert_eq!(file, once);
    }

    #[test]
    fn what_does_not_fit_or_is_missing_is_told_and_nothing_changes() {
        let mut file = elf(8, &[("f", BASE + 0x1000, 2)]);
        let before = file.clone();
        assert_eq!(
            embed(&mut file).unwrap_err().to_string(),
            "the symbols need 14 bytes, section .symbols has 8"
        );
        assert_eq!(file, before);
        let error = embed(&mut b"\x7fELF\x01\x01".to_vec()).unwrap_err().to_string();
        assert_eq!(error, "this is no 64-bit little-endian ELF file");
    }

    proptest! {
        #[test]
        fn broken_files_are_refused(cut in 0usize..600, at in 0usize..600, byte: u8) {
            let mut file = elf(64, &[("f", BASE + 0x1000, 2)]);
            if let Some(place) = file.get_mut(at) {
                *place = byte;
            }
            file.truncate(cut);
            // Whatever it says, it says it without a panic.
            let _ = embed(&mut file);
        }
    }
}
