//! ACPI tables: the root cell's (edited copies) and a guest cell's (generated).
