//! The machine's counter, the TSC: how fast it runs, and what time it is since boot.
// UNSAFETY: the HPET driver is given the mapped registers.
#![expect(unsafe_code, reason = "vouches for the mapping of the HPET")]

use crate::acpi::Firmware;
use crate::{apic, memory};
use bulkhead_arch::x86_64::ops;
use bulkhead_drivers::tsc::Reference;
use bulkhead_vmm::clock::{Bracket, Frequency, frequency, tightest};
use bulkhead_vmm::memory::address::PAGE_SIZE;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

/// Readings at each end of a window, of which the tightest counts.
const READINGS: u32 = 64;
/// Windows are so long first, in milliseconds; twice as long each time they disagree.
const WINDOW_MS: u64 = 100;
const LENGTHENED_MAX: u32 = 3;
/// A reference that stands must not stop the machine.
const POLLS_MAX: u64 = 1 << 26;
const HYPERVISOR_TIMING_LEAF: u32 = 0x4000_0010;

static BOOT: AtomicU64 = AtomicU64::new(0);
static HZ: AtomicU64 = AtomicU64::new(0);
static APIC_HZ: AtomicU64 = AtomicU64::new(0);

/// Time begins.
pub(crate) fn init() {
    BOOT.store(bulkhead_counter::read(), Ordering::Relaxed);
}

/// Nanoseconds since [`init`]; 0 while the frequency is not known.
pub(crate) fn nanoseconds_since_boot() -> u64 {
    let hz = HZ.load(Ordering::Relaxed);
    if hz == 0 {
        return 0;
    }
    let counts = bulkhead_counter::read().wrapping_sub(BOOT.load(Ordering::Relaxed));
    u64::try_from(u128::from(counts) * 1_000_000_000 / u128::from(hz)).unwrap_or(u64::MAX)
}

/// The counter's frequency in Hz; 1 while it is not known.
pub(crate) fn frequency_hz() -> u64 {
    HZ.load(Ordering::Relaxed).max(1)
}

/// The counter when time began.
pub(crate) fn boot_counter() -> u64 {
    BOOT.load(Ordering::Relaxed)
}

/// Ticks of the local APIC's timer in `ticks` of the counter, rounded up.
pub(crate) fn apic_timer_ticks(ticks: u64) -> u64 {
    let apic_hz = u128::from(APIC_HZ.load(Ordering::Relaxed));
    let hz = u128::from(frequency_hz());
    u64::try_from((u128::from(ticks) * apic_hz).div_ceil(hz)).unwrap_or(u64::MAX)
}

/// Waits for `us` microseconds. The frequency must be known.
pub(crate) fn delay_us(us: u64) {
    let end = nanoseconds_since_boot() + us * 1000;
    while nanoseconds_since_boot() < end {
        idle_a_moment();
    }
}

/// Lets some instructions pass. Not by PAUSE: an emulator that counts instructions takes
/// much longer for it than the single cycle that it lasts there.
fn idle_a_moment() {
    for n in 0..256 {
        core::hint::black_box(n);
    }
}

/// How fast the machine's counters run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frequencies {
    pub(crate) tsc: Frequency,
    /// The local APIC's timer, undivided.
    pub(crate) apic_timer: Frequency,
    /// What says so.
    pub(crate) source: Source,
}

/// Where the frequency of the TSC is known from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Cpuid,
    Hpet,
    PmTimer,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpuid => "CPUID",
            Self::Hpet => "HPET",
            Self::PmTimer => "PM timer",
        })
    }
}

/// The frequency that the CPU itself tells: leaf 15h with the crystal's frequency (Intel
/// SDM vol. 2A, CPUID), or a hypervisor's timing leaf, in kHz.
fn told() -> Option<u64> {
    if ops::cpuid(0, 0).eax >= 0x15 {
        let leaf = ops::cpuid(0x15, 0);
        if leaf.eax != 0 && leaf.ebx != 0 && leaf.ecx != 0 {
            return Some(u64::from(leaf.ecx) * u64::from(leaf.ebx) / u64::from(leaf.eax));
        }
    }
    let hypervisor = ops::cpuid(1, 0).ecx & 1 << 31 != 0;
    let last = ops::cpuid(0x4000_0000, 0).eax;
    if hypervisor && (HYPERVISOR_TIMING_LEAF..HYPERVISOR_TIMING_LEAF + 0x100).contains(&last) {
        let khz = ops::cpuid(HYPERVISOR_TIMING_LEAF, 0).eax;
        return (khz != 0).then_some(u64::from(khz) * 1000);
    }
    None
}

/// The clocks that can serve as reference, the best first.
fn references(firmware: &Firmware) -> impl Iterator<Item = (Reference, Source)> {
    let hpet = firmware.hpet.and_then(|at| {
        let page = memory::map_mmio(at, PAGE_SIZE).ok()?;
        // SAFETY: the registers were just mapped for good, uncached.
        unsafe { Reference::hpet(memory::pointer(page)) }.map(|hpet| (hpet, Source::Hpet))
    });
    let pm_timer = firmware.pm_timer.map(|(port, _)| (Reference::PmTimer { port }, Source::PmTimer));
    hpet.into_iter().chain(pm_timer)
}

/// One end of a window: TSC and APIC timer, each around the reference.
fn end_of_window(reference: Reference) -> [Bracket; 2] {
    let apic = apic::get();
    // The APIC's timer counts down.
    let ticks = || u64::from(u32::MAX - apic.ticks_left());
    let around = |read: &dyn Fn() -> u64| {
        tightest(READINGS, || Bracket { before: read(), reference: reference.read(), after: read() })
    };
    [around(&bulkhead_counter::read), around(&ticks)]
}

/// What one window says.
fn window(reference: Reference, ms: u64) -> Option<[Frequency; 2]> {
    apic::get().start_count();
    let start = end_of_window(reference);
    let ticks = ms * reference.millihertz() / 1_000_000;
    let begin = reference.read();
    let mut polls = 0u64;
    while reference.read().wrapping_sub(begin) & reference.mask() < ticks && polls < POLLS_MAX {
        polls += 1;
        idle_a_moment();
    }
    let end = end_of_window(reference);
    apic::get().stop_count();
    let hz = |n: usize| frequency(start[n], end[n], reference.millihertz(), reference.mask());
    Some([hz(0)?, hz(1)?])
}

/// Finds out how fast TSC and APIC timer run: two windows that agree within their errors,
/// else longer ones.
///
/// # Errors
/// When there is no reference, or none gives two windows that agree.
pub(crate) fn calibrate(firmware: &Firmware) -> Result<Frequencies, &'static str> {
    let mut result = Err("the frequency of the TSC is told by no CPUID leaf, HPET or PM timer");
    for (reference, source) in references(firmware) {
        for lengthened in 0..=LENGTHENED_MAX {
            let ms = WINDOW_MS << lengthened;
            let (Some(first), Some(second)) = (window(reference, ms), window(reference, ms)) else { break };
            let agree = first.iter().zip(&second).all(|(a, b)| a.agrees_with(b));
            log::debug!("{source}, {ms} ms: {first:?}, {second:?}");
            if !agree {
                result = Err("the frequency of the TSC differs from measurement to measurement");
                continue;
            }
            let better = |n: usize| if second[n].error_hz < first[n].error_hz { second[n] } else { first[n] };
            let found = Frequencies { tsc: better(0), apic_timer: better(1), source };
            result = Ok(found);
            break;
        }
        if result.is_ok() {
            break;
        }
    }
    if let (Some(hz), Ok(found)) = (told(), &mut result) {
        found.tsc = Frequency { hz, error_hz: 0 };
        found.source = Source::Cpuid;
    }
    // Measuring has changed the timer's mode.
    apic::init_cpu();
    if let Ok(found) = &result {
        HZ.store(found.tsc.hz, Ordering::Relaxed);
        APIC_HZ.store(found.apic_timer.hz, Ordering::Relaxed);
    }
    result
}
