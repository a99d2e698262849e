//! What to boot and how: the description of a node, and the files made for it.
use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    job::{Disk, Job},
    machine::{Boot, Interrupts, Machine, with_path},
    session::{Outcome, Session},
    source_dir, target_dir,
};

/// The root cell's kernel command line; what a node adds comes after it.
const ROOT_CMDLINE: &str = "console=ttyS0 panic=-1";

/// On the root cell's command line: there is a job.
const JOB_WORD: &str = "bulkhead.job";

/// UEFI firmware, as Debian's package `ovmf` has it.
const OVMF: &str = "/usr/share/OVMF";

/// Directories of earlier nodes of the same name that are kept.
const KEPT: u32 = 5;

/// A node to be started: 4 CPUs, 2 GiB, the kernel and the files of `guests/`, 300 s.
#[derive(Clone, Debug)]
pub struct Node {
    name: String,
    boot: Boot,
    machine: Machine,
    kernel: PathBuf,
    initrd: PathBuf,
    root_cmdline: String,
    hypervisor: PathBuf,
    hypervisor_cmdline: String,
    config: PathBuf,
    bundle: Option<PathBuf>,
    disks: Vec<Disk>,
    share: Option<PathBuf>,
    out: Option<PathBuf>,
    limit: Duration,
}

impl Node {
    /// A node whose logs go to a directory called after `name`.
    pub fn new(name: &str, boot: Boot) -> Self {
        let guests = target_dir().join("guests");
        Self {
            name: name.into(),
            boot,
            machine: Machine {
                cpus: 4,
                memory: "2G".into(),
                icount: false,
                // When Linux sizes PCI windows while another CPU writes to its xAPIC, QEMU 10's
                // threads can get the write to the wrong device, and an assertion of msix.c ends it.
                single_thread: boot == Boot::Native,
                cpu_flags: Vec::new(),
                interrupts: Interrupts::MsiX,
                extra: Vec::new(),
            },
            kernel: guests.join("vmlinuz"),
            initrd: guests.join("root-initrd"),
            root_cmdline: ROOT_CMDLINE.into(),
            hypervisor: target_dir().join("images/bulkhead-x86_64.elf"),
            hypervisor_cmdline: String::new(),
            config: source_dir().join("guests/node.toml"),
            bundle: None,
            disks: Vec::new(),
            share: None,
            out: None,
            limit: Duration::from_secs(300),
        }
    }

    /// The number of the machine's CPUs.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.machine.cpus = cpus;
        self
    }

    /// The machine's memory, in QEMU's notation: `2G`.
    pub fn memory(mut self, memory: &str) -> Self {
        self.machine.memory = memory.into();
        self
    }

    /// Whether an instruction takes exactly 1 ns of the node's time. What the node does is then
    /// nearly repeatable: disks and network take the host's time.
    pub fn icount(mut self, icount: bool) -> Self {
        self.machine.icount = icount;
        self
    }

    /// Adds a flag of the CPU: `-npt`.
    pub fn cpu_flag(mut self, flag: &str) -> Self {
        self.machine.cpu_flags.push(flag.into());
        self
    }

    /// How the machine's virtio devices interrupt.
    pub fn interrupts(mut self, interrupts: Interrupts) -> Self {
        self.machine.interrupts = interrupts;
        self
    }

    /// Adds an option of QEMU, one word each.
    pub fn qemu(mut self, words: &[&str]) -> Self {
        self.machine.extra.extend(words.iter().map(ToString::to_string));
        self
    }

    /// The root cell's kernel.
    pub fn kernel(mut self, file: impl Into<PathBuf>) -> Self {
        self.kernel = file.into();
        self
    }

    /// The root cell's initial file system.
    pub fn initrd(mut self, file: impl Into<PathBuf>) -> Self {
        self.initrd = file.into();
        self
    }

    /// Adds words to the root cell's kernel command line.
    pub fn root_cmdline(mut self, words: &str) -> Self {
        self.root_cmdline.push(' ');
        self.root_cmdline.push_str(words);
        self
    }

    /// Runs the hypervisor that checks itself at each entry.
    pub fn checked(mut self) -> Self {
        self.hypervisor = target_dir().join("images/bulkhead-x86_64-checked.elf");
        self
    }

    /// The hypervisor's command line.
    pub fn hypervisor_cmdline(mut self, words: &str) -> Self {
        self.hypervisor_cmdline = words.into();
        self
    }

    /// The node's configuration, a `node.toml`.
    pub fn config(mut self, file: impl Into<PathBuf>) -> Self {
        self.config = file.into();
        self
    }

    /// A bundle as it is, instead of one made of configuration, kernel and initial file system.
    pub fn bundle(mut self, file: impl Into<PathBuf>) -> Self {
        self.bundle = Some(file.into());
        self
    }

    /// Adds a disk that cannot be written to, with the content of `file`. The root cell finds it
    /// by its serial number.
    pub fn disk(mut self, serial: &'static str, file: impl Into<PathBuf>) -> Self {
        self.disks.push(Disk { serial, file: file.into(), read_only: true });
        self
    }

    /// A directory whose files the job finds in `/share`.
    pub fn share(mut self, dir: impl Into<PathBuf>) -> Self {
        self.share = Some(dir.into());
        self
    }

    /// A directory that gets what the job leaves in `/out`.
    pub fn out(mut self, dir: impl Into<PathBuf>) -> Self {
        self.out = Some(dir.into());
        self
    }

    /// How long the node may run.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Boots the node, runs `cmd` in the root cell's shell and waits for its end.
    ///
    /// # Errors
    /// The node could not be started, or its files not be written. What goes wrong in the node is
    /// no error but part of the outcome.
    pub fn run(self, cmd: &str) -> Result<Outcome> {
        self.start(Some(cmd))?.finish(|_| ())
    }

    /// Boots the node and returns at once, to talk over the console or to follow the job `cmd`.
    /// Without a job the root cell offers a shell on the console.
    ///
    /// # Errors
    /// As [`Node::run`].
    pub fn start(mut self, cmd: Option<&str>) -> Result<Session> {
        if cmd.is_some() {
            self = self.root_cmdline(JOB_WORD);
        }
        if self.machine.icount {
            // Linux would seed its place in memory from what differs from run to run.
            self = self.root_cmdline("nokaslr");
        }
        let dir = NodeDir::new(&self.name)?;
        let job = cmd.map(|cmd| Job::new(&dir.scratch, cmd, self.share.as_deref())).transpose()?;
        let mut command = self.command(&dir, job.as_ref())?;
        command.args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
        command.arg("-serial").arg(with_path("file:", &dir.logs.join("job.log")));
        Session::new(command, dir, job, self.out, self.limit)
    }

    /// Boots the node with its console on this process's terminal. Ctrl-a x leaves.
    ///
    /// # Errors
    /// As [`Node::run`].
    pub fn terminal(self) -> Result<ExitStatus> {
        let dir = NodeDir::new(&self.name)?;
        let mut command = self.command(&dir, None)?;
        command.args(["-serial", "mon:stdio", "-serial", "null"]);
        command.status().context("cannot run QEMU")
    }

    fn command(&self, dir: &NodeDir, job: Option<&Job>) -> Result<Command> {
        for file in [&self.kernel, &self.initrd] {
            ensure!(file.is_file(), "{} is no file; `make build` makes the default ones", file.display());
        }
        let disks = job.map_or(&[][..], |job| &job.disks);
        let mut command = self.machine.command(disks.iter().chain(&self.disks));
        match self.boot {
            Boot::Native => {
                command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.initrd);
                command.args(["-append", &self.root_cmdline]);
            }
            Boot::Pvh => {
                command.arg("-kernel").arg(&self.hypervisor).arg("-initrd").arg(self.make_bundle(dir)?);
                command.args(["-append", &self.hypervisor_cmdline]);
            }
            Boot::GrubBios => self.cdrom(dir, &mut command)?,
            Boot::GrubUefi => {
                let vars = dir.scratch.join("vars.fd");
                fs::copy(Path::new(OVMF).join("OVMF_VARS_4M.fd"), &vars)
                    .with_context(|| format!("no UEFI firmware in {OVMF}"))?;
                command.args([
                    "-drive",
                    &format!("if=pflash,unit=0,format=raw,readonly=on,file={OVMF}/OVMF_CODE_4M.fd"),
                ]);
                command.arg("-drive").arg(with_path("if=pflash,unit=1,format=raw,file=", &vars));
                self.cdrom(dir, &mut command)?;
            }
        }
        Ok(command)
    }

    fn make_bundle(&self, dir: &NodeDir) -> Result<PathBuf> {
        if let Some(bundle) = &self.bundle {
            return Ok(bundle.clone());
        }
        let bundle = dir.scratch.join("bundle");
        let mut command = mkimage("bundle");
        command.arg("--config").arg(&self.config).arg("--kernel").arg(&self.kernel);
        command.arg("--initrd").arg(&self.initrd).args(["--cmdline", &self.root_cmdline]);
        command.arg("--output").arg(&bundle);
        run(command)?;
        Ok(bundle)
    }

    fn cdrom(&self, dir: &NodeDir, command: &mut Command) -> Result<()> {
        let image = dir.scratch.join("node.iso");
        let mut make = mkimage("iso");
        make.arg("--kernel-elf").arg(&self.hypervisor).arg("--bundle").arg(self.make_bundle(dir)?);
        make.args(["--hv-cmdline", &self.hypervisor_cmdline]).arg("--output").arg(&image);
        run(make)?;
        command.arg("-drive").arg(with_path("if=none,id=cdrom,media=cdrom,format=raw,file=", &image));
        command.args(["-device", "ide-cd,drive=cdrom,bootindex=0"]);
        Ok(())
    }
}

fn mkimage(subcommand: &str) -> Command {
    let mut command = Command::new(target_dir().join("release/bulkhead-mkimage"));
    command.arg(subcommand);
    command
}

fn run(mut command: Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// A node's own directory: its logs stay, `scratch` goes with the node.
#[derive(Debug)]
pub(crate) struct NodeDir {
    pub(crate) logs: PathBuf,
    pub(crate) scratch: PathBuf,
}

impl NodeDir {
    /// Makes `target/nodes/NAME.N` with the next free number, and removes old ones of that name.
    fn new(name: &str) -> Result<Self> {
        let nodes = target_dir().join("nodes");
        fs::create_dir_all(&nodes)?;
        let number_of = |file: &str| file.strip_prefix(name)?.strip_prefix('.')?.parse::<u32>().ok();
        let mut next = 1;
        let numbers = fs::read_dir(&nodes)?
            .filter_map(|entry| number_of(entry.ok()?.file_name().to_str()?))
            .collect::<Vec<_>>();
        for &number in &numbers {
            next = next.max(number.saturating_add(1));
        }
        for number in numbers.into_iter().filter(|number| number.saturating_add(KEPT) < next) {
            // Another starter may be at the same.
            _ = fs::remove_dir_all(nodes.join(format!("{name}.{number}")));
        }
        loop {
            let logs = nodes.join(format!("{name}.{next}"));
            match fs::create_dir(&logs) {
                Ok(()) => {
                    let scratch = logs.join("scratch");
                    fs::create_dir(&scratch)?;
                    return Ok(Self { logs, scratch });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => next += 1,
                Err(error) => return Err(error).with_context(|| format!("cannot make {}", logs.display())),
            }
        }
    }
}

impl Drop for NodeDir {
    fn drop(&mut self) {
        // Nothing better can be done than to leave it for `make clean`.
        _ = fs::remove_dir_all(&self.scratch);
    }
}
