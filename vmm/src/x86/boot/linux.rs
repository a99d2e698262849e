//! Linux bzImage by the 64-bit boot protocol.
