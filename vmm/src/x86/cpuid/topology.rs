//! The leaves that say who a vCPU is and which vCPUs share what.
//!
//! The root cell sees the machine's: it runs on the CPUs that the leaves speak of. A
//! guest cell sees one socket, each core with caches of its own but for those of level 3
//! and up, which all share.

use super::features::{BASIC, CAPACITY, EXTENDED};
use super::{Query, Registers, Topology};

/// Leaf 1, ECX.
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const XSAVE: u32 = 1 << 26;
const OSXSAVE: u32 = 1 << 27;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 and, on AMD, 0x80000001, EDX.
const APIC: u32 = 1 << 9;
/// Leaf 1, EDX: the count in EBX is valid.
const HTT: u32 = 1 << 28;
/// Leaf 0x80000001, ECX: as HTT, and these are cores.
const CMP_LEGACY: u32 = 1 << 1;
const CR4_OSXSAVE: u64 = 1 << 18;

/// How many APIC IDs the vCPUs of a flat topology span: a power of two.
const fn id_space(vcpus: u32) -> u32 {
    // More do not fit 32-bit IDs.
    if vcpus > 1 << 31 { 1 << 31 } else { vcpus.next_power_of_two() }
}

/// `register` with the bits of `mask` on or off.
const fn with(register: u32, mask: u32, on: bool) -> u32 {
    if on { register | mask } else { register & !mask }
}

/// Leaf 1.
pub(super) fn basic(query: &Query<'_>) -> Registers {
    let [eax, ebx, ecx, mut edx] = BASIC.select(query.host());
    let mut count = ebx >> 16 & 0xff;
    if let Topology::Flat { vcpus } = query.view.topology {
        count = vcpus.min(0xff);
        edx = with(edx, HTT, vcpus > 1);
    }
    let ebx = ebx & 0xffff | count << 16 | (query.view.apic_id & 0xff) << 24;
    let ecx = ecx | X2APIC | TSC_DEADLINE | HYPERVISOR;
    let xsave_on = ecx & XSAVE != 0 && query.view.cr4 & CR4_OSXSAVE != 0;
    [eax, ebx, with(ecx, OSXSAVE, xsave_on), edx | APIC]
}

/// Leaf 4, Intel's caches.
pub(super) fn intel_caches(query: &Query<'_>) -> Registers {
    let cores = |vcpus| (id_space(vcpus) - 1).min(0x3f) << 26;
    caches(query, cores)
}

/// Leaf 0x8000001d, AMD's caches.
pub(super) fn amd_caches(query: &Query<'_>) -> Registers {
    caches(query, |_| 0)
}

/// A cache, one a subleaf: how many IDs share it is in EAX 25:14, less one.
fn caches(query: &Query<'_>, cores: impl Fn(u32) -> u32) -> Registers {
    let [eax, ebx, ecx, edx] = query.host();
    let (kind, level) = (eax & 0x1f, eax >> 5 & 7);
    match query.view.topology {
        Topology::Flat { vcpus } if kind != 0 => {
            let sharing = if level < 3 { 0 } else { (id_space(vcpus) - 1).min(0xfff) };
            [eax & 0x3fff | sharing << 14 | cores(vcpus), ebx, ecx, edx]
        }
        _ => [eax, ebx, ecx, edx],
    }
}

/// Leaves 0xb and 0x1f: threads of a core, then cores of a socket.
pub(super) fn levels(query: &Query<'_>) -> Registers {
    let number = query.subleaf & 0xff;
    let [eax, ebx, ecx] = match query.view.topology {
        Topology::Machine => {
            let [eax, ebx, ecx, _] = query.host();
            [eax, ebx, ecx]
        }
        Topology::Flat { vcpus } => match query.subleaf {
            0 => [0, 1, 1 << 8],
            1 => [id_space(vcpus).trailing_zeros(), vcpus & 0xffff, number | 2 << 8],
            _ => [0, 0, number],
        },
    };
    [eax, ebx, ecx, query.view.apic_id]
}

/// Leaf 0x80000001.
pub(super) fn extended(query: &Query<'_>) -> Registers {
    let [eax, ebx, mut ecx, mut edx] = EXTENDED.select(query.host());
    if !query.is_intel() {
        edx |= APIC;
        if let Topology::Flat { vcpus } = query.view.topology {
            ecx = with(ecx, CMP_LEGACY, vcpus > 1);
        }
    }
    [eax, ebx, ecx, edx]
}

/// Leaf 0x80000008.
pub(super) fn capacity(query: &Query<'_>) -> Registers {
    let [eax, ebx, ecx, edx] = CAPACITY.select(query.host());
    // How many cores there are, less one, and how many bits of the APIC ID number them.
    let ecx = match query.view.topology {
        Topology::Flat { vcpus } if !query.is_intel() => {
            vcpus.saturating_sub(1).min(0xff) | id_space(vcpus).trailing_zeros() << 12
        }
        _ => ecx & 0xf0ff,
    };
    // 23:16 of EAX would be the size of a nested guest's addresses.
    [eax & 0xffff, ebx, ecx, edx]
}

/// Leaf 0x8000001e: APIC ID; core number and threads of a core, less one; node.
pub(super) fn amd_ids(query: &Query<'_>) -> Registers {
    match query.view.topology {
        Topology::Machine => query.host(),
        Topology::Flat { .. } => [query.view.apic_id, query.view.apic_id & 0xff, 0, 0],
    }
}
