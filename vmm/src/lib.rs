//! Policy of the Bulkhead hypervisor: all that can be decided without a privileged
//! instruction, so that it builds and is tested on any host.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod cell;
pub mod clock;
pub mod device;
pub mod hal;
pub mod manage;
pub mod memory;
pub mod stats;
pub mod x86;
