//! What a bundle needs to know of a cell file: its cell's name and the files it boots from.
//! All else in it is `cellctl check`'s to judge.

use std::path::Path;

use anyhow::{Result, anyhow};
use bulkhead_abi::message::check_name;

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
    let named_by = &file.named_by;
    let name = name.ok_or_else(|| anyhow!("{named_by}: the file's name must be NAME{SUFFIX}"))?;
    check_name(name).map_err(|failure| anyhow!("{named_by}: the file's {failure}"))?;
    Ok(name)
}
