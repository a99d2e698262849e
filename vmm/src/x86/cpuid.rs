//! What CPUID shows to a cell, leaf by leaf.
