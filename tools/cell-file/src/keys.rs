//! The keys of a cell file.

use crate::reader::{Reader, Value};
use crate::{CellFile, CpuChoice};
use bulkhead_abi::message::{Action, MAX_CPUS, check_cmdline, check_cpu, check_memory, check_name};
use std::path::{Path, PathBuf};
use toml::de::DeTable;

impl Reader<'_> {
    /// Reads all of a cell file, which is complete only if there was no mistake.
    pub(crate) fn cell(&mut self, table: &DeTable) -> Option<CellFile> {
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
