//! The emulated machine: QEMU's command line.
use std::{ffi::OsString, path::Path, process::Command};

use crate::job::Disk;

/// How a node comes to life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boot {
    /// Linux on the bare machine, without the hypervisor: the reference.
    Native,
    /// The hypervisor's image as QEMU's `-kernel`, by the PVH entry.
    Pvh,
    /// From a GRUB image by the BIOS.
    GrubBios,
    /// From a GRUB image by UEFI.
    GrubUefi,
}

/// How the virtio devices of the machine interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupts {
    /// Messages.
    MsiX,
    /// Level-triggered lines.
    IntX,
}

/// What is in the machine, besides what it boots.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) cpus: u32,
    pub(crate) memory: String,
    pub(crate) icount: bool,
    /// Whether all CPUs share one host thread.
    pub(crate) single_thread: bool,
    pub(crate) cpu_flags: Vec<String>,
    pub(crate) interrupts: Interrupts,
    pub(crate) extra: Vec<String>,
}

impl Machine {
    /// QEMU's command line, to be completed by consoles and what is booted. QEMU gets killed when
    /// the thread that starts it ends, however that happens.
    pub(crate) fn command<'d>(&self, disks: impl Iterator<Item = &'d Disk>) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64", "-M", "q35"]);
        // x2APIC registers and instruction counting do not go together in QEMU 10. RDRAND is
        // the same at each run by `-seed`.
        let mut cpu = String::from(if self.icount { "EPYC,+vgif,-x2apic" } else { "EPYC,+vgif,+x2apic" });
        for flag in &self.cpu_flags {
            cpu.push(',');
            cpu.push_str(flag);
        }
        command.args(["-cpu", &cpu]);
        if self.icount {
            command.args(["-accel", "tcg", "-icount", "shift=0,sleep=off", "-seed", "1"]);
            command.args(["-rtc", "base=2020-01-01T00:00:00,clock=vm"]);
        } else {
            command
                .args(["-accel", if self.single_thread { "tcg,thread=single" } else { "tcg,thread=multi" }]);
        }
        command.args(["-smp", &self.cpus.to_string(), "-m", &self.memory]);
        command.args(["-display", "none", "-nodefaults", "-no-reboot"]);
        // Else SeaBIOS sets up every disk, and what it keeps of three reaches down into the place
        // where QEMU has put a bundle.
        command.args(["-boot", "strict=on"]);
        let vectors = match self.interrupts {
            Interrupts::MsiX => "",
            Interrupts::IntX => ",vectors=0",
        };
        command.args(["-netdev", "user,id=net", "-device"]);
        command.arg(format!("virtio-net-pci,netdev=net,romfile={vectors}"));
        for Disk { serial, file, read_only } in disks {
            let read_only = if *read_only { "on" } else { "off" };
            command.arg("-drive").arg(with_path(
                &format!("if=none,id={serial},format=raw,cache=unsafe,read-only={read_only},file="),
                file,
            ));
            command.arg("-device").arg(format!("virtio-blk-pci,drive={serial},serial={serial}{vectors}"));
        }
        command.args(&self.extra);
        command
    }
}

/// An option of QEMU that ends with a path; a comma in it is doubled.
pub(crate) fn with_path(option: &str, path: &Path) -> OsString {
    format!("{option}{}", path.display().to_string().replace(',', ",,")).into()
}
