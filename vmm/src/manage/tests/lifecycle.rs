//! The life of a cell as its users see it: each command in each state, what guests do by
//! themselves, and the turning off of the machine.

use super::*;
use bulkhead_abi::message::{Action, CRASH_WINDOW_NS, MAX_CRASHES};

/// The commands.
const COMMANDS: [&str; 8] = ["start", "pause", "resume", "stop", "stop --force", "reload", "destroy", "load"];

fn body(command: &str, cell: u32) -> Body {
    match command {
        "start" => Body::Start { cell },
        "pause" => Body::Pause { cell },
        "resume" => Body::Resume { cell },
        "stop" => Body::PressPower { cell },
        "stop --force" => Body::Stop { cell },
        "reload" => Body::Reload { cell, cmdline: "new".into() },
        "destroy" => Body::Destroy { cell },
        "load" => Body::LoadBegin { cell, what: LoadKind::KERNEL, size: 5 },
        other => panic!("{other}"),
    }
}

/// A node with a cell in this state.
fn in_state(state: CellState) -> (Bench, StreamId, u32) {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let cell = bench.create(id, spec("a", &[3], 2));
    if state == CellState::LOADING {
        return (bench, id, cell);
    }
    bench.load(id, cell, LoadKind::KERNEL, b"kernel").unwrap();
    bench.ask(id, Body::LoadFinish { cell }).unwrap();
    if state == CellState::READY {
        return (bench, id, cell);
    }
    bench.ask(id, Body::Start { cell }).unwrap();
    match state {
        CellState::RUNNING => {}
        CellState::PAUSED => drop(bench.ask(id, Body::Pause { cell }).unwrap()),
        CellState::STOPPED => drop(bench.ask(id, Body::Stop { cell }).unwrap()),
        CellState::FAILED => {
            bench.platform.end_cell(CellId(cell), Ending::Failed);
            bench.run();
        }
        CellState::RESTARTING => {
            bench.platform.end_cell(CellId(cell), Ending::Reset);
            bench.step();
        }
        other => panic!("{other}"),
    }
    assert_eq!(bench.show(id, cell).summary.state, state);
    (bench, id, cell)
}

/// Where each command leads from each state that a cell stays in, when all is done: the table in
/// the book tells the next state, this one the last.
const TABLE: [(CellState, [Option<CellState>; COMMANDS.len()]); 7] = {
    use CellState as S;
    const NO: Option<CellState> = None;
    const GONE: Option<CellState> = Some(S::DESTROYING);
    [
        //               start             pause            resume            stop             --force           reload            destroy load
        (S::LOADING, [NO, NO, NO, NO, NO, NO, GONE, Some(S::LOADING)]),
        (S::READY, [Some(S::RUNNING), NO, NO, NO, NO, NO, GONE, NO]),
        (S::RUNNING, [NO, Some(S::PAUSED), NO, Some(S::RUNNING), Some(S::STOPPED), NO, GONE, NO]),
        (S::PAUSED, [NO, NO, Some(S::RUNNING), NO, Some(S::STOPPED), NO, GONE, NO]),
        (S::STOPPED, [Some(S::RUNNING), NO, NO, NO, NO, Some(S::LOADING), GONE, NO]),
        (S::FAILED, [NO, NO, NO, NO, NO, Some(S::LOADING), GONE, NO]),
        (S::RESTARTING, [NO, NO, NO, NO, Some(S::STOPPED), NO, GONE, NO]),
    ]
};

#[test]
fn each_command_in_each_state() {
    for (state, row) in TABLE {
        for (command, expected) in COMMANDS.into_iter().zip(row) {
            let (mut bench, id, cell) = in_state(state);
            let before = bench.node_info(id);
            // Asking took some work, which may have brought a restarting cell on its way.
            if bench.show(id, cell).summary.state != state {
                assert_eq!(state, CellState::RESTARTING);
                bench.platform.end_cell(CellId(cell), Ending::Reset);
            }
            bench.send_request(id, 1, body(command, cell));
            let result = bench.answer(id);
            let now = bench.ask(id, Body::Show { cell });
            match (expected, result) {
                (Some(CellState::DESTROYING), result) => {
                    assert_eq!(result, Ok(Reply::Done), "{command} when {state}");
                    assert_eq!(now.unwrap_err().code, ErrorCode::NOT_FOUND, "{command} when {state}");
                }
                (Some(expected), result) => {
                    assert!(result.is_ok(), "{command} when {state}: {result:?}");
                    let Ok(Reply::Cell(now)) = now else { panic!("{now:?}") };
                    assert_eq!(now.summary.state, expected, "{command} when {state}");
                }
                (None, Ok(reply)) => panic!("{command} when {state}: {reply:?}"),
                (None, Err(failure)) => {
                    assert_eq!(failure.code, ErrorCode::STATE, "{command} when {state}: {failure}");
                    let words = [std::format!("cell 'a' is {state}"), std::format!("{command} needs: ")];
                    assert!(words.iter().all(|word| failure.message.contains(word)), "{failure}");
                    if state != CellState::RESTARTING {
                        let Ok(Reply::Cell(now)) = now else { panic!("{now:?}") };
                        assert_eq!(now.summary.state, state, "{command} when {state}");
                        let after = bench.node_info(id);
                        assert_eq!(NodeInfo { uptime_ns: before.uptime_ns, ..after }, before);
                    }
                }
            }
        }
    }
}

#[test]
fn a_cell_begins_anew_from_the_files_that_it_was_loaded_with() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let cell = bench.running(id, spec("a", &[3], 2));
    let port = bench.show(id, cell).summary.console_port.unwrap();
    let console = bench.attach(port, true);
    bench.platform.end_cell(CellId(cell), Ending::Reset);
    bench.run();
    assert_eq!(bench.show(id, cell).summary.state, CellState::RUNNING);
    assert_eq!(bench.text(console).matches("hello").count(), 2, "one console, both lives");
    assert!(!bench.node.finished(console));

    assert_eq!(bench.ask(id, Body::Stop { cell }), Ok(Reply::Done));
    assert_eq!(bench.ask(id, Body::Start { cell }), Ok(Reply::Done));
    let shown = bench.show(id, cell);
    assert_eq!((shown.summary.state, shown.restarts), (CellState::RUNNING, Some(2)));
    assert_eq!(shown.stopped, None, "it is not");
}

#[test]
fn what_a_guest_does_to_itself_ends_as_its_file_says() {
    let on =
        |reboot, crash| CellSpec { on_reboot: Some(reboot), on_crash: Some(crash), ..spec("a", &[3], 1) };
    let (stop, restart) = (Action::STOP, Action::RESTART);
    let stopped = |why: &str| (CellState::STOPPED, Some(String::from(why)));
    let failed = (CellState::FAILED, Some(String::from("triple fault")));
    let running = (CellState::RUNNING, None);
    for (ending, spec, expected) in [
        (Ending::PowerOff, on(restart, restart), stopped("the guest turned itself off")),
        (Ending::Exit(300), on(restart, restart), stopped("the guest wrote 300 to its exit port")),
        (Ending::Reset, on(stop, restart), stopped("the guest asked for a reset")),
        (Ending::Reset, on(restart, stop), running.clone()),
        (Ending::Failed, on(restart, stop), failed),
        (Ending::Failed, on(stop, restart), running),
    ] {
        let mut bench = Bench::new();
        let id = bench.open(MANAGEMENT_PORT);
        let cell = bench.running(id, spec);
        bench.platform.end_cell(CellId(cell), ending.clone());
        bench.run();
        let shown = bench.show(id, cell);
        assert_eq!((shown.summary.state, shown.stopped), expected, "{ending:?}");
        assert_eq!(shown.exit_code, matches!(ending, Ending::Exit(_)).then_some(300));
    }
}

#[test]
fn a_cell_that_fails_all_the_time_is_left_alone() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let spec = CellSpec { on_crash: Some(Action::RESTART), ..spec("a", &[3], 1) };
    let cell = bench.running(id, spec);
    let fail = |bench: &mut Bench| {
        bench.platform.end_cell(CellId(cell), Ending::Failed);
        bench.run();
        bench.show(id, cell).summary.state
    };
    for _ in 0..MAX_CRASHES {
        assert_eq!(fail(&mut bench), CellState::RUNNING);
    }
    bench.platform.now_ns += CRASH_WINDOW_NS;
    for _ in 0..MAX_CRASHES {
        assert_eq!(fail(&mut bench), CellState::RUNNING, "a minute later it may again");
    }
    assert_eq!(fail(&mut bench), CellState::FAILED);
    let id = bench.open(MANAGEMENT_PORT);
    assert_eq!(bench.show(id, cell).failure.unwrap().reason, "triple fault");
}

#[test]
fn other_files_may_be_given_to_a_cell_that_is_off() {
    let (mut bench, id, cell) = in_state(CellState::FAILED);
    let free = bench.node_info(id).free_memory;
    assert_eq!(bench.ask(id, Body::Reload { cell, cmdline: "new".into() }), Ok(Reply::Done));
    assert!(bench.load(id, cell, LoadKind::KERNEL, b"another").is_ok());
    assert_eq!(bench.ask(id, Body::LoadFinish { cell }), Ok(Reply::Done));
    let shown = bench.show(id, cell);
    assert_eq!((shown.summary.state, shown.failure, shown.cmdline.as_str()), (CellState::READY, None, "new"));
    assert_eq!(bench.platform.file(CellId(cell), LoadKind::KERNEL), Some(&b"another"[..]));
    assert_eq!(bench.platform.cmdline(CellId(cell)), Some("new"));
    assert_eq!(bench.node_info(id).free_memory, free, "the memory of the old file is used again");
}

#[test]
fn a_reload_that_is_given_up_leaves_the_cell_stopped() {
    for files in 0..3 {
        let (mut bench, id, cell) = in_state(CellState::STOPPED);
        let other = bench.open(MANAGEMENT_PORT);
        bench.ask(other, Body::Reload { cell, cmdline: String::new() }).unwrap();
        if files > 0 {
            bench.load(other, cell, LoadKind::KERNEL, b"another").unwrap();
        }
        if files > 1 {
            bench.send_request(other, 1, Body::LoadFinish { cell });
            bench.step();
        }
        bench.node.closed(other);
        bench.run();
        let shown = bench.show(id, cell);
        assert_eq!(shown.summary.state, CellState::STOPPED);
        assert_eq!(shown.stopped.as_deref(), Some("its reloading was given up"));
        let started = bench.ask(id, Body::Start { cell });
        match files {
            0 => assert!(started.unwrap_err().message.contains("not all of its files; reload it")),
            _ => assert_eq!(started, Ok(Reply::Done)),
        }
    }
}

#[test]
fn who_waits_for_a_state_is_told_when_it_is_there() {
    let (mut bench, id, cell) = in_state(CellState::RUNNING);
    let waiter = bench.open(MANAGEMENT_PORT);
    let wait = |states: &[CellState]| Body::Wait { cell, states: states.to_vec() };
    bench.send_request(waiter, 5, wait(&[CellState::STOPPED, CellState::FAILED]));
    bench.run();
    assert!(bench.responses(waiter).is_empty());
    bench.platform.end_cell(CellId(cell), Ending::Exit(7));
    bench.run();
    let told = bench.responses(waiter).remove(0).result();
    assert!(matches!(told, Ok(Reply::Cell(cell)) if cell.exit_code == Some(7)));
    // At once, when it is there already; and an error when the cell goes.
    assert!(matches!(bench.ask(waiter, wait(&[CellState::STOPPED])), Ok(Reply::Cell(_))));
    assert_eq!(bench.ask(waiter, wait(&[])).unwrap_err().field.as_deref(), Some("states"));
    bench.send_request(waiter, 6, wait(&[CellState::RUNNING]));
    bench.ask(id, Body::Destroy { cell }).unwrap();
    assert_eq!(bench.answer(waiter).unwrap_err().code, ErrorCode::NOT_FOUND);
    assert_eq!(bench.ask(waiter, wait(&[CellState::RUNNING])).unwrap_err().code, ErrorCode::NOT_FOUND);
}

#[test]
fn who_waits_for_what_something_else_made_impossible_is_told_so() {
    for (first, second) in [
        (body("pause", 1), body("stop --force", 1)),
        (body("pause", 1), body("destroy", 1)),
        (body("stop --force", 1), body("destroy", 1)),
    ] {
        let (mut bench, id, cell) = in_state(CellState::RUNNING);
        assert_eq!(cell, 1);
        let other = bench.open(MANAGEMENT_PORT);
        bench.send_request(id, 7, first.clone());
        bench.step();
        bench.send_request(other, 8, second);
        bench.run();
        let failure = bench.responses(id).remove(0).result().unwrap_err();
        assert!(failure.message.contains("came between"), "{failure}");
        assert_eq!(bench.responses(other).remove(0).result(), Ok(Reply::Done));
    }
    let (mut bench, id, cell) = in_state(CellState::RUNNING);
    bench.send_request(id, 7, Body::Pause { cell });
    bench.step();
    bench.platform.end_cell(CellId(cell), Ending::PowerOff);
    assert!(bench.answer(id).unwrap_err().message.contains("came between"));
}

#[test]
fn before_the_machine_goes_off_cells_turn_themselves_off_the_newest_first() {
    let mut bench = Bench::new();
    let id = bench.open(MANAGEMENT_PORT);
    let polite = bench.running(id, spec("polite", &[3], 1));
    let deaf = bench.running(id, spec("deaf", &[4], 1));
    let paused = bench.running(id, spec("paused", &[2], 1));
    bench.ask(id, Body::Pause { cell: paused }).unwrap();
    bench.platform.heed_button(CellId(polite));
    let begun_ns = bench.platform.now_ns;
    bench.node.begin_shutdown();
    while !bench.node.is_off() {
        assert_ne!(bench.step(), Progress::Idle);
        bench.platform.now_ns += 100_000_000;
        let early = bench.platform.now_ns - begun_ns < 30_000_000_000;
        assert!(!early || bench.platform.presses(CellId(polite)) == 0, "not before the deaf one is off");
    }
    bench.run();
    assert_eq!([polite, deaf, paused].map(|cell| bench.platform.presses(CellId(cell))), [1, 1, 0]);
    let seconds = (bench.platform.now_ns - begun_ns) / 1_000_000_000;
    assert!((30..33).contains(&seconds), "only the deaf one takes its time: {seconds} s");
    assert_eq!(bench.show(id, polite).stopped.as_deref(), Some("the guest turned itself off"));
}
