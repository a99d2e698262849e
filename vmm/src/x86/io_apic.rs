//! The virtual I/O APIC.
