//! The local APICs: one driver value stands for the APIC of whichever CPU uses it.
// UNSAFETY: the driver is given the mapped registers.
#![expect(unsafe_code, reason = "vouches for the mapping of the registers")]

use crate::interrupts::OWN_VECTORS;
use crate::{memory, percpu};
use bulkhead_arch::x86_64::page_table::PageTableError;
use bulkhead_drivers::local_apic::{self, LocalApic};
use bulkhead_vmm::hal::CpuId;
use bulkhead_vmm::memory::address::{Hpa, PAGE_SIZE};
use spin::Once;

static LOCAL_APIC: Once<LocalApic> = Once::new();

/// Finds and sets up the boot CPU's APIC.
///
/// # Errors
/// When its registers can't be mapped.
pub(crate) fn init() -> Result<(), PageTableError> {
    let page = memory::map_mmio(Hpa::new(local_apic::page()), PAGE_SIZE)?;
    // SAFETY: the registers were just mapped for good, uncached, in the tables of all CPUs.
    LOCAL_APIC.call_once(|| unsafe { LocalApic::new(memory::pointer(page)) });
    init_cpu();
    Ok(())
}

/// Sets up the APIC of the CPU that calls it.
pub(crate) fn init_cpu() {
    get().init(OWN_VECTORS.spurious, OWN_VECTORS.timer);
}

/// The local APIC of the CPU that calls it.
pub(crate) fn get() -> &'static LocalApic {
    LOCAL_APIC.get().expect("apic::init runs before interrupts are opened")
}

/// As [`get`], but `None` before [`init`]: for exceptions and panics.
pub(crate) fn try_get() -> Option<&'static LocalApic> {
    LOCAL_APIC.get()
}

/// Makes CPU `id` look at its mailbox.
pub(crate) fn kick(id: CpuId) {
    if let Some(cpu) = percpu::get(id) {
        get().send(cpu.apic_id, OWN_VECTORS.kick);
    }
}
