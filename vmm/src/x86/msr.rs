//! What each MSR does for a cell.
