//! Bad bundles, given to the hypervisor: each is refused in one line, and that is the end.
#![forbid(unsafe_code)]

use std::{fs, path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use bulkhead_tests::{Boot, End, Node, target_dir, tiny_kernel};

const LIMIT: Duration = Duration::from_secs(60);

/// The line in which the hypervisor refuses a bundle.
const REFUSED: &str = "Bulkhead cannot run here: ";

/// What a manifest begins with: an array of four, a text of 15 bytes.
const MAGIC: &[u8] = b"\x84\x6fbulkhead bundle";

/// What a small root kernel prints, if it comes to that.
const ALIVE: &str = "the root kernel runs\r\n";

fn kernel() -> Vec<u8> {
    tiny_kernel::tiny_kernel(&[&tiny_kernel::print(ALIVE), tiny_kernel::SLEEP].concat())
}

/// A bundle of `kernel` and the text of a `node.toml`.
fn bundle(dir: &Path, config: &str, kernel: &[u8]) -> Result<Vec<u8>> {
    let file = |name: &str| dir.join(name);
    fs::write(file("node.toml"), config)?;
    fs::write(file("kernel"), kernel)?;
    let output = Command::new(target_dir().join("release/bulkhead-mkimage"))
        .arg("bundle")
        .arg("--config")
        .arg(file("node.toml"))
        .arg("--kernel")
        .arg(file("kernel"))
        .arg("--output")
        .arg(file("bundle"))
        .output()
        .context("cannot run bulkhead-mkimage; `make build` makes it")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(fs::read(file("bundle"))?)
}

/// A node of 2 CPUs and 256 MiB with this bundle.
fn node(dir: &Path, bundle: &[u8]) -> Result<Node> {
    let file = dir.join("given");
    fs::write(&file, bundle)?;
    Ok(Node::new("bundle", Boot::Pvh).cpus(2).memory("256M").bundle(file).limit(LIMIT))
}

/// Checks that the hypervisor refuses `bundle` for the reason that begins with `why`.
fn is_refused(dir: &Path, bundle: &[u8], why: &str) -> Result<()> {
    let outcome = node(dir, bundle)?.start(None)?.finish(|_| ())?;
    let End::Died(line) = &outcome.end else { panic!("not refused for {why:?}: {outcome}") };
    let reason = line.split_once(REFUSED).map(|(_, reason)| reason);
    assert!(reason.is_some_and(|reason| reason.starts_with(why)), "{why}\n{outcome}");
    let last = outcome.console.trim_end().lines().last().unwrap_or_default();
    assert_eq!(last.trim_end(), line, "more came\n{outcome}");
    Ok(())
}

/// Where `part` is in `bytes`.
fn find(bytes: &[u8], part: &[u8]) -> Result<usize> {
    let found = bytes.windows(part.len()).position(|window| window == part);
    found.with_context(|| format!("no {:?}", String::from_utf8_lossy(part)))
}

/// `bytes` with `new` in the place of the first `old`.
fn replaced(bytes: &[u8], old: &[u8], new: &[u8]) -> Result<Vec<u8>> {
    let at = find(bytes, old)?;
    let mut bytes = bytes.to_vec();
    bytes.splice(at..at + old.len(), new.iter().copied());
    Ok(bytes)
}

#[test]
fn a_good_bundle_is_taken() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let good = bundle(dir.path(), "pool = \"64M\"", &kernel())?;
    let mut session = node(dir.path(), &good)?.start(None)?;
    // Else what is refused below proves nothing.
    session.wait_for(ALIVE.trim_end(), LIMIT)?;
    Ok(())
}

#[test]
fn damage_is_told() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let refused = |bundle: &[u8], why: &str| is_refused(dir.path(), bundle, why);
    let good = bundle(dir.path(), "name = \"rack-7\"\npool = \"64M\"", &kernel())?;
    let version = [MAGIC, b"\x01"].concat();

    refused(b"just a text", "bundle: not a cpio newc archive: no header (070701) at byte 0")?;
    refused(&good[..60], "bundle: truncated in ")?;
    refused(&good[..good.len() - 4096], "bundle: truncated in ")?;
    refused(
        &replaced(&good, b"bulkhead bundle", b"bulkhead bungle")?,
        "bundle: the manifest's magic is \"bulkhead bungle\", must be \"bulkhead bundle\"",
    )?;
    refused(
        &replaced(&good, &version, &[MAGIC, b"\x02"].concat())?,
        "bundle: the bundle has version 2, this program reads version 1",
    )?;
    refused(&replaced(&good, b"rack-7", b"rack-8")?, "bundle: \"bulkhead/manifest\" has checksum 0x")?;
    // The first letter of what the kernel prints, within `mov al, letter`.
    let code = |letter: u8| [0x66, 0xba, 0xf8, 0x03, 0xb0, letter];
    let kernel = replaced(&good, &code(b't'), &code(b'T'))?;
    refused(&kernel, "bundle: \"root/kernel\" has checksum 0x")?;
    refused(&[&good[..], b"x"].concat(), "bundle: byte ")
}

#[test]
fn a_kernel_that_is_none_is_told() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let refused = |bundle: &[u8], why: &str| is_refused(dir.path(), bundle, why);
    let kernel = kernel();
    let good = bundle(dir.path(), "pool = \"64M\"", &kernel)?;
    // Right but for the magic, checksums and all: mkimage would not make it.
    let none = replaced(&kernel, b"HdrS", b"hDRs")?;
    let forged = with_kernel(&good, &kernel, &none)?;
    refused(&forged, "bundle: root kernel \"root/kernel\" is not a bzImage: no ")?;

    // One by the magic, but of a protocol without a 64-bit entry.
    let old = replaced(&kernel, b"HdrS\x0c\x02", b"HdrS\x0b\x02")?;
    refused(
        &bundle(dir.path(), "pool = \"64M\"", &old)?,
        "root kernel: field version of the setup header is 0x20b; allowed: 0x20c",
    )
}

#[test]
fn cpus_and_memory_that_are_not_there_are_told() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let refused = |config: &str, why: &str| {
        let bundle = bundle(dir.path(), config, &kernel())?;
        is_refused(dir.path(), &bundle, why)
    };
    refused("pool = \"64M\"\nreserved_cpus = [1, 2]", "reserved_cpus: 2, but the machine has CPUs 0 to 1")?;
    refused("pool = \"1G\"", "pool: 0x40000000 bytes for the cell pool are not to be had: 0x")?;
    refused("pool = \"64M\"\n[root]\nmemory = \"1G\"", "root.memory: ")
}

/// `bundle` with another kernel of the same size, and with the checksums that belong to it.
fn with_kernel(bundle: &[u8], old: &[u8], new: &[u8]) -> Result<Vec<u8>> {
    let sum = |bytes: &[u8]| crc32(bytes).to_be_bytes();
    let bundle = replaced(bundle, old, new)?;
    let mut bundle = replaced(&bundle, &sum(old), &sum(new))?;
    // The manifest's body is a string of bytes with a length of one byte, or of two.
    let length_at = find(&bundle, MAGIC)? + MAGIC.len() + 1;
    let (start, length) = match bundle[length_at..] {
        [0x58, length, ..] => (length_at + 2, usize::from(length)),
        [0x59, high, low, ..] => (length_at + 3, usize::from(u16::from_be_bytes([high, low]))),
        ref other => anyhow::bail!("no string of bytes but {:#x}", other[0]),
    };
    let end = start + length;
    ensure!(bundle[end] == 0x1a, "no checksum behind the manifest's body");
    let checksum = sum(&bundle[start..end]);
    bundle[end + 1..end + 5].copy_from_slice(&checksum);
    Ok(bundle)
}

/// CRC-32/ISO-HDLC.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}
