//! The one library that starts nodes: QEMU command lines, serial consoles, time limits.
#![forbid(unsafe_code)]
