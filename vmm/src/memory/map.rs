//! The physical memory map, and what the hypervisor takes of it.
