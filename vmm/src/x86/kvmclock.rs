//! The KVM paravirtual clock (Linux, Documentation/virt/kvm/x86/msr.rst and cpuid.rst).
//!
//! A guest writes the address of a structure to an MSR and finds there how its counter
//! turns into nanoseconds. Here that is a pure function: the clock is 0 where the guest's
//! counter is 0, and runs at the cell's nominal frequency. So nothing is ever updated,
//! all vCPUs agree, and a cell that moves takes its clock along with its counter.

use crate::memory::address::Gpa;
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use core::num::NonZeroU64;
use core::sync::atomic::{Ordering, fence};
use thiserror::Error;

/// Wall clock at counter 0; a write of an address fills it once.
pub const MSR_WALL_CLOCK: u32 = 0x4b56_4d00;
/// A vCPU's clock; bit 0 of the value enables it, the others are the address.
pub const MSR_SYSTEM_TIME: u32 = 0x4b56_4d01;
/// [`MSR_WALL_CLOCK`] by its first number.
pub const MSR_WALL_CLOCK_OLD: u32 = 0x11;
/// [`MSR_SYSTEM_TIME`] by its first number.
pub const MSR_SYSTEM_TIME_OLD: u32 = 0x12;

const NS_PER_SECOND: u64 = 1_000_000_000;
/// `MSR_SYSTEM_TIME`: the clock is on.
const ENABLE: u64 = 1;
/// `pvclock_vcpu_time_info.flags`: readings of different vCPUs compare.
const TSC_STABLE: u8 = 1;

/// Why a value written to one of the MSRs cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum KvmClockError {
    /// The address is not one of a 32-bit word.
    #[error("kvmclock: address {0} is not a multiple of 4")]
    Alignment(Gpa),
    /// There is no memory.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
}

/// How counts become nanoseconds: `((count << shift) * mul) >> 32`, where a negative
/// shift goes to the right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    /// A fraction of 2^32; its top bit is set.
    pub mul: u32,
    /// -34 to 30.
    pub shift: i8,
}

impl Scale {
    /// The scale of a counter that runs at `hz`. It is wrong by less than 1 part in 2^32:
    /// as near as the structure can say.
    pub fn from_hz(hz: NonZeroU64) -> Self {
        // Nanoseconds per count, with 96 bits behind the point: at least 62 bits long, as
        // 10^9 has 30 and `hz` at most 64. `bits` of them lie before the 32 of `mul`.
        let ratio = (u128::from(NS_PER_SECOND) << 96) / u128::from(hz.get());
        let bits = ratio.ilog2() + 1;
        let rounded = (ratio + (1 << (bits - 33))) >> (bits - 32);
        // 62..=126 less 96 fits.
        let shift = i8::try_from(bits).unwrap_or_default() - 96;
        match u32::try_from(rounded) {
            Ok(mul) => Self { mul, shift },
            // Rounded up to 2^32.
            Err(_) => Self { mul: 1 << 31, shift: shift + 1 },
        }
    }
}

/// Does what a write of `value` to [`MSR_SYSTEM_TIME`] asks for: fills the structure, if
/// the value enables it.
///
/// # Errors
/// When the address is misaligned or not RAM; nothing is then written.
pub fn write_system_time(memory: &dyn GuestMemory, value: u64, scale: Scale) -> Result<(), KvmClockError> {
    if value & ENABLE == 0 {
        return Ok(());
    }
    // pvclock_vcpu_time_info without its version: padding, tsc_timestamp and system_time
    // all zero, then the scale.
    let mut body = [0; 28];
    let [.., m0, m1, m2, m3, shift, flags, _, _] = &mut body;
    [*m0, *m1, *m2, *m3] = scale.mul.to_le_bytes();
    [*shift] = scale.shift.to_le_bytes();
    *flags = TSC_STABLE;
    write_versioned(memory, Gpa::new(value & !ENABLE), &body)
}

/// Does what a write of `value` to [`MSR_WALL_CLOCK`] asks for. `wall_ns` is the wall
/// clock when the guest's counter was 0, in nanoseconds since 1970 (UTC); the structure
/// ends in 2106.
///
/// # Errors
/// When the address is misaligned or not RAM; nothing is then written.
pub fn write_wall_clock(memory: &dyn GuestMemory, value: u64, wall_ns: u64) -> Result<(), KvmClockError> {
    let seconds = u32::try_from(wall_ns / NS_PER_SECOND).unwrap_or(u32::MAX);
    let ns = u32::try_from(wall_ns % NS_PER_SECOND).unwrap_or_default();
    let mut body = [0; 8];
    let [s0, s1, s2, s3, n0, n1, n2, n3] = &mut body;
    [*s0, *s1, *s2, *s3] = seconds.to_le_bytes();
    [*n0, *n1, *n2, *n3] = ns.to_le_bytes();
    write_versioned(memory, Gpa::new(value), &body)
}

/// Writes a structure that begins with its version: odd while the rest changes, so that a
/// reader on another vCPU knows to try again.
fn write_versioned(memory: &dyn GuestMemory, at: Gpa, body: &[u8]) -> Result<(), KvmClockError> {
    if !at.is_aligned(4) {
        return Err(KvmClockError::Alignment(at));
    }
    let len = 4 + body.len() as u64;
    let rest = at.checked_add(4).ok_or(GuestMemoryError { gpa: at, len })?;
    // All of it must be there before any of it is written.
    let mut old = [0; 32];
    let old = old.get_mut(..4 + body.len()).unwrap_or_default();
    memory.read(at, old)?;
    let version = old.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    let odd = version.wrapping_add(1) | 1;
    memory.write(at, &odd.to_le_bytes())?;
    fence(Ordering::Release);
    memory.write(rest, body)?;
    fence(Ordering::Release);
    memory.write(at, &odd.wrapping_add(1).to_le_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::guest::fake::FakeMemory;
    use core::cell::RefCell;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// Ten years.
    const LONGEST_S: u128 = 10 * 366 * 86400;

    fn scale(hz: u64) -> Scale {
        Scale::from_hz(NonZeroU64::new(hz).unwrap())
    }

    /// What a guest computes (Linux, `pvclock_scale_delta`).
    fn guest_ns(scale: Scale, count: u64) -> u64 {
        let shifted = if scale.shift < 0 { count >> -scale.shift } else { count << scale.shift };
        u64::try_from((u128::from(shifted) * u128::from(scale.mul)) >> 32).unwrap()
    }

    #[test]
    fn known_frequencies() {
        assert_eq!(scale(1_000_000_000), Scale { mul: 1 << 31, shift: 1 });
        assert_eq!(scale(2_000_000_000), Scale { mul: 1 << 31, shift: 0 });
        assert_eq!(scale(3_000_000_000), Scale { mul: 0xaaaa_aaab, shift: -1 });
        assert_eq!(scale(1).shift, 30);
        assert_eq!(scale(u64::MAX).shift, -34);
    }

    proptest! {
        #[test]
        fn the_clock_is_within_1_ppb_for_ten_years(hz in 1_000_000_u64..10_000_000_000, part in any::<u32>()) {
            let count = u64::try_from((u128::from(hz) * LONGEST_S * u128::from(part)) >> 32).unwrap();
            let exact = u128::from(count) * 1_000_000_000 / u128::from(hz);
            let error = u128::from(guest_ns(scale(hz), count)).abs_diff(exact);
            // And what the two shifts cut off: a nanosecond each.
            prop_assert!(error <= exact / 1_000_000_000 + 2, "{error} of {exact}");
        }

        #[test]
        fn the_clock_never_goes_back(hz in 1_000_000_u64..10_000_000_000, count in 0_u64..1 << 60, step in 0_u64..1 << 20) {
            let scale = scale(hz);
            prop_assume!(count.leading_zeros() > u32::try_from(scale.shift.max(0)).unwrap() + 1);
            prop_assert!(guest_ns(scale, count) <= guest_ns(scale, count + step));
        }

        #[test]
        fn mul_is_as_precise_as_it_can_be(hz in 1_u64..) {
            prop_assert!(scale(hz).mul >= 1 << 31);
        }
    }

    #[test]
    fn the_time_structure_is_the_abis() {
        let memory = FakeMemory::new(0x1000, 64);
        memory.write(Gpa::new(0x1020), &[0xff; 32]).unwrap();
        write_system_time(&memory, 0x1021, scale(3_000_000_000)).unwrap();
        let mut bytes = [0; 32];
        memory.read(Gpa::new(0x1020), &mut bytes).unwrap();
        // Version 2 follows 0xffffffff: 1 is the next odd one after its successor, 0.
        assert_eq!(bytes[..4], [2, 0, 0, 0]);
        assert_eq!(bytes[4..24], [0; 20]);
        assert_eq!(bytes[24..], [0xab, 0xaa, 0xaa, 0xaa, 0xff, 1, 0, 0]);
    }

    #[test]
    fn the_wall_clock_is_the_abis() {
        let memory = FakeMemory::new(0x1000, 12);
        write_wall_clock(&memory, 0x1000, 1_700_000_000_000_000_007).unwrap();
        let mut bytes = [0; 12];
        memory.read(Gpa::new(0x1000), &mut bytes).unwrap();
        assert_eq!(bytes, [2, 0, 0, 0, 0x00, 0xf1, 0x53, 0x65, 7, 0, 0, 0]);
        write_wall_clock(&memory, 0x1000, u64::MAX).unwrap();
        assert_eq!(memory.read_u32(Gpa::new(0x1004)), Ok(u32::MAX));
    }

    #[test]
    fn bad_addresses_are_refused_and_nothing_is_written() {
        let memory = FakeMemory::new(0x1000, 32);
        let scale = scale(1);
        let misaligned = Err(KvmClockError::Alignment(Gpa::new(0x1002)));
        assert_eq!(write_system_time(&memory, 0x1003, scale), misaligned);
        assert_eq!(write_wall_clock(&memory, 0x1002, 0), misaligned);
        for value in [0x1005, 0xffd, u64::MAX - 2] {
            let error = write_system_time(&memory, value, scale).unwrap_err();
            assert!(matches!(error, KvmClockError::Memory(_)), "{error}");
        }
        assert_eq!(write_system_time(&memory, 0x1002, scale), Ok(()), "not enabled");
        let mut bytes = [1; 32];
        memory.read(Gpa::new(0x1000), &mut bytes).unwrap();
        assert_eq!(bytes, [0; 32]);
    }

    /// Memory that remembers every write.
    struct Spy(FakeMemory, RefCell<Vec<(Gpa, Vec<u8>)>>);

    impl GuestMemory for Spy {
        fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), GuestMemoryError> {
            self.0.read(gpa, buf)
        }

        fn write(&self, gpa: Gpa, data: &[u8]) -> Result<(), GuestMemoryError> {
            self.1.borrow_mut().push((gpa, data.to_vec()));
            self.0.write(gpa, data)
        }
    }

    #[test]
    fn the_version_is_odd_while_the_rest_changes() {
        for (old, odd, even) in [(0_u32, 1_u32, 2_u32), (1, 3, 4), (2, 3, 4), (u32::MAX - 1, u32::MAX, 0)] {
            let memory = Spy(FakeMemory::new(0, 32), RefCell::default());
            memory.0.write(Gpa::new(0), &old.to_le_bytes()).unwrap();
            write_system_time(&memory, 1, scale(1_000_000)).unwrap();
            let writes = memory.1.into_inner();
            assert_eq!(writes[0], (Gpa::new(0), odd.to_le_bytes().to_vec()));
            assert_eq!((writes[1].0, writes[1].1.len()), (Gpa::new(4), 28));
            assert_eq!(writes[2], (Gpa::new(0), even.to_le_bytes().to_vec()));
            assert_eq!(writes.len(), 3);
        }
    }
}
