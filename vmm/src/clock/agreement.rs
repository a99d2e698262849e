//! Whether two CPUs' counters agree.

/// What is known about the difference between another CPU's counter and this one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CounterOffset {
    /// The other counter is at least so far ahead, in counts.
    pub low: i64,
    /// And at most so far.
    pub high: i64,
}

impl CounterOffset {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self { low: i64::MIN, high: i64::MAX };

    /// Learns from an exchange: the other CPU read `theirs` between this one's reads
    /// `before` and `after`.
    pub fn learn(&mut self, before: u64, theirs: u64, after: u64) {
        self.low = self.low.max(theirs.wrapping_sub(after).cast_signed());
        self.high = self.high.min(theirs.wrapping_sub(before).cast_signed());
    }

    /// How far the counters may be apart, in counts.
    pub fn bound(&self) -> u64 {
        self.low.unsigned_abs().max(self.high.unsigned_abs())
    }

    /// Whether the counters may be equal.
    pub fn allows_equal(&self) -> bool {
        self.low <= 0 && 0 <= self.high
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn counters_that_differ_are_told_apart() {
        let mut known = CounterOffset::UNKNOWN;
        known.learn(1000, 1010, 1020);
        assert!(known.allows_equal());
        assert_eq!(known.bound(), 10);
        known.learn(2000, 2100, 2020);
        assert!(!known.allows_equal());
    }

    proptest! {
        #[test]
        fn the_true_offset_is_enclosed(
            offset in -1000i64..1000,
            trips in proptest::collection::vec((0u64..500, 0u64..500), 1..20),
        ) {
            let mut known = CounterOffset::UNKNOWN;
            let mut now = 1u64 << 40;
            for (there, back) in trips {
                let theirs = (now + there).wrapping_add_signed(offset);
                known.learn(now, theirs, now + there + back);
                now += 10_000;
            }
            prop_assert!(known.low <= offset && offset <= known.high);
            prop_assert!(known.bound() >= offset.unsigned_abs());
        }
    }
}
