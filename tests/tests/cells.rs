//! Guest cells from the root cell's side: Linux guests from creation to destruction, guests that
//! fail, and cell files that are refused. What was taken has to be given back.
#![forbid(unsafe_code)]

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result};
use bulkhead_tests::{Boot, Node, Steps, tiny_kernel};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(300);

/// Prints what `cellctl console` shows until the cell is off.
const UNTIL_OFF: &str = "--timeout 30s </dev/null";

/// The node as the step `name` printed it, without the time.
fn node(steps: &Steps, name: &str) -> Result<Value> {
    let mut node = steps.json(name)?;
    assert!(node["uptime_ns"].take().is_u64(), "{steps}");
    Ok(node)
}

/// The same when `cells` cells have come and gone.
fn after(mut node: Value, cells: u64) -> Result<Value> {
    let changes = node["generation"].as_u64().context("generation")?;
    node["generation"] = json!(changes + 2 * cells);
    Ok(node)
}

/// The text of a cell file with a kernel of the directory that it is in.
fn cell_file(name: &str, cpus: &str, memory: &str, kernel: &str) -> String {
    format!("name = \"{name}\"\ncpus = {cpus}\nmemory = \"{memory}\"\n[boot]\nkernel = \"{kernel}\"\n")
}

/// The same with Debian's Linux.
fn linux(name: &str, cpus: &str) -> String {
    cell_file(name, cpus, "192M", "/cells/vmlinuz")
        + "initrd = \"/cells/guest-initrd\"\ncmdline = \"console=ttyS0\"\n"
}

#[test]
fn two_linux_guests_run_side_by_side_and_everything_comes_back() -> Result<()> {
    let share = tempfile::tempdir()?;
    fs::write(share.path().join("one.cell.toml"), linux("one", "1"))?;
    fs::write(share.path().join("two.cell.toml"), linux("two", "[1, 2]"))?;
    // What the console showed before counts, so that each question needs an end of its own.
    let ask = |cell: &str, number: u32| {
        let done = 7 * number;
        format!(
            "echo 'nproc; uname -r; echo $(({number} * 7)) done' | \
            cellctl console {cell} --until '{done} done' --timeout 60s"
        )
    };
    // A guest that boots throws away what was typed before it reads it.
    let again = |ask: &str| format!("until {}; do :; done", ask.replace("60s", "20s"));
    let steps = Node::new("cells", Boot::Pvh).checked().share(share.path()).limit(LIMIT).steps(&[
        ("release", "uname -r"),
        ("before", "cellctl node --json"),
        ("create-one", "time cellctl create /share/one.cell.toml"),
        ("start-one", "cellctl start one"),
        ("create-two", "time cellctl create /share/two.cell.toml"),
        ("start-two", "cellctl start two"),
        ("left", "nproc"),
        ("up-one", "time cellctl console one --until 'guest: up on 1 CPUs' --timeout 120s"),
        ("up-two", "time cellctl console two --until 'guest: up on 2 CPUs' --timeout 120s"),
        ("ask-one", &ask("one", 6)),
        ("ask-two", &ask("two", 6)),
        ("list", "cellctl list --json"),
        ("between", "cellctl node --json"),
        ("text", "cellctl show two"),
        ("again", "cellctl create /share/two.cell.toml"),
        ("start-again", "cellctl start two"),
        ("pause-two", "cellctl pause two && cellctl wait two --for paused --timeout 5s"),
        ("paused", "cellctl list --json"),
        ("resume-two", "cellctl resume two"),
        // One turns itself off, the other when its power button is pressed.
        ("off-one", &format!("echo 'poweroff -f' | cellctl console one; cellctl console one {UNTIL_OFF}")),
        ("show-one", "cellctl show one --json"),
        ("two-goes-on", &ask("two", 11)),
        ("stop-two", "cellctl stop two --timeout 60s"),
        ("show-two", "cellctl show two --json"),
        // It begins anew twice: by command, and when it resets itself.
        ("start-two-again", "cellctl start two"),
        ("ask-two-again", &again(&ask("two", 13))),
        ("reboot-two", "echo 'reboot -f' | cellctl console two"),
        ("rebooted", "until cellctl show two --json | grep -q '\"restarts\": 2'; do :; done"),
        ("ask-two-rebooted", &again(&ask("two", 17))),
        ("destroy-one", "cellctl destroy one"),
        ("destroy-two", "cellctl destroy two"),
        ("cpus", "nproc"),
        ("none", "cellctl list --json"),
        ("after", "cellctl node --json"),
        ("nobody", "cellctl start two"),
        ("dmesg", "dmesg"),
    ])?;
    let release = steps.ok("release")?.trim();

    assert!(steps.ok("create-one")?.contains("cell 'one' is ready: CPUs 3, 192 MiB\n"), "{steps}");
    assert!(steps.ok("create-two")?.contains("cell 'two' is ready: CPUs 1, 2, 192 MiB\n"), "{steps}");
    assert_eq!(steps.ok("left")?, "1\n", "{steps}");
    for (cell, cpus) in [("one", 1), ("two", 2)] {
        steps.ok(&format!("start-{cell}"))?;
        steps.ok(&format!("up-{cell}"))?;
        let answer = steps.ok(&format!("ask-{cell}"))?.replace('\r', "");
        assert!(answer.contains(&format!("\n{cpus}\n{release}\n42 done")), "{answer}\n{steps}");
    }
    steps.ok("two-goes-on")?;
    let list = steps.json("list")?;
    for (at, name, cpus) in [(0, "one", json!([3])), (1, "two", json!([1, 2]))] {
        assert_eq!((&list[at]["name"], &list[at]["state"]), (&json!(name), &json!("running")), "{steps}");
        assert_eq!((&list[at]["cpus"], &list[at]["memory"]), (&cpus, &json!(192 << 20)), "{steps}");
    }
    let (before, between) = (node(&steps, "before")?, node(&steps, "between")?);
    let uses = |node: &Value| {
        let cpus = node["cpus"].as_array().into_iter().flatten();
        cpus.map(|cpu| cpu["state"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(uses(&before), ["root"; 4], "{steps}");
    assert_eq!(uses(&between), ["root", "cell", "cell", "cell"], "{steps}");
    let free = |node: &Value| node["free_memory"].as_u64().context("free_memory");
    let (one, two) = (steps.json("show-one")?, steps.json("show-two")?);
    // Their memory, and the files that they are filled from when they begin anew.
    let files = |cell: &Value| cell["files_memory"].as_u64().context("files_memory");
    let taken = ((2 * 192) << 20) + files(&one)? + files(&two)?;
    assert_eq!(free(&before)? - free(&between)?, taken, "{steps}");
    let text = steps.ok("text")?;
    assert!(text.contains("state     running") && text.contains("EXITS BY REASON"), "{steps}");

    // What its state does not allow is refused: exit code 6.
    for (step, why) in [
        ("again", "name 'two' is that of cell"),
        ("start-again", "cell 'two' is running; start needs: ready, stopped"),
    ] {
        let (output, status) = steps.get(step)?;
        assert!(status == 6 && output.contains(why), "{step}: {status}\n{steps}");
    }

    let states = ["running", "paused"].map(|state| json!(state));
    assert_eq!(
        steps
            .json("paused")?
            .as_array()
            .context("no list")?
            .iter()
            .map(|cell| cell["state"].clone())
            .collect::<Vec<_>>(),
        states,
        "{steps}"
    );
    assert_eq!(
        (&one["state"], &one["stopped"]),
        (&json!("stopped"), &json!("the guest turned itself off")),
        "{steps}"
    );
    assert_eq!(
        (&two["state"], &two["stopped"]),
        (&json!("stopped"), &json!("the guest turned itself off")),
        "{steps}"
    );
    for step in [
        "pause-two",
        "resume-two",
        "off-one",
        "stop-two",
        "start-two-again",
        "ask-two-again",
        "reboot-two",
        "rebooted",
        "ask-two-rebooted",
        "destroy-one",
        "destroy-two",
    ] {
        steps.ok(step)?;
    }
    assert_eq!(steps.ok("cpus")?, "4\n", "{steps}");
    assert_eq!(steps.json("none")?, json!([]), "{steps}");
    assert_eq!(steps.get("nobody")?.1, 5, "{steps}");
    assert_eq!(node(&steps, "after")?, after(before, 2)?, "{steps}");
    root_is_well(&steps)
}

#[test]
fn a_signal_gives_back_what_a_creation_has_taken_and_lets_a_destruction_end() -> Result<()> {
    let share = tempfile::tempdir()?;
    fs::write(share.path().join("web.cell.toml"), linux("web", "[1, 2]"))?;
    // As soon as the first CPU is off.
    let interrupted = |signal: &str| {
        format!(
            "cellctl create /share/web.cell.toml & \
            while [ $(nproc) = 4 ] && kill -0 $!; do :; done; kill -{signal} $!; wait $!"
        )
    };
    let steps = Node::new("signals", Boot::Pvh).share(share.path()).limit(LIMIT).steps(&[
        ("before", "cellctl node --json"),
        ("int", &interrupted("INT")),
        ("cpus-int", "nproc"),
        ("after-int", "cellctl node --json"),
        ("term", &interrupted("TERM")),
        ("cpus-term", "nproc"),
        ("after-term", "cellctl node --json"),
        ("create", "cellctl create /share/web.cell.toml"),
        (
            "destroy",
            "cellctl destroy web & \
            while cellctl list | grep -q ready && kill -0 $!; do :; done; kill -TERM $!; wait $!",
        ),
        ("cpus-destroy", "nproc"),
        ("after-destroy", "cellctl node --json"),
        ("dmesg", "dmesg"),
    ])?;
    let before = node(&steps, "before")?;
    for signal in ["int", "term"] {
        let (output, status) = steps.get(signal)?;
        assert!(status == 9 && output.contains("cellctl: interrupted\n"), "{steps}");
        assert_eq!(steps.ok(&format!("cpus-{signal}"))?, "4\n", "{steps}");
        assert_eq!(node(&steps, &format!("after-{signal}"))?, before, "{steps}");
    }
    steps.ok("create")?;
    steps.ok("destroy")?;
    assert_eq!(steps.ok("cpus-destroy")?, "4\n", "{steps}");
    assert_eq!(node(&steps, "after-destroy")?, after(before, 1)?, "{steps}");
    root_is_well(&steps)
}

#[test]
fn the_root_cell_goes_off_after_its_guests() -> Result<()> {
    let share = tempfile::tempdir()?;
    fs::write(share.path().join("linux.cell.toml"), linux("linux", "1"))?;
    let start = "cellctl create /share/linux.cell.toml && cellctl start linux && \
        cellctl console linux --until 'guest: up' --timeout 120s";
    let node = |name: &str| Node::new(name, Boot::Pvh).share(share.path()).limit(LIMIT);
    // The job's end turns the root cell off.
    let outcome = node("root-off").run(start)?;
    outcome.success()?;
    let (_, end) = outcome.console.split_once("root cell: turns the machine off").context("no power off")?;
    for line in ["cell 'linux': its power button is pressed", "cell 'linux': the guest turned itself off"] {
        assert!(end.contains(line), "{line}\n{outcome}");
    }
    let outcome = node("root-resets").run(&format!("{start}; reboot -f"))?;
    let (_, end) = outcome.console.split_once("root cell: resets the machine").context("no reset")?;
    assert!(end.contains("cell 'linux' runs, and is lost by the reset of the machine"), "{outcome}");
    Ok(())
}

/// Nothing that the root cell's Linux complains of.
fn root_is_well(steps: &Steps) -> Result<()> {
    let dmesg = steps.ok("dmesg")?;
    for words in [
        "Call Trace",
        "BUG:",
        "WARNING: CPU",
        "detected stall",
        "self-detected",
        "soft lockup",
        "nobody cared",
    ] {
        assert!(!dmesg.contains(words), "{words}\n{steps}");
    }
    Ok(())
}

/// Writes a cell of one CPU and 4 MiB with a kernel of a few instructions into `dir`.
fn tiny(dir: &Path, name: &str, code: &[u8]) -> Result<()> {
    fs::write(dir.join(format!("{name}.cell.toml")), cell_file(name, "1", "4M", name))?;
    Ok(fs::write(dir.join(name), tiny_kernel::tiny_kernel(code))?)
}

/// Adds lines to the cell file `name` in `dir`.
fn append(dir: &Path, name: &str, lines: &str) -> Result<()> {
    let path = dir.join(format!("{name}.cell.toml"));
    Ok(fs::write(&path, fs::read_to_string(&path)? + lines)?)
}

#[test]
fn a_guest_that_fails_is_shown_and_nobody_else_notices() -> Result<()> {
    let share = tempfile::tempdir()?;
    let said = tiny_kernel::print("alive\r\n");
    // What each of them does after it has said that it is there, and what is then to be read.
    let failing = [
        ("triple", tiny_kernel::TRIPLE_FAULT, "triple fault"),
        ("strange", tiny_kernel::STRANGE_ACCESS, "cannot carry out the instruction "),
    ];
    for (name, code, _) in failing {
        tiny(share.path(), name, &[&said[..], code].concat())?;
    }
    tiny(share.path(), "reset", &[&said[..], tiny_kernel::RESET].concat())?;
    append(share.path(), "reset", "[on]\nreboot = \"stop\"\n")?;
    // It fails again and again, and begins anew until that has happened too often.
    tiny(share.path(), "hopeless", &[&said[..], tiny_kernel::TRIPLE_FAULT].concat())?;
    append(share.path(), "hopeless", "[on]\ncrash = \"restart\"\n")?;
    tiny(share.path(), "exits", &[&said[..], &tiny_kernel::exit(0x1_0234)].concat())?;
    tiny(share.path(), "sleeper", &[&said[..], tiny_kernel::SLEEP].concat())?;

    let names = ["triple", "strange", "reset"];
    let life = |name: &str| {
        format!(
            "cellctl create /share/{name}.cell.toml && cellctl start {name} && \
            cellctl console {name} {UNTIL_OFF}"
        )
    };
    let mut steps = vec![
        ("before".to_owned(), "cellctl node --json".to_owned()),
        // A neighbour that is there all the time, and sleeps without interrupts.
        (
            "sleeper".to_owned(),
            "cellctl create /share/sleeper.cell.toml && cellctl start sleeper && \
            cellctl console sleeper --until alive --timeout 30s"
                .to_owned(),
        ),
    ];
    for name in names {
        steps.push((format!("run-{name}"), life(name)));
        steps.push((format!("show-{name}"), format!("cellctl show {name} --json")));
        steps.push((format!("text-{name}"), format!("cellctl show {name}")));
        steps.push((format!("restart-{name}"), format!("cellctl start {name}")));
        steps.push((format!("destroy-{name}"), format!("cellctl destroy {name}")));
    }
    for (name, command) in [
        // Its console is there for all its lives.
        ("run-hopeless", "cellctl run /share/hopeless.cell.toml </dev/null"),
        ("show-hopeless", "cellctl show hopeless --json; cellctl destroy hopeless"),
        ("run-exits", "cellctl run /share/exits.cell.toml </dev/null"),
        ("run-exits-kept", "cellctl run --keep /share/exits.cell.toml </dev/null"),
        ("wait-exits", "cellctl wait exits --timeout 30s"),
        (
            "reload-exits",
            "cellctl reload exits && cellctl start exits && cellctl wait exits; cellctl destroy exits",
        ),
        ("show-sleeper", "cellctl show sleeper --json"),
        ("pause-sleeper", "cellctl pause sleeper"),
        ("force", "cellctl destroy sleeper"),
        ("cpus", "nproc"),
        ("after", "cellctl node --json"),
        ("dmesg", "dmesg"),
    ] {
        steps.push((name.to_owned(), command.to_owned()));
    }
    let steps = steps.iter().map(|(name, command)| (name.as_str(), command.as_str())).collect::<Vec<_>>();
    let steps = Node::new("failing", Boot::Pvh).checked().share(share.path()).limit(LIMIT).steps(&steps)?;

    for (name, _, why) in failing {
        let show = steps.json(&format!("show-{name}"))?;
        assert_eq!(show["state"], "failed", "{steps}");
        let failure = &show["failure"];
        assert!(failure["reason"].as_str().is_some_and(|reason| reason.contains(why)), "{why}\n{steps}");
        assert_eq!(failure["vcpu"], 0, "{steps}");
        // In the tiny kernel, which is at 1 MiB.
        let rip = failure["registers"]["rip"].as_u64().context("no rip")?;
        assert!((0x10_0200..0x10_0300).contains(&rip), "rip {rip:#x}\n{steps}");
        let exits = failure["exits"].as_array().context("no last exits")?;
        // It said "alive" before.
        assert!(exits.iter().any(|exit| exit["reason"] == "port"), "{steps}");
        let text = steps.ok(&format!("text-{name}"))?;
        // The last exit of all is among those that are counted.
        let last = exits.last().and_then(|exit| exit["reason"].as_str()).context("no last exit")?;
        assert!(show["vcpus"][0]["exits"][last]["count"].as_u64() >= Some(1), "{last}\n{steps}");
        for part in ["state     failed", why, "rip 0000000000100", "LAST EXITS"] {
            assert!(text.contains(part), "{part}\n{steps}");
        }
    }
    let reset = steps.json("show-reset")?;
    assert_eq!(
        (&reset["state"], &reset["stopped"]),
        (&json!("stopped"), &json!("the guest asked for a reset")),
        "{steps}"
    );
    for name in names {
        let output = steps.ok(&format!("run-{name}"))?;
        assert!(output.contains("alive"), "{steps}");
        // One that has failed is kept to be looked at, one that is off may run again.
        let restarted = if name == "reset" { 0 } else { 6 };
        assert_eq!(steps.get(&format!("restart-{name}"))?.1, restarted, "{steps}");
        steps.ok(&format!("destroy-{name}"))?;
    }
    let (output, status) = steps.get("run-hopeless")?;
    assert!(status == 10 && output.contains("cell 'hopeless' has failed: triple fault"), "{steps}");
    assert_eq!(output.matches("alive").count(), 6, "{steps}");
    let hopeless = steps.json("show-hopeless")?;
    assert_eq!((&hopeless["state"], &hopeless["restarts"]), (&json!("failed"), &json!(5)), "{steps}");
    for step in ["run-exits", "run-exits-kept", "wait-exits"] {
        assert_eq!(steps.get(step)?.1, 0x34, "{step}\n{steps}");
    }
    assert_eq!(steps.ok("reload-exits")?, "", "{steps}");
    assert_eq!(steps.json("show-sleeper")?["state"], "running", "{steps}");
    steps.ok("pause-sleeper")?;
    steps.ok("force")?;
    assert_eq!(steps.ok("cpus")?, "4\n", "{steps}");
    assert_eq!(node(&steps, "after")?, after(node(&steps, "before")?, 7)?, "{steps}");
    root_is_well(&steps)
}

#[test]
fn what_is_asked_for_wrongly_is_refused_and_changes_nothing() -> Result<()> {
    let share = tempfile::tempdir()?;
    let write = |name: &str, bytes: &[u8]| fs::write(share.path().join(name), bytes);
    let good = tiny_kernel::tiny_kernel(tiny_kernel::SLEEP);
    write("kernel", &good)?;
    write("none", b"#!/bin/sh\n")?;
    write("empty", b"")?;
    let mut old = good.clone();
    old[0x206] = 0x0b;
    write("old", &old)?;
    write("cut", &good[..good.len() - 1])?;
    write("large", &vec![0; 5 << 20])?;
    write("owner.cell.toml", cell_file("owner", "[3]", "4M", "kernel").as_bytes())?;

    let with = |cpus: &str, memory: &str, kernel: &str| cell_file("web", cpus, memory, kernel);
    let web = with("1", "4M", "kernel");
    // The file, its exit code, what is said.
    let cases: Vec<(&str, String, u8, &[&str])> = vec![
        (
            "key",
            web.replace("cpus", "cpu"),
            3,
            &["key.cell.toml:2: cpu is unknown (did you mean cpus?); allowed: name,", "cpus is missing"],
        ),
        (
            "boot-key",
            format!("{web}cmd_line = \"\"\n"),
            3,
            &["boot-key.cell.toml:6: boot.cmd_line is unknown (did you mean boot.cmdline?)"],
        ),
        ("toml", "name = \n".into(), 3, &["toml.cell.toml:1: "]),
        (
            "no-cpus",
            with("0", "4M", "kernel"),
            3,
            &["no-cpus.cell.toml:2: cpus is 0; allowed: a count from 1 to 64"],
        ),
        (
            "cpu-0",
            with("[0, 1]", "4M", "kernel"),
            3,
            &["cpu-0.cell.toml:2: cpus has CPU 0, which the root cell's Linux cannot give away"],
        ),
        ("twice", with("[1, 1]", "4M", "kernel"), 3, &["cpus has 1 twice"]),
        (
            "many",
            with("4", "4M", "kernel"),
            6,
            &["cpus is 4, but of this node's 4 CPUs 2 belong to no guest cell", "up to 2"],
        ),
        (
            "no-such-cpu",
            with("[1, 9]", "4M", "kernel"),
            6,
            &["cpus has 9, which this machine has not; allowed: 1 to 3"],
        ),
        (
            "taken",
            with("[2, 3]", "4M", "kernel"),
            6,
            &["cpus has 3, which belongs to cell 'owner' (its CPUs: 3); allowed: 1, 2"],
        ),
        ("name", web.replace("web", "owner"), 6, &["name 'owner' is that of cell", "one that no cell has"]),
        ("bad-name", web.replace("web", "root"), 3, &["name is \"root\"; allowed: 1 to 32 of"]),
        (
            "odd-memory",
            with("1", "3M", "kernel"),
            3,
            &["memory is 3145728 bytes; allowed: a multiple of 2 MiB"],
        ),
        (
            "much-memory",
            with("1", "64G", "kernel"),
            6,
            &["memory is 65536 MiB; allowed: up to the 506 MiB that are free"],
        ),
        ("missing", with("1", "4M", "nowhere"), 3, &["/share/nowhere: cannot be opened: No such file"]),
        ("directory", with("1", "4M", "/proc"), 3, &["/proc: is not a file"]),
        ("empty", with("1", "4M", "empty"), 3, &["/share/empty: is not a file with something in it"]),
        ("none", with("1", "4M", "none"), 3, &["/share/none: is not a kernel; allowed: Linux as a bzImage"]),
        ("large", format!("{web}initrd = \"large\"\n"), 3, &["bytes, and the cell 4194304 bytes of memory"]),
        (
            "old",
            with("2", "4M", "old"),
            3,
            &["field version of the setup header is 0x20b; allowed: 0x20c (protocol 2.12) or later"],
        ),
        ("cut", with("2", "4M", "cut"), 3, &["kernel: the file has ", " bytes, but ", " are needed"]),
    ];
    let mut steps = vec![("owner".to_owned(), "cellctl create /share/owner.cell.toml".to_owned())];
    steps.push(("before".to_owned(), "cellctl node --json".to_owned()));
    for (name, text, ..) in &cases {
        write(&format!("{name}.cell.toml"), text.as_bytes())?;
        steps.push(((*name).to_owned(), format!("cellctl create /share/{name}.cell.toml")));
        steps.push((format!("after-{name}"), "cellctl node --json".to_owned()));
        steps.push((format!("cpus-{name}"), "nproc".to_owned()));
    }
    steps.push(("absent".to_owned(), "cellctl create /share/absent.cell.toml".to_owned()));
    steps.push(("list".to_owned(), "cellctl list --json".to_owned()));
    steps.push(("destroy".to_owned(), "cellctl destroy owner".to_owned()));
    steps.push(("cpus".to_owned(), "nproc".to_owned()));
    steps.push(("dmesg".to_owned(), "dmesg".to_owned()));
    let steps = steps.iter().map(|(name, command)| (name.as_str(), command.as_str())).collect::<Vec<_>>();
    let steps = Node::new("bad-cells", Boot::Pvh).share(share.path()).limit(LIMIT).steps(&steps)?;

    steps.ok("owner")?;
    let before = node(&steps, "before")?;
    for (name, _, exit, parts) in &cases {
        let (output, status) = steps.get(name)?;
        assert_eq!(status, *exit, "{name}: {output}\n{steps}");
        for part in *parts {
            assert!(output.contains(part), "{name}: no {part:?} in {output}\n{steps}");
        }
        assert_eq!(node(&steps, &format!("after-{name}"))?, before, "{name}\n{steps}");
        assert_eq!(steps.ok(&format!("cpus-{name}"))?, "3\n", "{name}\n{steps}");
    }
    let (output, status) = steps.get("absent")?;
    assert!(status == 3 && output.contains("/share/absent.cell.toml: cannot be read: "), "{steps}");
    assert_eq!(steps.json("list")?.as_array().map(Vec::len), Some(1), "{steps}");
    steps.ok("destroy")?;
    assert_eq!(steps.ok("cpus")?, "4\n", "{steps}");
    root_is_well(&steps)
}
