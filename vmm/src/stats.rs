//! Counters that are always on.

use core::sync::atomic::{AtomicU64, Ordering};

/// Exits of one vCPU by kind: how many, and how many ticks of the host's counter the vCPU
/// was away for them. Its own CPU alone counts; anybody may read.
#[derive(Debug)]
pub struct ExitCounts<const KINDS: usize>([(AtomicU64, AtomicU64); KINDS]);

impl<const KINDS: usize> Default for ExitCounts<KINDS> {
    fn default() -> Self {
        Self([const { (AtomicU64::new(0), AtomicU64::new(0)) }; KINDS])
    }
}

/// Adds for the one writer there is: no atomic addition is needed.
fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

impl<const KINDS: usize> ExitCounts<KINDS> {
    /// Counts an exit that kept the vCPU away for `ticks`.
    pub fn count(&self, kind: usize, ticks: u64) {
        if let Some((count, time)) = self.0.get(kind) {
            add(count, 1);
            add(time, ticks);
        }
    }

    /// (exits, ticks) of each kind.
    pub fn get(&self) -> [(u64, u64); KINDS] {
        core::array::from_fn(|kind| {
            self.0
                .get(kind)
                .map_or((0, 0), |(count, time)| (count.load(Ordering::Relaxed), time.load(Ordering::Relaxed)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_ignores_what_it_does_not_know() {
        let counts = ExitCounts::<3>::default();
        counts.count(2, 10);
        counts.count(2, 5);
        counts.count(0, 1);
        counts.count(3, 1);
        assert_eq!(counts.get(), [(1, 1), (0, 0), (2, 15)]);
    }
}
