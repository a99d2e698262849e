//! `bulkhead-mkimage`: makes and checks bundles and boot images.
#![forbid(unsafe_code)]

fn main() {}
