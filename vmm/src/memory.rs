//! Addresses, memory maps and access to guest memory.

pub mod address;
pub mod frames;
pub mod guest;
pub mod map;
