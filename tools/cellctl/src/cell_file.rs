//! `NAME.cell.toml`: what a cell is made of.
//!
//! ```toml
//! name = "web"
//! cpus = 2                  # so many, or their numbers: [2, 3]
//! memory = "256M"
//!
//! [boot]
//! kernel = "vmlinuz"        # paths are relative to this file
//! initrd = "initrd.img"     # may be left out
//! cmdline = "console=ttyS0" # may be left out
//!
//! [console]                 # may be left out
//! serial = true
//!
//! [on]                      # may be left out
//! reboot = "restart"        # or "stop": what happens when its guest asks for a reset
//! crash = "keep"            # or "restart": what happens when it fails
//! ```
//!
//! All mistakes of a file are told at once, each with its line.

use crate::cpus::CpuChoice;
use crate::exit::{Error, Exit};
use bulkhead_abi::message::{
    Action, CellSpec, Failure, MAX_CPUS, check_cmdline, check_cpu, check_memory, check_name,
};
use bulkhead_vmm::x86::board;
use bulkhead_vmm::x86::boot::{self, BootError, Handover, Image, ImageError};
use std::fmt::Display;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A cell file that was read and found right.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CellFile {
    pub(crate) name: String,
    pub(crate) cpus: CpuChoice,
    /// Bytes.
    pub(crate) memory: u64,
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: Option<PathBuf>,
    pub(crate) cmdline: String,
    pub(crate) console: bool,
    pub(crate) on_reboot: Action,
    pub(crate) on_crash: Action,
    /// Where it was read from.
    pub(crate) path: PathBuf,
}

impl CellFile {
    /// Reads and checks a cell file.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let source = fs::read_to_string(path)
            .map_err(|e| Error::new(Exit::BadFile, format!("{}: cannot be read: {e}", path.display())))?;
        Self::parse(path, &source)
    }

    /// Checks what `source`, read from `path`, says.
    fn parse(path: &Path, source: &str) -> Result<Self, Error> {
        let mut reader = Reader { path, source, mistakes: Vec::new() };
        let file = match DeTable::parse(source) {
            Ok(table) => reader.cell(table.get_ref()),
            Err(error) => {
                let at = error.span().map_or(0, |span| span.start);
                reader.mistake(at, error.message());
                None
            }
        };
        match file.filter(|_| reader.mistakes.is_empty()) {
            Some(file) => Ok(file),
            None => Err(Error::new(Exit::BadFile, reader.told())),
        }
    }

    /// Checks the kernel and the initrd as the hypervisor will when they are loaded. Returns how
    /// many bytes each has.
    pub(crate) fn check_images(&self) -> Result<Vec<u64>, Error> {
        let bad =
            |path: &Path, why: &dyn Display| Error::new(Exit::BadFile, format!("{}: {why}", path.display()));
        let open = |path: &Path| {
            let file = File::open(path).map_err(|e| bad(path, &format_args!("cannot be opened: {e}")))?;
            let meta = file.metadata().map_err(|e| bad(path, &e))?;
            if !meta.is_file() || meta.len() == 0 {
                return Err(bad(path, &"is not a file with something in it"));
            }
            Ok(ImageFile { file, size: meta.len() })
        };
        let kernel = open(&self.kernel)?;
        let initrd = self.initrd.as_ref().map(|path| open(path).map(|file| file.size)).transpose()?;
        let sum = kernel.size.saturating_add(initrd.unwrap_or(0));
        let handover = Handover {
            map: &board::memory_map(self.memory),
            cmdline: self.cmdline.as_bytes(),
            initrd,
            rsdp: Some(board::RSDP_ADDRESS),
        };
        // As the hypervisor itself does it.
        match boot::plan(&kernel, &handover) {
            Err(error @ BootError::Unknown) => return Err(bad(&self.kernel, &error)),
            _ if sum > self.memory => {
                let why = format!(
                    "kernel and initrd have {sum} bytes, and the cell {} bytes of memory; allowed: less",
                    self.memory
                );
                return Err(Error::new(Exit::BadFile, why));
            }
            Err(error @ BootError::NoRoom { what: "initrd", .. }) => {
                return Err(bad(self.initrd.as_ref().unwrap_or(&self.kernel), &error));
            }
            Err(error) => return Err(bad(&self.kernel, &error)),
            Ok(_) => {}
        }
        Ok([Some(kernel.size), initrd].into_iter().flatten().collect())
    }

    /// The request for this cell with these CPUs; `files` is what
    /// [`check_images`](Self::check_images) has said.
    pub(crate) fn spec(&self, cpus: Vec<u32>, wall_clock_ns: u64, files: Vec<u64>) -> CellSpec {
        CellSpec {
            name: self.name.clone(),
            cpus,
            memory: self.memory,
            cmdline: self.cmdline.clone(),
            console: self.console,
            wall_clock_ns,
            on_reboot: Some(self.on_reboot),
            on_crash: Some(self.on_crash),
            files: Some(files),
            origin: std::path::absolute(&self.path).ok().and_then(|path| path.to_str().map(Into::into)),
        }
    }
}

/// A file on disk.
struct ImageFile {
    file: File,
    size: u64,
}

impl Image for ImageFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), ImageError> {
        let len = buf.len();
        self.file.read_exact_at(buf, offset).map_err(|_| ImageError { offset, len })
    }
}

type Value<'a> = Spanned<DeValue<'a>>;

/// Reads values and gathers mistakes.
struct Reader<'a> {
    path: &'a Path,
    source: &'a str,
    /// The lines, from 1, and what is wrong there.
    mistakes: Vec<(usize, String)>,
}

impl Reader<'_> {
    /// Notes a mistake at the byte `at`.
    fn mistake(&mut self, at: usize, what: impl Display) {
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
    fn wrong(&mut self, key: &str, value: &Value, allowed: &str) {
        let text = self.source.get(value.span()).unwrap_or_default();
        self.mistake(value.span().start, format_args!("{key} is {text}; allowed: {allowed}"));
    }

    /// Passes `value` on if the check of it is passed.
    fn checked<T>(&mut self, at: usize, value: T, check: Result<(), Failure>) -> Option<T> {
        check.map_err(|failure| self.mistake(at, failure)).ok().map(|()| value)
    }

    fn cell(&mut self, table: &DeTable) -> Option<CellFile> {
        self.known(table, "", &["name", "cpus", "memory", "boot", "console", "on"]);
        let name = self.required(table, "name").and_then(|value| {
            let name = self.text("name", value)?;
            self.checked(value.span().start, name.to_owned(), check_name(name))
        });
        let cpus = self.required(table, "cpus").and_then(|value| self.cpus(value));
        let memory = self.required(table, "memory").and_then(|value| self.memory(value));
        let boot = self.required(table, "boot").and_then(|value| {
            let boot = self.table("[boot]", value)?;
            self.known(boot, "boot.", &["kernel", "initrd", "cmdline"]);
            let kernel = match boot.get("kernel") {
                Some(path) => self.image("boot.kernel", path),
                None => {
                    self.mistake(value.span().start, "[boot] has no kernel; allowed: the path of one");
                    None
                }
            };
            let initrd = boot.get("initrd").and_then(|path| self.image("boot.initrd", path));
            let cmdline = boot.get("cmdline").and_then(|value| {
                let text = self.text("boot.cmdline", value)?;
                self.checked(value.span().start, text.to_owned(), check_cmdline(text))
            });
            Some((kernel?, initrd, cmdline.unwrap_or_default()))
        });
        let console = table.get("console").and_then(|value| {
            let console = self.table("[console]", value)?;
            self.known(console, "console.", &["serial"]);
            let serial = console.get("serial")?;
            let on = serial.get_ref().as_bool();
            if on.is_none() {
                self.wrong("console.serial", serial, "true, false");
            }
            on
        });
        let (mut on_reboot, mut on_crash) = (Action::RESTART, Action::STOP);
        if let Some(on) = table.get("on").and_then(|value| self.table("[on]", value)) {
            self.known(on, "on.", &["reboot", "crash"]);
            let reboot = [("restart", Action::RESTART), ("stop", Action::STOP)];
            on_reboot = self.action(on, "reboot", reboot).unwrap_or(on_reboot);
            let crash = [("keep", Action::STOP), ("restart", Action::RESTART)];
            on_crash = self.action(on, "crash", crash).unwrap_or(on_crash);
        }
        let (kernel, initrd, cmdline) = boot?;
        Some(CellFile {
            name: name?,
            cpus: cpus?,
            memory: memory?,
            kernel,
            initrd,
            cmdline,
            console: console.unwrap_or(true),
            on_reboot,
            on_crash,
            path: self.path.into(),
        })
    }

    /// Reads what happens at an event.
    fn action(&mut self, on: &DeTable, event: &str, words: [(&str, Action); 2]) -> Option<Action> {
        let value = on.get(event)?;
        let word = value.get_ref().as_str().unwrap_or_default();
        let found = words.into_iter().find(|(known, _)| *known == word);
        if found.is_none() {
            let allowed: Vec<_> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
            self.wrong(&format!("on.{event}"), value, &allowed.join(", "));
        }
        found.map(|(_, action)| action)
    }

    /// Notes the keys of `table` that are not among `known`.
    fn known(&mut self, table: &DeTable, prefix: &str, known: &[&str]) {
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

    fn required<'t, 'i>(&mut self, table: &'t DeTable<'i>, key: &str) -> Option<&'t Value<'i>> {
        let value = table.get(key);
        if value.is_none() {
            self.mistake(0, format_args!("{key} is missing"));
        }
        value
    }

    fn text<'t>(&mut self, key: &str, value: &'t Value) -> Option<&'t str> {
        let text = value.get_ref().as_str();
        if text.is_none() {
            self.wrong(key, value, "a text in quotes");
        }
        text
    }

    fn table<'t, 'i>(&mut self, key: &str, value: &'t Value<'i>) -> Option<&'t DeTable<'i>> {
        let table = value.get_ref().as_table();
        if table.is_none() {
            self.wrong(key, value, "a table");
        }
        table
    }

    /// A path, which is relative to the file's own directory.
    fn image(&mut self, key: &str, value: &Value) -> Option<PathBuf> {
        let text = self.text(key, value)?;
        if text.is_empty() {
            self.wrong(key, value, "the path of a file");
            return None;
        }
        Some(self.path.parent().unwrap_or(Path::new("")).join(text))
    }

    fn cpus(&mut self, value: &Value) -> Option<CpuChoice> {
        let most = u32::try_from(MAX_CPUS).unwrap_or(u32::MAX);
        let Some(list) = value.get_ref().as_array() else {
            let count = number(value).filter(|count| (1..=most).contains(count));
            if count.is_none() {
                self.wrong("cpus", value, "a count from 1 to 64, or a list of numbers such as [2, 3]");
            }
            return count.map(CpuChoice::Count);
        };
        let mut numbers = Vec::new();
        for item in list.iter() {
            let Some(cpu) = number(item) else {
                self.wrong("cpus", item, "numbers of CPUs");
                return None;
            };
            let cpu = self.checked(item.span().start, cpu, check_cpu(cpu))?;
            if numbers.contains(&cpu) {
                self.mistake(item.span().start, format_args!("cpus has {cpu} twice; allowed: each CPU once"));
                return None;
            }
            numbers.push(cpu);
        }
        if numbers.is_empty() || numbers.len() > MAX_CPUS {
            self.wrong("cpus", value, "1 to 64 CPUs");
            return None;
        }
        Some(CpuChoice::Numbers(numbers))
    }

    fn memory(&mut self, value: &Value) -> Option<u64> {
        let Some(bytes) = value.get_ref().as_str().and_then(size) else {
            self.wrong("memory", value, "a whole number with M or G in quotes, such as \"256M\"");
            return None;
        };
        self.checked(value.span().start, bytes, check_memory(bytes))
    }
}

fn number(value: &Value) -> Option<u32> {
    let integer = value.get_ref().as_integer()?;
    u32::from_str_radix(integer.as_str(), integer.radix()).ok()
}

/// Reads a size such as `256M`: M is 2^20 bytes, G 2^30.
fn size(text: &str) -> Option<u64> {
    let (digits, shift) =
        text.strip_suffix('M').map(|d| (d, 20)).or_else(|| text.strip_suffix('G').map(|d| (d, 30)))?;
    let all_digits = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|_| all_digits)?.checked_mul(1 << shift)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = "name = \"web\"\ncpus = 2\nmemory = \"256M\"\n\n[boot]\nkernel = \"vmlinuz\"\n";

    /// A file that passes for a kernel (Documentation/arch/x86/boot.rst): one setup sector, no
    /// code.
    pub(crate) fn kernel() -> Vec<u8> {
        let mut kernel = vec![0; 100_352];
        let fields: [(usize, &[u8]); 10] = [
            (0x1f1, &[1]),
            (0x1f4, &6208_u32.to_le_bytes()),
            (0x1fe, &[0x55, 0xaa]),
            (0x202, b"HdrS\x0c\x02"),
            (0x211, &[1]),
            (0x22c, &u32::MAX.to_le_bytes()),
            (0x230, &0x1000_u32.to_le_bytes()),
            (0x234, &[1, 0, 1]),
            (0x238, &255_u32.to_le_bytes()),
            (0x260, &0x2_0000_u32.to_le_bytes()),
        ];
        for (at, bytes) in fields {
            kernel[at..at + bytes.len()].copy_from_slice(bytes);
        }
        kernel
    }

    fn parse(source: &str) -> Result<CellFile, Error> {
        CellFile::parse(Path::new("/cells/web.cell.toml"), source)
    }

    #[test]
    fn a_file_with_all_keys_says_all() {
        let all = "name = \"web\"\ncpus = [3, 1]\nmemory = \"1G\"\n[boot]\nkernel = \"/boot/k\"\n\
                   initrd = \"i\"\ncmdline = \"console=ttyS0\"\n[console]\nserial = false\n\
                   [on]\nreboot = \"stop\"\ncrash = \"restart\"\n";
        let expected = CellFile {
            name: "web".into(),
            cpus: CpuChoice::Numbers(vec![3, 1]),
            memory: 1 << 30,
            kernel: "/boot/k".into(),
            initrd: Some("/cells/i".into()),
            cmdline: "console=ttyS0".into(),
            console: false,
            on_reboot: Action::STOP,
            on_crash: Action::RESTART,
            path: "/cells/web.cell.toml".into(),
        };
        assert_eq!(parse(all).unwrap(), expected);
        let short = parse(GOOD).unwrap();
        assert_eq!((short.cpus, short.memory, short.console), (CpuChoice::Count(2), 256 << 20, true));
        assert_eq!((short.kernel, short.initrd), ("/cells/vmlinuz".into(), None));
    }

    /// A change to the good file, and what is said about it.
    #[test]
    fn each_mistake_is_told_with_its_line_and_what_is_allowed() {
        let table = [
            ("cpus = 2", "cpu = 2", ":2: cpu is unknown (did you mean cpus?); allowed: name, cpus"),
            ("cpus = 2", "frobnicate = 2", ":2: frobnicate is unknown; allowed: name"),
            ("kernel", "kernle", ":6: boot.kernle is unknown (did you mean boot.kernel?)"),
            ("[boot]", "[boto]", ":5: boto is unknown (did you mean boot?)"),
            ("[boot]", "[boto]", ":1: boot is missing"),
            ("name = \"web\"", "", ":1: name is missing"),
            ("\"web\"", "\"Web\"", ":1: name is \"Web\"; allowed: 1 to 32"),
            ("\"web\"", "5", ":1: name is 5; allowed: a text"),
            ("cpus = 2", "cpus = 0", ":2: cpus is 0; allowed: a count from 1 to 64"),
            ("cpus = 2", "cpus = -1", ":2: cpus is -1; allowed"),
            ("cpus = 2", "cpus = \"2\"", ":2: cpus is \"2\"; allowed"),
            ("cpus = 2", "cpus = []", ":2: cpus is []; allowed: 1 to 64 CPUs"),
            ("cpus = 2", "cpus = [1,\n 0]", ":3: cpus has CPU 0, which the root cell's Linux"),
            ("cpus = 2", "cpus = [1, 1]", ":2: cpus has 1 twice"),
            ("cpus = 2", "cpus = [1.5]", ":2: cpus is 1.5; allowed: numbers"),
            ("\"256M\"", "256", ":3: memory is 256; allowed: a whole number with M or G"),
            ("\"256M\"", "\"+1M\"", ":3: memory is \"+1M\"; allowed"),
            ("\"256M\"", "\"99999999999G\"", ":3: memory is \"99999999999G\"; allowed"),
            ("\"256M\"", "\"3M\"", ":3: memory is 3145728 bytes; allowed: a multiple of 2 MiB"),
            ("\"vmlinuz\"", "\"\"", ":6: boot.kernel is \"\"; allowed: the path"),
            ("kernel = \"vmlinuz\"", "", ":5: [boot] has no kernel"),
            ("[boot]", "[console]\nserial = 1\n[boot]", ":6: console.serial is 1; allowed: true, false"),
            (
                "[boot]",
                "[on]\nreboot = \"keep\"\n[boot]",
                ":6: on.reboot is \"keep\"; allowed: \"restart\", \"stop\"",
            ),
            ("[boot]", "[on]\ncrash = 1\n[boot]", ":6: on.crash is 1; allowed: \"keep\", \"restart\""),
            ("[boot]", "console = 1\n[boot]", ":5: [console] is 1; allowed: a table"),
            ("cpus = 2", "cpus = ", ":2: "),
            ("cpus = 2", "cpus = 2\ncpus = 3", ":3: duplicate key"),
        ];
        for (good, bad, expected) in table {
            assert!(GOOD.contains(good));
            let error = parse(&GOOD.replacen(good, bad, 1)).unwrap_err();
            assert_eq!(error.exit, Exit::BadFile);
            let expected = format!("/cells/web.cell.toml{expected}");
            assert!(error.to_string().lines().any(|line| line.starts_with(&expected)), "{bad}: {error}");
        }
        let many =
            GOOD.replace("name", "nmae").replace("256M", "x").replace("kernel", "kernle") + "initrd = 1";
        let error = parse(&many).unwrap_err().to_string();
        let lines: Vec<_> = error.lines().map(|line| line.split(':').nth(1).unwrap()).collect();
        assert_eq!(lines, ["1", "1", "3", "5", "6", "7"], "{error}");
    }

    #[test]
    fn images_are_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.cell.toml");
        fs::write(&path, GOOD.replace("256M", "2M")).unwrap();
        let file = CellFile::read(&path).unwrap();
        let said = |word: &str| {
            let error = file.check_images().unwrap_err();
            assert_eq!(error.exit, Exit::BadFile);
            assert!(error.to_string().contains(word), "{error}");
        };
        said("vmlinuz: cannot be opened");
        fs::write(dir.path().join("vmlinuz"), b"").unwrap();
        said("vmlinuz: is not a file with something in it");
        fs::write(dir.path().join("vmlinuz"), [0; 4000]).unwrap();
        said("vmlinuz: is not a kernel");
        fs::write(dir.path().join("vmlinuz"), kernel()).unwrap();
        file.check_images().unwrap();
        let mut large = kernel();
        large.resize(3 << 20, 0);
        fs::write(dir.path().join("vmlinuz"), large).unwrap();
        said("have 3145728 bytes, and the cell 2097152");
        // What only the loader sees.
        let mut old = kernel();
        old[0x206] = 0x0b;
        fs::write(dir.path().join("vmlinuz"), old).unwrap();
        said("vmlinuz: kernel: field version of the setup header is 0x20b");
        fs::write(dir.path().join("vmlinuz"), &kernel()[..100_000]).unwrap();
        said("vmlinuz: kernel: the file has 100000 bytes, but 100352 are needed");
        fs::write(dir.path().join("vmlinuz"), kernel()).unwrap();
        let long = format!("{GOOD}cmdline = \"{}\"\n", "x".repeat(256));
        fs::write(&path, long).unwrap();
        let error = CellFile::read(&path).unwrap().check_images().unwrap_err();
        assert!(error.to_string().contains("command line: 256 bytes; the kernel takes 0 to 255"), "{error}");
        fs::write(&path, format!("{GOOD}initrd = \"initrd\"\n").replace("256M", "2M")).unwrap();
        fs::write(dir.path().join("initrd"), vec![0; 1_900_000]).unwrap();
        let error = CellFile::read(&path).unwrap().check_images().unwrap_err();
        assert!(error.to_string().contains("initrd: initrd: no 1900000 bytes of free RAM"), "{error}");
    }

    proptest! {
        /// Whatever a file says, it is read or there is an error with a line.
        #[test]
        fn no_file_makes_it_panic(source in "[a-z\\[\\]=\"0-9M \n.,]{0,80}") {
            if let Err(error) = parse(&source) {
                prop_assert!(error.to_string().starts_with("/cells/web.cell.toml:"), "{}", error);
            }
        }
    }
}
