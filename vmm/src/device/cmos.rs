//! The CMOS real-time clock: an MC146818 with 128 bytes of memory behind an index and a data
//! port (0x70 and 0x71).
//!
//! It counts UTC from a wall-clock base. An update takes no time (UIP is never set), and it
//! raises no interrupts. The century is at 0x32, as the FADT says.

use super::bus::{BusDevice, Instant, Width, read_bytes, write_bytes};

/// Where the century is, for the FADT.
pub const CENTURY: u8 = 0x32;

const SECONDS: u8 = 0;
const MINUTES: u8 = 2;
const HOURS: u8 = 4;
const DAY_OF_WEEK: u8 = 6;
const DAY: u8 = 7;
const MONTH: u8 = 8;
const YEAR: u8 = 9;
const STATUS_A: u8 = 0xa;
const STATUS_B: u8 = 0xb;
const STATUS_C: u8 = 0xc;
const STATUS_D: u8 = 0xd;

/// The divider for a 32.768 kHz crystal; UIP clear.
const A_RUNNING: u8 = 0x26;
const B_SET: u8 = 1 << 7;
const B_BINARY: u8 = 1 << 2;
const B_24_HOURS: u8 = 1 << 1;
const C_UPDATE_ENDED: u8 = 1 << 4;
const D_VALID: u8 = 1 << 7;
const HOURS_PM: u8 = 1 << 7;

const NS_PER_S: u64 = 1_000_000_000;
const S_PER_DAY: u64 = 86_400;

/// A moment as the clock's registers have it; numbers, not BCD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Time {
    year: u64,
    month: u64,
    day: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Time {
    fn from_unix(seconds: u64) -> Self {
        let (year, month, day) = civil_from_days(seconds / S_PER_DAY);
        let in_day = seconds % S_PER_DAY;
        Self { year, month, day, hour: in_day / 3600, minute: in_day / 60 % 60, second: in_day % 60 }
    }

    /// Seconds since 1970; moments before it count as 1970. Fields out of range carry over.
    fn to_unix(self) -> u64 {
        days_from_civil(self.year, self.month, self.day) * S_PER_DAY
            + self.hour * 3600
            + self.minute * 60
            + self.second
    }
}

/// Days before month `m` (0 is March) in a year that begins in March.
const fn days_before(m: u64) -> u64 {
    (153 * m + 2) / 5
}

/// Days before the year `y` since the first of March of year 0, for years that begin in
/// March (a leap day is then a year's last).
const fn days_before_year(y: u64) -> u64 {
    365 * y + y / 4 - y / 100 + y / 400
}

/// Days from the first of March of year 0 to 1970-01-01.
const EPOCH: u64 = 719_468;

/// Year, month 1..=12 and day 1..=31 of the day `days` after 1970-01-01.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let days = days + EPOCH;
    let mut year = days * 400 / 146_097;
    // The estimate is at most one year off, either way.
    if days_before_year(year + 1) <= days {
        year += 1;
    } else if days_before_year(year) > days {
        year -= 1;
    }
    let in_year = days - days_before_year(year);
    let month = (5 * in_year + 2) / 153;
    let day = in_year - days_before(month) + 1;
    if month < 10 { (year, month + 3, day) } else { (year + 1, month - 9, day) }
}

/// The inverse of [`civil_from_days`]; 0 for days before 1970.
fn days_from_civil(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year.saturating_sub(1), month + 9) };
    (days_before_year(year) + days_before(month) + day).saturating_sub(EPOCH + 1)
}

/// The clock and its memory; two byte ports from 0x70 on.
#[derive(Debug)]
pub struct Cmos {
    index: u8,
    memory: [u8; 128],
    /// Unix time in ns when the cell's clock began, modulo 2^64: a cell may set a time that
    /// makes it negative.
    base_ns: u64,
    /// While B.SET is on: the time as it stands.
    stopped: Option<Time>,
    status_b: u8,
    /// The second in which C was last read.
    reported: u64,
}

impl Cmos {
    /// A clock that shows Unix time `base_ns` (in nanoseconds) at `Instant` 0.
    pub fn new(base_ns: u64) -> Self {
        Self {
            index: 0,
            memory: [0; 128],
            base_ns,
            stopped: None,
            status_b: B_24_HOURS,
            reported: base_ns / NS_PER_S,
        }
    }

    fn unix_ns(&self, now: Instant) -> u64 {
        self.base_ns.wrapping_add(now.ns)
    }

    fn time(&self, now: Instant) -> Time {
        self.stopped.unwrap_or_else(|| Time::from_unix(self.unix_ns(now) / NS_PER_S))
    }

    /// Lets the clock show `time` now. What lies below the second begins anew, as after SET.
    fn set_time(&mut self, time: Time, now: Instant) {
        self.base_ns = time.to_unix().saturating_mul(NS_PER_S).wrapping_sub(now.ns);
    }

    fn encode(&self, number: u64) -> u8 {
        let number = (number % 100) as u8;
        if self.status_b & B_BINARY != 0 { number } else { ((number / 10) << 4) | (number % 10) }
    }

    fn decode(&self, value: u8) -> u64 {
        if self.status_b & B_BINARY != 0 {
            value.into()
        } else {
            u64::from(value >> 4) * 10 + u64::from(value & 0xf)
        }
    }

    fn encode_hour(&self, hour: u64) -> u8 {
        if self.status_b & B_24_HOURS != 0 {
            return self.encode(hour);
        }
        let in_half = if hour.is_multiple_of(12) { 12 } else { hour % 12 };
        self.encode(in_half) | if hour >= 12 { HOURS_PM } else { 0 }
    }

    fn decode_hour(&self, value: u8) -> u64 {
        if self.status_b & B_24_HOURS != 0 {
            return self.decode(value);
        }
        self.decode(value & !HOURS_PM) % 12 + if value & HOURS_PM != 0 { 12 } else { 0 }
    }

    fn read_data(&mut self, now: Instant) -> u8 {
        let time = self.time(now);
        match self.index {
            SECONDS => self.encode(time.second),
            MINUTES => self.encode(time.minute),
            HOURS => self.encode_hour(time.hour),
            // 1970-01-01 was a Thursday; Sunday is 1.
            DAY_OF_WEEK => self.encode((time.to_unix() / S_PER_DAY + 4) % 7 + 1),
            DAY => self.encode(time.day),
            MONTH => self.encode(time.month),
            YEAR => self.encode(time.year),
            CENTURY => self.encode(time.year / 100),
            STATUS_B => self.status_b,
            STATUS_C => {
                let second = self.unix_ns(now) / NS_PER_S;
                let updated =
                    self.stopped.is_none() && core::mem::replace(&mut self.reported, second) != second;
                if updated { C_UPDATE_ENDED } else { 0 }
            }
            STATUS_D => D_VALID,
            STATUS_A => A_RUNNING,
            index => self.memory.get(usize::from(index)).copied().unwrap_or(0xff),
        }
    }

    fn write_data(&mut self, value: u8, now: Instant) {
        let mut time = self.time(now);
        let number = self.decode(value);
        match self.index {
            SECONDS => time.second = number,
            MINUTES => time.minute = number,
            HOURS => time.hour = self.decode_hour(value),
            DAY => time.day = number,
            MONTH => time.month = number,
            YEAR => time.year = time.year / 100 * 100 + number,
            CENTURY => time.year = number * 100 + time.year % 100,
            STATUS_B => {
                match (self.stopped, value & B_SET != 0) {
                    (None, true) => self.stopped = Some(time),
                    (Some(time), false) => {
                        self.stopped = None;
                        self.set_time(time, now);
                    }
                    _ => {}
                }
                self.status_b = value;
                return;
            }
            // The day of the week follows from the date.
            DAY_OF_WEEK | STATUS_A | STATUS_C | STATUS_D => return,
            index => {
                if let Some(byte) = self.memory.get_mut(usize::from(index)) {
                    *byte = value;
                }
                return;
            }
        }
        match &mut self.stopped {
            Some(stopped) => *stopped = time,
            None => self.set_time(time, now),
        }
    }
}

impl BusDevice for Cmos {
    fn read(&mut self, offset: u64, width: Width, now: Instant) -> u64 {
        // The index can't be read back.
        read_bytes(offset, width, |port| if port == 1 { self.read_data(now) } else { 0xff })
    }

    fn write(&mut self, offset: u64, width: Width, value: u64, now: Instant) {
        write_bytes(offset, width, value, |port, byte| match port {
            // Bit 7 masks NMI on a PC, and is not part of the index.
            0 => self.index = byte & 0x7f,
            1 => self.write_data(byte, now),
            _ => {}
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A_UIP: u8 = 1 << 7;

    /// Dates with their day numbers, from `date -ud DATE +%s` / 86400.
    const KNOWN: [(u64, (u64, u64, u64)); 9] = [
        (0, (1970, 1, 1)),
        (58, (1970, 2, 28)),
        (59, (1970, 3, 1)),
        (10_957, (2000, 1, 1)),
        (11_016, (2000, 2, 29)),
        (11_017, (2000, 3, 1)),
        (19_782, (2024, 2, 29)),
        (24_836, (2037, 12, 31)),
        (47_541, (2100, 3, 1)),
    ];

    #[test]
    fn known_dates() {
        for (days, (y, m, d)) in KNOWN {
            assert_eq!(civil_from_days(days), (y, m, d));
            assert_eq!(days_from_civil(y, m, d), days);
        }
    }

    /// Every day from 1970 to 2400 against the calendar's rules, day by day.
    #[test]
    fn every_day_follows_the_one_before() {
        let (mut y, mut m, mut d) = (1970, 1, 1);
        for days in 0..157_054 {
            assert_eq!(civil_from_days(days), (y, m, d));
            assert_eq!(days_from_civil(y, m, d), days);
            let leap = y % 4 == 0 && (y % 100 != 0 || y % 400 == 0);
            let last = match m {
                2 => 28 + u64::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            d += 1;
            if d > last {
                (m, d) = (m + 1, 1);
            }
            if m > 12 {
                (y, m) = (y + 1, 1);
            }
        }
        assert_eq!((y, m, d), (2400, 1, 1));
    }

    fn get(cmos: &mut Cmos, index: u8, s: u64) -> u8 {
        let now = Instant { ns: s * NS_PER_S };
        cmos.write(0, Width::Byte, index.into(), now);
        u8::try_from(cmos.read(1, Width::Byte, now)).unwrap()
    }

    fn put(cmos: &mut Cmos, index: u8, value: u8, s: u64) {
        let now = Instant { ns: s * NS_PER_S };
        // One word write is an index and a value.
        cmos.write(0, Width::Word, u64::from(value) << 8 | u64::from(index), now);
    }

    fn all(cmos: &mut Cmos, s: u64) -> [u8; 8] {
        [CENTURY, YEAR, MONTH, DAY, DAY_OF_WEEK, HOURS, MINUTES, SECONDS].map(|index| get(cmos, index, s))
    }

    /// 2024-02-29 (a Thursday) 23:59:58.
    fn leap_day() -> Cmos {
        Cmos::new((19_782 * S_PER_DAY + 86_398) * NS_PER_S)
    }

    #[test]
    fn time_runs_in_bcd_and_in_binary() {
        let mut cmos = leap_day();
        assert_eq!(get(&mut cmos, STATUS_B, 0), B_24_HOURS);
        assert_eq!(all(&mut cmos, 0), [0x20, 0x24, 0x02, 0x29, 0x05, 0x23, 0x59, 0x58]);
        assert_eq!(all(&mut cmos, 2), [0x20, 0x24, 0x03, 0x01, 0x06, 0x00, 0x00, 0x00]);
        put(&mut cmos, STATUS_B, B_24_HOURS | B_BINARY, 0);
        assert_eq!(all(&mut cmos, 0), [20, 24, 2, 29, 5, 23, 59, 58]);
        put(&mut cmos, STATUS_B, 0, 0);
        assert_eq!(get(&mut cmos, HOURS, 0), 0x91, "11 pm");
        assert_eq!(get(&mut cmos, HOURS, 2), 0x12, "12 am");
        assert_eq!(get(&mut cmos, HOURS, 2 + 12 * 3600), 0x92, "12 pm");
        assert_eq!(get(&mut cmos, HOURS, 2 + 9 * 3600), 0x09);
    }

    #[test]
    fn setting_the_time() {
        let mut cmos = leap_day();
        put(&mut cmos, STATUS_B, B_SET | B_24_HOURS, 5);
        for (index, value) in [
            (SECONDS, 0x07),
            (MINUTES, 0x08),
            (HOURS, 0x09),
            (DAY, 0x31),
            (MONTH, 0x12),
            (YEAR, 0x99),
            (CENTURY, 0x20),
        ] {
            put(&mut cmos, index, value, 6);
        }
        assert_eq!(get(&mut cmos, SECONDS, 100), 0x07, "it stands while SET is on");
        put(&mut cmos, STATUS_B, B_24_HOURS, 100);
        assert_eq!(all(&mut cmos, 100), [0x20, 0x99, 0x12, 0x31, 0x05, 0x09, 0x08, 0x07]);
        assert_eq!(get(&mut cmos, SECONDS, 103), 0x10);
        put(&mut cmos, MINUTES, 0x30, 103);
        assert_eq!(all(&mut cmos, 104), [0x20, 0x99, 0x12, 0x31, 0x05, 0x09, 0x30, 0x11]);
    }

    #[test]
    fn the_time_may_be_set_to_one_before_the_cell_began() {
        let mut cmos = Cmos::new(0);
        put(&mut cmos, SECONDS, 0x05, 3600);
        put(&mut cmos, HOURS, 0x00, 3600);
        assert_eq!(all(&mut cmos, 3601), [0x19, 0x70, 0x01, 0x01, 0x05, 0x00, 0x00, 0x06]);
    }

    #[test]
    fn status_registers() {
        let mut cmos = leap_day();
        assert_eq!(get(&mut cmos, STATUS_A | 0x80, 0) & A_UIP, 0, "bit 7 is not index");
        assert_eq!(get(&mut cmos, STATUS_D, 0), D_VALID);
        assert_eq!(get(&mut cmos, STATUS_C, 0), 0);
        assert_eq!(get(&mut cmos, STATUS_C, 3), C_UPDATE_ENDED);
        assert_eq!(get(&mut cmos, STATUS_C, 3), 0, "reading has cleared it");
        put(&mut cmos, 0x7f, 0xab, 0);
        put(&mut cmos, STATUS_D, 0, 0);
        assert_eq!((get(&mut cmos, 0x7f, 0), get(&mut cmos, STATUS_D, 0)), (0xab, D_VALID));
        assert_eq!(cmos.read(0, Width::Byte, Instant { ns: 0 }), 0xff);
    }

    proptest! {
        /// Whatever a guest writes, and whenever: no panic, and time goes on.
        #[test]
        fn any_writes(base: u64, steps in proptest::collection::vec((any::<u8>(), any::<u8>(), any::<u64>()), 0..50)) {
            let mut cmos = Cmos::new(base);
            for (index, value, ns) in steps {
                let now = Instant { ns };
                cmos.write(0, Width::Word, u64::from(value) << 8 | u64::from(index), now);
                for index in 0..128u8 {
                    cmos.write(0, Width::Byte, index.into(), now);
                    cmos.read(1, Width::Byte, now);
                }
            }
        }
    }
}
