//! The one library that starts nodes: QEMU command lines, jobs, serial consoles, time limits.
//!
//! A [`Node`] says what to boot and how. It runs a job without a keyboard ([`Node::run`]), talks
//! over the console ([`Node::start`] gives a [`Session`]) or hands the console to a person
//! ([`Node::terminal`]). The programs `node`, `demo` and `suite` and the tests in `tests/` stand on it.
#![forbid(unsafe_code)]

mod job;
mod machine;
mod node;
mod session;
mod steps;
pub mod tally;
pub mod tiny_kernel;

use std::path::{Path, PathBuf};

pub use job::nonce;
pub use machine::{Boot, Interrupts};
pub use node::Node;
pub use session::{End, Outcome, STATUS_DIED, STATUS_TIME_LIMIT, Session};
pub use steps::Steps;

/// The top of the source tree.
pub fn source_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Where Cargo and the Makefile put what they build.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| source_dir().join("target"), PathBuf::from)
}
