//! The virtual local APIC.
