//! Mechanisms: everything that needs privileged instructions, behind safe interfaces.
//!
//! The facade: the rest of the hypervisor names the instruction set it runs on only
//! here.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

#[cfg(target_arch = "x86_64")]
mod backend;
pub mod guest_ram;
#[cfg(target_arch = "x86_64")]
pub mod x86_64;

#[cfg(target_arch = "x86_64")]
pub use backend::Backend;
