//! What a cell file may say, and what is said about those that are wrong.

use super::*;
use crate::fake::kernel;
use proptest::prelude::*;

const GOOD: &str = "name = \"web\"\ncpus = 2\nmemory = \"256M\"\n\n[boot]\nkernel = \"vmlinuz\"\n";

fn parse(source: &str) -> Result<CellFile, BadFile> {
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
        let expected = format!("/cells/web.cell.toml{expected}");
        assert!(error.to_string().lines().any(|line| line.starts_with(&expected)), "{bad}: {error}");
    }
    let many = GOOD.replace("name", "nmae").replace("256M", "x").replace("kernel", "kernle") + "initrd = 1";
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
