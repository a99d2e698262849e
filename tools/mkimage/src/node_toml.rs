//! `node.toml`: what a person writes about a node.

use std::path::Path;

use bulkhead_abi::config::{Console, LogLevel, NodeConfig, SIZE_ALLOWED, parse_size};
use toml::de::{DeTable, DeValue};

use crate::toml_reader::{Named, NamedFile, Problems, Reader, Value, number};

const KEYS: &[&str] = &["name", "log_level", "console", "pool", "reserved_cpus", "autostart", "root", "cell"];
const ROOT_KEYS: &[&str] = &["kernel", "initrd", "cmdline", "memory"];
const CELL_KEYS: &[&str] = &["file"];

/// What a `node.toml` says: the configuration, and the files that go with it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeToml {
    pub(crate) config: NodeConfig,
    pub(crate) kernel: Option<NamedFile>,
    pub(crate) initrd: Option<NamedFile>,
    pub(crate) cells: Vec<NamedFile>,
    /// The names of the cells that are started before the root cell, each once.
    pub(crate) autostart: Vec<Named>,
}

impl NodeToml {
    /// Reads the text of `file`.
    pub(crate) fn parse(file: &Path, text: &str) -> Result<Self, Problems> {
        let (reader, table) = Reader::new(file, text)?;
        let mut parser = Parser { reader, node: Self::default() };
        parser.node(&table);
        parser.reader.finish()?;
        Ok(parser.node)
    }
}

struct Parser<'i> {
    reader: Reader<'i>,
    node: NodeToml,
}

impl<'i> Parser<'i> {
    fn node(&mut self, table: &DeTable<'i>) {
        self.reader.refuse_unknown(table, "", KEYS);
        if let Some(value) = self.reader.get(table, "", "name")
            && let Some(name) = self.reader.text(&value)
        {
            self.set(&value, |config| config.name = name.into());
        }
        if let Some(value) = self.reader.get(table, "", "log_level") {
            match value.value.as_str().and_then(LogLevel::from_name) {
                Some(level) => self.node.config.log_level = level,
                None => self.reader.refuse(&value, "\"error\", \"warn\", \"info\", \"debug\" or \"trace\""),
            }
        }
        if let Some(value) = self.reader.get(table, "", "console") {
            match value.value.as_str().and_then(Console::from_name) {
                Some(console) => self.node.config.console = console,
                None => self.reader.refuse(&value, "\"com1\", \"com2\" or \"none\""),
            }
        }
        if let Some(value) = self.reader.get(table, "", "pool") {
            match size(value.value) {
                Some(bytes) => self.set(&value, |config| config.pool_bytes = bytes),
                None => self.reader.refuse(&value, SIZE_ALLOWED),
            }
        }
        if let Some(value) = self.reader.get(table, "", "reserved_cpus") {
            self.reserved_cpus(&value);
        }
        if let Some(value) = self.reader.get(table, "", "autostart") {
            self.autostart(&value);
        }
        if let Some(value) = self.reader.get(table, "", "root")
            && let Some(root) = self.reader.table(&value)
        {
            self.root(root);
        }
        if let Some(value) = self.reader.get(table, "", "cell") {
            for cell in self.reader.items(&value, "[[cell]] tables") {
                self.cell(&cell);
            }
        }
    }

    fn reserved_cpus(&mut self, value: &Value<'_, 'i>) {
        let mut cpus = Vec::new();
        for item in self.reader.items(value, "a list of CPU numbers, as in [2, 3]") {
            match number(item.value) {
                Some(cpu) => cpus.push(cpu),
                None => self.reader.refuse(&item, "a CPU number"),
            }
        }
        self.set(value, |config| config.reserved_cpus.clone_from(&cpus));
    }

    fn autostart(&mut self, value: &Value<'_, 'i>) {
        for item in self.reader.items(value, "a list of names of cells, as in [\"web\"]") {
            let Some(name) = self.reader.text(&item) else { continue };
            if self.node.autostart.iter().any(|other| other.name == name) {
                self.reader.refuse_found(&item, "for the second time", "each cell once");
                continue;
            }
            self.node.autostart.push(Named { name: name.into(), named_by: self.reader.place(&item) });
        }
    }

    fn root(&mut self, table: &DeTable<'i>) {
        const PREFIX: &str = "root.";
        self.reader.refuse_unknown(table, PREFIX, ROOT_KEYS);
        if let Some(value) = self.reader.get(table, PREFIX, "kernel") {
            self.node.kernel = self.reader.file(&value);
        }
        if let Some(value) = self.reader.get(table, PREFIX, "initrd") {
            self.node.initrd = self.reader.file(&value);
        }
        if let Some(value) = self.reader.get(table, PREFIX, "cmdline")
            && let Some(cmdline) = self.reader.text(&value)
        {
            self.set(&value, |config| config.root.cmdline = cmdline.into());
        }
        if let Some(value) = self.reader.get(table, PREFIX, "memory") {
            match size(value.value) {
                _ if value.value.as_str() == Some("all") => self.node.config.root.memory = None,
                Some(bytes) => self.set(&value, |config| config.root.memory = Some(bytes)),
                None => self.reader.refuse(&value, format!("{SIZE_ALLOWED}, or \"all\"")),
            }
        }
    }

    fn cell(&mut self, value: &Value<'_, 'i>) {
        let Some(table) = self.reader.table(value) else { return };
        let prefix = format!("{}.", value.key);
        self.reader.refuse_unknown(table, &prefix, CELL_KEYS);
        match self.reader.get(table, &prefix, "file") {
            Some(file) => self.node.cells.extend(self.reader.file(&file)),
            None => self.reader.refuse_lack(value, "file", "the path of a NAME.cell.toml"),
        }
    }

    /// Takes a value over, or refuses it if it is out of the configuration's limits. It is
    /// tried on the default too, so that each value is told of its own mistakes alone.
    fn set(&mut self, value: &Value<'_, 'i>, change: impl Fn(&mut NodeConfig)) {
        let mut alone = NodeConfig::default();
        change(&mut alone);
        if let Err(error) = alone.validate() {
            self.reader.refuse_found(value, error.found, error.allowed);
        }
        change(&mut self.node.config);
    }
}

/// The bytes of a size, written as a number or as a text.
fn size(value: &DeValue<'_>) -> Option<u64> {
    value.as_str().map_or_else(|| number(value), parse_size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<NodeToml, String> {
        NodeToml::parse(Path::new("dir/node.toml"), text).map_err(|problems| problems.to_string())
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(parse(""), Ok(NodeToml::default()));
    }

    #[test]
    fn every_key_arrives() {
        let text = r#"
name = "rack-7"
log_level = "debug"
console = "com2"
pool = "1G"
reserved_cpus = [3, 0x2]
autostart = ["b", "a"]

[root]
kernel = "vmlinuz"
initrd = "/abs/initrd"
cmdline = "console=hvc0 quiet"
memory = 268435456

[[cell]]
file = "a.cell.toml"

[[cell]]
file = "../b.cell.toml"
"#;
        let NodeToml { config, kernel, initrd, cells, autostart } = parse(text).unwrap();
        assert_eq!(config.name, "rack-7");
        assert_eq!(config.log_level, LogLevel::DEBUG);
        assert_eq!(config.console, Console::COM2);
        assert_eq!(config.pool_bytes, 1 << 30);
        assert_eq!(config.reserved_cpus, [3, 2]);
        assert_eq!(config.root.cmdline, "console=hvc0 quiet");
        assert_eq!(config.root.memory, Some(256 << 20));
        let kernel = kernel.unwrap();
        assert_eq!(kernel.path, Path::new("dir/vmlinuz"));
        assert_eq!(kernel.named_by, "dir/node.toml:10: root.kernel = \"vmlinuz\"");
        assert_eq!(initrd.unwrap().path, Path::new("/abs/initrd"));
        let cells: Vec<_> = cells.iter().map(|cell| cell.path.to_str().unwrap()).collect();
        assert_eq!(cells, ["dir/a.cell.toml", "dir/../b.cell.toml"]);
        let autostart: Vec<_> = autostart.iter().map(|cell| (&cell.name[..], &cell.named_by[..])).collect();
        let at = |item: &'static str| format!("dir/node.toml:7: autostart{item}");
        assert_eq!(autostart, [("b", &at("[0] = \"b\"")[..]), ("a", &at("[1] = \"a\"")[..])]);
    }

    #[test]
    fn all_memory_is_none() {
        assert_eq!(parse("root.memory = \"all\"").unwrap().config.root.memory, None);
    }

    #[test]
    fn each_mistake_has_its_message() {
        const CPUS: &str = "must be numbers from 1 to 4095, each once (CPU 0 boots the root cell)";
        const NAME: &str = "must be 1 to 32 of a-z, 0-9, - and _, the first a letter or digit";
        const SIZE: &str = "must be a number of bytes or a size such as 64K, 512M or 1G";
        const POOL: &str = "must be a multiple of 2M up to 4096T";
        const MEMORY: &str = "must be a multiple of 2M from 64M to 4096T, or all";
        const CMDLINE: &str = "must be at most 2047 bytes without control characters";
        let long = "x".repeat(2048);
        let table = [
            ("name = 7", "1: name = 7: must be a text in quotes".into()),
            ("name = \"\"", format!("1: name = \"\": a text of 0 bytes, {NAME}")),
            ("name = \"Big\"", format!("1: name = \"Big\": a text with 'B', {NAME}")),
            (
                "\n# comment\nlog_level = \"loud\"",
                "3: log_level = \"loud\": must be \"error\", \"warn\", \"info\", \"debug\" or \"trace\"".into(),
            ),
            ("console = 1", "1: console = 1: must be \"com1\", \"com2\" or \"none\"".into()),
            ("console = \"COM1\"", "1: console = \"COM1\": must be \"com1\", \"com2\" or \"none\"".into()),
            ("pool = \"512MB\"", format!("1: pool = \"512MB\": {SIZE}")),
            ("pool = -2097152", format!("1: pool = -2097152: {SIZE}")),
            ("pool = 1.5", format!("1: pool = 1.5: {SIZE}")),
            ("pool = true", format!("1: pool = true: {SIZE}")),
            ("pool = \"3M\"", format!("1: pool = \"3M\": 3145728 bytes, {POOL}")),
            ("pool = 4096", format!("1: pool = 4096: 4096 bytes, {POOL}")),
            ("reserved_cpus = 3", "1: reserved_cpus = 3: must be a list of CPU numbers, as in [2, 3]".into()),
            ("reserved_cpus = [0]", format!("1: reserved_cpus = [0]: 0, {CPUS}")),
            ("reserved_cpus = [5000]", format!("1: reserved_cpus = [5000]: 5000, {CPUS}")),
            ("reserved_cpus = [1, 2, 1]", format!("1: reserved_cpus = [1, 2, 1]: 1 for the second time, {CPUS}")),
            ("reserved_cpus = [\n1,\n\"2\"]", "3: reserved_cpus[1] = \"2\": must be a CPU number".into()),
            ("reserved_cpus = [-1]", "1: reserved_cpus[0] = -1: must be a CPU number".into()),
            (
                "autostart = \"web\"",
                "1: autostart = \"web\": must be a list of names of cells, as in [\"web\"]".into(),
            ),
            ("autostart = [1]", "1: autostart[0] = 1: must be a text in quotes".into()),
            (
                "autostart = [\n\"a\", \"b\",\n\"a\"]",
                "3: autostart[2] = \"a\": for the second time, must be each cell once".into(),
            ),
            ("root = 1", "1: root = 1: must be a table".into()),
            ("[root]\nkernel = \"\"", "2: root.kernel = \"\": must be the path of a file".into()),
            ("[root]\ninitrd = []", "2: root.initrd = []: must be a text in quotes".into()),
            ("[root]\nmemory = \"some\"", format!("2: root.memory = \"some\": {SIZE}, or \"all\"")),
            ("[root]\nmemory = \"1M\"", format!("2: root.memory = \"1M\": 1048576 bytes, {MEMORY}")),
            (
                "[root]\ncmdline = \"a\\u0000b\"",
                format!("2: root.cmdline = \"a\\u0000b\": a text with '\\0', {CMDLINE}"),
            ),
            (
                &format!("[root]\ncmdline = \"{long}\""),
                format!("2: root.cmdline = \"{}…: a text of 2048 bytes, {CMDLINE}", &long[..59]),
            ),
            ("cell = \"a.cell.toml\"", "1: cell = \"a.cell.toml\": must be [[cell]] tables".into()),
            ("cell = [\"a.cell.toml\"]", "1: cell[0] = \"a.cell.toml\": must be a table".into()),
            ("[[cell]]", "1: cell[0].file is missing, must be the path of a NAME.cell.toml".into()),
            ("pol = \"1G\"", "1: pol = \"1G\": unknown key, did you mean pool?".into()),
            ("[root]\ncmd_line = \"\"", "2: root.cmd_line = \"\": unknown key, did you mean root.cmdline?".into()),
            ("[roots]", "1: roots: unknown table, did you mean root?".into()),
            (
                "[root]\nzz = 1",
                "2: root.zz = 1: unknown key, known are kernel, initrd, cmdline, memory".into(),
            ),
            (
                "\"a\\u001bb\" = 1",
                "1: \"a\\u001bb\" = 1: unknown key, known are name, log_level, console, pool, reserved_cpus, autostart, root, cell"
                    .into(),
            ),
            ("name = \"a\"\nname = \"b\"", "2: not TOML: duplicate key".into()),
            ("\n\npool", "3: not TOML: key with no value, expected `=`".into()),
        ];
        for (text, message) in table {
            assert_eq!(parse(text), Err(format!("dir/node.toml:{message}")), "{text}");
        }
    }

    #[test]
    fn all_mistakes_are_told_in_the_order_of_their_lines() {
        let text = "pool = 1\nnmae = \"a\"\nconsole = \"x\"";
        let lines: Vec<_> = parse(text)
            .unwrap_err()
            .lines()
            .map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(lines, ["dir/node.toml:1: pool", "dir/node.toml:2: nmae", "dir/node.toml:3: console"]);
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_within_the_limits(
            pool in 0u64..1 << 54, memory in 0u64..1 << 54, cpus in proptest::collection::vec(0u32..6000, 0..4),
        ) {
            let text = format!("pool = {pool}\nreserved_cpus = {cpus:?}\nroot.memory = {memory}");
            let config = NodeConfig {
                pool_bytes: pool,
                reserved_cpus: cpus,
                root: bulkhead_abi::config::RootConfig { memory: Some(memory), cmdline: String::new() },
                ..NodeConfig::default()
            };
            match parse(&text) {
                Ok(node) => {
                    prop_assert_eq!(node.config.validate(), Ok(()));
                    prop_assert_eq!(node.config, config);
                }
                Err(_) => prop_assert!(config.validate().is_err()),
            }
        }

        #[test]
        fn any_text_is_read_without_panic(text in "\\PC{0,80}|([a-z]{1,6} ?= ?[\"\\[{]?[a-z0-9]{0,4}[\"\\]}]?\n){0,5}") {
            // Whatever it is, each problem has a line that is there.
            if let Err(problems) = parse(&text) {
                for problem in problems.lines().filter_map(|line| line.strip_prefix("dir/node.toml:")) {
                    let line: usize = problem.split(':').next().unwrap().parse().unwrap();
                    prop_assert!((1..=text.matches('\n').count() + 1).contains(&line), "{}", problem);
                }
            }
        }
    }
}
