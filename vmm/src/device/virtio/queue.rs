//! Split virtqueues, read as hostile input.
