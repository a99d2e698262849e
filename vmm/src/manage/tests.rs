//! Management as its clients see it, and the ledger behind it after any sequence of
//! requests, lost connections and failures.

mod autostart;
mod lifecycle;
mod sequences;

use super::cells::{HEAP_RESERVE, cell_heap};
use super::connection::CONNECTION_HEAP;
use super::fake::{FAILURE, FakePlatform};
use super::platform::Ending;
use super::*;
use crate::cell::ownership::CpuOwner;
use crate::device::stream::WINDOW;
use crate::hal::CellId;
use crate::memory::address::Hpa;
use bulkhead_abi::frame;
use bulkhead_abi::frame::{Deframer, MAX_FRAME};
use bulkhead_abi::message::{
    CellDetails, CellSpec, CellState, CpuUse, LoadKind, MEMORY_UNIT, NodeInfo, Response, TOKEN_SIZE,
};
use std::collections::{BTreeMap, BTreeSet};
use std::string::String;
use std::vec;

const CPUS: u32 = 6;
/// CPU 5 was kept back at boot.
const KEPT_BACK: CpuId = CpuId(5);
const TOKEN: Token = Token::new([7; TOKEN_SIZE]);

fn pool() -> Vec<HostRange> {
    let range = |base, units| HostRange { base: Hpa::new(base), len: units * MEMORY_UNIT };
    vec![range(1 << 30, 4), range(1 << 32, 8)]
}

fn spec(name: &str, cpus: &[u32], units: u64) -> CellSpec {
    CellSpec {
        name: name.into(),
        cpus: cpus.into(),
        memory: units * MEMORY_UNIT,
        cmdline: "quiet".into(),
        console: true,
        wall_clock_ns: 5,
        on_reboot: None,
        on_crash: None,
        origin: None,
        files: None,
    }
}

/// A node, its platform, and the far ends of its streams.
struct Bench {
    node: Node,
    platform: FakePlatform,
    kept_back: Vec<CpuId>,
    streams: u64,
    /// What came out of each stream so far.
    seen: BTreeMap<StreamId, Vec<u8>>,
}

impl Bench {
    fn new() -> Self {
        Self::keeping_back(&[KEPT_BACK])
    }

    fn keeping_back(cpus: &[CpuId]) -> Self {
        let facts = NodeFacts { version: "9.9".into(), ..NodeFacts::default() };
        let node = Node::new(facts, TOKEN, CPUS, cpus, &pool());
        let mut platform = FakePlatform::default();
        platform.offline.extend(1..CPUS);
        Self { node, platform, kept_back: cpus.into(), streams: 0, seen: BTreeMap::new() }
    }

    fn connect(&mut self, port: u32) -> StreamId {
        self.streams += 1;
        let id = StreamId(self.streams);
        assert!(self.node.connect(id, port, 1023), "port {port}");
        id
    }

    fn open(&mut self, port: u32) -> StreamId {
        let id = self.connect(port);
        let reply = self.ask(id, Body::Hello { abi: ABI_VERSION, token: TOKEN, follow: None });
        assert_eq!(reply, Ok(Reply::Welcome { abi: ABI_VERSION, version: "9.9".into() }));
        id
    }

    /// Opens a console or the log; what is seen of it begins after the welcome.
    fn attach(&mut self, port: u32, follow: bool) -> StreamId {
        let id = self.connect(port);
        let hello = Body::Hello { abi: ABI_VERSION, token: TOKEN, follow: Some(follow) };
        self.send_request(id, 1, hello);
        self.run();
        let seen = self.seen.get_mut(&id).unwrap();
        let (count, welcome) = Deframer::default().take(seen).unwrap();
        assert!(frame::decode::<Response>(&welcome.unwrap()).unwrap().result().is_ok());
        seen.drain(..count);
        id
    }

    fn send(&mut self, id: StreamId, bytes: &[u8]) {
        self.node.receive(id, bytes);
    }

    fn send_request(&mut self, id: StreamId, request: u32, body: Body) {
        let frame = frame::encode(&Request { id: request, body: Some(body) }).unwrap();
        self.send(id, &frame);
    }

    /// Works until nothing more happens; time passes while something is waited for.
    fn run(&mut self) {
        for _ in 0..1500 {
            match self.step() {
                Progress::More => {}
                Progress::Waiting => self.platform.now_ns += 1_000_000,
                Progress::Idle => return,
            }
        }
    }

    fn step(&mut self) -> Progress {
        let progress = self.node.work(&mut self.platform);
        let streams: Vec<_> = self.node.connections.iter().map(Connection::stream).collect();
        for id in streams {
            let mut buf = [0; 512];
            loop {
                let count = self.node.transmit(id, &mut buf);
                self.seen.entry(id).or_default().extend(&buf[..count]);
                if count == 0 {
                    break;
                }
            }
        }
        self.audit();
        progress
    }

    /// Each CPU and each unit of memory has one owner, and the platform was told the same.
    fn audit(&self) {
        let (ownership, cells) = self.node.cells.audit();
        let mut claims = BTreeSet::new();
        let mut owned = BTreeSet::new();
        let mut ranges = ownership.free().to_vec();
        let mut ids = BTreeSet::new();
        for range in &ranges {
            assert!(!self.platform.is_tainted(*range), "{range:?} is free and not zeroed");
        }
        for (id, cpus, memory) in cells {
            assert!(ids.insert(id));
            for cpu in cpus {
                assert_eq!(ownership.owner(*cpu), Some(CpuOwner::Cell(id)));
                assert!(owned.insert(*cpu), "{cpu} has two owners");
                if !self.kept_back.contains(cpu) {
                    claims.insert(*cpu);
                }
            }
            ranges.extend(&memory);
        }
        for (cpu, owner) in ownership.owners() {
            let guest = matches!(owner, CpuOwner::Cell(cell) if cell != CellId::ROOT);
            assert_eq!(guest, owned.contains(&cpu), "{cpu}");
        }
        assert_eq!(self.platform.claims().collect::<BTreeSet<_>>(), claims);
        assert!(self.platform.cells().all(|id| ids.contains(&id)));
        ranges.sort_unstable();
        let mut joined: Vec<HostRange> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some(last) if last.base.raw() + last.len == range.base.raw() => last.len += range.len,
                _ => joined.push(range),
            }
        }
        assert_eq!(joined, pool(), "memory is lost or has two owners");
    }

    /// The responses that came out of `id` since the last call.
    fn responses(&mut self, id: StreamId) -> Vec<Response> {
        let bytes = self.seen.remove(&id).unwrap_or_default();
        let (mut rest, mut deframer, mut responses) = (&bytes[..], Deframer::default(), Vec::new());
        while !rest.is_empty() {
            let (count, body) = deframer.take(rest).unwrap();
            rest = &rest[count..];
            responses.extend(body.map(|body| frame::decode::<Response>(&body).unwrap()));
        }
        assert!(!deframer.is_amid());
        responses
    }

    fn answer(&mut self, id: StreamId) -> Result<Reply, Failure> {
        self.run();
        let mut responses = self.responses(id);
        assert_eq!(responses.len(), 1);
        responses.remove(0).result()
    }

    fn ask(&mut self, id: StreamId, body: Body) -> Result<Reply, Failure> {
        self.send_request(id, 1, body);
        self.answer(id)
    }

    fn create(&mut self, id: StreamId, spec: CellSpec) -> u32 {
        match self.ask(id, Body::Create { spec }) {
            Ok(Reply::Created { cell }) => cell,
            other => panic!("{other:?}"),
        }
    }

    /// Sends a file, and says what came of it.
    fn load(&mut self, id: StreamId, cell: u32, what: LoadKind, data: &[u8]) -> Result<Reply, Failure> {
        let body = Body::LoadBegin { cell, what, size: data.len() as u64 };
        let Reply::LoadPort { port } = self.ask(id, body)? else { panic!("no port") };
        let bulk = self.open(port);
        self.send(bulk, data);
        let result = self.answer(bulk);
        assert!(!self.node.finished(bulk), "not before the peer has sent all");
        self.node.peer_shutdown(bulk);
        assert!(self.node.finished(bulk));
        self.node.closed(bulk);
        result
    }

    fn running(&mut self, id: StreamId, spec: CellSpec) -> u32 {
        let cell = self.create(id, spec);
        let data = vec![0x5a; 3 * MAX_FRAME];
        assert_eq!(
            self.load(id, cell, LoadKind::KERNEL, &data),
            Ok(Reply::Loaded { bytes: data.len() as u64 })
        );
        assert_eq!(self.ask(id, Body::LoadFinish { cell }), Ok(Reply::Done));
        assert_eq!(self.platform.file(CellId(cell), LoadKind::KERNEL), Some(&data[..]));
        assert_eq!(self.ask(id, Body::Start { cell }), Ok(Reply::Done));
        cell
    }

    fn node_info(&mut self, id: StreamId) -> NodeInfo {
        match self.ask(id, Body::NodeInfo) {
            Ok(Reply::Node(info)) => info,
            other => panic!("{other:?}"),
        }
    }

    fn show(&mut self, id: StreamId, cell: u32) -> CellDetails {
        match self.ask(id, Body::Show { cell }) {
            Ok(Reply::Cell(details)) => details,
            other => panic!("{other:?}"),
        }
    }

    fn text(&mut self, id: StreamId) -> String {
        self.run();
        String::from_utf8(self.seen.remove(&id).unwrap_or_default()).unwrap()
    }
}

#[test]
fn a_cell_from_creation_to_destruction() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let before = bench.node_info(id);
    assert_eq!((before.free_cpus, before.free_memory), (1, 12 * MEMORY_UNIT));
    let cell = bench.running(id, spec("a", &[4, KEPT_BACK.0], 6));
    let info = bench.node_info(id);
    assert_eq!((info.free_cpus, info.free_memory, info.generation), (0, 5 * MEMORY_UNIT, 1));
    // Nor does a cell count that was given up before it was ready.
    let given_up = bench.create(id, spec("b", &[3], 1));
    assert_eq!(bench.ask(id, Body::Destroy { cell: given_up }), Ok(Reply::Done));
    assert_eq!(bench.node_info(id).generation, 1);
    let uses: Vec<_> = info.cpus.iter().map(|cpu| (cpu.state, cpu.cell)).collect();
    assert_eq!(uses[3..], [(CpuUse::ROOT, None), (CpuUse::CELL, Some(cell)), (CpuUse::CELL, Some(cell))]);
    let shown = bench.show(id, cell);
    assert_eq!(shown.summary.state, CellState::RUNNING);
    assert_eq!(shown.vcpus.iter().map(|vcpu| vcpu.cpu).collect::<Vec<_>>(), [4, 5]);

    assert_eq!(shown.files_memory, Some(MEMORY_UNIT));
    assert_eq!(bench.ask(id, Body::Stop { cell }), Ok(Reply::Done));
    assert_eq!(bench.show(id, cell).stopped.as_deref(), Some("stopped by request"));
    assert_eq!(bench.ask(id, Body::Destroy { cell }), Ok(Reply::Done));
    let after = bench.node_info(id);
    assert_eq!(after.generation, 2);
    assert_eq!(NodeInfo { generation: 0, uptime_ns: before.uptime_ns, ..after }, before);
    assert_eq!(bench.ask(id, Body::Show { cell }).unwrap_err().code, ErrorCode::NOT_FOUND);
}

#[test]
fn what_belongs_to_another_cell_is_refused_by_name_and_nothing_changes() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    bench.create(id, spec("a", &[3, 2], 8));
    let before = bench.node_info(id);
    let refused: [(_, _, _, &[&str]); 5] = [
        (spec("b", &[4, 3], 1), ErrorCode::CONFLICT, "cpus", &["has 3", "cell 'a'", "3, 2", "1, 4, 5"]),
        (spec("b", &[9], 1), ErrorCode::INVALID, "cpus", &["has 9", "1 to 5"]),
        (spec("b", &[0], 1), ErrorCode::INVALID, "cpus", &["booted on it"]),
        (spec("a", &[4], 1), ErrorCode::CONFLICT, "name", &["'a'", "cell1"]),
        (spec("b", &[4], 5), ErrorCode::EXHAUSTED, "memory", &["10 MiB", "8 MiB that are free"]),
    ];
    for (spec, code, field, words) in refused {
        let failure = bench.ask(id, Body::Create { spec }).unwrap_err();
        assert_eq!((failure.code, failure.field.as_deref()), (code, Some(field)), "{failure}");
        for word in words {
            assert!(failure.message.contains(word), "{word}: {failure}");
        }
        let info = bench.node_info(id);
        assert_eq!(NodeInfo { uptime_ns: before.uptime_ns, ..info }, before);
    }
}

#[test]
fn a_cpu_that_the_root_cell_keeps_ends_the_creation_after_a_second() {
    let mut bench = Bench::new();
    bench.platform.offline.remove(&2);
    let id = bench.open(MANAGEMENT_PORT);
    let begun_ns = bench.platform.now_ns;
    let failure = bench.ask(id, Body::Create { spec: spec("a", &[3, 2], 1) }).unwrap_err();
    assert_eq!(failure.code, ErrorCode::TIMEOUT);
    assert!(failure.message.contains("has 2") && failure.message.contains("offline"), "{failure}");
    assert!((1_000_000_000..1_100_000_000).contains(&(bench.platform.now_ns - begun_ns)));
    assert_eq!(bench.ask(id, Body::List), Ok(Reply::Cells(Vec::new())));
    // It is in time when it comes within that second.
    bench.send_request(id, 1, Body::Create { spec: spec("a", &[3, 2], 1) });
    for _ in 0..10 {
        assert_ne!(bench.step(), Progress::Idle);
        bench.platform.now_ns += 90_000_000;
    }
    bench.platform.offline.insert(2);
    assert!(matches!(bench.answer(id), Ok(Reply::Created { .. })));
}

#[test]
fn a_cell_dies_with_its_creator_until_it_is_ready() {
    for steps in [0, 1, 5, 60] {
        let mut bench = Bench::new();
        let id = bench.open(MANAGEMENT_PORT);
        bench.send_request(id, 1, Body::Create { spec: spec("a", &[3], 4) });
        for _ in 0..steps {
            bench.step();
        }
        bench.node.closed(id);
        bench.run();
        let id = bench.open(MANAGEMENT_PORT);
        assert_eq!(bench.ask(id, Body::List), Ok(Reply::Cells(Vec::new())), "after {steps} steps");
    }
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let cell = bench.running(id, spec("a", &[3], 4));
    bench.node.closed(id);
    bench.run();
    let id = bench.open(MANAGEMENT_PORT);
    assert_eq!(bench.show(id, cell).summary.state, CellState::RUNNING);
}

#[test]
fn files_that_are_not_right_leave_the_cell_loading() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let cell = bench.create(id, spec("a", &[3], 1));
    let finish = |bench: &mut Bench| bench.ask(id, Body::LoadFinish { cell }).unwrap_err();
    assert!(finish(&mut bench).message.contains("has no kernel"));
    let kernel = LoadKind::KERNEL;
    for (what, size, field) in [(LoadKind(9), 5, "what"), (kernel, 0, "size"), (kernel, 3 << 20, "size")] {
        let failure = bench.ask(id, Body::LoadBegin { cell, what, size }).unwrap_err();
        assert_eq!(failure.field.as_deref(), Some(field), "{failure}");
    }
    // A kernel that is none.
    assert!(bench.load(id, cell, kernel, b"bad kernel").is_ok());
    let failure = finish(&mut bench);
    assert_eq!(failure.code, ErrorCode::BAD_FILE);
    assert!(failure.message.contains("cell 'a': kernel: is none"), "{failure}");
    // One that ends early.
    let Ok(Reply::LoadPort { port }) = bench.ask(id, Body::LoadBegin { cell, what: kernel, size: 9 }) else {
        panic!("no port")
    };
    let bulk = bench.open(port);
    bench.send(bulk, b"12345678");
    bench.run();
    assert!(finish(&mut bench).message.contains("kernel: 8 of 9 bytes"));
    bench.node.peer_shutdown(bulk);
    assert!(bench.answer(bulk).unwrap_err().message.contains("8 of 9"));
    assert!(bench.node.finished(bulk));
    // One for which there is no room in the pool.
    let big = bench.create(id, spec("b", &[4], 10));
    let failure = bench.load(id, big, kernel, b"good").unwrap_err();
    assert_eq!((failure.code, failure.field.as_deref()), (ErrorCode::EXHAUSTED, Some("size")));
    assert!(failure.message.contains("the 0 MiB of the pool that are free"), "{failure}");
    // A port at which nothing is waited for.
    let bulk = bench.connect(port + 100);
    let hello = Body::Hello { abi: ABI_VERSION, token: TOKEN, follow: None };
    assert_eq!(bench.ask(bulk, hello).unwrap_err().code, ErrorCode::NOT_FOUND);
    // Then a good one.
    assert!(bench.load(id, cell, kernel, b"good").is_ok());
    assert_eq!(bench.ask(id, Body::LoadFinish { cell }), Ok(Reply::Done));
}

#[test]
fn a_console_shows_what_was_said_and_takes_what_is_typed() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let cell = bench.running(id, spec("a", &[3], 1));
    let port = bench.show(id, cell).summary.console_port.unwrap();
    let console = bench.attach(port, true);
    assert_eq!(bench.text(console), "hello from the cell\n");
    bench.node.take_consumed(console);
    let typed = "a line longer than the console's FIFO is\n";
    bench.send(console, typed.as_bytes());
    assert_eq!(bench.text(console), typed);
    assert_eq!(bench.node.take_consumed(console), typed.len());

    // Another one sees it all from the beginning, and ends if it does not follow.
    let late = bench.attach(port, false);
    assert_eq!(bench.text(late), std::format!("hello from the cell\n{typed}"));
    assert!(bench.node.finished(late) && !bench.node.finished(console));

    // All of the output comes, however much, and then the cell's end is the console's.
    bench.platform.print(CellId(cell), &"x".repeat(20_000));
    assert_eq!(bench.ask(id, Body::Stop { cell }), Ok(Reply::Done));
    assert_eq!(bench.text(console).len(), 20_000);
    assert!(bench.node.finished(console));

    let other = bench.connect(port + 1);
    let hello = Body::Hello { abi: ABI_VERSION, token: TOKEN, follow: None };
    assert_eq!(bench.ask(other, hello).unwrap_err().code, ErrorCode::NOT_FOUND);
}

#[test]
fn the_log_can_be_read_or_followed() {
    let mut bench = Bench::new();
    let (read, follow) = (bench.attach(LOG_PORT, false), bench.attach(LOG_PORT, true));
    for id in [read, follow] {
        assert_eq!(bench.text(id), "booted\n");
    }
    assert!(bench.node.finished(read) && !bench.node.finished(follow));
    bench.platform.log.extend(b"more\n");
    assert_eq!(bench.text(follow), "more\n");
}

#[test]
fn a_failed_cell_says_why() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let cell = bench.running(id, spec("a", &[3], 1));
    bench.platform.end_cell(CellId(cell), Ending::Failed);
    let shown = bench.show(id, cell);
    assert_eq!(shown.summary.state, CellState::FAILED);
    assert_eq!(shown.failure.unwrap().reason, "triple fault");
    assert_eq!(bench.ask(id, Body::Destroy { cell }), Ok(Reply::Done));
}

#[test]
fn requests_wait_for_the_one_before_on_their_connection_alone() {
    let mut bench = Bench::new();
    let (a, b) = (bench.open(MANAGEMENT_PORT), bench.open(MANAGEMENT_PORT));
    bench.platform.offline.remove(&3);
    bench.send_request(a, 7, Body::Create { spec: spec("a", &[3], 4) });
    bench.send_request(a, 8, Body::List);
    bench.step();
    bench.send_request(b, 9, Body::List);
    bench.step();
    assert!(bench.responses(a).is_empty());
    let listed = bench.responses(b).remove(0).result();
    assert!(matches!(listed, Ok(Reply::Cells(c)) if c[0].state == CellState::CREATING));
    bench.platform.offline.insert(3);
    bench.run();
    let ids: Vec<_> = bench.responses(a).iter().map(Response::id).collect();
    assert_eq!(ids, [7, 8]);
}

#[test]
fn without_heap_nothing_new_is_begun_but_cells_can_go() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let cell = bench.create(id, spec("a", &[3], 1));
    bench.platform.heap.used = bench.platform.heap.total;
    let failure = bench.ask(id, Body::Create { spec: spec("b", &[4], 1) }).unwrap_err();
    assert_eq!(failure.code, ErrorCode::EXHAUSTED);
    let failure = bench.ask(id, Body::LoadBegin { cell, what: LoadKind::KERNEL, size: 1 }).unwrap_err();
    assert_eq!(failure.code, ErrorCode::EXHAUSTED);
    assert_eq!(bench.ask(id, Body::Destroy { cell }), Ok(Reply::Done));
}

#[test]
fn a_cell_is_refused_whose_heap_is_promised_to_others() {
    let mut bench = Bench::new();
    let (a, b) = (bench.open(MANAGEMENT_PORT), bench.open(MANAGEMENT_PORT));
    let total = bench.platform.heap.total;
    let create = |name: &str, cpus: &[u32]| Body::Create { spec: spec(name, cpus, 1) };
    bench.platform.heap.used = total - HEAP_RESERVE - cell_heap(1) + 1;
    let before = bench.node_info(a);
    assert_eq!(bench.ask(a, create("a", &[3])).unwrap_err().code, ErrorCode::EXHAUSTED);
    assert_eq!(bench.node_info(a), before);
    // There is enough for one, and not for two as long as the first is being made.
    bench.platform.heap.used -= 1;
    bench.platform.offline.remove(&3);
    bench.send_request(a, 1, create("a", &[3]));
    bench.step();
    bench.send_request(b, 1, create("b", &[4]));
    bench.step();
    assert_eq!(bench.responses(b).remove(0).result().unwrap_err().code, ErrorCode::EXHAUSTED);
    bench.platform.offline.insert(3);
    assert!(matches!(bench.answer(a), Ok(Reply::Created { .. })));
    // What the first took is in use now.
    bench.platform.heap.used += cell_heap(1);
    assert_eq!(bench.ask(b, create("b", &[4])).unwrap_err().code, ErrorCode::EXHAUSTED);
}

#[test]
fn connections_hold_no_more_than_is_kept_for_them() {
    let window = usize::try_from(WINDOW).unwrap();
    // The rest is for one frame that is collected and what is in it.
    let most = CONNECTION_HEAP - 2 * MAX_FRAME as u64;
    // A frame that waits for its end; requests that wait for the one before; a file that nobody
    // takes. Each as much as the window lets through.
    let unfinished = [&u32::try_from(MAX_FRAME).unwrap().to_le_bytes()[..], &vec![0; MAX_FRAME - 1]].concat();
    let show = frame::encode(&Request { id: 1, body: Some(Body::Show { cell: 99 }) }).unwrap();
    for data in [unfinished, show.repeat(window / show.len())] {
        for (port, piece) in [(MANAGEMENT_PORT, 4096), (MANAGEMENT_PORT, 1000), (LOG_PORT, 4096)] {
            let mut bench = Bench::new();
            let id = if port == LOG_PORT { bench.attach(port, true) } else { bench.open(port) };
            for part in data.chunks(piece) {
                bench.send(id, part);
                assert!(bench.node.connections[0].capacity() <= most);
            }
            for _ in 0..3 {
                // Without a reader.
                let _ = bench.node.work(&mut bench.platform);
                assert!(bench.node.connections[0].capacity() <= most);
            }
        }
    }
}

#[test]
fn what_could_be_made_is_told_and_nothing_is_taken() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    bench.create(id, spec("a", &[3, 2], 8));
    // Whether the CPUs are offline does not matter yet.
    bench.platform.offline.clear();
    let before = bench.node_info(id);
    assert_eq!(bench.ask(id, Body::Check { spec: spec("b", &[4, KEPT_BACK.0], 4) }), Ok(Reply::Done));
    for (spec, code) in [
        (spec("b", &[4, 3], 1), ErrorCode::CONFLICT),
        (spec("b", &[9], 1), ErrorCode::INVALID),
        (spec("B", &[4], 1), ErrorCode::INVALID),
        (spec("a", &[4], 1), ErrorCode::CONFLICT),
        (spec("b", &[4], 5), ErrorCode::EXHAUSTED),
    ] {
        let failure = bench.ask(id, Body::Check { spec: spec.clone() }).unwrap_err();
        assert_eq!(failure.code, code, "{failure}");
        // It is what creation says.
        assert_eq!(bench.ask(id, Body::Create { spec }).unwrap_err(), failure);
    }
    let info = bench.node_info(id);
    assert_eq!(NodeInfo { uptime_ns: before.uptime_ns, ..info }, before);
}

// Hostile peers.

#[test]
fn only_privileged_ports_and_known_services_are_connected_and_not_too_many() {
    let mut bench = Bench::new();
    let refused = [(MANAGEMENT_PORT, 1024), (0, 1), (3, 1), (CONSOLE_PORTS - 1, 1)];
    for (port, source) in refused {
        assert!(!bench.node.connect(StreamId(99), port, source), "{port} from {source}");
    }
    for _ in 0..MAX_CONNECTIONS {
        bench.connect(LOG_PORT);
    }
    assert!(!bench.node.connect(StreamId(99), LOG_PORT, 1));
    // Those that do not open themselves make room again.
    bench.platform.now_ns += 1;
    bench.step();
    bench.platform.now_ns += HELLO_TIMEOUT_NS + 1;
    bench.step();
    assert!(bench.node.finished(StreamId(1)));
}

#[test]
fn without_hello_version_and_token_nothing_is_answered_but_an_error() {
    let hello = |abi, token| Body::Hello { abi, token: Token::new(token), follow: None };
    let mut near = [7; TOKEN_SIZE];
    near[31] = 6;
    let refused = [
        (hello(ABI_VERSION + 1, [7; TOKEN_SIZE]), ErrorCode::VERSION, "abi is 3"),
        (hello(ABI_VERSION, near), ErrorCode::AUTHORITY, "token"),
        (Body::NodeInfo, ErrorCode::AUTHORITY, "hello first"),
        (Body::Create { spec: spec("a", &[1], 1) }, ErrorCode::AUTHORITY, "hello first"),
        (Body::Destroy { cell: 1 }, ErrorCode::AUTHORITY, "hello first"),
    ];
    for port in [MANAGEMENT_PORT, LOG_PORT, CONSOLE_PORTS + 1, BULK_PORTS] {
        for (body, code, word) in &refused {
            let mut bench = Bench::new();
            let id = bench.connect(port);
            let failure = bench.ask(id, body.clone()).unwrap_err();
            assert_eq!(failure.code, *code);
            assert!(failure.message.contains(word), "{failure}");
            assert!(bench.node.finished(id));
            assert_eq!(bench.node.receive(id, b"more"), 4, "dropped");
        }
    }
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    assert_eq!(bench.ask(id, hello(ABI_VERSION, [7; TOKEN_SIZE])).unwrap_err().code, ErrorCode::INVALID);
}

#[test]
fn bytes_that_are_no_request_end_the_connection_with_an_error() {
    let good = frame::encode(&Request { id: 1, body: Some(Body::Show { cell: 1 }) }).unwrap();
    let with_body = |body: &[u8]| {
        let len = u32::try_from(body.len()).unwrap();
        [&len.to_le_bytes(), body].concat()
    };
    let mut hostile = vec![
        vec![0, 0, 0, 0],
        vec![1, 0, 1, 0],
        vec![0xff; 4],
        with_body(&[0x82, 0x61, b'x', 0xf6]),
        with_body(&[0xff; 9]),
    ];
    // A request cut short at each byte, with a length that fits.
    hostile.extend((5..good.len()).map(|end| with_body(&good[4..end])));
    for bytes in hostile {
        let mut bench = Bench::new();
        let id = bench.open(MANAGEMENT_PORT);
        bench.send(id, &bytes);
        assert_eq!(bench.answer(id).unwrap_err().code, ErrorCode::MALFORMED, "{bytes:x?}");
        assert!(bench.node.finished(id));
    }
    // A frame that never ends is no error, but the end of the stream ends it.
    for end in 0..good.len() {
        let mut bench = Bench::new();
        let id = bench.open(MANAGEMENT_PORT);
        bench.send(id, &good[..end]);
        bench.run();
        assert!(bench.responses(id).is_empty() && !bench.node.finished(id));
        bench.node.peer_shutdown(id);
        bench.run();
        assert!(bench.node.finished(id));
    }
    // An unknown request is answered, and the next one as well.
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    bench.send(id, &with_body(&[0x82, 0x07, 0x82, 0x18, 99, 0x80]));
    assert_eq!(bench.answer(id).unwrap_err().code, ErrorCode::UNKNOWN_REQUEST);
    assert_eq!(bench.ask(id, Body::List), Ok(Reply::Cells(Vec::new())));
}
