//! What the hypervisor does with interrupts and exceptions.
//!
//! Vectors below 0x20 that no exception has are the hypervisor's own and mere hints: the
//! timer (look at the counter), the kick (look at the mailbox). All from 0x20 on are
//! devices of the root cell: the handler notes the vector and how it came, and ends the
//! interrupt; the loop takes what was noted. What nobody of ours sends is ended and counted.
//! The handler takes no lock.

use crate::{apic, panic, percpu};
use bulkhead_arch::x86_64::interrupts::{TrapFrame, set_handler};
use bulkhead_vmm::x86::arrival::{Arrival, OwnVectors, classify};
use core::sync::atomic::{AtomicU64, Ordering};

/// The hypervisor's own vectors.
pub(crate) const OWN_VECTORS: OwnVectors = OwnVectors { timer: 0x18, kick: 0x19, spurious: 0x1f };

/// Interrupts that nobody of ours sends.
static STRAYS: AtomicU64 = AtomicU64::new(0);
/// INIT messages that were made exceptions.
static INITS: AtomicU64 = AtomicU64::new(0);
/// What [`count`] is told for an INIT; for an interrupt, its vector.
const TELL_INIT: u64 = 0x100;

/// Takes over all vectors.
pub(crate) fn init() {
    set_handler(handle);
}

fn handle(frame: &TrapFrame) {
    #[expect(clippy::cast_possible_truncation, reason = "the stubs push vectors of 8 bits")]
    let vector = frame.vector as u8;
    let in_service = || apic::try_get().is_some_and(|apic| apic.is_in_service(vector));
    match classify(vector, frame.error_code(), OWN_VECTORS, in_service) {
        Arrival::Nmi => {
            panic::stop_if_panicking();
            percpu::this().nmis.fetch_add(1, Ordering::Relaxed);
        }
        Arrival::Timer => {
            percpu::this().timer_fired.store(true, Ordering::Relaxed);
            apic::get().eoi();
        }
        Arrival::Kick => {
            percpu::this().kicked.store(true, Ordering::Relaxed);
            apic::get().eoi();
        }
        Arrival::Spurious => {}
        Arrival::Device => {
            let cpu = percpu::this();
            let apic = apic::get();
            let (word, bit) = (usize::from(vector / 64), 1u64 << (vector % 64));
            // The trigger mode is known only until the end of the interrupt.
            let level = apic.is_level(vector);
            if level {
                cpu.arrived_level[word].fetch_or(bit, Ordering::Relaxed);
            } else {
                cpu.arrived_level[word].fetch_and(!bit, Ordering::Relaxed);
            }
            cpu.arrived[word].fetch_or(bit, Ordering::Relaxed);
            // The end of a level-triggered one makes the I/O APIC send it again while its
            // line is up: that has to wait until the line is held (`take_arrived`).
            if !level {
                apic.eoi();
            }
        }
        Arrival::Init => count(&INITS, TELL_INIT),
        Arrival::Stray { end } => {
            if end {
                apic::get().eoi();
            }
            count(&STRAYS, vector.into());
        }
        Arrival::Exception => panic::exception(frame),
    }
}

/// Counts what should not have come, for the log to tell of it now and then: at every power
/// of two, which is enough to see and too little to flood.
fn count(counter: &AtomicU64, what: u64) {
    let count = counter.fetch_add(1, Ordering::Relaxed) + 1;
    if count.is_power_of_two() {
        percpu::this().to_tell.store(count << 9 | what, Ordering::Relaxed);
    }
}

/// Tells the log what [`count`] has left for it.
fn tell(cpu: &percpu::PerCpu) {
    if cpu.to_tell.load(Ordering::Relaxed) == 0 {
        return;
    }
    let told = cpu.to_tell.swap(0, Ordering::Relaxed);
    let (count, what) = (told >> 9, told & 0x1ff);
    if what == TELL_INIT {
        log::warn!("{}: ignored an INIT, which nobody sends ({count} so far)", cpu.id);
    } else {
        log::warn!(
            "{}: ended an interrupt with vector {what:#x}, which nobody sends ({count} so far)",
            cpu.id
        );
    }
}

/// Takes the device vectors that have arrived on this CPU: `accept(vector, level)` for
/// each, which must hold the lines of a level-triggered one back; then it is ended.
/// Interrupts must be closed, or one that arrives meanwhile may be taken twice.
pub(crate) fn take_arrived(mut accept: impl FnMut(u8, bool)) {
    let cpu = percpu::this();
    tell(cpu);
    for (word, (arrived, levels)) in (0u8..).zip(cpu.arrived.iter().zip(&cpu.arrived_level)) {
        if arrived.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut bits = arrived.swap(0, Ordering::Relaxed);
        let levels = levels.load(Ordering::Relaxed);
        while bits != 0 {
            #[expect(clippy::cast_possible_truncation, reason = "a bit number of u64 is below 64")]
            let bit = bits.trailing_zeros() as u8;
            bits &= bits - 1;
            let level = levels >> bit & 1 != 0;
            accept(word * 64 + bit, level);
            if level {
                apic::get().eoi();
            }
        }
    }
}
