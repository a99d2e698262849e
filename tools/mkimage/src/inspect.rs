//! `inspect`: shows what is in a bundle.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use bulkhead_abi::bundle::{Bundle, Entry, VERSION};
use bulkhead_abi::config::{NodeConfig, RootConfig};
use bulkhead_abi::message::CellSpec;
use serde::Serialize;

use crate::read;

/// A bundle as JSON shows it.
#[derive(Serialize)]
struct Shown<'a> {
    version: u32,
    name: &'a str,
    log_level: String,
    console: String,
    pool_bytes: u64,
    reserved_cpus: &'a [u32],
    autostart: Vec<ShownCell<'a>>,
    root: ShownRoot<'a>,
    entries: Vec<ShownEntry<'a>>,
}

#[derive(Serialize)]
struct ShownRoot<'a> {
    /// `null` is all that is left.
    memory_bytes: Option<u64>,
    cmdline: &'a str,
}

/// A cell that is started before the root cell.
#[derive(Serialize)]
struct ShownCell<'a> {
    name: &'a str,
    cpus: &'a [u32],
    memory_bytes: u64,
}

#[derive(Serialize)]
struct ShownEntry<'a> {
    name: &'a str,
    role: String,
    offset: usize,
    size: usize,
    crc32: String,
}

pub(crate) fn inspect(file: &Path, json: bool) -> Result<String> {
    let bytes = read(file)?;
    let bundle = Bundle::parse(&bytes).with_context(|| file.display().to_string())?;
    let shown = Shown::new(&bundle);
    if json { Ok(serde_json::to_string_pretty(&shown)? + "\n") } else { Ok(shown.to_text()?) }
}

impl<'a> Shown<'a> {
    fn new(bundle: &'a Bundle<'a>) -> Self {
        let NodeConfig { name, root, reserved_cpus, pool_bytes, console, log_level, autostart } =
            &bundle.config;
        let RootConfig { memory, cmdline } = root;
        Self {
            version: VERSION,
            name,
            log_level: log_level.to_string(),
            console: console.to_string(),
            pool_bytes: *pool_bytes,
            reserved_cpus,
            autostart: autostart.iter().map(ShownCell::new).collect(),
            root: ShownRoot { memory_bytes: *memory, cmdline },
            entries: bundle.entries.iter().map(ShownEntry::new).collect(),
        }
    }

    fn to_text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        let cells = self.autostart.iter().map(ShownCell::to_text).collect::<Vec<_>>().join(", ");
        let memory = self.root.memory_bytes.map_or("all".into(), size);
        writeln!(text, "bundle version {} of node {}", self.version, self.name)?;
        writeln!(text, "log level      {}", self.log_level)?;
        writeln!(text, "console        {}", self.console)?;
        writeln!(text, "cell pool      {}", size(self.pool_bytes))?;
        writeln!(text, "reserved CPUs  {}", or_none(&numbers(self.reserved_cpus)))?;
        writeln!(text, "autostart      {}", or_none(&cells))?;
        writeln!(text, "root memory    {memory}")?;
        writeln!(text, "root cmdline   {}", self.root.cmdline)?;
        writeln!(text, "\n{:<12} {:>10} {:>10} {:>10}  name", "role", "offset", "size", "crc32")?;
        for ShownEntry { name, role, offset, size, crc32 } in &self.entries {
            writeln!(text, "{role:<12} {offset:>#10x} {size:>10} {crc32:>10}  {name}")?;
        }
        Ok(text)
    }
}

impl<'a> ShownEntry<'a> {
    fn new(entry: &Entry<'a>) -> Self {
        let Entry { name, role, data, offset, crc32 } = *entry;
        Self { name, role: role.to_string(), offset, size: data.len(), crc32: format!("{crc32:#010x}") }
    }
}

impl<'a> ShownCell<'a> {
    fn new(spec: &'a CellSpec) -> Self {
        Self { name: &spec.name, cpus: &spec.cpus, memory_bytes: spec.memory }
    }

    fn to_text(&self) -> String {
        format!("{} (CPUs {}; {})", self.name, numbers(self.cpus), size(self.memory_bytes))
    }
}

fn numbers(cpus: &[u32]) -> String {
    cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}

/// Bytes in the largest unit that divides them, as `node.toml` takes them.
fn size(bytes: u64) -> String {
    let units = [(1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M")];
    let unit = units.iter().find(|(unit, _)| bytes != 0 && bytes.is_multiple_of(*unit));
    unit.map_or(bytes.to_string(), |(unit, letter)| format!("{}{letter}", bytes / unit))
}
