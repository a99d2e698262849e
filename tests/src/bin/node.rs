//! Starts a node without a keyboard, runs a command in its root cell and ends with its status; or,
//! without a command, gives the root cell's console to this terminal.
#![forbid(unsafe_code)]

use std::{
    io::{Write, stdout},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Result, ensure};
use bulkhead_tests::{Boot, End, Node, STATUS_DIED};
use clap::{Parser, ValueEnum};

/// Starts a node in QEMU. Each option can be given as an environment variable too.
#[derive(Parser)]
struct Options {
    /// Bring the root cell's console to this terminal (Ctrl-a x leaves) and run no command
    #[arg(long)]
    terminal: bool,
    /// What to run in the root cell's shell
    #[arg(long, env = "CMD")]
    cmd: Option<String>,
    /// Directory whose files the command finds in /share
    #[arg(long, env = "SHARE")]
    share: Option<PathBuf>,
    /// Directory that gets what the command leaves in /out
    #[arg(long, env = "OUT")]
    out: Option<PathBuf>,
    /// Seconds that the node may run
    #[arg(long, env = "LIMIT", default_value_t = 300)]
    limit: u64,
    /// The machine's CPUs
    #[arg(long, env = "CPUS", default_value_t = 4)]
    cpus: u32,
    /// The machine's memory, in QEMU's notation
    #[arg(long, env = "MEM", default_value = "2G")]
    mem: String,
    /// 1: an instruction takes 1 ns of the node's time; repeatable
    #[arg(long, env = "ICOUNT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    icount: u8,
    /// The root cell's kernel
    #[arg(long, env = "KERNEL")]
    kernel: Option<PathBuf>,
    /// The root cell's initial file system
    #[arg(long, env = "INITRD")]
    initrd: Option<PathBuf>,
    /// How the node boots
    #[arg(long, env = "BOOT", value_enum, default_value_t = BootPath::Pvh)]
    boot: BootPath,
    /// The node's configuration
    #[arg(long, env = "CONFIG")]
    config: Option<PathBuf>,
    /// The hypervisor's command line
    #[arg(long, env = "APPEND", default_value = "", allow_hyphen_values = true)]
    append: String,
    /// Words added to the root cell's kernel command line
    #[arg(long, env = "ROOT_APPEND", default_value = "")]
    root_append: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum BootPath {
    Native,
    Pvh,
    GrubBios,
    GrubUefi,
}

impl From<BootPath> for Boot {
    fn from(path: BootPath) -> Self {
        match path {
            BootPath::Native => Self::Native,
            BootPath::Pvh => Self::Pvh,
            BootPath::GrubBios => Self::GrubBios,
            BootPath::GrubUefi => Self::GrubUefi,
        }
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    match start(options) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("node: {error:#}");
            ExitCode::from(STATUS_DIED)
        }
    }
}

fn start(options: Options) -> Result<u8> {
    let mut node = Node::new("node", options.boot.into())
        .cpus(options.cpus)
        .memory(&options.mem)
        .icount(options.icount == 1)
        .hypervisor_cmdline(&options.append)
        .root_cmdline(&options.root_append)
        .limit(Duration::from_secs(options.limit));
    if let Some(file) = options.kernel {
        node = node.kernel(file);
    }
    if let Some(file) = options.initrd {
        node = node.initrd(file);
    }
    if let Some(file) = options.config {
        node = node.config(file);
    }
    if let Some(dir) = options.share {
        node = node.share(dir);
    }
    if let Some(dir) = options.out {
        node = node.out(dir);
    }
    let Some(cmd) = options.cmd.filter(|_| !options.terminal) else {
        ensure!(options.terminal, "nothing to run: give CMD, or --terminal for a console");
        return Ok(u8::from(!node.terminal()?.success()));
    };

    let outcome = node.start(Some(&cmd))?.finish(|bytes| {
        // Whoever does not read the output still gets the status.
        _ = stdout().write_all(bytes).and_then(|()| stdout().flush());
    })?;
    match &outcome.end {
        End::Job(_) if !outcome.powered_off => eprintln!("node: it did not power off and was stopped"),
        End::Job(_) | End::PoweredOff => {}
        End::TimeLimit => eprintln!("node: not done after {} s\n{}", options.limit, outcome.last_words()),
        End::Died(reason) => eprintln!("node: {reason}\n{}", outcome.last_words()),
    }
    let status = outcome.end.status();
    eprintln!("node: status {status}, logs in {}", outcome.logs.display());
    Ok(status)
}
