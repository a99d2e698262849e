//! A guest cell's ACPI tables.
//!
//! They describe the [`board`] and nothing else: no 8042, no VGA, no 8259, no PCI. The
//! power button is the fixed one of PM1, and soft off and reset are registers.

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, table};
use crate::memory::address::Gpa;
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use crate::x86::board;
use acpi_tables::aml::{Device, EISAName, IO, Interrupt, Name, Package, Path, ResourceTemplate, Scope, ZERO};
use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use alloc::vec;
use alloc::vec::Vec;
use thiserror::Error;

/// The tables of one cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestTables {
    /// What lies from [`board::RSDP_ADDRESS`] on.
    pub tables: Vec<u8>,
    /// What lies at [`board::FACS_ADDRESS`].
    pub facs: Vec<u8>,
}

/// A cell cannot have so many vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{vcpus} vCPUs; allowed: 1 to {max}", max = board::MAX_VCPUS)]
pub struct VcpuCountError {
    /// How many were asked for.
    pub vcpus: u32,
}

impl GuestTables {
    /// The tables of a cell with `vcpus` vCPUs.
    ///
    /// # Errors
    /// When the board has no room for so many, or there are none.
    pub fn build(vcpus: u32) -> Result<Self, VcpuCountError> {
        let ids = u8::try_from(vcpus).ok().filter(|ids| *ids > 0 && vcpus <= board::MAX_VCPUS);
        let ids = ids.ok_or(VcpuCountError { vcpus })?;

        let mut tables = vec![0; Rsdp::len()];
        let dsdt = append(&mut tables, &table(*b"DSDT", 2, &devices()));
        let fadt = append(&mut tables, &fixed_description(dsdt));
        let madt = append(&mut tables, &interrupt_controllers(ids));
        let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
        xsdt.add_entry(fadt.into());
        xsdt.add_entry(madt.into());
        let xsdt = append(&mut tables, &xsdt);
        let mut rsdp = Vec::new();
        Rsdp::new(OEM_ID, xsdt.into()).to_aml_bytes(&mut rsdp);
        tables.splice(..rsdp.len(), rsdp);

        let mut facs = Vec::new();
        FACS::new().to_aml_bytes(&mut facs);
        Ok(Self { tables, facs })
    }

    /// Writes them to their places.
    ///
    /// # Errors
    /// When the cell has no RAM there.
    pub fn write(&self, memory: &dyn GuestMemory) -> Result<(), GuestMemoryError> {
        memory.write(board::RSDP_ADDRESS, &self.tables)?;
        memory.write(Gpa::new(board::FACS_ADDRESS.into()), &self.facs)
    }
}

/// Appends a table at the next multiple of 16, and says at which address it lies.
fn append(tables: &mut Vec<u8>, table: &dyn Aml) -> u32 {
    tables.resize(tables.len().next_multiple_of(16), 0);
    // The tables of 255 vCPUs take less than 4 KiB, far from the end of 32 bits.
    let address = u32::try_from(board::ACPI_TABLES.start + tables.len() as u64).unwrap_or(u32::MAX);
    table.to_aml_bytes(tables);
    address
}

/// FADT, "fixed hardware" (5.2.9).
fn fixed_description(dsdt: u32) -> impl Aml {
    let port =
        |port: u16, bits| GAS::new(AddressSpace::SystemIo, bits, 0, AccessSize::Undefined, port.into());
    // Devices on the old PC's ports, and no VGA; the bits for an 8042 and for "no CMOS
    // clock" are clear (table 5.11).
    let boot_architecture = 1 << 0 | 1 << 2;
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        // Caches are coherent, HLT is C1, the power button is the fixed one (its flag
        // clear) and there is no fixed sleep button (its flag set) or alarm.
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::TmrValExt)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        .firmware_ctrl_32(board::FACS_ADDRESS);
    fadt.dsdt = dsdt.into();
    fadt.x_dsdt = u64::from(dsdt).into();
    fadt.sci_int = u16::from(board::SCI_GSI).into();
    fadt.pm1a_evt_blk = u32::from(board::PM1A_EVENT_PORT).into();
    fadt.pm1a_cnt_blk = u32::from(board::PM1A_CONTROL_PORT).into();
    fadt.pm_tmr_blk = u32::from(board::PM_TIMER_PORT).into();
    fadt.pm1_evt_len = 4;
    fadt.pm1_cnt_len = 2;
    fadt.pm_tmr_len = 4;
    // So long that they mean there is no C2 and no C3.
    fadt.p_lvl2_lat = 0xffff.into();
    fadt.p_lvl3_lat = 0xffff.into();
    fadt.iapc_boot_arch = boot_architecture.into();
    fadt.reset_reg = port(board::RESET_PORT, 8);
    fadt.reset_value = board::RESET_VALUE;
    fadt.x_pm1a_evt_blk = port(board::PM1A_EVENT_PORT, 32);
    fadt.x_pm1a_cnt_blk = port(board::PM1A_CONTROL_PORT, 16);
    fadt.x_pm_tmr_blk = port(board::PM_TIMER_PORT, 32);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"Bulkhead").into();
    fadt.finalize()
}

/// MADT (5.2.12): the vCPUs, whose APIC IDs are their numbers, and one I/O APIC. Its
/// flags are clear: there is no 8259.
fn interrupt_controllers(vcpus: u8) -> Sdt {
    let mut body = Vec::new();
    body.dword(board::LOCAL_APIC_ADDRESS);
    body.dword(0);
    for id in 0..vcpus {
        ProcessorLocalApic::new(id, id, EnabledStatus::Enabled).to_aml_bytes(&mut body);
    }
    IoApic::new(board::IO_APIC_ID, board::IO_APIC_ADDRESS, 0).to_aml_bytes(&mut body);
    // Interrupt source override: type, length, ISA bus, source; then which it is, and
    // that it is active-high and level-triggered, where ISA would be edge-triggered.
    body.vec(&[2, 10, 0, board::SCI_GSI]);
    body.dword(board::SCI_GSI.into());
    body.word(0b1101);
    table(*b"APIC", 5, &body)
}

/// AML of the DSDT: the serial port, the clock, and how to get to S5.
fn devices() -> Vec<u8> {
    let device = |path: &str, id: &str, resources: &ResourceTemplate<'_>| {
        let mut aml = Vec::new();
        let hid = Name::new(Path::new("_HID"), &EISAName::new(id));
        let crs = Name::new(Path::new("_CRS"), resources);
        let uid = Name::new(Path::new("_UID"), &ZERO);
        Device::new(Path::new(path), vec![&hid, &uid, &crs]).to_aml_bytes(&mut aml);
        aml
    };
    let com1_ports = IO::new(board::COM1_PORT, board::COM1_PORT, 1, 8);
    // Consumer, edge-triggered, active-high, exclusive.
    let com1_line = Interrupt::new(true, true, false, false, board::COM1_GSI);
    let clock_ports = IO::new(board::CMOS_PORT, board::CMOS_PORT, 1, 2);
    let mut children = device("COM1", "PNP0501", &ResourceTemplate::new(vec![&com1_ports, &com1_line]));
    children.extend(device("RTC0", "PNP0B00", &ResourceTemplate::new(vec![&clock_ports])));

    let mut aml = Scope::raw(Path::new("\\_SB_"), children);
    let sleep_types = Package::new(vec![&board::S5_SLEEP_TYPE, &ZERO, &ZERO, &ZERO]);
    Name::new(Path::new("\\_S5_"), &sleep_types).to_aml_bytes(&mut aml);
    aml
}

#[cfg(test)]
mod tests {
    use super::super::sums_to_zero;
    use super::*;
    use crate::memory::guest::fake::FakeMemory;

    fn u32_at(bytes: &[u8], offset: usize) -> u32 {
        u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
    }

    /// The table at a pointer, found as a kernel does: by address, as long as it says.
    fn follow(memory: &FakeMemory, address: u64, signature: &[u8; 4]) -> Vec<u8> {
        let mut header = [0; 36];
        memory.read(Gpa::new(address), &mut header).unwrap();
        assert_eq!(header[..4], *signature);
        let mut bytes = vec![0; u32_at(&header, 4) as usize];
        memory.read(Gpa::new(address), &mut bytes).unwrap();
        assert!(sums_to_zero(&bytes), "{}", signature.escape_ascii());
        bytes
    }

    fn read_back(vcpus: u32) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let memory = FakeMemory::new(0, 1 << 20);
        let tables = GuestTables::build(vcpus).unwrap();
        assert!(tables.tables.len() as u64 <= board::ACPI_TABLES.end - board::ACPI_TABLES.start);
        tables.write(&memory).unwrap();
        let mut rsdp = [0; 36];
        memory.read(board::RSDP_ADDRESS, &mut rsdp).unwrap();
        assert_eq!(rsdp[..8], *b"RSD PTR ");
        assert_eq!(rsdp[15], 2);
        assert!(sums_to_zero(&rsdp[..20]) && sums_to_zero(&rsdp));
        let xsdt = follow(&memory, u32_at(&rsdp, 24).into(), b"XSDT");
        assert_eq!(xsdt.len(), 36 + 2 * 8);
        let fadt = follow(&memory, u32_at(&xsdt, 36).into(), b"FACP");
        let madt = follow(&memory, u32_at(&xsdt, 44).into(), b"APIC");
        let dsdt = follow(&memory, u32_at(&fadt, 40).into(), b"DSDT");
        let mut facs = [0; 64];
        memory.read(Gpa::new(u32_at(&fadt, 36).into()), &mut facs).unwrap();
        assert_eq!((&facs[..4], u32_at(&facs, 4)), (&b"FACS"[..], 64));
        (fadt, madt, dsdt)
    }

    #[test]
    fn the_fixed_hardware_is_the_boards() {
        let (fadt, _, dsdt) = read_back(1);
        // Offsets of table 5.9.
        assert_eq!(fadt[46], 9, "SCI_INT");
        assert_eq!(fadt[48..53], [0; 5], "no SMI_CMD, no ACPI_ENABLE");
        assert_eq!((u32_at(&fadt, 56), u32_at(&fadt, 64), u32_at(&fadt, 76)), (0x600, 0x604, 0x608));
        assert_eq!((fadt[88], fadt[89], fadt[91]), (4, 2, 4));
        assert_eq!(fadt[109..111], [0b101, 0], "IAPC_BOOT_ARCH");
        // WBINVD, PROC_C1, SLP_BUTTON, FIX_RTC, TMR_VAL_EXT, RESET_REG_SUP, HEADLESS.
        assert_eq!(u32_at(&fadt, 112), 1 | 1 << 2 | 1 << 5 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 12);
        assert_eq!(fadt[116..129], [1, 8, 0, 0, 0xf9, 0x0c, 0, 0, 0, 0, 0, 0, 6]);
        assert_eq!(u32_at(&fadt, 140), u32_at(&fadt, 40), "X_DSDT");
        assert_eq!(fadt[148..156], [1, 32, 0, 0, 0, 6, 0, 0], "X_PM1a_EVT_BLK");
        let aml = &dsdt[36..];
        let has = |bytes: &[u8]| aml.windows(bytes.len()).any(|window| window == bytes);
        assert!(has(b"\x08\\_S5_\x12\x07\x04\x0a\x05\0\0\0"), "{aml:02x?}");
        assert!(has(b"\x0c\x41\xd0\x05\x01"), "PNP0501 as an EISA ID");
        assert!(has(b"\x0c\x41\xd0\x0b\0"), "PNP0B00");
        assert!(has(b"\x47\x01\xf8\x03\xf8\x03\x01\x08\x89\x06\0\x03\x01\x04\0\0\0"), "COM1");
    }

    #[test]
    fn every_vcpu_and_the_io_apic_are_in_the_madt() {
        for vcpus in [1, 2, 255] {
            let (_, madt, _) = read_back(vcpus);
            assert_eq!((u32_at(&madt, 36), u32_at(&madt, 40)), (0xfee0_0000, 0));
            let (cpus, rest) = madt[44..].split_at(vcpus as usize * 8);
            for (id, cpu) in (0..=254).zip(cpus.chunks(8)) {
                assert_eq!(cpu, [0, 8, id, id, 1, 0, 0, 0]);
            }
            assert_eq!(rest, [1, 12, 0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0, 2, 10, 0, 9, 9, 0, 0, 0, 0x0d, 0]);
        }
    }

    #[test]
    fn a_cell_has_1_to_255_vcpus() {
        for vcpus in [0, 256, u32::MAX] {
            assert_eq!(GuestTables::build(vcpus), Err(VcpuCountError { vcpus }));
        }
    }
}
