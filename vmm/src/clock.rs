//! Counters and clocks: how fast the machine's counter runs.
//!
//! A frequency is measured by bracketing: the counter is read before and after a reference,
//! and of many such readings the tightest counts. Two of them, a window apart, give the
//! frequency and the error that the brackets allow.

pub mod agreement;

/// One reading of a reference between two of the counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bracket {
    /// The counter before.
    pub before: u64,
    /// The reference.
    pub reference: u64,
    /// The counter after.
    pub after: u64,
}

impl Bracket {
    /// How far the two readings of the counter are apart.
    pub const fn width(&self) -> u64 {
        self.after.saturating_sub(self.before)
    }

    /// The counter's value when the reference was read, to half a width.
    const fn middle(&self) -> u64 {
        self.before + self.width() / 2
    }
}

/// Takes `readings` brackets and keeps the tightest.
pub fn tightest(readings: u32, mut take: impl FnMut() -> Bracket) -> Bracket {
    let mut best = take();
    for _ in 1..readings {
        let next = take();
        if next.width() < best.width() {
            best = next;
        }
    }
    best
}

/// A frequency and how far it may be off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frequency {
    /// In Hz.
    pub hz: u64,
    /// The truth lies within this many Hz of it.
    pub error_hz: u64,
}

impl Frequency {
    /// Whether both can be true.
    pub const fn agrees_with(&self, other: &Self) -> bool {
        self.hz.abs_diff(other.hz) <= self.error_hz + other.error_hz
    }
}

/// The counter's frequency from two brackets of a reference that counts at
/// `reference_millihertz` in the bits of `mask`, and did not go round more than once between
/// them. `None` when the reference or the counter has not moved.
pub fn frequency(start: Bracket, end: Bracket, reference_millihertz: u64, mask: u64) -> Option<Frequency> {
    let reference_ticks = u128::from(end.reference.wrapping_sub(start.reference) & mask);
    let ticks = u128::from(end.middle().checked_sub(start.middle())?);
    if reference_ticks == 0 || ticks == 0 {
        return None;
    }
    let hz =
        |ticks: u128| u64::try_from(ticks * u128::from(reference_millihertz) / reference_ticks / 1000).ok();
    // Each end is known to half a bracket of the counter, and to one tick of the reference,
    // which stands still between its ticks.
    let brackets = u128::from(start.width()) + u128::from(end.width());
    let reference_tick = 2 * (ticks / reference_ticks + 1);
    Some(Frequency { hz: hz(ticks)?, error_hz: hz(brackets / 2 + reference_tick)? + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the true frequency and however wide the brackets, the stated error holds.
        #[test]
        fn the_truth_lies_within_the_stated_error(
            hz in 1_000_000u64..10_000_000_000,
            (reference_hz, mask) in prop_oneof![Just((3_579_545u64, 0xff_ffffu64)), Just((100_000_000, 0xffff_ffff)), Just((14_318_180, 0xffff_ffff))],
            start_ns in 0u64..1_000_000_000_000,
            window_ns in 50_000_000u64..500_000_000,
            widths in prop::array::uniform4(0u64..20_000),
        ) {
            let at = |ns: u64, f: u64| u64::try_from(u128::from(ns) * u128::from(f) / 1_000_000_000).unwrap();
            let bracket = |ns: u64, before: u64, after: u64| Bracket {
                before: at(ns + 20_000 - before, hz),
                reference: at(ns + 20_000, reference_hz) & mask,
                after: at(ns + 20_000 + after, hz),
            };
            let start = bracket(start_ns, widths[0], widths[1]);
            let end = bracket(start_ns + window_ns, widths[2], widths[3]);
            let f = frequency(start, end, reference_hz * 1000, mask).unwrap();
            prop_assert!(f.hz.abs_diff(hz) <= f.error_hz, "{f:?} for {hz}");
        }
    }

    #[test]
    fn tight_brackets_make_a_small_error() {
        let at = |ns: u64| Bracket { before: ns, reference: ns / 10, after: ns + 50 };
        let f = frequency(at(1_000), at(100_001_000), 100_000_000_000, 0xffff_ffff).unwrap();
        assert_eq!(f.hz, 1_000_000_000);
        assert!(f.error_hz < 1_000, "{f:?}");
    }

    #[test]
    fn clocks_that_stand_still_have_no_frequency() {
        let b = |t, reference| Bracket { before: t, reference, after: t };
        assert_eq!(frequency(b(1, 5), b(1000, 5), 1_000_000, 0xff_ffff), None);
        assert_eq!(frequency(b(1, 5), b(1, 50), 1_000_000, 0xff_ffff), None);
        assert_eq!(frequency(b(10, 5), b(1, 50), 1_000_000, 0xff_ffff), None, "backwards");
    }

    #[test]
    fn the_tightest_bracket_is_kept() {
        let mut widths = [9, 3, 7].into_iter();
        let best = tightest(3, || Bracket { before: 0, reference: 0, after: widths.next().unwrap() });
        assert_eq!(best.width(), 3);
    }
}
