//! Drivers for the devices that the hypervisor itself uses.
#![cfg_attr(not(test), no_std)]

pub mod local_apic;
pub mod pic;
pub mod rtc;
pub mod tsc;
pub mod uart;
