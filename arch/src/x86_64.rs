//! The x86-64 instruction set.

#[cfg(target_os = "none")]
pub mod boot;
pub mod descriptors;
pub mod interrupts;
pub mod ops;
pub mod page_table;
pub mod scrub;
pub mod svm;
