//! Links the image by its own linker script, and notes the commit it is built from.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=image.ld");
    println!("cargo:rerun-if-changed=../.git/logs/HEAD");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("none") {
        let directory = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
        println!("cargo:rustc-link-arg-bins=-T{directory}/image.ld");
    }
    // Sources that were unpacked from an archive have no commit.
    let commit = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok();
    let commit =
        commit.filter(|output| output.status.success()).and_then(|o| String::from_utf8(o.stdout).ok());
    println!("cargo:rustc-env=BULKHEAD_COMMIT={}", commit.as_deref().map_or("unknown", str::trim));
}
