//! Tests of `bulkhead-mkimage` as a user runs it.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use bulkhead_abi::bundle::{Bundle, Role};
use bulkhead_abi::message::{Action, CellSpec};
use bulkhead_cell_file::fake::kernel as cell_kernel;
use tempfile::TempDir;

/// A cell file with kernel and initrd.
fn cell_file(name: &str, cpus: &str, memory: &str) -> String {
    format!(
        "name = \"{name}\"\ncpus = {cpus}\nmemory = \"{memory}\"\n\
        [boot]\nkernel = \"cell-kernel\"\ninitrd = \"initrd\"\n"
    )
}

/// A directory with a node in it: `node.toml`, root kernel and initrd, a cell.
fn node() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, data: &[u8]| fs::write(dir.path().join(name), data).unwrap();
    let mut kernel = vec![0x90; 10_000];
    kernel[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    kernel[0x202..0x206].copy_from_slice(b"HdrS");
    put("vmlinuz", &kernel);
    put("initrd", b"an initrd");
    put("web.cell.toml", cell_file("web", "1", "4M").as_bytes());
    put("cell-kernel", &cell_kernel());
    let node = r#"name = "test"
pool = "64M"
reserved_cpus = [3]
[root]
kernel = "vmlinuz"
initrd = "initrd"
cmdline = "console=hvc0"
memory = "1G"
[[cell]]
file = "web.cell.toml"
"#;
    put("node.toml", node.as_bytes());
    dir
}

fn mkimage(dir: &TempDir, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bulkhead-mkimage")).args(arguments).current_dir(dir).output().unwrap()
}

/// What it printed, when it must have succeeded.
#[track_caller]
fn ok(dir: &TempDir, arguments: &[&str]) -> String {
    let output = mkimage(dir, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stderr, b"");
    String::from_utf8(output.stdout).unwrap()
}

/// What it complained of, when it must have ended with 1.
#[track_caller]
fn error(dir: &TempDir, arguments: &[&str]) -> String {
    let output = mkimage(dir, arguments);
    assert_eq!((output.status.code(), output.stdout), (Some(1), Vec::new()));
    String::from_utf8(output.stderr).unwrap()
}

fn replace(dir: &TempDir, file: &str, from: &str, to: &str) {
    let path = dir.path().join(file);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from));
    fs::write(path, text.replace(from, to)).unwrap();
}

const BUNDLE: &[&str] = &["bundle", "--config", "node.toml", "--output", "bundle"];

#[test]
fn a_bundle_has_all_that_the_node_names() {
    let dir = node();
    ok(&dir, BUNDLE);
    let bytes = fs::read(dir.path().join("bundle")).unwrap();
    let bundle = Bundle::parse(&bytes).unwrap();
    assert_eq!(bundle.config.name, "test");
    assert_eq!(bundle.config.root.cmdline, "console=hvc0");
    let entries: Vec<_> = bundle.entries.iter().map(|entry| (entry.name, entry.role)).collect();
    assert_eq!(
        entries,
        [
            ("root/kernel", Role::ROOT_KERNEL),
            ("root/initrd", Role::ROOT_INITRD),
            ("cell/web/file", Role::CELL_FILE),
            ("cell/web/kernel", Role::CELL_KERNEL),
            ("cell/web/initrd", Role::CELL_INITRD),
        ]
    );
    assert_eq!(bundle.root_kernel.data, fs::read(dir.path().join("vmlinuz")).unwrap());
    assert_eq!(bundle.entries[3].data, cell_kernel());
    assert!(!dir.path().join("bundle.partial").exists());
}

#[test]
fn cpio_lists_and_extracts_a_bundle() {
    let dir = node();
    ok(&dir, BUNDLE);
    let bundle = fs::File::open(dir.path().join("bundle")).unwrap();
    let output = Command::new("cpio")
        .args(["-i", "-d", "-D", "out", "--quiet", "--unconditional"])
        .current_dir({
            fs::create_dir(dir.path().join("out")).unwrap();
            dir.path()
        })
        .stdin(bundle)
        .output()
        .expect("cpio is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let same = |one: &str, other: &str| {
        assert_eq!(fs::read(dir.path().join(one)).unwrap(), fs::read(dir.path().join(other)).unwrap());
    };
    same("out/root/kernel", "vmlinuz");
    same("out/cell/web/file", "web.cell.toml");
}

#[test]
fn options_come_before_the_file() {
    let dir = node();
    replace(&dir, "node.toml", "kernel = \"vmlinuz\"", "kernel = \"not there\"");
    fs::write(dir.path().join("db.cell.toml"), cell_file("db", "[9]", "2M")).unwrap();
    let mut arguments = BUNDLE.to_vec();
    arguments.extend(["--kernel", "vmlinuz", "--initrd", "cell-kernel", "--cmdline", "quiet"]);
    arguments.extend(["--cell", "db.cell.toml"]);
    ok(&dir, &arguments);
    let bytes = fs::read(dir.path().join("bundle")).unwrap();
    let bundle = Bundle::parse(&bytes).unwrap();
    assert_eq!(bundle.root_initrd.unwrap().data, cell_kernel());
    assert_eq!(bundle.config.root.cmdline, "quiet");
    assert_eq!(bundle.entries.last().unwrap().name, "cell/db/initrd");
}

#[test]
fn the_same_input_gives_the_same_bundle() {
    let dir = node();
    ok(&dir, BUNDLE);
    let first = fs::read(dir.path().join("bundle")).unwrap();
    ok(&dir, BUNDLE);
    assert_eq!(fs::read(dir.path().join("bundle")).unwrap(), first);
}

#[test]
fn check_accepts_what_is_right() {
    let dir = node();
    assert_eq!(ok(&dir, &["check", "node.toml"]), "node.toml: ok\n");
    ok(&dir, BUNDLE);
    assert_eq!(ok(&dir, &["check", "bundle"]), "bundle: ok\n");
    replace(&dir, "node.toml", "kernel = \"vmlinuz\"", "");
    assert_eq!(
        ok(&dir, &["check", "node.toml"]),
        "node.toml: ok, but has no root.kernel: bundle needs --kernel\n"
    );
}

#[test]
fn mistakes_in_the_configuration_are_told_by_line() {
    let dir = node();
    replace(&dir, "node.toml", "64M", "63M");
    replace(&dir, "node.toml", "memory =", "memroy =");
    let message = "\
node.toml:2: pool = \"63M\": 66060288 bytes, must be a multiple of 2M up to 4096T
node.toml:8: root.memroy = \"1G\": unknown key, did you mean root.memory?
";
    assert_eq!(error(&dir, &["check", "node.toml"]), message);
    assert_eq!(error(&dir, BUNDLE), message);
    assert!(!dir.path().join("bundle").exists());
}

#[test]
fn files_that_do_not_fit_are_told_with_who_names_them() {
    let dir = node();
    let blame = "bulkhead-mkimage: node.toml:5: root.kernel = \"initrd\": ";
    replace(&dir, "node.toml", "kernel = \"vmlinuz\"", "kernel = \"initrd\"");
    assert_eq!(
        error(&dir, &["check", "node.toml"]),
        format!(
            "{blame}root kernel \"root/kernel\" is not a bzImage: no boot sector signature (55 aa at 0x1fe)\n"
        )
    );
    replace(&dir, "node.toml", "kernel = \"initrd\"", "kernel = \"gone\"");
    assert_eq!(
        error(&dir, &["check", "node.toml"]),
        "bulkhead-mkimage: node.toml:5: root.kernel = \"gone\": gone: No such file or directory (os error 2)\n"
    );
    replace(&dir, "node.toml", "kernel = \"gone\"", "");
    assert_eq!(
        error(&dir, BUNDLE),
        "bulkhead-mkimage: no root kernel: neither root.kernel in node.toml nor --kernel\n"
    );
}

#[test]
fn mistakes_in_cell_files_are_told() {
    let dir = node();
    replace(&dir, "web.cell.toml", "\"cell-kernel\"", "\"gone\"");
    assert_eq!(
        error(&dir, BUNDLE),
        "bulkhead-mkimage: web.cell.toml: boot.kernel: gone: No such file or directory (os error 2)\n"
    );
    replace(&dir, "web.cell.toml", "\"gone\"", "5");
    replace(&dir, "web.cell.toml", "cpus", "cpu");
    assert_eq!(
        error(&dir, BUNDLE),
        "\
web.cell.toml:1: cpus is missing
web.cell.toml:2: cpu is unknown (did you mean cpus?); allowed: name, cpus, memory, boot, console, on
web.cell.toml:5: boot.kernel is 5; allowed: a text in quotes
"
    );
    fs::write(dir.path().join("web.cell.toml"), cell_file("www", "1", "4M")).unwrap();
    assert_eq!(
        error(&dir, BUNDLE),
        "bulkhead-mkimage: node.toml:10: cell[0].file = \"web.cell.toml\": the cell's name is \"www\", must be \"web\"\n"
    );
    replace(&dir, "web.cell.toml", "www", "web");
    assert_eq!(
        error(&dir, &[BUNDLE, &["--cell", "web.cell.toml"]].concat()),
        "bulkhead-mkimage: entry \"cell/web/file\" is there twice\n"
    );
    replace(&dir, "node.toml", "web.cell.toml", "initrd");
    assert_eq!(
        error(&dir, BUNDLE),
        "bulkhead-mkimage: node.toml:10: cell[0].file = \"initrd\": the file's name must be NAME.cell.toml\n"
    );
    replace(&dir, "node.toml", "file = \"initrd\"", "file = \"root.cell.toml\"");
    assert_eq!(
        error(&dir, BUNDLE),
        "bulkhead-mkimage: node.toml:10: cell[0].file = \"root.cell.toml\": the file's name is \"root\"; allowed: 1 to 32 of a-z, 0-9, - and _, \
         the first a letter or digit, not \"root\"\n"
    );
}

/// Lets the node's pool and CPUs be for `cells` alone, which are started with it.
fn autostart(dir: &TempDir, pool: &str, cells: &[(&str, &str, &str)]) {
    let names: Vec<_> = cells.iter().map(|(name, ..)| *name).collect();
    let start = format!("reserved_cpus = [5, 2, 3]\nautostart = {names:?}");
    replace(dir, "node.toml", "reserved_cpus = [3]", &start);
    replace(dir, "node.toml", "64M", pool);
    let mut node = fs::read_to_string(dir.path().join("node.toml")).unwrap();
    for (name, cpus, memory) in cells {
        if *name != "web" {
            node += &format!("[[cell]]\nfile = \"{name}.cell.toml\"\n");
        }
        fs::write(dir.path().join(format!("{name}.cell.toml")), cell_file(name, cpus, memory)).unwrap();
    }
    fs::write(dir.path().join("node.toml"), node).unwrap();
}

#[test]
fn cells_that_start_with_the_node_get_their_cpus() {
    let dir = node();
    // Kernel and initrd take 2 MiB each beside the memory.
    autostart(&dir, "18M", &[("web", "1", "4M"), ("db", "[5]", "2M")]);
    let db = dir.path().join("db.cell.toml");
    let text = fs::read_to_string(&db).unwrap() + "cmdline = \"quiet\"\n[on]\ncrash = \"restart\"\n";
    fs::write(db, text + "[console]\nserial = false\n").unwrap();
    ok(&dir, BUNDLE);
    let bytes = fs::read(dir.path().join("bundle")).unwrap();
    let web = CellSpec {
        name: "web".into(),
        // Not 5, which another cell names.
        cpus: vec![3],
        memory: 4 << 20,
        cmdline: String::new(),
        console: true,
        wall_clock_ns: 0,
        on_reboot: Some(Action::RESTART),
        on_crash: Some(Action::STOP),
        origin: None,
        files: None,
    };
    let db = CellSpec {
        name: "db".into(),
        cpus: vec![5],
        memory: 2 << 20,
        cmdline: "quiet".into(),
        console: false,
        on_crash: Some(Action::RESTART),
        ..web.clone()
    };
    assert_eq!(Bundle::parse(&bytes).unwrap().config.autostart, [web, db]);

    let line = "autostart      web (CPUs 3; 4M), db (CPUs 5; 2M)";
    let text = ok(&dir, &["inspect", "bundle"]);
    assert!(text.lines().any(|shown| shown == line), "{text}");
    let json: serde_json::Value = serde_json::from_str(&ok(&dir, &["inspect", "--json", "bundle"])).unwrap();
    assert_eq!(json["autostart"][1], serde_json::json!({"name": "db", "cpus": [5], "memory_bytes": 2 << 20}));
}

#[test]
fn cells_that_can_not_start_with_the_node_are_told() {
    let told = |pool: &str, cells: &[(&str, &str, &str)], expected: &str| {
        let dir = node();
        autostart(&dir, pool, cells);
        assert_eq!(error(&dir, &["check", "node.toml"]), expected);
        assert_eq!(error(&dir, BUNDLE), expected);
    };
    told(
        "8M",
        &[("web", "[2, 4]", "4M"), ("db", "[2]", "2M"), ("log", "3", "2M")],
        "\
node.toml:4: autostart[0] = \"web\": its cpus has 4, must be among those of reserved_cpus that are left: 5, 2, 3
node.toml:4: autostart[1] = \"db\": its cpus has 2, must be among those of reserved_cpus that are left: 5, 3
node.toml:4: autostart[1] = \"db\": has 6 MiB with its files, must be at most the 0 MiB left of the pool
node.toml:4: autostart[2] = \"log\": its cpus is 3, must be at most the 2 of reserved_cpus that are left
node.toml:4: autostart[2] = \"log\": has 6 MiB with its files, must be at most the 0 MiB left of the pool
",
    );
    told(
        "10M",
        &[("web", "1", "4M"), ("db", "1", "4M")],
        "node.toml:4: autostart[1] = \"db\": has 8 MiB with its files, must be at most the 2 MiB left of the pool\n",
    );
    told(
        "64M",
        &[("web", "3", "4M"), ("db", "[5]", "4M")],
        "node.toml:4: autostart[0] = \"web\": its cpus is 3, must be at most the 2 of reserved_cpus that are left\n",
    );

    let dir = node();
    replace(&dir, "node.toml", "reserved_cpus = [3]", "reserved_cpus = [3]\nautostart = [\"wbe\"]");
    assert_eq!(
        error(&dir, BUNDLE),
        "node.toml:4: autostart[0] = \"wbe\": must be the name of a cell in the bundle: web\n"
    );
    // What the hypervisor would refuse to load.
    replace(&dir, "node.toml", "wbe", "web");
    fs::write(dir.path().join("cell-kernel"), "#!/bin/sh").unwrap();
    let message = error(&dir, BUNDLE);
    assert!(message.starts_with("cell-kernel: is not a kernel; allowed: Linux as a bzImage"), "{message}");
    replace(&dir, "node.toml", "\"web\"]", "\"web\",\n\"web\"]");
    assert_eq!(
        error(&dir, BUNDLE),
        "node.toml:5: autostart[1] = \"web\": for the second time, must be each cell once\n"
    );
}

#[test]
fn a_bad_cmdline_option_is_told() {
    let dir = node();
    assert_eq!(
        error(&dir, &[BUNDLE, &["--cmdline", "a\nb"]].concat()),
        "bulkhead-mkimage: --cmdline is a text with '\\n', must be at most 2047 bytes without control characters\n"
    );
}

#[test]
fn damaged_bundles_are_told() {
    let dir = node();
    ok(&dir, BUNDLE);
    let path = dir.path().join("bundle");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 200]).unwrap();
    let message = error(&dir, &["check", "bundle"]);
    assert!(message.starts_with("bulkhead-mkimage: bundle: truncated in "), "{message}");
    assert_eq!(error(&dir, &["inspect", "bundle"]), message);

    let mut flipped = bytes.clone();
    let kernel = Bundle::parse(&bytes).unwrap().root_kernel.offset;
    flipped[kernel + 9_999] ^= 1;
    fs::write(&path, flipped).unwrap();
    let message = error(&dir, &["check", "bundle"]);
    assert!(message.starts_with("bulkhead-mkimage: bundle: \"root/kernel\" has checksum 0x"), "{message}");

    fs::write(&path, b"\x7fELF\xff").unwrap();
    assert_eq!(
        error(&dir, &["check", "bundle"]),
        "bulkhead-mkimage: bundle: neither a bundle (it would start with 070701) nor text\n"
    );
}

#[test]
fn inspect_shows_a_bundle() {
    let dir = node();
    ok(&dir, BUNDLE);
    let text = ok(&dir, &["inspect", "bundle"]);
    for line in [
        "bundle version 1 of node test",
        "cell pool      64M",
        "reserved CPUs  3",
        "autostart      none",
        "root memory    1G",
        "root cmdline   console=hvc0",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
    }
    let json: serde_json::Value = serde_json::from_str(&ok(&dir, &["inspect", "--json", "bundle"])).unwrap();
    assert_eq!(json["pool_bytes"], 64 << 20);
    assert_eq!(json["console"], "com1");
    assert_eq!(json["root"]["memory_bytes"], 1 << 30);
    assert_eq!(json["entries"][1]["name"], "root/initrd");
    assert_eq!(json["entries"][1]["role"], "root-initrd");
    assert_eq!(json["entries"][1]["size"], 9);
    assert_eq!(json["entries"][1]["offset"].as_u64().unwrap() % 4096, 0);
}

#[test]
fn wrong_usage_ends_with_2() {
    let dir = node();
    for arguments in [&[][..], &["bundle"], &["chekc", "node.toml"], &["check", "node.toml", "--json"]] {
        assert_eq!(mkimage(&dir, arguments).status.code(), Some(2), "{arguments:?}");
    }
    assert!(ok(&dir, &["--help"]).contains("Exit codes:"));
}

/// An ELF header and, at byte 64, a multiboot2 header with an end tag.
fn multiboot2_elf() -> Vec<u8> {
    let mut elf = b"\x7fELF".to_vec();
    elf.resize(64, 0);
    let (magic, length) = (0xe852_50d6_u32, 24_u32);
    for word in [magic, 0, length, 0_u32.wrapping_sub(magic).wrapping_sub(length), 0, 8] {
        elf.extend(word.to_le_bytes());
    }
    elf
}

/// The file at `path` of an ISO image.
fn from_iso(dir: &Path, path: &str) -> Vec<u8> {
    let out = dir.join("extracted");
    let status = Command::new("xorriso")
        .args(["-osirrox", "on", "-indev", "image.iso", "-extract", path, "extracted"])
        .current_dir(dir)
        .output()
        .expect("xorriso is installed")
        .status;
    assert!(status.success());
    let data = fs::read(&out).unwrap();
    fs::remove_file(out).unwrap();
    data
}

const ISO: &[&str] = &["iso", "--kernel-elf", "bulkhead.elf", "--bundle", "bundle", "--output", "image.iso"];

#[test]
fn an_iso_has_kernel_bundle_and_configuration() {
    let dir = node();
    fs::write(dir.path().join("bulkhead.elf"), multiboot2_elf()).unwrap();
    ok(&dir, BUNDLE);
    // That both firmwares boot it, mkimage has checked itself.
    ok(&dir, &[ISO, &["--hv-cmdline", "svm.disable=nrips  log=debug"]].concat());
    assert_eq!(from_iso(dir.path(), "/boot/bulkhead"), multiboot2_elf());
    assert_eq!(from_iso(dir.path(), "/boot/bundle"), fs::read(dir.path().join("bundle")).unwrap());
    assert_eq!(
        String::from_utf8(from_iso(dir.path(), "/boot/grub/grub.cfg")).unwrap(),
        "\
if serial --unit=0 --speed=115200; then
    terminal_input serial
    terminal_output serial
fi
set timeout=0
menuentry Bulkhead {
    multiboot2 /boot/bulkhead 'svm.disable=nrips' 'log=debug'
    module2 /boot/bundle
}
"
    );
}

#[test]
fn what_can_not_boot_becomes_no_iso() {
    let dir = node();
    ok(&dir, BUNDLE);
    let kernel = |data: &[u8]| fs::write(dir.path().join("bulkhead.elf"), data).unwrap();
    kernel(b"MZ");
    assert_eq!(error(&dir, ISO), "bulkhead-mkimage: bulkhead.elf: not an ELF file\n");
    let headerless = "bulkhead-mkimage: bulkhead.elf: no multiboot2 header in its first 32 KiB\n";
    kernel(&[b"\x7fELF".as_slice(), &[0; 100]].concat());
    assert_eq!(error(&dir, ISO), headerless);
    let mut bad_checksum = multiboot2_elf();
    bad_checksum[76] ^= 1;
    kernel(&bad_checksum);
    assert_eq!(error(&dir, ISO), headerless);
    kernel(&multiboot2_elf());
    assert_eq!(
        error(&dir, &[ISO, &["--hv-cmdline", "a'b"]].concat()),
        "bulkhead-mkimage: --hv-cmdline has '\\'', must be printable ASCII without quotes and backslashes\n"
    );
    fs::write(dir.path().join("bundle"), b"070701").unwrap();
    let message = error(&dir, ISO);
    assert!(message.starts_with("bulkhead-mkimage: bundle: truncated in a header"), "{message}");
    assert!(!dir.path().join("image.iso").exists());
}
