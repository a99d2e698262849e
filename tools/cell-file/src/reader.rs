//! Reads values of TOML and gathers mistakes, each with its line.

use crate::{BadFile, CellFile};
use bulkhead_abi::message::Failure;
use std::fmt::Display;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub(crate) type Value<'a> = Spanned<DeValue<'a>>;

/// Checks what `source`, read from `path`, says.
///
/// # Errors
/// All that is wrong with it.
pub(crate) fn read(path: &Path, source: &str) -> Result<CellFile, BadFile> {
    let mut reader = Reader { path, source, mistakes: Vec::new() };
    let file = match DeTable::parse(source) {
        Ok(table) => reader.cell(table.get_ref()),
        Err(error) => {
            let at = error.span().map_or(0, |span| span.start);
            reader.mistake(at, error.message());
            None
        }
    };
    file.filter(|_| reader.mistakes.is_empty()).ok_or_else(|| BadFile(reader.told()))
}

/// Reads values and gathers mistakes.
pub(crate) struct Reader<'a> {
    pub(crate) path: &'a Path,
    source: &'a str,
    /// The lines, from 1, and what is wrong there.
    mistakes: Vec<(usize, String)>,
}

impl Reader<'_> {
    /// Notes a mistake at the byte `at`.
    pub(crate) fn mistake(&mut self, at: usize, what: impl Display) {
        let line = 1 + self.source.bytes().take(at).filter(|b| *b == b'\n').count();
        self.mistakes.push((line, what.to_string()));
    }

    /// All mistakes, in the order of their lines.
    fn told(mut self) -> String {
        self.mistakes.sort_by_key(|(line, _)| *line);
        let path = self.path.display();
        let told: Vec<_> =
            self.mistakes.iter().map(|(line, what)| format!("{path}:{line}: {what}")).collect();
        told.join("\n")
    }

    /// Notes what is wrong with `key`'s value.
    pub(crate) fn wrong(&mut self, key: &str, value: &Value, allowed: &str) {
        let text = self.source.get(value.span()).unwrap_or_default();
        self.mistake(value.span().start, format_args!("{key} is {text}; allowed: {allowed}"));
    }

    /// Passes `value` on if the check of it is passed.
    pub(crate) fn checked<T>(&mut self, at: usize, value: T, check: Result<(), Failure>) -> Option<T> {
        check.map_err(|failure| self.mistake(at, failure)).ok().map(|()| value)
    }

    /// The value of `key`, which has to be there.
    pub(crate) fn required<'t, 'i>(&mut self, table: &'t DeTable<'i>, key: &str) -> Option<&'t Value<'i>> {
        let value = table.get(key);
        if value.is_none() {
            self.mistake(0, format_args!("{key} is missing"));
        }
        value
    }

    /// The value as a text.
    pub(crate) fn text<'t>(&mut self, key: &str, value: &'t Value) -> Option<&'t str> {
        let text = value.get_ref().as_str();
        if text.is_none() {
            self.wrong(key, value, "a text in quotes");
        }
        text
    }

    /// The value as a table.
    pub(crate) fn table<'t, 'i>(&mut self, key: &str, value: &'t Value<'i>) -> Option<&'t DeTable<'i>> {
        let table = value.get_ref().as_table();
        if table.is_none() {
            self.wrong(key, value, "a table");
        }
        table
    }
}
