//! The end: what the hypervisor says when one of its own invariants is broken.
//!
//! The first CPU to panic stops the others by NMI, prints reason, place, CPU, registers
//! (of an exception) and a backtrace, and halts. It waits for no lock.
// UNSAFETY: the backtrace reads the chain of frames on a stack that may be broken.
#![expect(unsafe_code, reason = "walks stack frames")]

use crate::symbols::Symbolised;
use crate::{apic, logging, memory, percpu};
use bulkhead_arch::x86_64::boot::image_layout;
use bulkhead_arch::x86_64::interrupts::TrapFrame;
use bulkhead_arch::x86_64::ops;
use bulkhead_vmm::memory::address::Hva;
use core::fmt::{self, Write};
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicU32, Ordering};

const NOBODY: u32 = u32::MAX;
const FRAMES_MAX: usize = 32;
const DOUBLE_FAULT: u64 = 8;
const MACHINE_CHECK: u64 = 18;
const PAGE_FAULT: u64 = 14;

/// The number of the CPU that panics.
static PANICKING: AtomicU32 = AtomicU32::new(NOBODY);

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    end(format_args!("{info}"), None, ops::frame_pointer())
}

/// An exception in the hypervisor itself.
pub(crate) fn exception(frame: &TrapFrame) -> ! {
    let name = match frame.vector {
        0 => "divide error",
        6 => "invalid opcode",
        DOUBLE_FAULT => "double fault",
        13 => "general protection",
        PAGE_FAULT => "page fault",
        MACHINE_CHECK => "machine check",
        _ => "exception",
    };
    let (vector, error) = (frame.vector, frame.error_code().unwrap_or_default());
    if vector == PAGE_FAULT {
        let at = ops::fault_address();
        end(format_args!("{name} at {at:#x}, error code {error:#x}"), Some(frame), frame.rbp);
    }
    end(format_args!("{name} (vector {vector}), error code {error:#x}"), Some(frame), frame.rbp)
}

/// Called for an NMI: does not return when another CPU has panicked.
pub(crate) fn stop_if_panicking() {
    if PANICKING.load(Ordering::Acquire) != NOBODY {
        ops::halt_forever();
    }
}

fn end(reason: fmt::Arguments<'_>, frame: Option<&TrapFrame>, rbp: u64) -> ! {
    ops::disable_interrupts();
    let cpu = percpu::try_this();
    let id = cpu.map_or(0, |cpu| cpu.id.0);
    match PANICKING.compare_exchange(NOBODY, id, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {}
        Err(first) if first == id => {
            // The report itself failed.
            let _ = writeln!(logging::emergency(), "cpu{id} panicked in its panic: {reason}");
            ops::halt_forever();
        }
        Err(_) => ops::halt_forever(),
    }
    if let (Some(cpu), Some(apic)) = (cpu, apic::try_get()) {
        percpu::for_each(|other| {
            if other.id != cpu.id {
                apic.send_nmi(other.apic_id);
            }
        });
    }
    let _ = report(&mut logging::emergency(), id, reason, frame, rbp);
    ops::halt_forever()
}

fn report(
    console: &mut impl Write,
    cpu: u32,
    reason: fmt::Arguments<'_>,
    frame: Option<&TrapFrame>,
    rbp: u64,
) -> fmt::Result {
    writeln!(console, "\nbulkhead: PANIC on cpu{cpu}: {reason}")?;
    if let Some(frame) = frame {
        writeln!(console, "{frame}")?;
    }
    writeln!(console, "backtrace:")?;
    if let Some(frame) = frame {
        writeln!(console, "  {}", Symbolised(frame.rip))?;
    }
    let mut rbp = rbp;
    for _ in 0..FRAMES_MAX {
        let Some((next, return_address)) = caller(rbp) else { break };
        // The call is before the address it returns to.
        writeln!(console, "  {}", Symbolised(return_address.wrapping_sub(1)))?;
        if next <= rbp {
            break;
        }
        rbp = next;
    }
    writeln!(console, "bulkhead: halted")
}

/// The frame pointer and the return address that the frame at `rbp` has saved, if it is
/// on a stack.
fn caller(rbp: u64) -> Option<(u64, u64)> {
    let layout = image_layout();
    let in_image = (layout.data_start..layout.image_end - 16).contains(&rbp);
    if !rbp.is_multiple_of(8) || !(in_image || memory::is_stack(rbp)) {
        return None;
    }
    let frame = memory::pointer::<[u64; 2]>(Hva::new(rbp));
    // SAFETY: a frame pointer in the image's data or among the stacks; should the frame
    // reach over a stack's end, the fault ends the report.
    let [next, return_address] = unsafe { frame.read_volatile() };
    (return_address != 0).then_some((next, return_address))
}
