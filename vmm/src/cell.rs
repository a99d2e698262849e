//! Cells: configuration, life cycle, ownership of CPUs and memory.

pub mod config;
pub mod lifecycle;
pub mod ownership;
