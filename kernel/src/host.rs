//! The machine as the run loop and the boards use it: counter, timer, interrupts, ports.

// UNSAFETY: hands raw mappings to the types that check accesses to them.
#![expect(unsafe_code, reason = "hands raw mappings to the types that check accesses to them")]

use crate::memory::access::Registers;
use crate::{apic, counter, memory, percpu};
use alloc::boxed::Box;
use alloc::vec::Vec;
use bulkhead_arch::guest_ram::{GuestRam, RamRegion};
use bulkhead_arch::x86_64::ops;
use bulkhead_arch::x86_64::page_table::PageSize;
use bulkhead_arch::x86_64::svm::Permissions;
use bulkhead_arch::x86_64::svm::vmcb::{IoPermissionMap, MsrPermissionMap};
use bulkhead_vmm::device::bus::Width;
use bulkhead_vmm::hal::{CpuId, Role};
use bulkhead_vmm::memory::address::Hpa;
use bulkhead_vmm::x86::machine::Machine;
use bulkhead_vmm::x86::mediated_io_apic::IoApicHardware;
use bulkhead_vmm::x86::msr::{MSR_TABLE, MsrAction};
use bulkhead_vmm::x86::posted::LogicalId;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use spin::Once;

/// Where writes are interrupt messages, and the local APICs' registers are. Chipsets, and
/// emulators, take a CPU's write there for a message too, of any mode, to any CPU.
pub(crate) const MSI_WINDOW: Range<u64> = 0xfee0_0000..0xfef0_0000;

/// Wall-clock nanoseconds since 1970 at boot, by the machine's clock.
static BOOT_WALL_NS: Once<u64> = Once::new();
/// Interrupts of the machine that arrived at a CPU outside the root cell.
static STRAY_INTERRUPTS: AtomicU64 = AtomicU64::new(0);

/// Notes what time of day it is; once, at boot.
pub(crate) fn note_wall_clock() {
    BOOT_WALL_NS.call_once(|| {
        let now = bulkhead_drivers::rtc::unix_seconds().unwrap_or_else(|| {
            log::warn!("the machine's real-time clock shows no date");
            0
        });
        now.saturating_mul(1_000_000_000).saturating_sub(counter::nanoseconds_since_boot())
    });
}

/// The time of day at boot in nanoseconds since 1970, once it was noted.
pub(crate) fn boot_wall_clock_ns() -> u64 {
    BOOT_WALL_NS.get().copied().unwrap_or_default()
}

/// The machine's counter.
pub(crate) fn counter() -> u64 {
    bulkhead_counter::read()
}

/// A value of the counter, in nanoseconds since boot.
pub(crate) fn counter_to_ns(counter: u64) -> u64 {
    ticks_to_ns(counter.saturating_sub(counter::boot_counter()))
}

/// A number of ticks of the counter, in nanoseconds.
pub(crate) fn ticks_to_ns(ticks: u64) -> u64 {
    let ns = u128::from(ticks) * 1_000_000_000 / u128::from(counter::frequency_hz());
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// The machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostMachine;

impl Machine for HostMachine {
    fn counter(&self) -> u64 {
        counter()
    }

    fn counter_hz(&self) -> u64 {
        counter::frequency_hz()
    }

    fn ns(&self) -> u64 {
        counter::nanoseconds_since_boot()
    }

    fn wall_clock_base_ns(&self) -> u64 {
        boot_wall_clock_ns().saturating_sub(ticks_to_ns(counter::boot_counter()))
    }

    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let result = ops::cpuid(leaf, subleaf);
        [result.eax, result.ebx, result.ecx, result.edx]
    }

    fn read_msr(&self, msr: u32) -> u64 {
        // Only what the table lets be read, so that no value of a guest reaches RDMSR.
        let known = MSR_TABLE.iter().any(|row| {
            (row.first..=row.last).contains(&msr)
                && (row.root == MsrAction::ReadOnly || row.guest == MsrAction::ReadOnly)
        });
        if known { ops::read_msr(msr) } else { 0 }
    }

    fn read_port(&self, port: u16, width: Width) -> u64 {
        u64::from(match width {
            Width::Byte => u32::from(ops::in8(port)),
            Width::Word => u32::from(ops::in16(port)),
            Width::Dword | Width::Qword => ops::in32(port),
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "the width says how much is meant")]
    fn write_port(&self, port: u16, width: Width, value: u64) {
        match width {
            Width::Byte => ops::out8(port, value as u8),
            Width::Word => ops::out16(port, value as u16),
            Width::Dword | Width::Qword => ops::out32(port, value as u32),
        }
    }

    fn kick(&self, cpu: CpuId) {
        apic::kick(cpu);
    }
}

/// One of the machine's I/O APICs.
pub(crate) struct HostIoApic(Registers);

impl HostIoApic {
    /// The I/O APIC at `address`.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub(crate) fn new(address: Hpa) -> Option<Self> {
        Registers::map(address).map(Self)
    }
}

impl IoApicHardware for HostIoApic {
    fn read(&mut self, register: u8) -> u32 {
        self.0.write(0, u32::from(register));
        self.0.read(0x10)
    }

    fn write(&mut self, register: u8, value: u32) {
        self.0.write(0, u32::from(register));
        self.0.write(0x10, value);
    }
}

/// How many pins the I/O APIC at `address` has; 0 when it cannot be mapped.
pub(crate) fn io_apic_pins(address: Hpa) -> u32 {
    HostIoApic::new(address).map_or(0, |mut apic| (apic.read(1) >> 16 & 0xff) + 1)
}

/// The RAM of a cell.
pub(crate) fn guest_ram(regions: Vec<RamRegion>) -> GuestRam {
    // SAFETY: the direct map covers all RAM for good, and callers give only memory that
    // belongs to a cell: the map of the root cell, or what management took from the pool.
    unsafe { GuestRam::new(regions, memory::word(memory::DIRECT_MAP)) }
}

/// What a cell of this role may touch without an exit: `trapped` are ports that a root cell
/// must not write unseen; a guest cell has no ports of its own at all.
pub(crate) fn permissions(role: Role, trapped: impl Iterator<Item = u16>) -> Permissions {
    let mut msrs = Box::new(MsrPermissionMap::all());
    for row in MSR_TABLE {
        let action = match role {
            Role::Root => row.root,
            Role::Guest => row.guest,
        };
        if action == MsrAction::Pass {
            for msr in row.first..=row.last {
                msrs.allow(msr, true, true);
            }
        }
    }
    let mut ports = Box::new(match role {
        Role::Root => IoPermissionMap::none(),
        Role::Guest => IoPermissionMap::all(),
    });
    for port in trapped {
        ports.set(port, true);
    }
    Permissions { msrs, ports }
}

/// Counts an interrupt of the machine that arrived at a CPU outside the root cell, and tells
/// of every power of two.
pub(crate) fn count_stray_interrupt(cpu: CpuId, vector: u8) {
    let count = STRAY_INTERRUPTS.fetch_add(1, Ordering::Relaxed) + 1;
    if count.is_power_of_two() {
        log::warn!(
            "{cpu}: not the root cell's, but one of its devices interrupts it with vector {vector:#x} ({count} so far)"
        );
    }
}

/// Arms this CPU's timer for a value of the counter, or disarms it.
pub(crate) fn arm_timer(deadline: Option<u64>) {
    let cpu = percpu::this();
    let target = deadline.unwrap_or(u64::MAX);
    let fired = cpu.timer_fired.swap(false, Ordering::Relaxed);
    if cpu.timer_target.swap(target, Ordering::Relaxed) == target && !fired {
        return;
    }
    let apic = apic::get();
    let Some(deadline) = deadline else {
        apic.disarm();
        return;
    };
    if apic.has_deadline_timer() {
        apic.arm_deadline(deadline);
    } else {
        let ticks = counter::apic_timer_ticks(deadline.saturating_sub(counter()));
        // A longer wait is cut: the timer then fires early, and is armed again.
        apic.arm_ticks(u32::try_from(ticks).unwrap_or(u32::MAX));
    }
}

/// Lets what interrupts wait be taken by their handlers.
pub(crate) fn open_interrupts_briefly() {
    ops::enable_interrupts();
    // The instruction after STI is still in its shadow (AMD APM vol. 3, STI).
    core::hint::spin_loop();
    ops::disable_interrupts();
}

/// Halts until an interrupt was taken. One that came after interrupts were closed ends it
/// at once.
pub(crate) fn wait_for_interrupt() {
    ops::enable_interrupts_and_halt();
    ops::disable_interrupts();
}

/// The size of the physical address space in bytes, as far as a root cell is given it.
pub(crate) fn physical_address_space() -> u64 {
    /// So much is mapped with few tables; no machine that is known has devices beyond.
    const BITS_MAX: u32 = 46;
    let bits = ops::cpuid(0x8000_0008, 0).eax & 0xff;
    1 << if memory::largest_page() == PageSize::Size1G { bits.min(BITS_MAX) } else { bits.min(40) }
}

/// Lets the machine's devices find this CPU by the logical ID that the root cell has given it.
pub(crate) fn set_logical_id(cpu: CpuId, id: LogicalId) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let apic = apic::get();
    let found = apic.set_logical_id(id.ldr, id.flat) || id == LogicalId::NONE;
    if !found && !id.is_that_of_x2apic(apic.id()) && !TOLD.swap(true, Ordering::Relaxed) {
        log::warn!(
            "root cell: {cpu} has the logical ID {:#x}, by which no device finds it: the machine's APICs are in x2APIC mode, and so should be the root cell's",
            id.ldr
        );
    }
}

/// Resets the machine.
pub(crate) fn reset_machine() -> ! {
    ops::out8(0xcf9, 6);
    ops::halt_forever()
}
