//! The machine's real-time clock (MC146818), read once at boot.
// UNSAFETY: it is reached by port I/O.
#![expect(unsafe_code, reason = "port I/O")]

use x86_64::instructions::port::Port;

const INDEX: u16 = 0x70;
const DATA: u16 = 0x71;
const STATUS_A: u8 = 0x0a;
const UPDATE_IN_PROGRESS: u8 = 1 << 7;
const STATUS_B: u8 = 0x0b;
const BINARY: u8 = 1 << 2;
const HOURS_24: u8 = 1 << 1;
/// Reads of the update bit before a clock that never settles is given up.
const POLLS_MAX: u32 = 1_000_000;

fn read(register: u8) -> u8 {
    // SAFETY: selects a register; nothing there affects memory.
    unsafe { Port::<u8>::new(INDEX).write(register) };
    // SAFETY: reads it.
    unsafe { Port::<u8>::new(DATA).read() }
}

/// Registers of the clock: seconds, minutes, hours, day, month, year.
fn snapshot() -> [u8; 6] {
    for _ in 0..POLLS_MAX {
        if read(STATUS_A) & UPDATE_IN_PROGRESS == 0 {
            break;
        }
        core::hint::spin_loop();
    }
    [0, 2, 4, 7, 8, 9].map(read)
}

/// Seconds since 1970-01-01T00:00Z by the machine's clock, taken as UTC of the years 2000 to
/// 2099; `None` when it shows no date.
pub fn unix_seconds() -> Option<u64> {
    // Two equal snapshots: none was taken in the middle of an update.
    let mut last = snapshot();
    for _ in 0..8 {
        let next = snapshot();
        if next == last {
            return decode(next, read(STATUS_B));
        }
        last = next;
    }
    None
}

/// The time that the registers show, given status register B.
fn decode(registers: [u8; 6], status_b: u8) -> Option<u64> {
    let [second, minute, hour, day, month, year] = registers;
    let number = |value: u8| {
        if status_b & BINARY != 0 {
            u64::from(value)
        } else {
            u64::from(value >> 4) * 10 + u64::from(value & 15)
        }
    };
    let hour = if status_b & HOURS_24 != 0 {
        number(hour)
    } else {
        // Bit 7 is PM; 12 AM is midnight.
        number(hour & 0x7f) % 12 + if hour & 0x80 != 0 { 12 } else { 0 }
    };
    let (day, month, year) = (number(day), number(month), 2000 + number(year));
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Days by the civil calendar, in years that begin in March.
    let (y, m) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719_468;
    Some(((days * 24 + hour) * 60 + number(minute)) * 60 + number(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates_in_all_formats() {
        // 2026-11-30T20:05:04Z.
        let want = Some(1796069104);
        assert_eq!(decode([4, 5, 20, 30, 11, 26], BINARY | HOURS_24), want);
        assert_eq!(decode([0x04, 0x05, 0x20, 0x30, 0x11, 0x26], HOURS_24), want);
        assert_eq!(decode([0x04, 0x05, 0x88, 0x30, 0x11, 0x26], 0), want, "8 PM");
        assert_eq!(decode([0, 0, 0x12, 1, 1, 0], 0), Some(946_684_800), "12 AM");
        assert_eq!(decode([0, 0, 0, 0x3a, 2, 0], HOURS_24), None, "day 40");
        assert_eq!(decode([0, 0, 0, 0x29, 2, 0x24], HOURS_24), Some(1_709_164_800));
        assert_eq!(decode([0, 0, 0, 1, 0, 0], HOURS_24), None);
    }
}
