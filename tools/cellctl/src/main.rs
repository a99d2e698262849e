//! `cellctl`: the root cell's management tool.
#![forbid(unsafe_code)]

fn main() {}
