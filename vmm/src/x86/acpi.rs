//! ACPI tables: the root cell's (edited copies) and a guest cell's (generated).
//!
//! The root cell keeps its firmware's tables where they are; what it must see differently
//! comes from tables of ours beside them ([`root`]). A guest cell has only ours
//! ([`guest`]). Chapters and tables named here are those of the ACPI specification 6.5.

pub mod guest;
pub mod root;
pub mod sleep;

use acpi_tables::sdt::Sdt;
use core::fmt;

/// Length of the header of every table but RSDP and FACS (5.2.6).
const HEADER: usize = 36;
/// Who made our tables.
const OEM_ID: [u8; 6] = *b"BLKHD ";
const OEM_TABLE_ID: [u8; 8] = *b"BULKHEAD";
const OEM_REVISION: u32 = 1;

/// A table's signature.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signature(pub [u8; 4]);

impl Signature {
    /// Multiple APIC description table.
    pub const MADT: Self = Self(*b"APIC");
    /// DMA remapping, Intel.
    pub const DMAR: Self = Self(*b"DMAR");
    /// I/O virtualization reporting structure, AMD.
    pub const IVRS: Self = Self(*b"IVRS");
    /// Our own: the management channel's token, for those who may read tables.
    pub const BLKH: Self = Self(*b"BLKH");
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A table with its header and checksum, around `body`.
fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Sdt {
    let mut table = Sdt::new(signature, 36, revision, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(body);
    table
}

/// The checksum rule of 5.2.6: all bytes add up to zero.
fn sums_to_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) == 0
}
