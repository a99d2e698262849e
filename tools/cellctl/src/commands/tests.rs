//! Commands against a fake node: the hypervisor's own management, without hardware.

use super::*;
use crate::cpus::tests::{fake_cpus, offline};
use crate::exit::Exit;
use crate::fake_node::{CPUS, FakeNode, TOKEN};
use bulkhead_abi::message::{CellState, LoadKind};
use bulkhead_cell_file::fake::kernel;
use bulkhead_vmm::hal::CellId;
use bulkhead_vmm::manage::platform::Ending;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

struct Bench {
    dir: TempDir,
    node: FakeNode,
    /// What the root cell's CPUs are switched by.
    cpus: PathBuf,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("cpu")).unwrap();
        fake_cpus(&dir.path().join("cpu"), CPUS);
        fs::write(dir.path().join("vmlinuz"), kernel()).unwrap();
        fs::write(dir.path().join("initrd"), [1; 70_000]).unwrap();
        let cpus = dir.path().join("cpu");
        let node = FakeNode::start(&cpus);
        Self { dir, node, cpus }
    }

    fn file(&self, name: &str, cpus: &str, memory: &str) -> PathBuf {
        let path = self.dir.path().join(format!("{name}.cell.toml"));
        let boot = "[boot]\nkernel = \"vmlinuz\"\ninitrd = \"initrd\"";
        let text = format!("name = \"{name}\"\ncpus = {cpus}\nmemory = \"{memory}\"\n{boot}\n");
        fs::write(&path, text).unwrap();
        path
    }

    fn offline(&self) -> Vec<u32> {
        offline(&self.dir.path().join("cpu"), CPUS)
    }

    fn run(&self, command: Command, json: bool) -> Result<String, Error> {
        self.run_until(command, json, &Interrupt::never())
    }

    fn run_until(&self, command: Command, json: bool, interrupt: &Interrupt) -> Result<String, Error> {
        self.carry_out(command, json, interrupt).map(|(_, text)| text)
    }

    /// The exit code and what was printed.
    fn carry_out(&self, command: Command, json: bool, interrupt: &Interrupt) -> Result<(u8, String), Error> {
        let mut client = Client::open(self.node.clone(), TOKEN)?;
        let input = fs::File::open("/dev/null").unwrap();
        let mut out = Terminal { json, input, to: Vec::new() };
        let code = carry_out(command, &mut client, &Hotplug::at(&self.cpus), interrupt, &mut out)?;
        Ok((code, String::from_utf8(out.to).unwrap()))
    }

    fn code(&self, command: Command) -> Result<u8, Error> {
        self.carry_out(command, false, &Interrupt::never()).map(|(code, _)| code)
    }

    /// Has the cell with this number end as soon as it runs.
    fn end_soon(&self, cell: u32, ending: Ending) -> std::thread::JoinHandle<()> {
        let node = self.node.clone();
        std::thread::spawn(move || {
            let mut client = Client::open(node.clone(), TOKEN).unwrap();
            while !client.list().unwrap().iter().any(|c| c.cell == cell && c.state == CellState::RUNNING) {}
            node.platform(|platform| platform.end_cell(CellId(cell), ending));
        })
    }

    fn json(&self, command: Command) -> Value {
        serde_json::from_str(&self.run(command, true).unwrap()).unwrap()
    }

    /// The node, without what changes by itself.
    fn node(&self) -> Value {
        let mut node = self.json(Command::Node);
        node["uptime_ns"].take();
        node
    }

    fn fails(&self, command: Command, exit: Exit, words: &[&str]) {
        let error = self.run(command, false).unwrap_err();
        assert_eq!(error.exit, exit, "{error}");
        for word in words {
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
    }
}

fn web() -> String {
    "web".into()
}

#[test]
fn a_cell_is_made_run_and_destroyed() {
    let bench = Bench::new();
    let before = bench.node();
    let file = bench.file("web", "2", "16M");
    assert!(bench.run(Command::Check { file: file.clone() }, false).unwrap().ends_with(": ok\n"));
    assert_eq!(
        bench.run(Command::Create { file }, false).unwrap(),
        "cell 'web' is ready: CPUs 2, 3, 16 MiB\n"
    );
    assert_eq!(bench.offline(), [2, 3]);
    let cell = CellId(1);
    bench.node.platform(|p| assert_eq!(p.file(cell, LoadKind::KERNEL), Some(&kernel()[..])));
    bench.node.platform(|p| assert_eq!(p.file(cell, LoadKind::INITRD), Some(&[1; 70_000][..])));
    assert_eq!(bench.json(Command::List)[0]["state"], "ready");
    bench.run(Command::Start { cell: web() }, false).unwrap();
    bench.fails(Command::Start { cell: web() }, Exit::Conflict, &["'web' is running", "ready"]);
    let shown = bench.json(Command::Show { cell: web() });
    assert_eq!(shown["vcpus"][1]["exits"]["hlt"]["count"], 5);
    bench.run(Command::Stop { cell: web(), timeout: Duration::ZERO, force: true }, false).unwrap();
    assert!(bench.run(Command::Show { cell: web() }, false).unwrap().contains("by request"));
    bench.run(Command::Destroy { cell: web() }, false).unwrap();
    assert_eq!(bench.offline(), [0; 0]);
    let mut after = bench.node();
    assert_eq!(after["generation"], 2);
    after["generation"] = before["generation"].clone();
    assert_eq!(after, before);
}

#[test]
fn destroy_turns_off_first_and_leaves_other_cells_alone() {
    let bench = Bench::new();
    for (name, cpus) in [("web", "[3]"), ("db", "[1]")] {
        bench.run(Command::Create { file: bench.file(name, cpus, "8M") }, false).unwrap();
    }
    bench.run(Command::Start { cell: web() }, false).unwrap();
    bench.run(Command::Destroy { cell: web() }, false).unwrap();
    assert_eq!(bench.offline(), [1]);
    bench.fails(Command::Start { cell: web() }, Exit::NotFound, &["'web'", "db"]);
}

#[test]
fn a_cell_is_paused_resumed_and_waited_for() {
    let bench = Bench::new();
    let file = bench.file("web", "[3]", "8M");
    bench.run(Command::Create { file }, false).unwrap();
    bench.run(Command::Start { cell: web() }, false).unwrap();
    bench.run(Command::Pause { cell: web() }, false).unwrap();
    let wait = |state, ms| Command::Wait { cell: web(), state, timeout: Some(Duration::from_millis(ms)) };
    assert_eq!(bench.code(wait(Some(CellState::PAUSED), 10_000)).unwrap(), 0);
    bench.fails(wait(None, 20), Exit::Timeout, &["'web' is not off in time"]);
    bench.run(Command::Resume { cell: web() }, false).unwrap();
    bench.node.platform(|platform| platform.end_cell(CellId(1), Ending::Exit(0x1_0203)));
    assert_eq!(bench.code(wait(None, 10_000)).unwrap(), 3);
    assert_eq!(bench.json(Command::Show { cell: web() })["exit_code"], 0x1_0203);
}

#[test]
fn stop_presses_the_button_and_says_when_nobody_heeds_it() {
    let bench = Bench::new();
    let file = bench.file("web", "[3]", "8M");
    bench.run(Command::Create { file }, false).unwrap();
    bench.run(Command::Start { cell: web() }, false).unwrap();
    let stop = |ms, force| Command::Stop { cell: web(), timeout: Duration::from_millis(ms), force };
    bench.fails(stop(20, false), Exit::Timeout, &["within 20ms", "stop --force"]);
    assert_eq!(bench.node.platform(|platform| platform.presses(CellId(1))), 1);
    bench.node.platform(|platform| platform.heed_button(CellId(1)));
    bench.run(stop(10_000, false), false).unwrap();
    assert_eq!(bench.json(Command::Show { cell: web() })["stopped"], "the guest turned itself off");
    bench.run(Command::Start { cell: web() }, false).unwrap();
    bench.run(stop(0, true), false).unwrap();
    bench.fails(stop(0, true), Exit::Conflict, &["'web' is stopped; stop --force needs: running"]);
}

#[test]
fn run_ends_as_its_guest_does_and_leaves_only_what_has_failed() {
    let bench = Bench::new();
    let before = bench.node();
    let run = |keep| Command::Run { file: bench.file("web", "[3]", "8M"), keep };
    let ender = bench.end_soon(1, Ending::Exit(0x2a));
    let (code, shown) = bench.carry_out(run(false), false, &Interrupt::never()).unwrap();
    ender.join().unwrap();
    assert_eq!((code, shown.as_str()), (0x2a, "hello from the cell\n"));
    let mut after = bench.node();
    after["generation"] = before["generation"].clone();
    assert_eq!(after, before);

    let ender = bench.end_soon(2, Ending::PowerOff);
    assert_eq!(bench.code(run(true)).unwrap(), 0);
    ender.join().unwrap();
    assert_eq!(bench.json(Command::List)[0]["state"], "stopped");
    bench.run(Command::Destroy { cell: web() }, false).unwrap();

    let ender = bench.end_soon(3, Ending::Failed);
    bench.fails(run(false), Exit::Failed, &["'web' has failed: triple fault"]);
    ender.join().unwrap();
    assert_eq!(bench.json(Command::List)[0]["state"], "failed");
}

#[test]
fn reload_takes_the_files_again_or_others() {
    let bench = Bench::new();
    let file = bench.file("web", "1", "8M");
    bench.run(Command::Create { file: file.clone() }, false).unwrap();
    bench.run(Command::Start { cell: web() }, false).unwrap();
    let reload = |file: Option<&PathBuf>| Command::Reload { cell: web(), file: file.cloned() };
    bench.fails(reload(None), Exit::Conflict, &["'web' is running; reload needs: stopped, failed"]);
    bench.node.platform(|platform| platform.end_cell(CellId(1), Ending::Failed));
    fs::write(bench.dir.path().join("initrd"), [2; 300]).unwrap();
    bench.run(reload(None), false).unwrap();
    bench.node.platform(|p| assert_eq!(p.file(CellId(1), LoadKind::INITRD), Some(&[2; 300][..])));
    assert_eq!(bench.json(Command::List)[0]["state"], "ready");

    bench.run(Command::Start { cell: web() }, false).unwrap();
    bench.node.platform(|platform| platform.end_cell(CellId(1), Ending::PowerOff));
    let other = bench.dir.path().join("other.cell.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&other, text.replace("initrd = \"initrd\"", "cmdline = \"other\"")).unwrap();
    bench.run(reload(Some(&other)), false).unwrap();
    bench.node.platform(|p| assert_eq!(p.file(CellId(1), LoadKind::INITRD), None));
    assert_eq!(bench.json(Command::Show { cell: web() })["cmdline"], "other");
    fs::write(&other, text.replace("8M", "16M")).unwrap();
    bench.fails(reload(Some(&other)), Exit::BadFile, &["must be those of cell 'web' (3, 8 MiB)"]);
}

#[test]
fn what_cannot_be_created_changes_nothing() {
    let mut bench = Bench::new();
    bench.run(Command::Create { file: bench.file("db", "[3]", "8M") }, false).unwrap();
    let before = bench.node();
    // Where a switch of a CPU would be another error.
    bench.cpus = "/nowhere".into();
    let create =
        |name: &str, cpus: &str, memory: &str| Command::Create { file: bench.file(name, cpus, memory) };
    bench.fails(create("web", "[2, 3]", "8M"), Exit::Conflict, &["has 3", "cell 'db'"]);
    bench.fails(create("web", "[2, 9]", "8M"), Exit::Conflict, &["has 9", "1 to 3"]);
    bench.fails(create("web", "3", "8M"), Exit::Conflict, &["cpus is 3", "up to 2"]);
    bench.fails(create("web", "1", "64M"), Exit::Conflict, &["memory is 64 MiB", "52 MiB that are free"]);
    bench.fails(create("web", "1", "52M"), Exit::Conflict, &["files take 4 MiB", "up to 48 MiB"]);
    bench.fails(create("db", "1", "8M"), Exit::Conflict, &["name 'db'"]);
    bench.fails(create("web", "0", "8M"), Exit::BadFile, &["web.cell.toml:2: cpus is 0"]);
    bench.node.platform(|platform| platform.heap.used = platform.heap.total - (1 << 20));
    bench.fails(create("web", "1", "8M"), Exit::Conflict, &["heap has 1048576 of "]);
    bench.node.platform(|platform| platform.heap.used = 0);
    assert_eq!(bench.node(), before);
    assert_eq!(bench.offline(), [3]);
}

#[test]
fn a_failure_at_any_call_is_put_back() {
    let bench = Bench::new();
    let before = bench.node();
    let create = || Command::Create { file: bench.file("web", "[2, 1]", "8M") };
    let mut calls = 0;
    loop {
        bench.node.platform(|platform| platform.fail_after = Some(calls));
        let result = bench.run(create(), false);
        if bench.node.platform(|platform| platform.fail_after.take()).is_some() {
            result.unwrap();
            break;
        }
        let error = result.unwrap_err();
        assert!(error.to_string().contains("told to fail"), "after {calls} calls: {error}");
        assert_eq!(bench.offline(), [0; 0], "after {calls} calls");
        assert_eq!(bench.node(), before, "after {calls} calls");
        calls += 1;
    }
    // Claims of two CPUs, the making, the plan and two slices of filling.
    assert!(calls >= 6, "{calls}");
}

#[test]
fn a_signal_at_any_time_is_put_back_or_comes_too_late() {
    let bench = Bench::new();
    let before = bench.node();
    let mut looks = 1;
    loop {
        let create = Command::Create { file: bench.file("web", "[2, 1]", "8M") };
        let Err(error) = bench.run_until(create, false, &Interrupt::after(looks)) else { break };
        assert_eq!(error.exit, Exit::Interrupted, "at look {looks}: {error}");
        assert_eq!(error.to_string(), "interrupted");
        assert_eq!(bench.offline(), [0; 0], "at look {looks}");
        assert_eq!(bench.node(), before, "at look {looks}");
        looks += 1;
    }
    // Before each CPU, the request, each piece of the files, the end.
    assert!(looks >= 7, "{looks}");
    assert_eq!(bench.json(Command::List)[0]["state"], "ready");
    // Destruction is not put back, but done.
    let destroy = Command::Destroy { cell: web() };
    bench.run_until(destroy, false, &Interrupt::after(1)).unwrap();
    assert_eq!(bench.offline(), [0; 0]);
}

#[test]
fn a_wrong_token_is_told() {
    let bench = Bench::new();
    let other = bulkhead_abi::message::Token::new([0; 32]);
    let error = Client::open(bench.node.clone(), other).err().unwrap();
    assert_eq!(error.exit, Exit::NoNode);
    assert!(error.to_string().contains("token"), "{error}");
}

#[test]
fn the_log_is_printed() {
    let bench = Bench::new();
    assert_eq!(bench.run(Command::Log { follow: false }, false).unwrap(), "booted\n");
}

#[test]
fn a_console_is_reached_by_its_cells_name() {
    let bench = Bench::new();
    bench.run(Command::Create { file: bench.file("web", "1", "8M") }, false).unwrap();
    bench.run(Command::Start { cell: web() }, false).unwrap();
    let console = |until: &str, timeout| {
        Command::Console(crate::cli::ConsoleArgs {
            cell: web(),
            until: Some(until.into()),
            timeout: Some(std::time::Duration::from_millis(timeout)),
        })
    };
    let shown = bench.run(console("from the cell", 10_000), false).unwrap();
    assert!(shown.starts_with("hello from the cell"), "{shown}");
    bench.fails(console("goodbye", 50), Exit::Timeout, &["'web'", "goodbye"]);
}
