//! What a bundle needs to know of a cell file: its cell's name and the files it boots from.
//! All else in it is `cellctl check`'s to judge.

use std::path::Path;

use anyhow::{Result, bail};
use bulkhead_abi::config::check_name;

use crate::toml_reader::{NamedFile, Problems, Reader};

/// How the name of a cell file ends, behind the cell's name.
const SUFFIX: &str = ".cell.toml";

/// The files that a cell boots from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CellToml {
    pub(crate) kernel: Option<NamedFile>,
    pub(crate) initrd: Option<NamedFile>,
}

impl CellToml {
    /// Reads the text of `file`.
    pub(crate) fn parse(file: &Path, text: &str) -> Result<Self, Problems> {
        let (mut reader, table) = Reader::new(file, text)?;
        let mut cell = Self { kernel: None, initrd: None };
        if let Some(value) = reader.get(&table, "", "boot")
            && let Some(boot) = reader.table(&value)
        {
            let mut named = |key| reader.get(boot, "boot.", key).and_then(|value| reader.file(&value));
            cell = Self { kernel: named("kernel"), initrd: named("initrd") };
        }
        reader.finish()?;
        Ok(cell)
    }
}

/// The cell's name, which the file's name begins with.
pub(crate) fn cell_name(file: &NamedFile) -> Result<&str> {
    let name = file.path.file_name().and_then(|name| name.to_str()?.strip_suffix(SUFFIX));
    match name {
        Some(name) if check_name("name", name).is_ok() => Ok(name),
        _ => bail!("{}: the file's name must be NAME{SUFFIX}, NAME 1 to 32 of a-z, 0-9 and -", file.named_by),
    }
}
