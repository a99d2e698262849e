//! Starts the other CPUs, one at a time, by INIT and start-up messages.
//!
//! The start-up code runs in a page below 1 MiB whose contents are put back afterwards. A
//! CPU that does not answer is sent INIT again, so that it stays in wait-for-start-up,
//! and is left out.
//!
//! Once it runs, the new CPU and the boot CPU exchange readings of their counters, which
//! bounds how far the two may be apart.
// UNSAFETY: writes start-up code to low memory.
#![expect(unsafe_code, reason = "start-up code in low memory")]

use crate::percpu::{self, PerCpu, Stacks};
use crate::{apic, counter, memory};
use bulkhead_arch::x86_64::boot::{TrampolineArguments, trampoline};
use bulkhead_arch::x86_64::descriptors::CpuDescriptors;
use bulkhead_arch::x86_64::ops;
use bulkhead_arch::x86_64::page_table::PageTableError;
use bulkhead_vmm::clock::agreement::CounterOffset;
use bulkhead_vmm::hal::CpuId;
use bulkhead_vmm::memory::address::{Hpa, PAGE_SIZE};
use bulkhead_vmm::memory::map::{Kind, MemoryMap, PageRange};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How long a CPU may take to answer, in microseconds. Silicon takes less than one
/// thousandth of it, an emulator on a busy host does not.
const ANSWER_US: u64 = 2_000_000;
/// How long INIT may take, in microseconds.
const SETTLE_US: u64 = 1000;
const EXCHANGES: u64 = 64;
const PAGE: usize = memory::word(PAGE_SIZE);

/// What a new CPU is handed: valid until it is online. All it needs is in there, for a CPU
/// that is late may be reset at any instruction until then: it takes no lock.
struct Start {
    cpu: &'static PerCpu,
    descriptors: &'static mut CpuDescriptors,
}

/// Turn of the exchange of counters: odd for the new CPU, even for the boot CPU.
static TURN: AtomicU64 = AtomicU64::new(0);
static THEIRS: AtomicU64 = AtomicU64::new(0);
/// All CPUs are up: the others may go on.
static GO: AtomicBool = AtomicBool::new(false);

/// Starts the CPUs with these APIC IDs, but for this one. Returns how far the CPUs'
/// counters may be apart at most, in counts.
pub(crate) fn start_all(apic_ids: &[u32], map: &MemoryMap) -> u64 {
    let own = percpu::this().apic_id;
    let mut bound = 0;
    if apic_ids.iter().all(|&id| id == own) {
        return bound;
    }
    let Some(page) = low_page(map) else {
        log::error!("no page below 1 MiB is usable: only the boot CPU runs");
        return bound;
    };
    let mut next = 1;
    let started = with_low_page(page, |low| {
        for &apic_id in apic_ids.iter().filter(|&&id| id != own) {
            match start(low, CpuId(next), apic_id) {
                Ok(offset) => {
                    next += 1;
                    bound = bound.max(offset.bound());
                    if !offset.allows_equal() {
                        log::warn!("the counter of the CPU with APIC ID {apic_id} is off: {offset:?}");
                    }
                }
                Err(error) => log::error!("the CPU with APIC ID {apic_id} is left out: {error}"),
            }
        }
    });
    if let Err(error) = started {
        log::error!("only the boot CPU runs: {error}");
    }
    GO.store(true, Ordering::Release);
    bound
}

/// The highest usable page below 640 KiB, page 0 apart.
fn low_page(map: &MemoryMap) -> Option<Hpa> {
    let window = PageRange::covering(Hpa::new(PAGE_SIZE), 0x9_f000)?;
    let parts = map.regions().iter().filter(|r| r.kind == Kind::USABLE);
    let part = parts.filter_map(|r| r.range.intersection(window)).next_back()?;
    Some(Hpa::new(part.end().raw() - PAGE_SIZE))
}

/// A page below 1 MiB, in use for start-up code.
struct LowPage {
    at: Hpa,
    bytes: *mut [u8; PAGE],
}

/// Puts the start-up code into the page at `at`, calls `f`, and restores what was there.
fn with_low_page(at: Hpa, f: impl FnOnce(&LowPage)) -> Result<(), PageTableError> {
    let bytes = memory::pointer::<[u8; PAGE]>(memory::direct(at));
    // SAFETY: usable RAM, which nobody else uses while the hypervisor boots.
    let saved = unsafe { bytes.read_volatile() };
    let mut code = [0; PAGE];
    code[..trampoline().len()].copy_from_slice(trampoline());
    // SAFETY: as above.
    unsafe { bytes.write_volatile(code) };
    let result = memory::with_identity_page(at, || f(&LowPage { at, bytes }));
    // SAFETY: as above; the CPUs that came up have left the page, the others are reset.
    unsafe { bytes.write_volatile(saved) };
    result
}

/// Starts one CPU.
fn start(low: &LowPage, id: CpuId, apic_id: u32) -> Result<CounterOffset, &'static str> {
    let cpu = PerCpu::new(id, apic_id);
    let stacks = Stacks::new().map_err(|_| "no memory for its stacks")?;
    let start = Start { cpu, descriptors: percpu::new_descriptors(stacks.ist) };
    let arguments = TrampolineArguments {
        page_tables: ops::page_table_root(),
        stack_top: stacks.own.raw(),
        argument: (&raw const start).cast_mut().cast(),
        entry: enter,
    };
    let end = low.bytes.wrapping_byte_add(PAGE - size_of::<TrampolineArguments>());
    // SAFETY: the last bytes of the page are the arguments', see `with_low_page`.
    unsafe { end.cast::<TrampolineArguments>().write_volatile(arguments) };
    TURN.store(0, Ordering::Relaxed);

    let apic = apic::get();
    #[expect(clippy::cast_possible_truncation, reason = "a page below 1 MiB")]
    let page = (low.at.raw() / PAGE_SIZE) as u8;
    // INIT, start-up, and start-up again if it was missed (AMD APM vol. 2, 15.27.8 and
    // Intel SDM vol. 3, 9.4.4, whose 10 ms after INIT no CPU with SVM or VMX needs).
    apic.send_init(apic_id);
    counter::delay_us(SETTLE_US);
    for patience_us in [1000, ANSWER_US] {
        apic.send_startup(apic_id, page);
        let end = counter::nanoseconds_since_boot() + patience_us * 1000;
        while counter::nanoseconds_since_boot() < end {
            if cpu.online.load(Ordering::Acquire) {
                percpu::add(cpu);
                return Ok(exchange_counters());
            }
            core::hint::spin_loop();
        }
    }
    apic.send_init(apic_id);
    counter::delay_us(SETTLE_US);
    Err("it does not answer")
}

/// The boot CPU's part of the exchange.
fn exchange_counters() -> CounterOffset {
    let mut offset = CounterOffset::UNKNOWN;
    for round in 0..EXCHANGES {
        let before = bulkhead_counter::read();
        TURN.store(2 * round + 1, Ordering::Release);
        while TURN.load(Ordering::Acquire) != 2 * round + 2 {
            core::hint::spin_loop();
        }
        let after = bulkhead_counter::read();
        offset.learn(before, THEIRS.load(Ordering::Relaxed), after);
    }
    offset
}

/// The first Rust code of a CPU.
extern "C" fn enter(start: *mut ()) -> ! {
    // SAFETY: `start` waits until this CPU is online before it drops what it points to.
    let Start { cpu, descriptors } = unsafe { start.cast::<Start>().read() };
    cpu.install();
    // SAFETY: the descriptors and their stacks were made for this CPU.
    unsafe { percpu::load_descriptors(descriptors) };
    apic::init_cpu();
    cpu.online.store(true, Ordering::Release);
    for round in 0..EXCHANGES {
        while TURN.load(Ordering::Acquire) != 2 * round + 1 {
            core::hint::spin_loop();
        }
        THEIRS.store(bulkhead_counter::read(), Ordering::Relaxed);
        TURN.store(2 * round + 2, Ordering::Release);
    }
    while !GO.load(Ordering::Acquire) {
        core::hint::spin_loop();
    }
    ops::flush_all();
    crate::secondary(cpu.id)
}
