//! `iso`: the hypervisor and a bundle as an image that GRUB boots by BIOS and by UEFI.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use bulkhead_abi::bundle::Bundle;
use bulkhead_abi::config::Console;

use crate::bundle::put;
use crate::cli::IsoArguments;
use crate::read;

pub(crate) fn make(arguments: &IsoArguments) -> Result<String> {
    let IsoArguments { kernel_elf, bundle: bundle_file, output, hv_cmdline } = arguments;
    let kernel = read(kernel_elf)?;
    check_kernel(&kernel).with_context(|| kernel_elf.display().to_string())?;
    let bundle = read(bundle_file)?;
    let console = Bundle::parse(&bundle).with_context(|| bundle_file.display().to_string())?.config.console;

    let directory = tempfile::tempdir()?;
    let (tree, image) = (directory.path().join("tree"), directory.path().join("iso"));
    let boot = tree.join("boot");
    fs::create_dir_all(boot.join("grub"))?;
    fs::write(boot.join("bulkhead"), kernel)?;
    fs::write(boot.join("bundle"), bundle)?;
    fs::write(boot.join("grub/grub.cfg"), grub_cfg(console, hv_cmdline)?)?;
    run("grub-mkrescue", ["-o".as_ref(), image.as_os_str(), tree.as_os_str()])?;
    check_image(&image)?;

    let image = read(&image)?;
    put(output, &image)?;
    Ok(format!("{}: {} bytes\n", output.display(), image.len()))
}

/// Multiboot2 specification, 3.1.1 "The layout of Multiboot2 header".
fn check_kernel(kernel: &[u8]) -> Result<()> {
    ensure!(kernel.starts_with(b"\x7fELF"), "not an ELF file");
    let searched = kernel.get(..32768).unwrap_or(kernel);
    let found = searched.chunks_exact(8).zip(searched.chunks_exact(8).skip(1)).any(|(first, second)| {
        let [magic, architecture, length, checksum] =
            [&first[..4], &first[4..], &second[..4], &second[4..]].map(word);
        magic == 0xe852_50d6
            && magic.wrapping_add(architecture).wrapping_add(length).wrapping_add(checksum) == 0
    });
    ensure!(found, "no multiboot2 header in its first 32 KiB");
    Ok(())
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

fn grub_cfg(console: Console, hv_cmdline: &str) -> Result<String> {
    // GRUB puts a backslash before quotes and backslashes of a command line.
    if let Some(character) = hv_cmdline.chars().find(|c| !matches!(c, ' '..='~') || "\\'\"".contains(*c)) {
        bail!("--hv-cmdline has {character:?}, must be printable ASCII without quotes and backslashes");
    }
    let words: String =
        hv_cmdline.split(' ').filter(|word| !word.is_empty()).map(|word| format!(" '{word}'")).collect();
    let serial = |unit| {
        format!(
            "if serial --unit={unit} --speed=115200; then\n    terminal_input serial\n    terminal_output serial\nfi\n"
        )
    };
    let terminal = match console {
        Console::COM1 => serial(0),
        Console::COM2 => serial(1),
        _ => String::new(),
    };
    Ok(format!(
        "{terminal}\
         set timeout=0\n\
         menuentry Bulkhead {{\n    \
             multiboot2 /boot/bulkhead{words}\n    \
             module2 /boot/bundle\n\
         }}\n"
    ))
}

/// `grub-mkrescue` leaves out the firmware whose GRUB isn't installed and calls that success.
fn check_image(image: &Path) -> Result<()> {
    let report = run(
        "xorriso",
        ["-indev".as_ref(), image.as_os_str(), "-report_el_torito".as_ref(), "plain".as_ref()],
    )?;
    for (firmware, package) in [("BIOS", "grub-pc-bin"), ("UEFI", "grub-efi-amd64-bin")] {
        let boots = report.lines().any(|line| {
            line.starts_with("El Torito boot img") && line.split_whitespace().any(|word| word == firmware)
        });
        ensure!(boots, "the image would not boot by {firmware}: is {package} installed?");
    }
    Ok(())
}

/// Runs a program and returns what it printed.
fn run<'a>(program: &str, arguments: impl IntoIterator<Item = &'a OsStr>) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {program}: are grub-common, xorriso and mtools installed?"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} failed ({}):\n{}", output.status, errors.trim_end());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
