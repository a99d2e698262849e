//! Counters and clocks.
