//! What crosses a boundary: management messages and the bundle. Everything here is
//! read from untrusted bytes, so decoding never panics and every error names its culprit.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod bundle;
pub mod config;
pub mod frame;
pub mod message;
