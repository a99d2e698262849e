//! The ACPI power-management timer.
