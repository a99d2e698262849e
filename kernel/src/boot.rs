//! What the boot loader hands over, whichever it was.
//!
//! The structures are read through the first page tables, which map the first 4 GiB onto
//! themselves; everything that is kept is copied. A loader is not trusted to be sane: what
//! makes no sense is left out with a log line.
// UNSAFETY: the loader's structures lie at physical addresses.
#![expect(unsafe_code, reason = "reads physical memory")]

mod multiboot2;
mod pvh;

use alloc::string::String;
use alloc::vec::Vec;
use bulkhead_arch::x86_64::boot::{PROTOCOL_MULTIBOOT2, PROTOCOL_PVH};
use bulkhead_vmm::memory::address::Hpa;
use bulkhead_vmm::memory::map::{FOUR_GIB, RawEntry};
use core::fmt;

/// How the machine came to run the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BootPath {
    /// Xen PVH: QEMU's `-kernel`.
    Pvh,
    /// GRUB on a BIOS.
    GrubBios,
    /// GRUB on UEFI.
    GrubUefi,
}

impl fmt::Display for BootPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pvh => "pvh",
            Self::GrubBios => "grub-bios",
            Self::GrubUefi => "grub-uefi",
        })
    }
}

/// A copy of the RSDP (ACPI 6.5, 5.2.5.3). The first revision has only 20 bytes; the rest
/// is then 0.
pub(crate) type Rsdp = [u8; 36];

/// What the boot loader told.
#[derive(Debug)]
pub(crate) struct BootInfo {
    pub(crate) path: BootPath,
    pub(crate) memory: Vec<RawEntry>,
    pub(crate) rsdp: Option<Rsdp>,
    pub(crate) command_line: String,
    /// Where the bundle is, and its length in bytes.
    pub(crate) bundle: Option<(Hpa, u64)>,
}

/// Reads what the loader left at `info`.
///
/// # Safety
/// The first page tables must be in use.
pub(crate) unsafe fn read(protocol: u32, info: u32) -> BootInfo {
    let loader = Loader(());
    match protocol {
        PROTOCOL_PVH => pvh::read(&loader, u64::from(info)),
        PROTOCOL_MULTIBOOT2 => multiboot2::read(&loader, u64::from(info)),
        other => panic!("boot protocol {other} is none of this image's"),
    }
}

/// Access to what the loader left in memory. Only [`read`] makes one, while the first page
/// tables are in use.
struct Loader(());

impl Loader {
    /// The `len` bytes at `at`, when they lie below 4 GiB.
    fn bytes(&self, at: u64, len: u64) -> Option<&[u8]> {
        let end = at.checked_add(len)?;
        if at == 0 || end > FOUR_GIB {
            return None;
        }
        let start = core::ptr::with_exposed_provenance(usize::try_from(at).ok()?);
        // SAFETY: the first page tables map the first 4 GiB; nothing is written there
        // while the loader's structures are read.
        Some(unsafe { core::slice::from_raw_parts(start, usize::try_from(len).ok()?) })
    }

    /// The zero-terminated text at `at`, cut off at 4 KiB.
    fn text(&self, at: u64) -> String {
        let bytes = self.bytes(at, 4096.min(FOUR_GIB.saturating_sub(at))).unwrap_or_default();
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}

/// The RSDP that begins `bytes`: right signature, and the first 20 bytes sum up to 0.
pub(crate) fn rsdp(bytes: &[u8]) -> Option<Rsdp> {
    let first = bytes.get(..20)?;
    if !first.starts_with(b"RSD PTR ") || first.iter().fold(0u8, |sum, &b| sum.wrapping_add(b)) != 0 {
        return None;
    }
    let len = if first[15] >= 2 { 36 } else { 20 };
    let mut copy = [0; 36];
    copy[..len].copy_from_slice(bytes.get(..len)?);
    Some(copy)
}
