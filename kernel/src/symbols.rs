//! Names for addresses in the image.
//!
//! The image reserves a section for the table of its own functions; `bulkhead-mkimage
//! symbols` fills it in after linking. The section begins with the number of entries;
//! then come entries of two `u32`, sorted: an address relative to the image's beginning,
//! and where in the section its name begins, which ends with a zero. All numbers are
//! little-endian. A table that was not filled in has no entries.
// UNSAFETY: places the table in a section of its own.
#![expect(unsafe_code, reason = "a section for the table")]

use bulkhead_arch::x86_64::boot::image_layout;
use core::fmt;
use rustc_demangle::demangle;

const SIZE: usize = 512 << 10;

#[used]
// SAFETY: the linker script keeps the section; it holds nothing else.
#[unsafe(link_section = ".symbols")]
static TABLE: [u8; SIZE] = [0; SIZE];

fn number(table: &[u8], index: usize) -> Option<usize> {
    let bytes = table.get(index * 4..)?.first_chunk()?;
    usize::try_from(u32::from_le_bytes(*bytes)).ok()
}

/// An address, printed with the function that it is in, if that is known.
pub(crate) struct Symbolised(pub(crate) u64);

impl Symbolised {
    fn find(&self) -> Option<(&'static str, u64)> {
        // The compiler must not believe that the table is what the source says.
        let table: &'static [u8] = core::hint::black_box(&TABLE);
        let layout = image_layout();
        if !(layout.text_start..layout.data_start).contains(&self.0) {
            return None;
        }
        let offset = usize::try_from(self.0 - layout.image_start).ok()?;
        let (mut low, mut high) = (0, number(table, 0)?.min(SIZE / 8));
        while low < high {
            let middle = (low + high) / 2;
            if number(table, 1 + 2 * middle)? <= offset { low = middle + 1 } else { high = middle }
        }
        let entry = low.checked_sub(1)?;
        let name = table.get(number(table, 2 + 2 * entry)?..)?;
        let name = name.split(|&byte| byte == 0).next()?;
        let start = number(table, 1 + 2 * entry)?;
        Some((core::str::from_utf8(name).ok()?, (offset - start) as u64))
    }
}

impl fmt::Display for Symbolised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.0)?;
        match self.find() {
            Some((name, offset)) => write!(f, " {:#}+{offset:#x}", demangle(name)),
            None => Ok(()),
        }
    }
}
