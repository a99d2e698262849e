//! The root cell's ACPI tables: the firmware's, with a few of ours.
//!
//! The firmware's tables are never written, and stay where they are. [`build`] makes a
//! new root pointer and a new XSDT that leads to them, but for the MADT, which is
//! replaced, and for the tables of IOMMUs, which are the hypervisor's to use. Added are
//! an SSDT with the virtio device of the management channel, on an I/O APIC of its own,
//! and a table with the channel's token, which Linux shows to root alone.

use super::{HEADER, OEM_ID, Signature, sums_to_zero, table};
use crate::memory::address::Gpa;
use acpi_tables::aml::{Device, Interrupt, Memory32Fixed, Name, Path, ResourceTemplate, Scope, ZERO};
use acpi_tables::madt::IoApic;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::{Aml, AmlSink};
use alloc::vec;
use alloc::vec::Vec;
use thiserror::Error;

/// One of the firmware's tables.
#[derive(Debug, Clone, Copy)]
pub struct FirmwareTable<'a> {
    /// Its signature.
    pub signature: Signature,
    /// Where it lies; the root cell's memory is mapped one to one.
    pub address: Gpa,
    /// A copy of it, at least as long as its header says.
    pub bytes: &'a [u8],
}

/// What is added to the firmware's board.
#[derive(Clone, Copy)]
pub struct Additions<'a> {
    /// How many pins the I/O APIC at an address has.
    pub io_apic_pins: &'a dyn Fn(Gpa) -> u32,
    /// APIC IDs of the CPUs that the root cell must not have.
    pub kept_back: &'a [u32],
    /// Where the virtual I/O APIC lies, a page.
    pub io_apic: u32,
    /// Where the virtio-mmio device lies.
    pub virtio: u32,
    /// How many bytes it has there.
    pub virtio_size: u32,
    /// Its pin on the virtual I/O APIC.
    pub virtio_pin: u32,
    /// What a client of the management channel must show.
    pub token: [u8; 32],
}

/// The tables, as bytes for one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootTables {
    /// The bytes. They begin with the root pointer; how many there are does not depend
    /// on the place.
    pub bytes: Vec<u8>,
    /// The I/O APIC ID that the virtual I/O APIC has to show.
    pub io_apic_id: u8,
    /// The global system interrupt of its pin 0.
    pub gsi_base: u32,
}

/// Why the firmware's tables cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum AcpiError {
    /// A table's length is impossible.
    #[error("ACPI table {table} at {address}: length {length}; allowed: {HEADER} to {have}")]
    Length {
        /// Which.
        table: Signature,
        /// Where.
        address: Gpa,
        /// What its header says.
        length: u64,
        /// How many bytes there are.
        have: usize,
    },
    /// A table's bytes do not add up to zero.
    #[error("ACPI table {table} at {address}: the checksum is wrong")]
    Checksum {
        /// Which.
        table: Signature,
        /// Where.
        address: Gpa,
    },
    /// An entry of the MADT has an impossible length.
    #[error(
        "ACPI table APIC: entry of type {kind} at offset {offset} has length {length}; allowed: {least} to {rest}"
    )]
    MadtEntry {
        /// The entry's type.
        kind: u8,
        /// Where in the table.
        offset: usize,
        /// What it says.
        length: usize,
        /// What entries of its type have.
        least: usize,
        /// What is left of the table.
        rest: usize,
    },
    /// There is no MADT.
    #[error("ACPI: the firmware has no table APIC, so its interrupt controllers are unknown")]
    NoMadt,
    /// All I/O APIC IDs are taken, or no interrupt numbers are left.
    #[error("ACPI table APIC: no {what} is free for one more I/O APIC")]
    NothingFree {
        /// What there is none of.
        what: &'static str,
    },
}

/// Builds the root cell's tables for the place `at`, a multiple of 16.
///
/// # Errors
/// When a firmware table is malformed, or the MADT is missing.
pub fn build(
    firmware: &[FirmwareTable<'_>],
    additions: &Additions<'_>,
    at: Gpa,
) -> Result<RootTables, AcpiError> {
    let mut entries = Vec::with_capacity(firmware.len());
    let mut madt = None;
    for table in firmware {
        let bytes = checked(table)?;
        match table.signature {
            Signature::MADT => madt = madt.or(Some(bytes)),
            Signature::DMAR | Signature::IVRS => {}
            _ => entries.push(table.address.raw()),
        }
    }
    let madt = Madt::read(madt.ok_or(AcpiError::NoMadt)?, additions)?;
    let gsi = madt.gsi_base.checked_add(additions.virtio_pin);
    let gsi = gsi.ok_or(AcpiError::NothingFree { what: "interrupt number" })?;

    let added = [
        table(Signature::MADT.0, madt.revision, &madt.body),
        table(*b"SSDT", 2, &virtio_device(additions, gsi)),
        table(Signature::BLKH.0, 1, &additions.token),
    ];
    let mut bytes = Vec::new();
    let rsdp_size = Rsdp::len().next_multiple_of(16);
    let xsdt_size = HEADER + (entries.len() + added.len()) * 8;
    let mut offset = rsdp_size + xsdt_size.next_multiple_of(16);
    for table in &added {
        entries.push(at.raw() + offset as u64);
        offset += table.len().next_multiple_of(16);
    }
    let pointers: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    Rsdp::new(OEM_ID, at.raw() + rsdp_size as u64).to_aml_bytes(&mut bytes);
    for table in core::iter::once(&table(*b"XSDT", 1, &pointers)).chain(&added) {
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        bytes.vec(table.as_slice());
    }
    Ok(RootTables { bytes, io_apic_id: madt.io_apic_id, gsi_base: madt.gsi_base })
}

/// The table's own bytes, without what follows it.
fn checked<'a>(table: &FirmwareTable<'a>) -> Result<&'a [u8], AcpiError> {
    let FirmwareTable { signature, address, bytes } = *table;
    let error = |length| AcpiError::Length { table: signature, address, length, have: bytes.len() };
    let [_, _, _, _, a, b, c, d, ..] = *bytes else { return Err(error(bytes.len() as u64)) };
    let length = u32::from_le_bytes([a, b, c, d]);
    let own = usize::try_from(length).ok().filter(|length| *length >= HEADER).and_then(|l| bytes.get(..l));
    let own = own.ok_or(error(length.into()))?;
    if !sums_to_zero(own) {
        return Err(AcpiError::Checksum { table: signature, address });
    }
    Ok(own)
}

/// The firmware's MADT (5.2.12), edited.
struct Madt {
    revision: u8,
    /// What follows the header.
    body: Vec<u8>,
    io_apic_id: u8,
    gsi_base: u32,
}

/// Entry types, with how long they are at least.
const LOCAL_APIC: u8 = 0;
const IO_APIC: u8 = 1;
const LOCAL_X2APIC: u8 = 9;

/// Both flags of a CPU's entry: enabled, and may be enabled later.
const CPU_USABLE: u8 = 0b11;

impl Madt {
    fn read(bytes: &[u8], additions: &Additions<'_>) -> Result<Self, AcpiError> {
        let revision = bytes.get(8).copied().unwrap_or_default();
        let mut body = bytes.get(HEADER..).unwrap_or_default().to_vec();
        // Local APIC address and flags come before the entries.
        let mut offset = 8;
        let mut gsi_base = 0_u32;
        let mut used_ids = [false; 256];
        while offset < body.len() {
            let entry = body.get_mut(offset..).unwrap_or_default();
            let kind = entry.first().copied().unwrap_or_default();
            let length = entry.get(1).copied().map_or(0, usize::from);
            let least = match kind {
                LOCAL_APIC => 8,
                IO_APIC => 12,
                LOCAL_X2APIC => 16,
                _ => 2,
            };
            let malformed =
                AcpiError::MadtEntry { kind, offset: HEADER + offset, length, least, rest: entry.len() };
            let entry = entry.get_mut(..length).filter(|_| length >= least).ok_or(malformed)?;
            match (kind, entry) {
                (LOCAL_APIC, [_, _, _, id, flags, ..]) => {
                    mark_used(&mut used_ids, *id);
                    if additions.kept_back.contains(&u32::from(*id)) {
                        *flags &= !CPU_USABLE;
                    }
                }
                (LOCAL_X2APIC, [_, _, _, _, a, b, c, d, flags, ..])
                    if additions.kept_back.contains(&u32::from_le_bytes([*a, *b, *c, *d])) =>
                {
                    *flags &= !CPU_USABLE;
                }
                (IO_APIC, [_, _, id, _, a, b, c, d, e, f, g, h, ..]) => {
                    mark_used(&mut used_ids, *id);
                    let address = u32::from_le_bytes([*a, *b, *c, *d]);
                    let base = u32::from_le_bytes([*e, *f, *g, *h]);
                    let end = base.checked_add((additions.io_apic_pins)(Gpa::new(address.into())));
                    let end = end.ok_or(AcpiError::NothingFree { what: "interrupt number" })?;
                    gsi_base = gsi_base.max(end);
                }
                _ => {}
            }
            offset += length;
        }
        // IDs of local APICs are avoided too: on the first I/O APICs' bus both were alike.
        let free = (0..=u8::MAX).zip(used_ids).find(|(_, used)| !used);
        let (io_apic_id, _) = free.ok_or(AcpiError::NothingFree { what: "I/O APIC ID" })?;
        IoApic::new(io_apic_id, additions.io_apic, gsi_base).to_aml_bytes(&mut body);
        Ok(Self { revision, body, io_apic_id, gsi_base })
    }
}

fn mark_used(used: &mut [bool; 256], id: u8) {
    if let Some(used) = used.get_mut(usize::from(id)) {
        *used = true;
    }
}

/// AML of the management channel's device. Linux takes `LNRO0005` for virtio-mmio.
fn virtio_device(additions: &Additions<'_>, gsi: u32) -> Vec<u8> {
    let registers = Memory32Fixed::new(true, additions.virtio, additions.virtio_size);
    // Consumer, level-triggered, active-high, exclusive.
    let line = Interrupt::new(true, false, false, false, gsi);
    let mut aml = Vec::new();
    Scope::new(
        Path::new("\\_SB_"),
        vec![&Device::new(
            Path::new("BLKV"),
            vec![
                &Name::new(Path::new("_HID"), &"LNRO0005"),
                &Name::new(Path::new("_UID"), &ZERO),
                &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&registers, &line])),
            ],
        )],
    )
    .to_aml_bytes(&mut aml);
    aml
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;

    const AT: u64 = 0x7ff0_0000;

    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let length = u32::try_from(bytes.len()).unwrap();
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes[9] = 0;
        bytes[9] = bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
        bytes
    }

    fn firmware_bytes(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 36];
        bytes[..4].copy_from_slice(signature);
        bytes[8] = 3;
        bytes.extend_from_slice(body);
        sealed(bytes)
    }

    /// Address and flags; CPUs 0, 1 and (x2APIC) 300; an I/O APIC with ID 2 for GSIs from
    /// 0 and one with ID 4 for those from 24; an override; an entry of unknown type.
    #[rustfmt::skip]
    const MADT_BODY: [u8; 78] = [
        0, 0, 0xe0, 0xfe, 1, 0, 0, 0,
        0, 8, 0, 0, 1, 0, 0, 0,
        0, 8, 1, 1, 3, 0, 0, 0,
        9, 16, 0, 0, 0x2c, 1, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0,
        1, 12, 2, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0,
        1, 12, 4, 0, 0, 0, 0xc1, 0xfe, 24, 0, 0, 0,
        2, 10, 0, 9, 9, 0, 0, 0, 0x0d, 0,
        0x7f, 4, 0xaa, 0xbb,
    ];

    fn pins(address: Gpa) -> u32 {
        if address == Gpa::new(0xfec1_0000) { 32 } else { 24 }
    }

    fn additions(kept_back: &[u32]) -> Additions<'_> {
        Additions {
            io_apic_pins: &pins,
            kept_back,
            io_apic: 0x7fe0_0000,
            virtio: 0x7fe0_1000,
            virtio_size: 0x1000,
            virtio_pin: 3,
            token: [0xa5; 32],
        }
    }

    fn build_from(tables: &[([u8; 4], Vec<u8>)], kept_back: &[u32]) -> Result<RootTables, AcpiError> {
        let tables: Vec<_> = (1..)
            .zip(tables)
            .map(|(n, (signature, bytes))| FirmwareTable {
                signature: Signature(*signature),
                address: Gpa::new(n * 0x1000),
                bytes,
            })
            .collect();
        build(&tables, &additions(kept_back), Gpa::new(AT))
    }

    fn firmware() -> Vec<([u8; 4], Vec<u8>)> {
        [*b"FACP", *b"APIC", *b"DMAR", *b"HPET", *b"IVRS"]
            .map(|signature| {
                let body = if signature == *b"APIC" { &MADT_BODY[..] } else { &[1, 2, 3] };
                (signature, firmware_bytes(&signature, body))
            })
            .to_vec()
    }

    fn u64_at(bytes: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
    }

    /// The table of ours at an address.
    fn ours(tables: &RootTables, address: u64) -> &[u8] {
        let bytes = &tables.bytes[usize::try_from(address - AT).unwrap()..];
        let length = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
        assert!(sums_to_zero(&bytes[..length]));
        assert_eq!(address % 16, 0);
        &bytes[..length]
    }

    fn entries(tables: &RootTables) -> Vec<u64> {
        assert_eq!(tables.bytes[..8], *b"RSD PTR ");
        assert!(sums_to_zero(&tables.bytes[..20]) && sums_to_zero(&tables.bytes[..36]));
        let xsdt = ours(tables, u64_at(&tables.bytes, 24));
        assert_eq!(xsdt[..4], *b"XSDT");
        xsdt[36..].chunks(8).map(|entry| u64_at(entry, 0)).collect()
    }

    #[test]
    fn the_firmwares_tables_stay_but_for_madt_and_iommus() {
        let tables = build_from(&firmware(), &[]).unwrap();
        let entries = entries(&tables);
        assert_eq!(entries[..2], [0x1000, 0x4000], "FACP and HPET, in place");
        let signatures: Vec<_> = entries[2..].iter().map(|at| &ours(&tables, *at)[..4]).collect();
        assert_eq!(signatures, [b"APIC", b"SSDT", b"BLKH"]);
        let token = ours(&tables, entries[4]);
        assert_eq!((token.len(), &token[36..]), (68, &[0xa5; 32][..]));
    }

    #[test]
    fn the_madt_gets_one_more_io_apic_above_all_interrupts() {
        let tables = build_from(&firmware(), &[]).unwrap();
        // 0 and 1 are CPUs, 2 is an I/O APIC.
        assert_eq!((tables.io_apic_id, tables.gsi_base), (3, 24 + 32));
        let madt = ours(&tables, entries(&tables)[2]);
        assert_eq!(madt[8], 3, "the firmware's revision");
        assert_eq!(madt[36..36 + 78], MADT_BODY);
        assert_eq!(madt[36 + 78..], [1, 12, 3, 0, 0, 0, 0xe0, 0x7f, 56, 0, 0, 0]);
    }

    #[test]
    fn cpus_kept_back_cannot_be_enabled() {
        let tables = build_from(&firmware(), &[1, 300]).unwrap();
        let madt = &ours(&tables, entries(&tables)[2])[36..];
        let mut expected = MADT_BODY;
        expected[20] = 0;
        expected[32] = 0;
        assert_eq!(madt[..78], expected);
    }

    #[test]
    fn the_virtio_device_has_its_page_and_a_level_triggered_line() {
        let tables = build_from(&firmware(), &[]).unwrap();
        let aml = &ours(&tables, entries(&tables)[3])[36..];
        let has = |bytes: &[u8]| aml.windows(bytes.len()).any(|window| window == bytes);
        assert!(has(b"_HID\x0dLNRO0005\0"));
        // 6.4.3.4 and 6.4.3.6: 32-bit fixed memory, writable; extended interrupt 59.
        assert!(has(b"\x86\x09\0\x01\0\x10\xe0\x7f\0\x10\0\0\x89\x06\0\x01\x01\x3b\0\0\0"));
    }

    #[test]
    fn malformed_tables_are_named() {
        let with = |change: &dyn Fn(&mut Vec<u8>), index: usize| {
            let mut tables = firmware();
            change(&mut tables[index].1);
            build_from(&tables, &[]).unwrap_err().to_string()
        };
        let short = |bytes: &mut Vec<u8>| bytes.truncate(38);
        assert_eq!(with(&short, 3), "ACPI table HPET at 0x4000: length 39; allowed: 36 to 38");
        let headless = |bytes: &mut Vec<u8>| bytes.truncate(7);
        assert_eq!(with(&headless, 0), "ACPI table FACP at 0x1000: length 7; allowed: 36 to 7");
        let broken = |bytes: &mut Vec<u8>| bytes[37] ^= 1;
        assert_eq!(with(&broken, 2), "ACPI table DMAR at 0x3000: the checksum is wrong");
        let resealed = |offset: usize, value: u8| {
            move |bytes: &mut Vec<u8>| {
                bytes[offset] = value;
                *bytes = sealed(bytes.clone());
            }
        };
        assert_eq!(
            with(&resealed(45, 7), 1),
            "ACPI table APIC: entry of type 0 at offset 44 has length 7; allowed: 8 to 70"
        );
        assert_eq!(
            with(&resealed(111, 5), 1),
            "ACPI table APIC: entry of type 127 at offset 110 has length 5; allowed: 2 to 4"
        );
        assert_eq!(
            with(&resealed(111, 0), 1),
            "ACPI table APIC: entry of type 127 at offset 110 has length 0; allowed: 2 to 4"
        );
        assert_eq!(build_from(&[], &[]), Err(AcpiError::NoMadt));
    }

    proptest! {
        #[test]
        fn any_bytes_give_tables_or_an_error(body in proptest::collection::vec(any::<u8>(), 0..80), junk in proptest::collection::vec(any::<u8>(), 0..60)) {
            let madt = (*b"APIC", firmware_bytes(b"APIC", &body));
            if let Ok(tables) = build_from(core::slice::from_ref(&madt), &[0, 1]) {
                prop_assert_eq!(entries(&tables).len(), 3);
            }
            prop_assert!(build_from(&[(*b"JUNK", junk), madt], &[]).is_err());
        }
    }
}
