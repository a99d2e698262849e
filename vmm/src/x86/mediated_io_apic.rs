//! The machine's own I/O APIC, mediated for the root cell.
