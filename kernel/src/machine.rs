//! The machine, as it was found.

use crate::acpi::Firmware;
use crate::boot::BootPath;
use crate::counter::Frequencies;
use crate::percpu;
use alloc::string::String;
use alloc::vec::Vec;
use bulkhead_vmm::hal::CpuId;
use bulkhead_vmm::memory::address::Gpa;
use bulkhead_vmm::memory::map::{Kind, MemoryMap, PageRange};
use bulkhead_vmm::x86::acpi::Signature;
use bulkhead_vmm::x86::acpi::root::FirmwareTable;
use bulkhead_vmm::x86::acpi::sleep::PowerOffTypes;
use bulkhead_vmm::x86::boot::e820::{E820Entry, E820Kind};
use bulkhead_vmm::x86::root_ports::PowerPorts;

/// What the boot CPU has found out about the machine.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) boot_path: BootPath,
    pub(crate) command_line: String,
    /// Who owns which memory.
    pub(crate) memory: MemoryMap,
    /// What the firmware tells. The CPUs that really run are those of `percpu`.
    pub(crate) firmware: Firmware,
    /// How many CPUs run, numbered from 0.
    pub(crate) cpus: u32,
    /// The bundle, empty when there is none.
    pub(crate) bundle: &'static [u8],
    pub(crate) frequencies: Frequencies,
    /// How far the CPUs' counters may be apart, in counts.
    pub(crate) counter_bound: u64,
}

impl Machine {
    /// The value of `name` in a command line of words `name=value`; the last one counts. A
    /// word without a value has an empty one.
    pub(crate) fn option<'a>(command_line: &'a str, name: &str) -> Option<&'a str> {
        let words = command_line.split_ascii_whitespace();
        words
            .map(|word| word.split_once('=').unwrap_or((word, "")))
            .filter(|w| w.0 == name)
            .map(|w| w.1)
            .next_back()
    }

    /// APIC IDs of the CPUs that run, in the order of their numbers.
    pub(crate) fn apic_ids(&self) -> Vec<u32> {
        (0..self.cpus).filter_map(|cpu| percpu::get(CpuId(cpu))).map(|cpu| cpu.apic_id).collect()
    }

    /// The memory map for the root cell: of its RAM the first `limit` bytes.
    pub(crate) fn root_map(&self, limit: Option<u64>) -> Vec<E820Entry> {
        let mut left = limit.unwrap_or(u64::MAX);
        let mut map = Vec::new();
        for region in self.memory.root_map() {
            let (start, end) = (region.range.start().raw(), region.range.end().raw());
            if region.kind != Kind::USABLE {
                map.push(E820Entry::new(start, end, E820Kind(region.kind.0)));
                continue;
            }
            let cut = start + left.min(end - start);
            left -= cut - start;
            for (start, end, kind) in [(start, cut, E820Kind::RAM), (cut, end, E820Kind::RESERVED)] {
                if start < end {
                    map.push(E820Entry::new(start, end, kind));
                }
            }
        }
        map
    }

    /// What no cell but a guest cell may reach: the hypervisor's own memory and the pool.
    pub(crate) fn kept_ranges(&self) -> impl Iterator<Item = PageRange> {
        let own = [Kind::IMAGE, Kind::BUNDLE, Kind::HYPERVISOR, Kind::POOL];
        self.memory
            .regions()
            .iter()
            .filter(move |region| own.contains(&region.kind))
            .map(|region| region.range)
    }

    /// The firmware's tables, for the root cell's to be built from.
    pub(crate) fn firmware_tables(&self) -> Vec<FirmwareTable<'_>> {
        let tables = self.firmware.tables.iter().filter(|t| !matches!(&t.signature, b"RSDT" | b"XSDT"));
        tables
            .map(|table| FirmwareTable {
                signature: Signature(table.signature),
                address: Gpa::new(table.address.raw()),
                bytes: &table.bytes,
            })
            .collect()
    }

    /// Ports by which the machine is turned off, put to sleep and reset.
    pub(crate) fn power_ports(&self) -> PowerPorts {
        let Firmware { pm1_status, pm1_control, reset, .. } = self.firmware;
        let ssdts = self.firmware.tables.iter().filter(|table| &table.signature == b"SSDT");
        let blocks = self.firmware.dsdt.iter().chain(ssdts).map(|table| &table.bytes[..]);
        let off = PowerOffTypes::find(blocks);
        if off.is_empty() {
            log::warn!(
                "the firmware names no sleep type for off: the root cell can reset the machine, but not turn it off"
            );
        }
        PowerPorts { pm1_status, pm1_control, off, reset }
    }
}
