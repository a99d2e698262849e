//! Models of the x86 platform: what a cell's vCPUs and its board look like.

pub mod acpi;
pub mod arrival;
pub mod board;
pub mod boot;
pub mod cpuid;
pub mod emulate;
pub mod exit;
pub mod guest_board;
pub mod interrupt;
pub mod io_apic;
pub mod kvmclock;
pub mod local_apic;
pub mod machine;
pub mod mediated_io_apic;
pub mod msr;
pub mod paging;
pub mod posted;
pub mod root_board;
pub mod root_ports;
pub mod state;
pub mod vcpu;
