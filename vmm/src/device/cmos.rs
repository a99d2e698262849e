//! The CMOS real-time clock.
