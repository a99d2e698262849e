//! Cells that the bundle starts before the root cell runs, and one that cannot be started.
#![forbid(unsafe_code)]

use std::{fs, path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use bulkhead_abi::bundle::{Bundle, NewEntry, cell_kernel, write};
use bulkhead_tests::{Boot, Node, target_dir, tiny_kernel};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(300);

/// The text of a cell file, up to what it boots.
fn cell(name: &str, cpus: &str, memory: &str) -> String {
    format!("name = \"{name}\"\ncpus = {cpus}\nmemory = \"{memory}\"\n")
}

/// Puts a cell of one CPU and 4 MiB there, with a kernel that says "alive" and goes on with `code`.
fn put_tiny(dir: &Path, name: &str, cpus: &str, code: &[u8], more: &str) -> Result<()> {
    let kernel = tiny_kernel::tiny_kernel(&[&tiny_kernel::print("alive\r\n"), code].concat());
    fs::write(dir.join(name), kernel)?;
    let text = cell(name, cpus, "4M") + &format!("[boot]\nkernel = \"{name}\"\n{more}");
    Ok(fs::write(dir.join(format!("{name}.cell.toml")), text)?)
}

/// A configuration that starts these cells, whose files are beside it.
fn put_node(dir: &Path, reserved_cpus: &str, names: &[&str]) -> Result<()> {
    let mut text = format!("pool = \"300M\"\nreserved_cpus = {reserved_cpus}\nautostart = {names:?}\n");
    for name in names {
        text += &format!("[[cell]]\nfile = \"{name}.cell.toml\"\n");
    }
    Ok(fs::write(dir.join("node.toml"), text)?)
}

/// Where `text` is in `log`.
fn place(log: &str, text: &str) -> Result<usize> {
    log.find(text).with_context(|| format!("no {text:?} in\n{log}"))
}

#[test]
fn cells_of_the_bundle_run_before_the_root_cell() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let guests = target_dir().join("guests");
    let boot = format!(
        "[boot]\nkernel = \"{0}/vmlinuz\"\ninitrd = \"{0}/guest-initrd\"\ncmdline = \"console=ttyS0\"\n",
        guests.display()
    );
    fs::write(dir.path().join("linux.cell.toml"), cell("linux", "1", "192M") + &boot)?;
    put_tiny(dir.path(), "tiny", "[3]", tiny_kernel::SLEEP, "")?;
    put_tiny(dir.path(), "hopeless", "1", tiny_kernel::TRIPLE_FAULT, "[on]\ncrash = \"restart\"\n")?;
    put_node(dir.path(), "[2, 3, 4]", &["linux", "tiny", "hopeless"])?;

    // A guest that boots throws away what was typed before it reads it.
    let ask = |number: u32| {
        let done = 7 * number;
        format!(
            "until echo 'echo T=$(date +%s); echo $(({number} * 7)) done' | \
            cellctl console linux --until '{done} done' --timeout 20s; do :; done"
        )
    };
    let node = Node::new("autostart", Boot::Pvh).checked().cpus(5).limit(LIMIT);
    let steps = node.config(dir.path().join("node.toml")).share(dir.path()).steps(&[
        ("list", "cellctl list --json"),
        ("cpus", "nproc"),
        ("node", "cellctl node --json"),
        ("said", "cellctl console tiny --until alive --timeout 30s"),
        ("up", "cellctl console linux --until 'guest: up on 1 CPUs' --timeout 120s"),
        ("ask", &ask(6)),
        ("now", "date +%s"),
        ("show", "cellctl show linux --json"),
        ("hopeless", "cellctl wait hopeless --for failed --timeout 60s; cellctl show hopeless --json"),
        ("stop", "cellctl stop linux --timeout 60s"),
        ("start", "cellctl start linux"),
        ("ask-again", &ask(11)),
        ("reboot", "echo 'reboot -f' | cellctl console linux"),
        ("rebooted", "until cellctl show linux --json | grep -q '\"restarts\": 2'; do :; done"),
        ("ask-rebooted", &ask(13)),
        ("reload", "cellctl stop --force tiny && cellctl reload tiny"),
        ("reload-file", "cellctl reload tiny /share/tiny.cell.toml && cellctl start tiny"),
        ("destroy", "for cell in linux tiny hopeless; do cellctl destroy $cell || exit; done"),
        ("none", "cellctl list --json"),
        ("cpus-after", "nproc"),
        ("after", "cellctl node --json"),
        ("again", "cellctl create /share/tiny.cell.toml && cellctl start tiny && cellctl destroy tiny"),
        ("last", "cellctl node --json"),
    ])?;

    // Said on the console before the root cell has anything to say there.
    let console = &steps.outcome.console;
    let root = place(console, "Linux version")?;
    for name in ["linux", "tiny", "hopeless"] {
        let started = place(console, &format!("cell '{name}': Ready -> Running"))?;
        assert!(started < root, "{name}: {started}, {root}\n{steps}");
    }
    let list = steps.json("list")?;
    for (at, name, cpu) in [(0, "linux", 4), (1, "tiny", 3), (2, "hopeless", 2)] {
        assert_eq!((&list[at]["name"], &list[at]["cpus"]), (&json!(name), &json!([cpu])), "{steps}");
    }
    assert_eq!((&list[0]["state"], &list[1]["state"]), (&json!("running"), &json!("running")), "{steps}");
    assert_eq!(steps.ok("cpus")?, "2\n", "{steps}");
    let uses = |node: &Value| {
        let cpus = node["cpus"].as_array().into_iter().flatten();
        cpus.map(|cpu| cpu["state"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(uses(&steps.json("node")?), ["root", "root", "cell", "cell", "cell"], "{steps}");

    // What was said since the beginning, and a Linux that knows what time it is.
    steps.ok("said")?;
    let up = steps.ok("up")?;
    assert!(up.contains("Linux version"), "{steps}");
    let seconds = |text: &str| text.trim().parse::<u64>().with_context(|| format!("{text:?}\n{steps}"));
    let answer = steps.ok("ask")?;
    let told = answer.rsplit_once("\nT=").and_then(|(_, rest)| rest.split_once('\r'));
    let (told, now) = (seconds(told.context("no time")?.0)?, seconds(steps.ok("now")?)?);
    assert!(told.abs_diff(now) < 60, "{told}, and in the root cell {now}\n{steps}");
    let show = steps.json("show")?;
    assert_eq!((&show["restarts"], &show["cmdline"]), (&json!(0), &json!("console=ttyS0")), "{steps}");
    assert!(show["vcpus"][0]["exits"]["port"]["count"].as_u64() > Some(0), "{steps}");
    let hopeless = steps.json("hopeless")?;
    assert_eq!((&hopeless["state"], &hopeless["restarts"]), (&json!("failed"), &json!(5)), "{steps}");
    for step in [
        "stop",
        "start",
        "ask-again",
        "reboot",
        "rebooted",
        "ask-rebooted",
        "reload-file",
        "destroy",
        "again",
    ] {
        steps.ok(step)?;
    }
    // Where its file is in the root cell, nobody has said.
    let (reload, status) = steps.get("reload")?;
    assert!(status == 2 && reload.contains("reload tiny FILE"), "{steps}");
    assert_eq!(steps.json("none")?, json!([]), "{steps}");
    assert_eq!(steps.ok("cpus-after")?, "2\n", "{steps}");
    for step in ["after", "last"] {
        let node = steps.json(step)?;
        assert_eq!(uses(&node), ["root", "root", "free", "free", "free"], "{steps}");
        assert_eq!((&node["free_memory"], &node["free_cpus"]), (&json!(300 << 20), &json!(3)), "{steps}");
    }
    Ok(())
}

#[test]
fn a_cell_that_cannot_be_started_is_told_and_keeps_nobody_else_from_it() -> Result<()> {
    const ALIVE: &str = "the root kernel runs";
    let dir = tempfile::tempdir()?;
    let file = |name: &str| dir.path().join(name);
    put_tiny(dir.path(), "bad", "[1]", tiny_kernel::SLEEP, "")?;
    put_tiny(dir.path(), "good", "[2]", tiny_kernel::SLEEP, "")?;
    put_node(dir.path(), "[1, 2]", &["bad", "good"])?;
    let root = [&tiny_kernel::print(&format!("{ALIVE}\r\n")), tiny_kernel::SLEEP].concat();
    fs::write(file("root"), tiny_kernel::tiny_kernel(&root))?;
    let output = Command::new(target_dir().join("release/bulkhead-mkimage"))
        .args(["bundle", "--config", "node.toml", "--kernel", "root", "--output", "bundle"])
        .current_dir(dir.path())
        .output()
        .context("cannot run bulkhead-mkimage; `make build` makes it")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    // Of a protocol without a 64-bit entry: mkimage itself would have told.
    let mut old = fs::read(file("bad"))?;
    old[0x206] = 0x0b;
    let made = fs::read(file("bundle"))?;
    let bundle = Bundle::parse(&made)?;
    let data = |entry: &bulkhead_abi::bundle::Entry| {
        if entry.name == cell_kernel("bad") { old.clone() } else { entry.data.to_vec() }
    };
    let data: Vec<_> = bundle.entries.iter().map(data).collect();
    let entries: Vec<_> = bundle
        .entries
        .iter()
        .zip(&data)
        .map(|(entry, data)| NewEntry { name: entry.name, role: entry.role, data })
        .collect();
    fs::write(file("forged"), write(&bundle.config, &entries)?)?;

    let node = Node::new("autostart-bad", Boot::Pvh).checked().cpus(3).memory("512M");
    let mut session = node.bundle(file("forged")).limit(LIMIT).start(None)?;
    let console = session.wait_for(ALIVE, Duration::from_secs(60))?;
    let reason = "autostart of \"bad\": cell 'bad': kernel: field version of the setup header is 0x20b";
    let (refused, gone) = (place(&console, reason)?, place(&console, "cell 'bad': gone")?);
    let started = place(&console, "cell 'good': Ready -> Running")?;
    assert!(gone < refused && refused < started, "{console}");
    assert!(!console.contains("cell 'bad': Ready"), "{console}");
    Ok(())
}
