//! `bundle` and `check`: collects what belongs to a node, and makes or checks the bundle.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, ensure};
use bulkhead_abi::bundle::{self, Bundle, BundleError, CPIO_MAGIC, NewEntry, Role, write};
use bulkhead_abi::config::{NodeConfig, check_cmdline};
use bulkhead_abi::message::check_name;
use bulkhead_cell_file::CellFile;

use crate::autostart;
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
        Contents::collect(&node)?;
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
    let Contents { config, entries } = Contents::collect(node)?;
    let new: Vec<_> = entries.iter().map(|(name, role, data)| NewEntry { name, role: *role, data }).collect();
    write(&config, &new).map_err(|error| match (&error, &node.kernel) {
        (BundleError::NotBzImage { .. }, Some(kernel)) => anyhow!("{}: {error}", kernel.named_by),
        _ => error.into(),
    })
}

/// What goes into a bundle.
struct Contents {
    config: NodeConfig,
    /// Name, role and content of the files.
    entries: Vec<(String, Role, Vec<u8>)>,
}

impl Contents {
    fn collect(node: &NodeToml) -> Result<Self> {
        let mut contents = Self { config: node.config.clone(), entries: Vec::new() };
        contents.add("root/kernel".into(), Role::ROOT_KERNEL, node.kernel.as_ref())?;
        contents.add("root/initrd".into(), Role::ROOT_INITRD, node.initrd.as_ref())?;
        let mut cells = Vec::new();
        for file in &node.cells {
            let name = cell_name(file)?;
            let text = read_text(&file.path).context(file.named_by.clone())?;
            let cell = CellFile::parse(&file.path, &text)?;
            ensure!(
                cell.name == name,
                "{}: the cell's name is {:?}, must be {name:?}",
                file.named_by,
                cell.name
            );
            contents.entries.push((bundle::cell_file(name), Role::CELL_FILE, text.into_bytes()));
            let named = |key: &str, path: &Path| NamedFile {
                path: path.into(),
                named_by: format!("{}: boot.{key}", file.path.display()),
            };
            contents.add(
                bundle::cell_kernel(name),
                Role::CELL_KERNEL,
                Some(&named("kernel", &cell.kernel)),
            )?;
            let initrd = cell.initrd.as_ref().map(|path| named("initrd", path));
            contents.add(bundle::cell_initrd(name), Role::CELL_INITRD, initrd.as_ref())?;
            cells.push(cell);
        }
        contents.config.autostart = autostart::specs(node, &cells)?;
        Ok(contents)
    }

    fn add(&mut self, name: String, role: Role, file: Option<&NamedFile>) -> Result<()> {
        if let Some(file) = file {
            self.entries.push((name, role, read(&file.path).context(file.named_by.clone())?));
        }
        Ok(())
    }
}

/// How the name of a cell file ends, behind the cell's name.
const SUFFIX: &str = ".cell.toml";

/// The cell's name, which the file's name begins with.
fn cell_name(file: &NamedFile) -> Result<&str> {
    let name = file.path.file_name().and_then(|name| name.to_str()?.strip_suffix(SUFFIX));
    let named_by = &file.named_by;
    let name = name.ok_or_else(|| anyhow!("{named_by}: the file's name must be NAME{SUFFIX}"))?;
    check_name(name).map_err(|failure| anyhow!("{named_by}: the file's {failure}"))?;
    Ok(name)
}
