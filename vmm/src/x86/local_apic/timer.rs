//! The local APIC's timer (Intel SDM vol. 3, 11.5.4).
//!
//! All instants are guest TSC ticks. The count modes count a bus clock of [`BUS_HZ`] divided
//! by the divide configuration; they are kept in bus ticks since an origin, so that a
//! periodic timer does not drift, and converted with one rule: a timer is never early.

/// Frequency of the clock that the count modes divide, in Hz.
pub const BUS_HZ: u64 = 1_000_000_000;

/// A timer without its LVT entry: when it fires, not what then happens.
pub(super) struct Timer {
    tsc_hz: u64,
    armed: Armed,
}

#[derive(Clone, Copy)]
enum Armed {
    No,
    /// TSC-deadline mode.
    Deadline(u64),
    Count(Count),
}

#[derive(Clone, Copy)]
struct Count {
    /// The TSC when `next` was counted from zero.
    origin: u64,
    /// The next expiry, in bus ticks since `origin`.
    next: u64,
    /// The initial count.
    initial: u32,
    /// Bus ticks for one count: 1..=128.
    divisor: u8,
    periodic: bool,
}

impl Count {
    fn period(&self) -> u64 {
        u64::from(self.initial) * u64::from(self.divisor)
    }
}

impl Timer {
    /// A disarmed timer of a guest whose TSC runs at `tsc_hz`, at least 1.
    pub(super) fn new(tsc_hz: u64) -> Self {
        Self { tsc_hz: tsc_hz.max(1), armed: Armed::No }
    }

    pub(super) fn disarm(&mut self) {
        self.armed = Armed::No;
    }

    /// Arms for the TSC value `deadline`; 0 disarms.
    pub(super) fn arm_deadline(&mut self, deadline: u64) {
        self.armed = if deadline == 0 { Armed::No } else { Armed::Deadline(deadline) };
    }

    /// Starts to count down from `initial`; 0 disarms.
    pub(super) fn arm_count(&mut self, initial: u32, divisor: u8, periodic: bool, now: u64) {
        let mut count = Count { origin: now, next: 0, initial, divisor, periodic };
        count.next = count.period();
        self.armed = if initial == 0 { Armed::No } else { Armed::Count(count) };
    }

    /// Goes on from the current count with another divisor. Call [`Self::poll`] first.
    pub(super) fn set_divisor(&mut self, divisor: u8, now: u64) {
        let left = u64::from(self.current_count(now));
        if let Armed::Count(count) = &mut self.armed {
            (count.origin, count.next, count.divisor) = (now, left * u64::from(divisor), divisor);
        }
    }

    /// Keeps the time that is left in the count modes when the guest's TSC jumps from `old`
    /// to `new`. Call [`Self::poll`] first. A TSC deadline stays what it is.
    pub(super) fn tsc_jumped(&mut self, old: u64, new: u64) {
        let elapsed = |origin| self.bus_ticks(old.saturating_sub(origin));
        if let Armed::Count(count) = self.armed {
            let next = count.next.saturating_sub(elapsed(count.origin));
            self.armed = Armed::Count(Count { origin: new, next, ..count });
        }
    }

    /// The TSC value at which it fires next.
    pub(super) fn deadline(&self) -> Option<u64> {
        match self.armed {
            Armed::No => None,
            Armed::Deadline(deadline) => Some(deadline),
            Armed::Count(count) => Some(count.origin.saturating_add(self.tsc_ticks(count.next))),
        }
    }

    /// IA32_TSC_DEADLINE as the guest reads it.
    pub(super) fn deadline_register(&self, now: u64) -> u64 {
        match self.armed {
            Armed::Deadline(deadline) if deadline > now => deadline,
            _ => 0,
        }
    }

    /// The current count. Call [`Self::poll`] first.
    pub(super) fn current_count(&self, now: u64) -> u32 {
        let Armed::Count(count) = self.armed else { return 0 };
        let left = count.next.saturating_sub(self.bus_ticks(now.saturating_sub(count.origin)));
        u32::try_from(left.div_ceil(u64::from(count.divisor))).unwrap_or(count.initial)
    }

    /// Whether it has fired; if so, a periodic timer is armed for the next period that is
    /// not yet over, and any other disarmed.
    pub(super) fn poll(&mut self, now: u64) -> bool {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return false;
        }
        let armed = match self.armed {
            Armed::Count(count) if count.periodic => {
                let late = self.bus_ticks(now.saturating_sub(count.origin)).saturating_sub(count.next);
                let periods = late / count.period() + 1;
                let next = count.next.saturating_add(periods.saturating_mul(count.period()));
                Armed::Count(Count { next, ..count })
            }
            _ => Armed::No,
        };
        self.armed = armed;
        true
    }

    /// Whole bus ticks in `tsc_ticks`.
    fn bus_ticks(&self, tsc_ticks: u64) -> u64 {
        let ticks = u128::from(tsc_ticks) * u128::from(BUS_HZ) / u128::from(self.tsc_hz);
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    /// The fewest TSC ticks that hold `bus_ticks`.
    fn tsc_ticks(&self, bus_ticks: u64) -> u64 {
        let ticks = (u128::from(bus_ticks) * u128::from(self.tsc_hz)).div_ceil(u128::from(BUS_HZ));
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}

/// The divisor of a divide configuration register: bits 3, 1 and 0 (Intel SDM vol. 3, figure
/// 11-10).
pub(super) fn divisor(register: u32) -> u8 {
    match (register >> 1 & 4) | (register & 3) {
        7 => 1,
        code => 2 << code,
    }
}
