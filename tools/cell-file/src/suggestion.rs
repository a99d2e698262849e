//! Unknown keys, and what they may have been meant to be.

use crate::reader::Reader;
use toml::de::DeTable;

impl Reader<'_> {
    /// Notes the keys of `table` that are not among `known`.
    pub(crate) fn known(&mut self, table: &DeTable, prefix: &str, known: &[&str]) {
        for key in table.keys() {
            let name: &str = key.get_ref();
            if known.contains(&name) {
                continue;
            }
            let close = |other: &&&str| strsim::damerau_levenshtein(name, other) <= 2;
            let likely = known.iter().filter(close).min_by_key(|o| strsim::damerau_levenshtein(name, o));
            let hint = likely.map_or(String::new(), |likely| format!(" (did you mean {prefix}{likely}?)"));
            let allowed = known.join(", ");
            self.mistake(
                key.span().start,
                format_args!("{prefix}{name} is unknown{hint}; allowed: {allowed}"),
            );
        }
    }
}
