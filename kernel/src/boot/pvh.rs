//! The start info of Xen's PVH protocol (Xen, `public/arch-x86/hvm/start_info.h`).

use super::{BootInfo, BootPath, Loader, rsdp};
use alloc::string::String;
use alloc::vec::Vec;
use bulkhead_vmm::memory::address::Hpa;
use bulkhead_vmm::memory::map::{Kind, RawEntry};

const MAGIC: u32 = 0x336e_c578;
/// Firmware with more entries than this is out of its mind.
const ENTRIES_MAX: u32 = 1024;

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(offset..offset + 8)?.try_into().ok()?))
}

pub(super) fn read(loader: &Loader, info: u64) -> BootInfo {
    let mut boot = BootInfo {
        path: BootPath::Pvh,
        memory: Vec::new(),
        rsdp: None,
        command_line: String::new(),
        bundle: None,
    };
    if read_into(loader, info, &mut boot).is_none() {
        log::warn!("the PVH start info at {info:#x} is cut short or has no right magic");
    }
    boot
}

fn read_into(loader: &Loader, info: u64, boot: &mut BootInfo) -> Option<()> {
    let bytes = loader.bytes(info, 56)?;
    if u32_at(bytes, 0)? != MAGIC {
        return None;
    }
    if let Some(at @ 1..) = u64_at(bytes, 24) {
        boot.command_line = loader.text(at);
    }
    if u32_at(bytes, 12)? > 0 {
        let module = loader.bytes(u64_at(bytes, 16)?, 32)?;
        boot.bundle = Some((Hpa::new(u64_at(module, 0)?), u64_at(module, 8)?));
    }
    boot.rsdp = loader.bytes(u64_at(bytes, 32)?, 36).and_then(rsdp);
    // Version 0 of the structure ends before the memory map.
    if u32_at(bytes, 4)? == 0 {
        return Some(());
    }
    let count = u32_at(bytes, 48)?.min(ENTRIES_MAX);
    let map = loader.bytes(u64_at(bytes, 40)?, u64::from(count) * 24)?;
    for entry in map.chunks_exact(24) {
        boot.memory.push(RawEntry {
            base: u64_at(entry, 0)?,
            len: u64_at(entry, 8)?,
            kind: Kind(u32_at(entry, 16)?),
        });
    }
    Some(())
}
