//! A kernel that is no Linux (`guests/bare`) says by which protocol it was booted and what it was
//! handed: in a cell, and in QEMU itself as a check of the kernel.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use bulkhead_tests::{Boot, Node, target_dir};

const LIMIT: Duration = Duration::from_secs(180);
const MULTIBOOT: &str = "multiboot 1";

/// Puts the kernel there twice, under the names of what it is booted by, and a module: a loader that
/// does not find the multiboot header takes the PVH note, and ours the other way round.
fn put_kernels(dir: &Path) -> Result<u64> {
    let kernel = fs::read(target_dir().join("guests/bare.elf"))?;
    let cut = |word: &[u8]| {
        let at = kernel.windows(word.len()).position(|bytes| bytes == word).context("not in the kernel")?;
        let mut cut = kernel.clone();
        cut[at..at + word.len()].fill(0);
        anyhow::Ok(cut)
    };
    fs::write(dir.join("pvh"), cut(&0x1bad_b002_u32.to_le_bytes())?)?;
    fs::write(dir.join("multiboot"), cut(b"\x12\0\0\0Xen\0")?)?;
    let module: Vec<u8> = (0..=255).cycle().take(70_001).collect();
    fs::write(dir.join("module"), &module)?;
    Ok(module.iter().copied().map(u64::from).sum())
}

#[test]
fn a_cell_boots_kernels_by_pvh_and_by_multiboot() -> Result<()> {
    let share = tempfile::tempdir()?;
    let sum = put_kernels(share.path())?;
    let kernels = [("pvh", "PVH"), ("multiboot", MULTIBOOT)];
    for (name, _) in kernels {
        let text = format!(
            "name = \"{name}\"\ncpus = 1\nmemory = \"4M\"\n[boot]\nkernel = \"{name}\"\n\
            initrd = \"module\"\ncmdline = \"for {name} exit=21\"\n"
        );
        fs::write(share.path().join(format!("{name}.cell.toml")), text)?;
    }
    let steps = Node::new("bare", Boot::Pvh).checked().share(share.path()).limit(LIMIT).steps(&[
        ("pvh", "cellctl run /share/pvh.cell.toml </dev/null"),
        ("multiboot", "cellctl run /share/multiboot.cell.toml </dev/null"),
    ])?;
    for (name, protocol) in kernels {
        let (said, code) = steps.get(name)?;
        assert_eq!(code, 21, "{steps}");
        let expected = [
            format!("bare: booted by {protocol}"),
            format!("bare: command line 'for {name} exit=21'"),
            // Memory below 640 KiB, what is reserved, ACPI tables, FACS, memory above 1 MiB.
            "bare: 5 entries in the memory map".into(),
            format!("bare: a module of 70001 bytes, sum {sum}"),
        ];
        let said: Vec<_> = said.lines().map(str::trim).filter(|line| line.starts_with("bare: ")).collect();
        assert_eq!(said, expected, "{steps}");
    }
    Ok(())
}

#[test]
fn qemu_boots_it_both_ways_too() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let sum = put_kernels(dir.path())?;
    for (name, protocol) in [("pvh", "PVH"), ("multiboot", MULTIBOOT)] {
        let output = Command::new("timeout")
            .args(["60", "qemu-system-x86_64", "-M", "q35", "-accel", "tcg", "-m", "64"])
            .args(["-display", "none", "-nodefaults", "-no-reboot", "-serial", "stdio"])
            .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-append", "exit=21"])
            .args(["-initrd", "module", "-kernel", name])
            .current_dir(dir.path())
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        // The device makes 2n + 1 of it.
        assert_eq!(output.status.code(), Some(43), "{said}");
        for part in [format!("booted by {protocol}\r\n"), format!("a module of 70001 bytes, sum {sum}\r\n")] {
            assert!(said.contains(&part), "{part}\n{said}");
        }
    }
    Ok(())
}
