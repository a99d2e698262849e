//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  something is wrong with the input, or a file can't be read or written
  2  wrong usage";

/// Makes and checks bundles and boot images of the Bulkhead hypervisor.
#[derive(Parser)]
#[command(version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Make a bundle: a node's configuration, kernels and initial file systems in one file.
    #[command(after_help = EXIT_CODES)]
    Bundle(BundleArguments),
    /// Check a node.toml with all files it names, or a bundle.
    #[command(after_help = EXIT_CODES)]
    Check {
        /// The node.toml or the bundle; which of them it is shows in the file.
        file: PathBuf,
    },
    /// Check a bundle and show what is in it.
    #[command(after_help = EXIT_CODES)]
    Inspect {
        /// The bundle.
        file: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Make an ISO image that boots by BIOS and by UEFI (needs grub-mkrescue).
    #[command(after_help = EXIT_CODES)]
    Iso(IsoArguments),
    /// Fill the table of function names in a hypervisor's ELF file, for its backtraces.
    #[command(after_help = EXIT_CODES)]
    Symbols {
        /// The file, which is changed.
        elf: PathBuf,
    },
}

#[derive(Args)]
pub(crate) struct BundleArguments {
    /// The node's configuration; paths in it start from its directory.
    #[arg(long, value_name = "node.toml")]
    pub(crate) config: PathBuf,
    /// Where the bundle goes.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// The root cell's kernel, instead of root.kernel.
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// The root cell's initial file system, instead of root.initrd.
    #[arg(long, value_name = "FILE")]
    pub(crate) initrd: Option<PathBuf>,
    /// The root cell's kernel command line, instead of root.cmdline.
    #[arg(long, value_name = "TEXT")]
    pub(crate) cmdline: Option<String>,
    /// A cell file to carry along besides those in the configuration.
    #[arg(long = "cell", value_name = "NAME.cell.toml")]
    pub(crate) cells: Vec<PathBuf>,
}

#[derive(Args)]
pub(crate) struct IsoArguments {
    /// The hypervisor: an ELF file with a multiboot2 header.
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel_elf: PathBuf,
    /// The bundle.
    #[arg(long, value_name = "FILE")]
    pub(crate) bundle: PathBuf,
    /// Where the image goes.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// The hypervisor's command line.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) hv_cmdline: String,
}
