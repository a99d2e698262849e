//! The boot information of Multiboot2, by the `multiboot2` crate.
// UNSAFETY: the crate takes a pointer.
#![expect(unsafe_code, reason = "reads physical memory")]

use super::{BootInfo, BootPath, Loader, Rsdp, rsdp};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use bulkhead_vmm::memory::address::Hpa;
use bulkhead_vmm::memory::map::{Kind, RawEntry};
use multiboot2::{BootInformation, BootInformationHeader, TagHeader};

/// More than this no loader has to tell.
const SIZE_MAX: u64 = 1 << 20;
const TAG_RSDP_V1: u32 = 14;
const TAG_RSDP_V2: u32 = 15;

pub(super) fn read(loader: &Loader, info: u64) -> BootInfo {
    let mut boot = BootInfo {
        path: BootPath::GrubBios,
        memory: Vec::new(),
        rsdp: None,
        command_line: String::new(),
        bundle: None,
    };
    let size = loader.bytes(info, 8).and_then(|bytes| bytes.first_chunk().copied());
    let size = u64::from(u32::from_le_bytes(size.unwrap_or_default()));
    let Some(bytes) = loader.bytes(info, size).filter(|_| size <= SIZE_MAX) else {
        log::warn!("the Multiboot2 information at {info:#x} says that it has {size:#x} bytes");
        return boot;
    };
    // SAFETY: `bytes` has the size that the structure claims.
    let information = match unsafe { BootInformation::load(bytes.as_ptr().cast::<BootInformationHeader>()) } {
        Ok(information) => information,
        Err(error) => {
            log::warn!("the Multiboot2 information at {info:#x} is broken: {error}");
            return boot;
        }
    };
    if information.efi_sdt64_tag().is_some() || information.efi_sdt32_tag().is_some() {
        boot.path = BootPath::GrubUefi;
    }
    if let Some(line) = information.command_line_tag().and_then(|tag| tag.cmdline().ok()) {
        boot.command_line = line.to_string();
    }
    boot.rsdp = rsdp_tag(bytes);
    if let Some(module) = information.module_tags().next() {
        let (start, end) = (module.start_address(), module.end_address());
        boot.bundle = Some((Hpa::new(u64::from(start)), u64::from(end.saturating_sub(start))));
    }
    if let Some(map) = information.memory_map_tag() {
        boot.memory.extend(map.memory_areas().iter().map(|area| RawEntry {
            base: area.start_address(),
            len: area.size(),
            kind: Kind(u32::from(area.typ())),
        }));
    }
    boot
}

/// The RSDP that the newest of the ACPI tags holds. The crate shows only some fields.
fn rsdp_tag(information: &[u8]) -> Option<Rsdp> {
    let mut found = None;
    let mut rest = information.get(8..)?;
    while let Some(&[t0, t1, t2, t3, s0, s1, s2, s3]) = rest.first_chunk() {
        let size = u32::from_le_bytes([s0, s1, s2, s3]) as usize;
        match u32::from_le_bytes([t0, t1, t2, t3]) {
            0 => break,
            TAG_RSDP_V1 if found.is_none() => found = rest.get(size_of::<TagHeader>()..size).and_then(rsdp),
            TAG_RSDP_V2 => found = rest.get(size_of::<TagHeader>()..size).and_then(rsdp).or(found),
            _ => {}
        }
        rest = rest.get(size.max(8).checked_next_multiple_of(8)?..)?;
    }
    found
}
