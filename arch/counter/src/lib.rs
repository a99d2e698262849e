//! One safe function that reads the CPU's counter, for the hypervisor and for programs
//! alike: the TSC on x86-64, the virtual counter CNTVCT_EL0 on AArch64.
// UNSAFETY: the counter is read by one instruction of inline assembly.
#![no_std]
#![expect(unsafe_code, reason = "reads the counter")]

use core::arch::asm;

/// The counter's value. The read is not moved before what precedes it in the program.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn read() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: both instructions touch no memory and are available in every mode.
    unsafe {
        asm!("lfence", "rdtsc", out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags))
    };
    u64::from(high) << 32 | u64::from(low)
}

/// The counter's value. The read is not moved before what precedes it in the program.
#[cfg(target_arch = "aarch64")]
#[inline]
pub fn read() -> u64 {
    let counter;
    // SAFETY: both instructions touch no memory; EL0 may read the virtual counter under
    // every kernel that this runs on.
    unsafe { asm!("isb", "mrs {}, cntvct_el0", out(reg) counter, options(nomem, nostack, preserves_flags)) };
    counter
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_counter_goes_forward() {
        let first = super::read();
        let mut last = first;
        for _ in 0..1000 {
            let next = super::read();
            assert!(next >= last);
            last = next;
        }
        assert!(last > first);
    }
}
