//! What the firmware's ACPI tables say of the machine, by the `acpi` crate.
//!
//! The tables are read, never written: the root cell's are built from the copies.
// UNSAFETY: the crate reads tables through mappings that we vouch for.
#![expect(unsafe_code, reason = "maps the firmware's tables for the acpi crate")]

use crate::boot::{self, Rsdp};
use acpi::address::{AddressSpace, GenericAddress};
use acpi::fadt::Fadt;
use acpi::madt::{Madt, MadtEntry};
use acpi::sdt::SdtHeader;
use acpi::{AcpiHandler, AcpiTables, PhysicalMapping};
use alloc::string::String;
use alloc::vec::Vec;
use bulkhead_vmm::memory::address::Hpa;
use core::ptr::NonNull;

/// One I/O APIC.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IoApicInfo {
    /// Where its registers are.
    pub(crate) address: Hpa,
    /// Its ID.
    pub(crate) id: u8,
    /// The global system interrupt of its pin 0.
    pub(crate) gsi_base: u32,
}

/// A copy of one of the firmware's tables.
#[derive(Debug, Clone)]
pub(crate) struct FirmwareTable {
    /// Its signature.
    pub(crate) signature: [u8; 4],
    /// Where it is.
    pub(crate) address: Hpa,
    /// All of it.
    pub(crate) bytes: Vec<u8>,
}

/// What the tables say.
#[derive(Debug, Clone)]
pub(crate) struct Firmware {
    /// APIC IDs of the CPUs that are there and enabled, in the tables' order.
    pub(crate) apic_ids: Vec<u32>,
    /// The I/O APICs.
    pub(crate) io_apics: Vec<IoApicInfo>,
    /// Port of the PM timer, and how many bits it has: 24 or 32.
    pub(crate) pm_timer: Option<(u16, u32)>,
    /// Ports of PM1a and PM1b status.
    pub(crate) pm1_status: [Option<u16>; 2],
    /// Ports of PM1a and PM1b control.
    pub(crate) pm1_control: [Option<u16>; 2],
    /// The reset register, if it is a port, and what is written there.
    pub(crate) reset: Option<(u16, u8)>,
    /// Where the HPET's registers are.
    pub(crate) hpet: Option<Hpa>,
    /// A copy of the DSDT, which the FADT lists.
    pub(crate) dsdt: Option<FirmwareTable>,
    /// Copies of the root table and of the tables that it lists.
    pub(crate) tables: Vec<FirmwareTable>,
}

/// Maps physical memory: the pointer to `len` readable bytes at an address, for good, or
/// `None` where there is no memory.
pub(crate) type Map = fn(Hpa, usize) -> Option<NonNull<u8>>;

/// Gives the crate its mappings.
#[derive(Clone)]
struct Mapper(Map);

impl AcpiHandler for Mapper {
    unsafe fn map_physical_region<T>(
        &self,
        physical_address: usize,
        size: usize,
    ) -> PhysicalMapping<Self, T> {
        let len = size.max(size_of::<T>());
        let Some(start) = (self.0)(Hpa::new(physical_address as u64), len) else {
            // The crate has no way to say no.
            panic!("the ACPI table at {physical_address:#x} can't be mapped");
        };
        // SAFETY: `map` gave `len` bytes at that address, for good.
        unsafe { PhysicalMapping::new(physical_address, start.cast(), size, len, self.clone()) }
    }

    fn unmap_physical_region<T>(_: &PhysicalMapping<Self, T>) {}
}

/// A port that a generic address names.
fn port(address: GenericAddress) -> Option<u16> {
    if address.address_space != AddressSpace::SystemIo || address.address == 0 {
        return None;
    }
    u16::try_from(address.address).ok()
}

/// The CPU is there and may be used (ACPI 6.5, table 5.23).
const ENABLED: u32 = 1;
/// No table is longer; a length beyond it is nonsense.
const TABLE_MAX: usize = 16 << 20;
const HEADER_SIZE: usize = size_of::<SdtHeader>();

/// A copy of the table at `address`, if there is one that is whole.
fn table(address: Hpa, map: Map) -> Option<FirmwareTable> {
    let bytes = |len| {
        let start = map(address, len)?;
        // SAFETY: `map` gave `len` readable bytes, which are the firmware's and not written.
        Some(unsafe { core::slice::from_raw_parts(start.as_ptr(), len) })
    };
    let header = bytes(HEADER_SIZE)?;
    let len = u32::from_le_bytes(*header.get(4..)?.first_chunk()?) as usize;
    if !(HEADER_SIZE..=TABLE_MAX).contains(&len) {
        log::warn!("the ACPI table at {address} says that it has {len} bytes: left out");
        return None;
    }
    let bytes = bytes(len)?;
    let signature = *bytes.first_chunk()?;
    if bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte)) != 0 {
        log::warn!("the ACPI table {} at {address} has a wrong checksum", signature.escape_ascii());
    }
    Some(FirmwareTable { signature, address, bytes: bytes.to_vec() })
}

/// Where a BIOS leaves the RSDP (ACPI 6.5, 5.2.5.1): in the first KiB of the extended BIOS
/// data area, or below 1 MiB.
fn find_rsdp(map: Map) -> Option<Rsdp> {
    let at = |address: u64, len: usize| {
        let start = map(Hpa::new(address), len)?;
        // SAFETY: `map` gave `len` readable bytes; nobody writes there now.
        Some(unsafe { core::slice::from_raw_parts(start.as_ptr(), len) })
    };
    let &[low, high] = at(0x40e, 2)? else { return None };
    let areas = [(u64::from(u16::from_le_bytes([low, high])) << 4, 1024), (0xe_0000, 0x2_0000)];
    areas.into_iter().filter(|area| area.0 != 0).find_map(|(address, len)| {
        let area = at(address, len)?;
        (0..len).step_by(16).find_map(|offset| boot::rsdp(&area[offset..]))
    })
}

/// Reads the tables that `rsdp` leads to, or the one that a BIOS left in memory.
///
/// # Errors
/// When there are none, or no MADT among them.
pub(crate) fn read(rsdp: Option<Rsdp>, map: Map) -> Result<Firmware, String> {
    let rsdp = rsdp.or_else(|| find_rsdp(map)).ok_or("the firmware has no ACPI tables")?;
    // Revision 0 has the RSDT with entries of 4 bytes, later ones the XSDT with 8.
    let revision = rsdp[15];
    let (root, entry_size) = if revision == 0 { (&rsdp[16..20], 4) } else { (&rsdp[24..32], 8) };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
    let root = Hpa::new(number(root));
    let root_table = table(root, map).ok_or_else(|| alloc::format!("no ACPI root table at {root}"))?;
    let entries = root_table.bytes[HEADER_SIZE..].chunks_exact(entry_size);
    let listed: Vec<_> = entries.filter_map(|entry| table(Hpa::new(number(entry)), map)).collect();
    let mut firmware = Firmware {
        apic_ids: Vec::new(),
        io_apics: Vec::new(),
        pm_timer: None,
        pm1_status: [None; 2],
        pm1_control: [None; 2],
        reset: None,
        hpet: None,
        dsdt: None,
        tables: core::iter::once(root_table).chain(listed).collect(),
    };

    let address = usize::try_from(root.raw()).map_err(|_| "the ACPI root table is out of reach")?;
    // SAFETY: a root table is there, as has just been checked.
    let tables = unsafe { AcpiTables::from_rsdt(Mapper(map), revision, address) };
    let tables = tables.map_err(|error| alloc::format!("ACPI root table at {root}: {error:?}"))?;

    let madt = tables.find_table::<Madt>();
    let madt = madt.map_err(|_| "the firmware has no MADT: which CPUs are there is unknown")?;
    for entry in madt.get().entries() {
        match entry {
            MadtEntry::LocalApic(cpu) if { cpu.flags } & ENABLED != 0 => {
                firmware.apic_ids.push(u32::from(cpu.apic_id));
            }
            MadtEntry::LocalX2Apic(cpu) if { cpu.flags } & ENABLED != 0 => {
                firmware.apic_ids.push(cpu.x2apic_id)
            }
            MadtEntry::IoApic(apic) => firmware.io_apics.push(IoApicInfo {
                address: Hpa::new(u64::from(apic.io_apic_address)),
                id: apic.io_apic_id,
                gsi_base: apic.global_system_interrupt_base,
            }),
            _ => {}
        }
    }

    if let Ok(fadt) = tables.find_table::<Fadt>() {
        let bits = if { fadt.flags }.pm_timer_is_32_bit() { 32 } else { 24 };
        firmware.pm_timer = fadt.pm_timer_block().ok().flatten().and_then(port).map(|port| (port, bits));
        firmware.pm1_status = [
            fadt.pm1a_event_block().ok().and_then(port),
            fadt.pm1b_event_block().ok().flatten().and_then(port),
        ];
        firmware.pm1_control = [
            fadt.pm1a_control_block().ok().and_then(port),
            fadt.pm1b_control_block().ok().flatten().and_then(port),
        ];
        let dsdt = fadt.dsdt_address().ok().and_then(|at| table(Hpa::new(at as u64), map));
        firmware.dsdt = dsdt.filter(|table| &table.signature == b"DSDT");
        if { fadt.flags }.supports_system_reset_via_fadt() {
            firmware.reset = fadt.reset_register().ok().and_then(port).map(|port| (port, fadt.reset_value));
        }
    }
    // The HPET's registers, as a generic address (IA-PC HPET specification 1.0a, 3.2.4).
    let hpet = firmware.tables.iter().find(|table| &table.signature == b"HPET");
    firmware.hpet = hpet.and_then(|table| {
        let in_memory = table.bytes.get(40) == Some(&0);
        let address = number(table.bytes.get(44..52)?);
        (in_memory && address != 0).then_some(Hpa::new(address))
    });
    Ok(firmware)
}
