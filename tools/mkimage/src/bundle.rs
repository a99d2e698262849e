//! `bundle` and `check`: collects what belongs to a node, and makes or checks the bundle.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use bulkhead_abi::bundle::{Bundle, BundleError, CPIO_MAGIC, NewEntry, Role, write};
use bulkhead_abi::config::check_cmdline;

use crate::cell_toml::{CellToml, cell_name};
use crate::cli::BundleArguments;
use crate::node_toml::NodeToml;
use crate::toml_reader::NamedFile;
use crate::{read, read_text};

pub(crate) fn make(arguments: &BundleArguments) -> Result<String> {
    let BundleArguments { config, output, kernel, initrd, cmdline, cells } = arguments;
    let mut node = NodeToml::parse(config, &read_text(config)?)?;
    if let Some(kernel) = kernel {
        node.kernel = Some(NamedFile::by_option("--kernel", kernel));
    }
    if let Some(initrd) = initrd {
        node.initrd = Some(NamedFile::by_option("--initrd", initrd));
    }
    if let Some(cmdline) = cmdline {
        check_cmdline("--cmdline", cmdline)?;
        node.config.root.cmdline.clone_from(cmdline);
    }
    node.cells.extend(cells.iter().map(|cell| NamedFile::by_option("--cell", cell)));
    if node.kernel.is_none() {
        return Err(anyhow!("no root kernel: neither root.kernel in {} nor --kernel", config.display()));
    }
    let bundle = assemble(&node)?;
    put(output, &bundle)?;
    Ok(format!("{}: {} bytes\n", output.display(), bundle.len()))
}

pub(crate) fn check(file: &Path) -> Result<String> {
    let bytes = read(file)?;
    let name = file.display();
    if bytes.starts_with(CPIO_MAGIC) {
        Bundle::parse(&bytes).with_context(|| name.to_string())?;
        return Ok(format!("{name}: ok\n"));
    }
    let text = String::from_utf8(bytes)
        .map_err(|_| anyhow!("{name}: neither a bundle (it would start with 070701) nor text"))?;
    let node = NodeToml::parse(file, &text)?;
    if node.kernel.is_some() {
        assemble(&node)?;
        Ok(format!("{name}: ok\n"))
    } else {
        Entries::collect(&node)?;
        Ok(format!("{name}: ok, but has no root.kernel: bundle needs --kernel\n"))
    }
}

/// Writes a file whole or not at all.
pub(crate) fn put(path: &Path, data: &[u8]) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    fs::write(&partial, data).and_then(|()| fs::rename(&partial, path)).with_context(|| {
        // What is left is of no use; the error that matters is the first.
        let _ = fs::remove_file(&partial);
        format!("cannot write {}", path.display())
    })
}

/// Makes the bundle of a node.
fn assemble(node: &NodeToml) -> Result<Vec<u8>> {
    let Entries(entries) = Entries::collect(node)?;
    let new: Vec<_> = entries.iter().map(|(name, role, data)| NewEntry { name, role: *role, data }).collect();
    write(&node.config, &new).map_err(|error| match (&error, &node.kernel) {
        (BundleError::NotBzImage { .. }, Some(kernel)) => anyhow!("{}: {error}", kernel.named_by),
        _ => error.into(),
    })
}

/// Name, role and content of the files of a bundle.
struct Entries(Vec<(String, Role, Vec<u8>)>);

impl Entries {
    fn collect(node: &NodeToml) -> Result<Self> {
        let mut entries = Self(Vec::new());
        entries.add("root/kernel".into(), Role::ROOT_KERNEL, node.kernel.as_ref())?;
        entries.add("root/initrd".into(), Role::ROOT_INITRD, node.initrd.as_ref())?;
        for file in &node.cells {
            let name = cell_name(file)?;
            let text = read_text(&file.path).context(file.named_by.clone())?;
            let CellToml { kernel, initrd } = CellToml::parse(&file.path, &text)?;
            entries.0.push((format!("cell/{name}/file"), Role::CELL_FILE, text.into_bytes()));
            entries.add(format!("cell/{name}/kernel"), Role::CELL_KERNEL, kernel.as_ref())?;
            entries.add(format!("cell/{name}/initrd"), Role::CELL_INITRD, initrd.as_ref())?;
        }
        Ok(entries)
    }

    fn add(&mut self, name: String, role: Role, file: Option<&NamedFile>) -> Result<()> {
        if let Some(file) = file {
            self.0.push((name, role, read(&file.path).context(file.named_by.clone())?));
        }
        Ok(())
    }
}
