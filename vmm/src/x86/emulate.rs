//! Decoding and carrying out instructions that touch device memory.
