//! Walking a guest's page tables.
