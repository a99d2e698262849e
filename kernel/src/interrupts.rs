//! What the hypervisor does with interrupts and exceptions.
//!
//! Vectors below 0x20 that no exception has are the hypervisor's own and mere hints: the
//! timer (look at the counter), the kick (look at the mailbox). All from 0x20 on are
//! devices of the root cell: the handler notes the vector and how it came, and ends the
//! interrupt; the loop takes what was noted. The handler takes no lock.

use crate::{apic, panic, percpu};
use bulkhead_arch::x86_64::interrupts::{TrapFrame, set_handler};
use core::sync::atomic::Ordering;

/// The local APIC's timer.
pub(crate) const TIMER_VECTOR: u8 = 0x18;
/// Another CPU has put something into this one's mailbox.
pub(crate) const KICK_VECTOR: u8 = 0x19;
/// Spurious interrupts.
pub(crate) const SPURIOUS_VECTOR: u8 = 0x1f;
const FIRST_DEVICE_VECTOR: u8 = 0x20;
const NMI: u8 = 2;

/// Takes over all vectors.
pub(crate) fn init() {
    set_handler(handle);
}

fn handle(frame: &TrapFrame) {
    #[expect(clippy::cast_possible_truncation, reason = "the stubs push vectors of 8 bits")]
    let vector = frame.vector as u8;
    match vector {
        NMI => {
            panic::stop_if_panicking();
            percpu::this().nmis.fetch_add(1, Ordering::Relaxed);
        }
        TIMER_VECTOR => {
            percpu::this().timer_fired.store(true, Ordering::Relaxed);
            apic::get().eoi();
        }
        KICK_VECTOR => {
            percpu::this().kicked.store(true, Ordering::Relaxed);
            apic::get().eoi();
        }
        SPURIOUS_VECTOR => {}
        FIRST_DEVICE_VECTOR.. => {
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
        _ => panic::exception(frame),
    }
}

/// Takes the device vectors that have arrived on this CPU: `accept(vector, level)` for
/// each, which must hold the lines of a level-triggered one back; then it is ended.
/// Interrupts must be closed, or one that arrives meanwhile may be taken twice.
pub(crate) fn take_arrived(mut accept: impl FnMut(u8, bool)) {
    let cpu = percpu::this();
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
