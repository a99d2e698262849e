//! Tests of the bundle: the format as documented, every error, hostile bytes.

use alloc::format;
use alloc::vec;

use proptest::prelude::*;

use super::*;
use crate::config::{Console, Found, RootConfig};
use crate::message::{Action, CellSpec};

/// A file that passes for a bzImage.
fn kernel() -> Vec<u8> {
    let mut kernel = vec![0x90; 0x300];
    kernel[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    kernel[0x202..0x206].copy_from_slice(b"HdrS");
    kernel
}

fn root_kernel(data: &[u8]) -> NewEntry<'_> {
    NewEntry { name: "root/kernel", role: Role::ROOT_KERNEL, data }
}

fn listed<'a>(name: &'a str, role: Role, data: &[u8]) -> Listed<'a> {
    Listed { name, role, size: data.len() as u64, crc32: CRC.checksum(data) }
}

fn manifest(config: NodeConfig, entries: Vec<Listed<'_>>) -> Vec<u8> {
    Body { config, entries }.to_manifest().unwrap()
}

/// An archive of any files, be it a bundle or not.
fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, data) in files {
        cpio::append(&mut archive, name, data).unwrap();
    }
    cpio::finish(&mut archive);
    archive
}

/// What parsing a manifest and a sound root kernel says.
fn error_with_manifest(manifest: &[u8]) -> BundleError {
    let kernel = kernel();
    Bundle::parse(&archive(&[(MANIFEST, manifest), ("root/kernel", &kernel)])).unwrap_err()
}

fn small() -> Vec<u8> {
    write(&NodeConfig::default(), &[root_kernel(&kernel())]).unwrap()
}

#[test]
fn the_checksum_is_that_of_zlib() {
    assert_eq!(CRC.checksum(b"123456789"), 0xcbf4_3926);
}

#[test]
fn a_bundle_says_what_was_put_in() {
    let kernel = kernel();
    let config = NodeConfig {
        name: "n1".into(),
        root: RootConfig { memory: Some(1 << 30), cmdline: "console=hvc0 quiet".into() },
        reserved_cpus: vec![3, 2],
        pool_bytes: 64 << 20,
        console: Console::COM2,
        ..NodeConfig::default()
    };
    let new = [
        root_kernel(&kernel),
        NewEntry { name: "root/initrd", role: Role::ROOT_INITRD, data: b"not page-sized" },
        NewEntry { name: "later", role: Role(77), data: b"" },
    ];
    let archive = write(&config, &new).unwrap();
    let bundle = Bundle::parse(&archive).unwrap();
    assert_eq!(bundle.config, config);
    assert_eq!(bundle.entries.len(), 3);
    for (entry, new) in bundle.entries.iter().zip(new) {
        assert_eq!((entry.name, entry.role, entry.data), (new.name, new.role, new.data));
        assert_eq!(&archive[entry.offset..][..entry.data.len()], entry.data);
        assert_eq!(entry.offset % PAGE_SIZE, 0, "{}", entry.name);
    }
    assert_eq!(bundle.root_kernel, bundle.entries[0]);
    assert_eq!(bundle.root_initrd, Some(bundle.entries[1]));
}

#[test]
fn without_an_initrd_there_is_none() {
    let archive = small();
    assert_eq!(Bundle::parse(&archive).unwrap().root_initrd, None);
}

#[test]
fn zeros_after_the_archive_are_accepted_and_nothing_else() {
    let mut archive = small();
    let end = archive.len();
    archive.resize(end + 5000, 0);
    assert!(Bundle::parse(&archive).is_ok());
    archive[end + 4321] = 1;
    assert_eq!(Bundle::parse(&archive).unwrap_err(), BundleError::TrailingData { offset: end + 4321 });
}

#[test]
fn what_is_no_archive_is_told_so() {
    let error = Bundle::parse(b"\x7fELF and so on").unwrap_err();
    assert_eq!(error, BundleError::NotCpio { offset: 0 });
    // The older "old character" format of cpio.
    assert_eq!(Bundle::parse(b"070707000000").unwrap_err(), BundleError::NotCpio { offset: 0 });
    let nothing = Bundle::parse(b"").unwrap_err();
    assert_eq!(nothing.to_string(), "truncated in a header: 110 bytes should be at byte 0, 0 are there");
}

#[test]
fn a_damaged_header_is_told_with_its_place() {
    for at in [cpio_at("filesize"), cpio_at("namesize")] {
        let mut archive = small();
        archive[at] = b'x';
        assert_eq!(Bundle::parse(&archive).unwrap_err(), BundleError::Header { offset: 0 }, "{at}");
    }
    let spaced = archive(&[("has space", b"")]);
    assert_eq!(Bundle::parse(&spaced).unwrap_err(), BundleError::Header { offset: 0 });
    let long = archive(&[("x".repeat(256).as_str(), b"")]);
    assert_eq!(Bundle::parse(&long).unwrap_err(), BundleError::Header { offset: 0 });
    let unnamed = archive(&[("", b"")]);
    assert_eq!(Bundle::parse(&unnamed).unwrap_err(), BundleError::Header { offset: 0 });
}

/// Offset of a field in a newc header, from the list in the kernel's documentation.
fn cpio_at(field: &str) -> usize {
    let fields = "ino mode uid gid nlink mtime filesize maj min rmaj rmin namesize chksum";
    6 + 8 * fields.split(' ').position(|name| name == field).unwrap()
}

#[test]
fn sizes_that_reach_beyond_the_end_are_truncations() {
    let mut archive = small();
    let at = cpio_at("filesize");
    archive[at..at + 8].copy_from_slice(b"FFFFFFFF");
    let BundleError::Truncated { what, size, .. } = Bundle::parse(&archive).unwrap_err() else {
        panic!("another error");
    };
    assert_eq!((what.as_str(), size), (MANIFEST, 0xffff_ffff));
}

#[test]
fn every_shorter_file_is_truncated() {
    let archive = small();
    for length in 0..archive.len() {
        let error = Bundle::parse(&archive[..length]).unwrap_err();
        assert!(matches!(error, BundleError::Truncated { .. }), "{length}: {error}");
    }
}

#[test]
fn the_manifest_comes_first() {
    let kernel = kernel();
    let error = Bundle::parse(&archive(&[("root/kernel", &kernel)])).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"no manifest: the first file is "root/kernel", must be "bulkhead/manifest""#
    );
    assert_eq!(Bundle::parse(&archive(&[])).unwrap_err(), BundleError::NoManifest { found: String::new() });
}

#[test]
fn magic_and_version_are_told_even_if_the_rest_is_unknown() {
    let error = error_with_manifest(&encode(&("another", 1, 2, 3)).unwrap());
    assert_eq!(error.to_string(), r#"the manifest's magic is "another", must be "bulkhead bundle""#);
    let error = error_with_manifest(&encode(&(MAGIC, 7, "in", "another", "way")).unwrap());
    assert_eq!(error.to_string(), "the bundle has version 7, this program reads version 1");
}

#[test]
fn a_damaged_manifest_is_told() {
    assert!(matches!(error_with_manifest(b""), BundleError::Manifest { .. }));
    assert!(matches!(error_with_manifest(b"\xff"), BundleError::Manifest { .. }));
    let kernel = kernel();
    let mut longer = manifest(NodeConfig::default(), vec![listed("root/kernel", Role::ROOT_KERNEL, &kernel)]);
    longer.push(0);
    let BundleError::Manifest { reason } = error_with_manifest(&longer) else { panic!("another error") };
    assert_eq!(reason, "more bytes than it needs");
    // Sound checksum, no body.
    let empty = Manifest { magic: MAGIC, version: VERSION, body: b"", crc32: 0 };
    assert!(matches!(error_with_manifest(&encode(&empty).unwrap()), BundleError::Manifest { .. }));
}

#[test]
fn a_changed_manifest_is_told_with_both_sums() {
    let wrong = Manifest { magic: MAGIC, version: VERSION, body: b"123456789", crc32: 1 };
    assert_eq!(
        error_with_manifest(&encode(&wrong).unwrap()).to_string(),
        r#""bulkhead/manifest" has checksum 0xcbf43926, the manifest says 0x00000001"#
    );
}

#[test]
fn a_configuration_from_before_there_was_autostart_has_none() {
    let config = encode(&NodeConfig::default()).unwrap();
    // An array of seven, of which the last is an empty one.
    assert_eq!((config.first(), config.last()), (Some(&0x87), Some(&0x80)));
    let older = [&[0x86], &config[1..config.len() - 1]].concat();
    assert_eq!(decode::<NodeConfig>(&older).unwrap(), NodeConfig::default());
}

#[test]
fn a_bad_configuration_is_told_by_field() {
    let config = NodeConfig { reserved_cpus: vec![0], ..NodeConfig::default() };
    let BundleError::Config(error) = error_with_manifest(&manifest(config, vec![])) else {
        panic!("another error");
    };
    assert_eq!((error.field, error.found), ("reserved_cpus", Found::Number(0)));
}

#[test]
fn missing_unlisted_and_double_entries_are_told_by_name() {
    let kernel = kernel();
    let root = || listed("root/kernel", Role::ROOT_KERNEL, &kernel);
    let error = |entries: Vec<Listed<'_>>, files: &[&str]| {
        let manifest = manifest(NodeConfig::default(), entries);
        let mut all: Vec<(&str, &[u8])> = vec![(MANIFEST, &manifest)];
        all.extend(files.iter().map(|&name| (name, kernel.as_slice())));
        Bundle::parse(&archive(&all)).unwrap_err()
    };
    let twice = BundleError::Duplicate { name: "root/kernel".into() };
    assert_eq!(error(vec![root()], &[]), BundleError::Missing { name: "root/kernel".into() });
    assert_eq!(error(vec![root()], &["root/kernel", "more"]), BundleError::Unlisted { name: "more".into() });
    assert_eq!(error(vec![root()], &["root/kernel", "root/kernel"]), twice);
    assert_eq!(error(vec![root(), root()], &["root/kernel"]), twice);
    assert_eq!(
        error(vec![root()], &["root/kernel", MANIFEST]),
        BundleError::Duplicate { name: MANIFEST.into() }
    );
    assert_eq!(
        error(vec![root(), listed("k2", Role::ROOT_KERNEL, &kernel)], &["root/kernel", "k2"]).to_string(),
        r#"two entries have the role root-kernel: "root/kernel" and "k2""#
    );
}

#[test]
fn size_and_checksum_are_told_with_both_values() {
    let kernel = kernel();
    let mut entry = listed("root/kernel", Role::ROOT_KERNEL, &kernel);
    entry.size += 1;
    let error = error_with_manifest(&manifest(NodeConfig::default(), vec![entry]));
    assert_eq!(error.to_string(), r#"entry "root/kernel" has 768 bytes, the manifest says 769"#);
    let mut entry = listed("root/kernel", Role::ROOT_KERNEL, &kernel);
    let found = entry.crc32;
    entry.crc32 ^= 1;
    let expected = entry.crc32;
    let error = error_with_manifest(&manifest(NodeConfig::default(), vec![entry]));
    assert_eq!(error, BundleError::Checksum { name: "root/kernel".into(), found, expected });
}

#[test]
fn the_root_kernel_must_be_there_and_a_bzimage() {
    assert_eq!(write(&NodeConfig::default(), &[]).unwrap_err(), BundleError::NoRootKernel);
    let error =
        |kernel: &[u8]| write(&NodeConfig::default(), &[root_kernel(kernel)]).unwrap_err().to_string();
    let signature =
        r#"root kernel "root/kernel" is not a bzImage: no boot sector signature (55 aa at 0x1fe)"#;
    assert_eq!(error(b""), signature);
    assert_eq!(error(b"\x7fELF"), signature);
    let mut other = kernel();
    other[0x205] = b'x';
    assert_eq!(
        error(&other),
        r#"root kernel "root/kernel" is not a bzImage: no setup header (HdrS at 0x202)"#
    );
}

#[test]
fn there_may_be_256_entries_and_not_more() {
    let kernel = kernel();
    let names: Vec<String> = (0..ENTRIES_MAX).map(|number| format!("cell/{number}")).collect();
    let mut entries = vec![root_kernel(&kernel)];
    entries.extend(names.iter().map(|name| NewEntry { name, role: Role::CELL_FILE, data: b"" }));
    assert_eq!(write(&NodeConfig::default(), &entries).unwrap_err(), BundleError::TooMany);
    entries.pop();
    assert!(write(&NodeConfig::default(), &entries).is_ok());
}

#[test]
fn what_is_written_must_be_readable() {
    let kernel = kernel();
    let named = |name| {
        let entry = NewEntry { name, role: Role::CELL_FILE, data: b"" };
        write(&NodeConfig::default(), &[root_kernel(&kernel), entry])
    };
    assert!(matches!(named("with space"), Err(BundleError::Header { .. })));
    assert!(matches!(named(PAD), Err(BundleError::Missing { .. })));
    let config = NodeConfig { pool_bytes: 1, ..NodeConfig::default() };
    assert!(matches!(write(&config, &[root_kernel(&kernel)]), Err(BundleError::Config(_))));
}

/// Where the bytes are whose change must be noticed: the manifest's and the entries' data.
fn checked_bytes(archive: &[u8]) -> Vec<usize> {
    let mut reader = Reader::new(archive);
    let mut bytes = Vec::new();
    while let Some(file) = reader.next().unwrap() {
        if file.name != PAD {
            bytes.extend(file.offset..file.offset + file.data.len());
        }
    }
    bytes
}

#[test]
fn every_flipped_bit_of_manifest_and_payload_is_noticed() {
    let archive = small();
    for at in checked_bytes(&archive) {
        for bit in 0..8 {
            let mut damaged = archive.clone();
            damaged[at] ^= 1 << bit;
            assert!(Bundle::parse(&damaged).is_err(), "byte {at}, bit {bit}");
        }
    }
}

prop_compose! {
    fn any_cell()(
        name in ".{0,10}",
        cpus in proptest::collection::vec(any::<u32>(), 0..4),
        memory: u64,
        console: bool,
        crash in proptest::option::of(0u8..3),
    ) -> CellSpec {
        CellSpec {
            name,
            cpus,
            memory,
            cmdline: "quiet".into(),
            console,
            wall_clock_ns: 0,
            on_reboot: None,
            on_crash: crash.map(Action),
            origin: None,
            files: None,
        }
    }
}

prop_compose! {
    fn any_config()(
        name in "[a-z0-9][a-z0-9_-]{0,31}",
        memory in proptest::option::of(32u64..1 << 30),
        cmdline in "[ -~]{0,300}",
        reserved_cpus in proptest::collection::btree_set(1u32..4096, 0..8),
        pool in 0u64..1 << 31,
        console in 0u8..3,
        log_level in 1u8..6,
        autostart in proptest::collection::vec(any_cell(), 0..3),
    ) -> NodeConfig {
        NodeConfig {
            name,
            root: RootConfig { memory: memory.map(|units| units << 21), cmdline },
            reserved_cpus: reserved_cpus.into_iter().collect(),
            pool_bytes: pool << 21,
            console: Console(console),
            log_level: crate::config::LogLevel(log_level),
            autostart,
        }
    }
}

proptest! {
    #[test]
    fn round_trip(
        config in any_config(),
        files in proptest::collection::btree_map(
            "[!-~]{1,40}",
            (3u8.., proptest::collection::vec(any::<u8>(), 0..6000)),
            0..5,
        ),
    ) {
        let kernel = kernel();
        let mut new = vec![root_kernel(&kernel)];
        new.extend(files.iter().map(|(name, (role, data))| NewEntry { name, role: Role(*role), data }));
        let archive = write(&config, &new).unwrap();
        let bundle = Bundle::parse(&archive).unwrap();
        prop_assert_eq!(bundle.config, config);
        prop_assert_eq!(bundle.entries.len(), new.len());
        for (entry, new) in bundle.entries.iter().zip(new) {
            prop_assert_eq!((entry.name, entry.role, entry.data), (new.name, new.role, new.data));
            prop_assert_eq!(entry.offset % PAGE_SIZE, 0);
        }
    }

    #[test]
    fn damage_never_panics_and_is_noticed_where_it_matters(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4),
    ) {
        let mut archive = small();
        let checked = checked_bytes(&archive);
        let before = archive.clone();
        for (index, flip) in changes {
            let at = index.index(archive.len());
            archive[at] ^= flip;
        }
        let parsed = Bundle::parse(&archive);
        if checked.iter().any(|&at| archive[at] != before[at]) {
            prop_assert!(parsed.is_err());
        }
    }

    #[test]
    fn any_manifest_body_is_read_without_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let manifest = Manifest { magic: MAGIC, version: VERSION, body: &body, crc32: CRC.checksum(&body) };
        error_with_manifest(&encode(&manifest).unwrap());
    }
}
