//! Cells that run before anybody can ask for them.

use super::*;
use bulkhead_abi::bundle::{Bundle, Entry, Role};
use bulkhead_abi::config::NodeConfig;
use proptest::prelude::*;

/// Kept back at boot.
const KEPT: [CpuId; 2] = [CpuId(4), CpuId(5)];
const WEB_KERNEL: &[u8] = b"a kernel that spans no page";

type File<'a> = (&'a str, Role, &'a [u8]);

const WEB: [File<'static>; 2] = [
    ("cell/web/kernel", Role::CELL_KERNEL, WEB_KERNEL),
    ("cell/web/initrd", Role::CELL_INITRD, b"an initrd"),
];
const DB: [File<'static>; 1] = [("cell/db/kernel", Role::CELL_KERNEL, b"another kernel")];

fn entries<'a>(files: &[File<'a>]) -> Vec<Entry<'a>> {
    files.iter().map(|&(name, role, data)| Entry { name, role, data, offset: 0, crc32: 0 }).collect()
}

impl Bench {
    /// Starts a cell of a bundle, and audits what came of it.
    pub(super) fn start(
        &mut self,
        name: &str,
        cpus: &[u32],
        units: u64,
        files: &[File<'_>],
    ) -> Result<(), Failure> {
        let result = self.node.start_one(spec(name, cpus, units), &entries(files), &mut self.platform);
        self.audit();
        result
    }

    fn list(&mut self, id: StreamId) -> Vec<(String, CellState, Vec<u32>)> {
        match self.ask(id, Body::List) {
            Ok(Reply::Cells(cells)) => cells.into_iter().map(|c| (c.name, c.state, c.cpus)).collect(),
            other => panic!("{other:?}"),
        }
    }

    /// The node, but for what changes with time.
    fn facts(&mut self, id: StreamId) -> NodeInfo {
        NodeInfo { generation: 0, uptime_ns: 0, ..self.node_info(id) }
    }
}

#[test]
fn cells_of_the_bundle_run_and_are_like_others() {
    let mut bench = Bench::keeping_back(&KEPT);
    let id = bench.open(MANAGEMENT_PORT);
    let before = bench.facts(id);
    bench.node.closed(id);

    let entries = entries(&[&WEB[..], &DB[..]].concat());
    let config = NodeConfig {
        autostart: vec![spec("web", &[5], 2), spec("bad", &[4, 1], 1), spec("db", &[4], 1)],
        ..NodeConfig::default()
    };
    let bundle = Bundle { config, root_kernel: entries[0], root_initrd: None, entries };
    bench.node.start_bundled(&bundle, 1_000_000_000, &mut bench.platform);
    bench.audit();
    // No work was done since, and nobody has asked.
    let (web, db) = (CellId(1), CellId(2));
    assert_eq!(bench.platform.file(web, LoadKind::KERNEL), Some(WEB_KERNEL));
    assert_eq!(bench.platform.file(web, LoadKind::INITRD), Some(&b"an initrd"[..]));
    assert_eq!(bench.platform.cmdline(web), Some("quiet"));
    assert_eq!(bench.platform.file(db, LoadKind::INITRD), None);

    let id = bench.open(MANAGEMENT_PORT);
    let running = |name: &str, cpu| (name.into(), CellState::RUNNING, vec![cpu]);
    assert_eq!(bench.list(id), [running("web", 5), running("db", 4)]);
    let details = bench.show(id, web.0);
    // Kernel and initrd have a unit each.
    assert_eq!((details.files_memory, details.origin), (Some(2 * MEMORY_UNIT), None));
    let console = bench.attach(details.summary.console_port.unwrap(), false);
    assert_eq!(bench.text(console), "hello from the cell\n");
    assert_eq!(bench.node_info(id).free_memory, before.free_memory - 6 * MEMORY_UNIT);

    // It begins anew by itself, and by request; nobody's leaving takes it away.
    bench.platform.end_cell(web, Ending::Reset);
    bench.node.closed(id);
    let id = bench.open(MANAGEMENT_PORT);
    assert_eq!(bench.show(id, web.0).restarts, Some(1));
    assert_eq!(bench.ask(id, Body::Stop { cell: web.0 }), Ok(Reply::Done));
    assert_eq!(bench.ask(id, Body::Start { cell: web.0 }), Ok(Reply::Done));
    assert_eq!(bench.list(id), [running("web", 5), running("db", 4)]);

    for cell in [web, db] {
        assert_eq!(bench.ask(id, Body::Destroy { cell: cell.0 }), Ok(Reply::Done));
    }
    let after = bench.facts(id);
    assert_eq!(after, before, "CPUs and memory are nobody's again");
    assert_eq!(after.free_cpus, 2);
}

#[test]
fn what_cannot_run_is_left_out_for_a_reason() {
    let mut bench = Bench::keeping_back(&KEPT);
    assert_eq!(bench.start("web", &[4], 3, &WEB), Ok(()));
    let bad = [("cell/bad/kernel", Role::CELL_KERNEL, &b"bad"[..])];
    let empty = [("cell/db/kernel", Role::CELL_KERNEL, &b""[..])];
    let table: [(_, &[u32], _, &[File<'_>], _); 11] = [
        ("db", &[3], 1, &DB, "cpus has 3, which is the root cell's; allowed: 5"),
        ("db", &[5, 4], 1, &DB, "cpus has 4, which belongs to cell 'web' (its CPUs: 4)"),
        ("db", &[5, 6], 1, &DB, "cpus has 6, which this machine has not; allowed: 1 to 5"),
        ("db", &[], 1, &DB, "cpus is 0 CPUs; allowed: 1 to 64 CPUs"),
        ("web", &[5], 1, &WEB, "name 'web' is that of cell"),
        ("Db", &[5], 1, &DB, "name is \"Db\"; allowed: 1 to 32 of"),
        (
            "db",
            &[5],
            7,
            &DB,
            "memory is 14 MiB, and the pool has 14 MiB free, of which the cell's files take 2 MiB",
        ),
        ("db", &[5], 1, &WEB, "cell 'db' has no kernel; load one first"),
        ("db", &[5], 1, &empty, "kernel: size is 0 bytes; allowed: 1 to the cell's"),
        ("bad", &[5], 1, &bad, "cell 'bad': kernel: is none"),
        ("db", &[5], 1, &DB, ""),
    ];
    for (name, cpus, units, files, why) in table {
        let started = bench.start(name, cpus, units, files);
        match started {
            Err(failure) => assert!(!why.is_empty() && failure.message.contains(why), "{why}: {failure}"),
            Ok(()) => assert_eq!(why, "", "not refused"),
        }
    }
    let id = bench.open(MANAGEMENT_PORT);
    let names: Vec<_> = bench.list(id).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["web", "db"]);
}

#[test]
fn a_role_counts_not_only_a_name() {
    let mut bench = Bench::new();
    let files = [("cell/web/kernel", Role::CELL_FILE, WEB_KERNEL)];
    let failure = bench.start("web", &[KEPT_BACK.0], 1, &files).unwrap_err();
    assert!(failure.message.contains("has no kernel"), "{failure}");
}

proptest! {
    /// A failure at any call of the platform is told, and all is as before; or it comes too late.
    #[test]
    fn a_failure_at_any_call_leaves_nothing(calls in 0u32..10) {
        let mut bench = Bench::new();
        let id = bench.open(MANAGEMENT_PORT);
        let before = bench.facts(id);
        bench.platform.fail_after = Some(calls);
        match bench.start("web", &[KEPT_BACK.0], 2, &WEB) {
            Ok(()) => prop_assert!(bench.platform.fail_after.is_some(), "a failure was not reported"),
            Err(failure) => {
                prop_assert!(failure.message.contains(FAILURE), "{}", failure);
                prop_assert_eq!(bench.list(id), []);
                prop_assert_eq!(bench.facts(id), before);
            }
        }
    }
}
