//! Boot protocols: how a kernel's file becomes guest memory and first registers.

pub mod e820;
pub mod linux;
