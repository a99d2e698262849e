//! The board of a guest cell: where its memory and devices are.
//!
//! Everything that names an address, a port or an interrupt of that board takes it from
//! here: the device models, the ACPI tables, and the memory map that kernels are told.

use crate::memory::address::Gpa;
use crate::x86::boot::e820::{E820Entry, E820Kind};
use alloc::vec::Vec;
use core::ops::Range;

/// The most vCPUs a guest cell can have. A vCPU's APIC ID is its number, and 255 means
/// everybody in xAPIC mode.
pub const MAX_VCPUS: u32 = 255;

/// First port of the 16550, which has 8.
pub const COM1_PORT: u16 = 0x3f8;
/// Its interrupt: edge-triggered, active-high.
pub const COM1_GSI: u32 = 4;
/// Index port of the CMOS and real-time clock; the data port follows.
pub const CMOS_PORT: u16 = 0x70;
/// PM1a event block: status, then enable, 16 bits each.
pub const PM1A_EVENT_PORT: u16 = 0x600;
/// PM1a control, 16 bits. Its `SCI_EN` reads as 1 at all times: there is no legacy mode.
pub const PM1A_CONTROL_PORT: u16 = 0x604;
/// ACPI PM timer, 32 bits wide at 3.579545 MHz.
pub const PM_TIMER_PORT: u16 = 0x608;
/// Value of `PM1a_CNT.SLP_TYP` that means S5, soft off.
pub const S5_SLEEP_TYPE: u8 = 5;
/// The ACPI reset register, 8 bits.
pub const RESET_PORT: u16 = 0xcf9;
/// What is written there to reset the cell.
pub const RESET_VALUE: u8 = 6;
/// What a guest writes here, 32 bits, is how it ended: it is off then.
pub const EXIT_PORT: u16 = 0xf4;
/// The ACPI system control interrupt: level-triggered, active-high.
pub const SCI_GSI: u8 = 9;

/// Where the I/O APIC is. Its pins are the global system interrupts from 0.
pub const IO_APIC_ADDRESS: u32 = 0xfec0_0000;
/// Its ID.
pub const IO_APIC_ID: u8 = 0;
/// Where the local APICs are after reset, in xAPIC mode.
pub const LOCAL_APIC_ADDRESS: u32 = 0xfee0_0000;

/// End of the memory below the old video memory.
const LOW_END: u64 = 0xa_0000;
/// Where the ACPI tables are; the root pointer comes first.
pub const ACPI_TABLES: Range<u64> = 0xe_0000..0xf_f000;
/// Where the FACS is, which firmware and system share while the system runs.
pub const FACS_ADDRESS: u32 = 0xf_f000;
const ONE_MIB: u64 = 0x10_0000;
/// Addresses that devices have instead of memory.
pub const DEVICE_HOLE: Range<u64> = 0xc000_0000..0x1_0000_0000;

/// The ranges of a cell's RAM when it has `size` bytes: from 0 without a hole up to the
/// devices, and the rest from 4 GiB on.
pub fn ram(size: u64) -> impl Iterator<Item = Range<u64>> {
    let low = size.min(DEVICE_HOLE.start);
    let high = DEVICE_HOLE.end..DEVICE_HOLE.end.saturating_add(size - low);
    [0..low, high].into_iter().filter(|range| !range.is_empty())
}

/// The memory map of a cell with `size` bytes of RAM. What an old PC has between 640 KiB
/// and 1 MiB is RAM too, so that who looks for tables there finds zeros, but it is not
/// given away.
pub fn memory_map(size: u64) -> Vec<E820Entry> {
    let below = [
        E820Entry::new(0, LOW_END, E820Kind::RAM),
        E820Entry::new(LOW_END, ACPI_TABLES.start, E820Kind::RESERVED),
        E820Entry::new(ACPI_TABLES.start, ACPI_TABLES.end, E820Kind::ACPI),
        E820Entry::new(FACS_ADDRESS.into(), ONE_MIB, E820Kind::NVS),
    ];
    let above = ram(size).map(|range| E820Entry::new(range.start.max(ONE_MIB), range.end, E820Kind::RAM));
    below.into_iter().chain(above).filter(|entry| entry.size > 0).collect()
}

/// The root pointer of the ACPI tables.
pub const RSDP_ADDRESS: Gpa = Gpa::new(ACPI_TABLES.start);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_map_tells_all_memory_once_and_no_device(pages in 256_u64..0x200_0000) {
            let size = pages << 12;
            let map = memory_map(size);
            prop_assert_eq!(map.iter().map(|entry| entry.size).sum::<u64>(), size);
            for (a, b) in map.iter().zip(map.iter().skip(1)) {
                prop_assert!(a.base.raw() + a.size <= b.base.raw());
            }
            for entry in &map {
                let end = entry.base.raw() + entry.size;
                prop_assert!(end <= DEVICE_HOLE.start || entry.base.raw() >= DEVICE_HOLE.end);
                prop_assert!(ram(size).any(|ram| ram.start <= entry.base.raw() && end <= ram.end));
            }
            prop_assert_eq!(ram(size).map(|ram| ram.end - ram.start).sum::<u64>(), size);
        }
    }

    #[test]
    fn memory_goes_on_above_the_devices() {
        let map = memory_map(0xc000_1000);
        let tail: Vec<_> = map.iter().rev().take(2).map(|e| (e.base.raw(), e.size, e.kind)).collect();
        assert_eq!(tail, [(1 << 32, 0x1000, E820Kind::RAM), (0x10_0000, 0xbff0_0000, E820Kind::RAM)]);
    }
}
