//! Reads TOML and says of each mistake where it is, what it is and what is allowed.
//!
//! All mistakes of a file are collected, so that a person corrects them in one go.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Mistakes in files that a person wrote, a line each that begins with file and line.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub(crate) struct Problems(Vec<String>);

impl Problems {
    /// Ends with the mistakes, if there are any.
    pub(crate) fn none(problems: Vec<String>) -> Result<(), Self> {
        if problems.is_empty() { Ok(()) } else { Err(Self(problems)) }
    }
}

/// The name of something that is described elsewhere, with the words to blame the namer by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) name: String,
    /// As in `node.toml:3: autostart[0] = "web"`.
    pub(crate) named_by: String,
}

/// A file that another one names, with the words to blame the namer by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedFile {
    pub(crate) path: PathBuf,
    /// As in `node.toml:3: root.kernel = "vmlinuz"`.
    pub(crate) named_by: String,
}

impl NamedFile {
    pub(crate) fn by_option(option: &str, path: &Path) -> Self {
        Self { path: path.to_path_buf(), named_by: format!("{option} {}", path.display()) }
    }
}

/// A value of the file.
#[derive(Clone)]
pub(crate) struct Value<'t, 'i> {
    /// Its key with those of the tables it is in, as in `root.kernel`.
    pub(crate) key: String,
    pub(crate) value: &'t DeValue<'i>,
    span: Range<usize>,
}

/// Collects the mistakes of a file.
pub(crate) struct Reader<'i> {
    file: &'i Path,
    text: &'i str,
    /// The lines, from 1, and what is wrong there.
    problems: Vec<(usize, String)>,
}

/// So much of a value is shown.
const SHOWN_MAX: usize = 60;

impl<'i> Reader<'i> {
    /// Parses the file.
    pub(crate) fn new(file: &'i Path, text: &'i str) -> Result<(Self, DeTable<'i>), Problems> {
        let mut reader = Self { file, text, problems: Vec::new() };
        let (table, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            // An error at the end has no span.
            let at = error.span().map_or(text.len(), |span| span.start);
            reader.refuse_at(at, format!("not TOML: {}", error.message()));
        }
        // What recovery made of it isn't what the person meant.
        reader.finish()?;
        Ok((Self { file, text, problems: Vec::new() }, table.into_inner()))
    }

    /// Ends with the mistakes, if there are any.
    pub(crate) fn finish(mut self) -> Result<(), Problems> {
        self.problems.sort_by_key(|(line, _)| *line);
        let file = self.file.display();
        let told = self.problems.iter().map(|(line, text)| format!("{file}:{line}: {text}"));
        Problems::none(told.collect())
    }

    /// The value of a key of `table`, whose own key and a dot are `prefix`.
    pub(crate) fn get<'t>(&self, table: &'t DeTable<'i>, prefix: &str, key: &str) -> Option<Value<'t, 'i>> {
        let value = table.get(key)?;
        Some(Value { key: format!("{prefix}{key}"), value: value.get_ref(), span: value.span() })
    }

    /// Refuses all keys of `table` but those in `known`.
    pub(crate) fn refuse_unknown(&mut self, table: &DeTable<'i>, prefix: &str, known: &[&str]) {
        for (key, value) in table {
            let name = key.get_ref();
            if known.contains(&name.as_ref()) {
                continue;
            }
            let nearest = known
                .iter()
                .map(|known| (strsim::jaro_winkler(name, known), known))
                .max_by(|(one, _), (other, _)| one.total_cmp(other));
            let hint = match nearest {
                Some((likeness, nearest)) if likeness > 0.8 => format!("did you mean {prefix}{nearest}?"),
                _ => format!("known are {}", known.join(", ")),
            };
            // A key may have any character in quotes: shown as it is written.
            let written = self.shown(key.span());
            let what = match value.get_ref() {
                DeValue::Table(_) => format!("{prefix}{written}: unknown table"),
                _ => format!("{prefix}{written} = {}: unknown key", self.shown(value.span())),
            };
            self.refuse_at(key.span().start, format!("{what}, {hint}"));
        }
    }

    /// Refuses a value and says what is allowed.
    pub(crate) fn refuse(&mut self, value: &Value<'_, 'i>, allowed: impl fmt::Display) {
        let text = format!("{}: must be {allowed}", self.blame(value));
        self.refuse_at(value.span.start, text);
    }

    /// Refuses a value for what it is and says what is allowed.
    pub(crate) fn refuse_found(
        &mut self,
        value: &Value<'_, 'i>,
        found: impl fmt::Display,
        allowed: impl fmt::Display,
    ) {
        let text = format!("{}: {found}, must be {allowed}", self.blame(value));
        self.refuse_at(value.span.start, text);
    }

    /// Refuses that `value`, a table, has no `key`.
    pub(crate) fn refuse_lack(&mut self, value: &Value<'_, 'i>, key: &str, allowed: impl fmt::Display) {
        let text = format!("{}.{key} is missing, must be {allowed}", value.key);
        self.refuse_at(value.span.start, text);
    }

    fn refuse_at(&mut self, offset: usize, text: String) {
        self.problems.push((self.line(offset), text));
    }

    /// The value as a table, refused if it is none.
    pub(crate) fn table<'t>(&mut self, value: &Value<'t, 'i>) -> Option<&'t DeTable<'i>> {
        let table = value.value.as_table();
        if table.is_none() {
            self.refuse(value, "a table");
        }
        table
    }

    /// The items of the value, refused if it is no array.
    pub(crate) fn items<'t>(&mut self, value: &Value<'t, 'i>, allowed: &str) -> Vec<Value<'t, 'i>> {
        let Some(items) = value.value.as_array() else {
            self.refuse(value, allowed);
            return Vec::new();
        };
        let item = |(index, item): (usize, &'t Spanned<DeValue<'i>>)| Value {
            key: format!("{}[{index}]", value.key),
            value: item.get_ref(),
            span: item.span(),
        };
        items.iter().enumerate().map(item).collect()
    }

    /// The value as a text, refused if it is none.
    pub(crate) fn text<'t>(&mut self, value: &Value<'t, 'i>) -> Option<&'t str> {
        let text = value.value.as_str();
        if text.is_none() {
            self.refuse(value, "a text in quotes");
        }
        text
    }

    /// The value as the path of a file, which starts from the directory of this one.
    pub(crate) fn file(&mut self, value: &Value<'_, 'i>) -> Option<NamedFile> {
        match self.text(value)? {
            "" => {
                self.refuse(value, "the path of a file");
                None
            }
            path => Some(NamedFile {
                path: self.file.parent().unwrap_or(Path::new("")).join(path),
                named_by: self.place(value),
            }),
        }
    }

    /// Where the value is and what it is.
    pub(crate) fn place(&self, value: &Value<'_, 'i>) -> String {
        format!("{}:{}: {}", self.file.display(), self.line(value.span.start), self.blame(value))
    }

    fn blame(&self, value: &Value<'_, 'i>) -> String {
        format!("{} = {}", value.key, self.shown(value.span.clone()))
    }

    /// The line, from 1, of a byte offset.
    fn line(&self, offset: usize) -> usize {
        self.text.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1
    }

    /// A value as it is written, its first line and not too much of it.
    fn shown(&self, span: Range<usize>) -> String {
        let source = self.text.get(span).unwrap_or_default();
        let shown: String = source.chars().take_while(|c| !c.is_control()).take(SHOWN_MAX).collect();
        if shown.len() < source.len() { shown + "…" } else { shown }
    }
}

/// The number, if it is one that fits.
pub(crate) fn number<T: TryFrom<u64>>(value: &DeValue<'_>) -> Option<T> {
    let number = value.as_integer()?;
    u64::from_str_radix(number.as_str(), number.radix()).ok()?.try_into().ok()
}
