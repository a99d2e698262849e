//! Each way to boot a node, and machines that are refused, crippled or small.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bulkhead_tests::{Boot, End, Node, Outcome};

const LIMIT: Duration = Duration::from_secs(180);
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The line in which the hypervisor refuses a machine.
const REFUSED: &str = "Bulkhead cannot run here: ";

/// Starts a node that is not to get as far as a root cell.
fn refused(node: Node) -> Result<Outcome> {
    node.memory("512M").limit(LIMIT).start(None)?.finish(|_| ())
}

/// Boots `node` and checks what its root cell says of it against what `cellctl` and the root cell's
/// Linux do.
fn reaches_the_root_cell(node: Node, boot: &str, cpus: usize) -> Result<()> {
    let steps = node.limit(LIMIT).steps(&[
        ("node", "cellctl node --json"),
        ("text", "cellctl node"),
        ("cpus", "nproc"),
        ("kernel", "uname -s"),
        ("log", "cellctl log"),
    ])?;
    let node = steps.json("node")?;
    assert_eq!(node["boot"], boot, "{steps}");
    assert_eq!(node["version"], VERSION, "{steps}");
    assert_eq!(node["backend"], "svm", "{steps}");
    assert_eq!(node["cpus"].as_array().map(Vec::len), Some(cpus), "{steps}");
    let name = node["name"].as_str().context("the node has no name")?;
    let memory = node["root_memory"].as_u64().context("the root cell has no memory")? >> 20;
    // 2 GiB, less a pool of 512 MiB, the hypervisor and its bundle.
    ensure!((1200..1536).contains(&memory), "the root cell has {memory} MiB\n{steps}");
    let line = format!(
        "bulkhead: root cell on {name}, hypervisor {VERSION}, boot={boot}, cpus={cpus}, memory={memory}M"
    );
    let lines = steps.outcome.console.lines().filter(|seen| seen.trim_end() == line).count();
    assert_eq!(lines, 1, "{line}\n{}", steps.outcome);
    assert_eq!(steps.ok("cpus")?, format!("{cpus}\n"), "{steps}");
    assert_eq!(steps.ok("kernel")?, "Linux\n", "{steps}");
    assert!(steps.ok("text")?.contains(&format!("boot      {boot}, svm")), "{steps}");
    assert!(steps.ok("log")?.contains(&format!("booted by {boot}")), "{steps}");
    Ok(())
}

#[test]
fn pvh() -> Result<()> {
    reaches_the_root_cell(Node::new("pvh", Boot::Pvh), "pvh", 4)
}

#[test]
fn grub_on_bios() -> Result<()> {
    reaches_the_root_cell(Node::new("grub-bios", Boot::GrubBios), "grub-bios", 4)
}

#[test]
fn grub_on_uefi() -> Result<()> {
    reaches_the_root_cell(Node::new("grub-uefi", Boot::GrubUefi), "grub-uefi", 4)
}

#[test]
fn one_cpu_is_enough() -> Result<()> {
    reaches_the_root_cell(Node::new("one-cpu", Boot::Pvh).cpus(1), "pvh", 1)
}

#[test]
fn a_machine_without_x2apic_will_do() -> Result<()> {
    reaches_the_root_cell(Node::new("xapic", Boot::Pvh).cpu_flag("-x2apic"), "pvh", 4)
}

#[test]
fn an_svm_without_assists_will_do() -> Result<()> {
    let node = Node::new("no-assists", Boot::Pvh).hypervisor_cmdline("svm.disable=nrips,decode,clean");
    reaches_the_root_cell(node, "pvh", 4)
}

#[test]
fn what_it_cannot_run_on_is_told_in_one_line() -> Result<()> {
    let node = || Node::new("refused", Boot::Pvh);
    let cases = [
        (node().cpu_flag("-svm"), "this CPU has no AMD SVM (CPUID 8000_0001 ECX.2 is 0)"),
        (node().cpu_flag("-npt"), "this CPU's SVM has no nested paging (CPUID 8000_000A EDX.0 is 0)"),
        (
            node().hypervisor_cmdline("svm.disable=nrips,magic"),
            "svm.disable=magic: allowed are nrips, clean, decode",
        ),
    ];
    for (node, why) in cases {
        let outcome = refused(node)?;
        let End::Died(line) = &outcome.end else { panic!("{outcome}") };
        assert_eq!(line.split_once(REFUSED).map(|(_, reason)| reason), Some(why), "{outcome}");
        let last = outcome.console.trim_end().lines().last().unwrap_or_default();
        assert_eq!(last.trim_end(), line, "more came\n{outcome}");
    }
    Ok(())
}

#[test]
fn a_panic_has_reason_cpu_and_backtrace_by_names() -> Result<()> {
    let outcome = refused(Node::new("panicked", Boot::Pvh).hypervisor_cmdline("test.panic"))?;
    assert!(matches!(&outcome.end, End::Died(why) if why.contains("PANIC on cpu0")), "{outcome}");
    let (_, report) = outcome.console.split_once("bulkhead: PANIC").context("no panic")?;
    assert!(report.contains("test.panic was asked for"), "{outcome}");
    let (_, backtrace) = report.split_once("backtrace:").with_context(|| outcome.to_string())?;
    // An inlined function has no frame; this one is called through a pointer.
    assert!(backtrace.lines().any(|line| line.contains("bulkhead::bring_up+0x")), "{outcome}");
    assert_eq!(outcome.console.trim_end().lines().last(), Some("bulkhead: halted"), "{outcome}");
    Ok(())
}

#[test]
fn a_root_cell_that_fails_says_why_before_the_machine_is_reset() -> Result<()> {
    // Told to, Linux ends by a triple fault.
    let outcome = Node::new("root-fails", Boot::Pvh)
        .cpus(1)
        .root_cmdline("reboot=t")
        .limit(LIMIT)
        .run("reboot -f; while :; do :; done")?;
    assert!(matches!(outcome.end, End::Died(_)), "{outcome}");
    let (_, report) = outcome
        .console
        .split_once("the root cell failed at vcpu0: triple fault")
        .with_context(|| outcome.to_string())?;
    assert!(report.contains(" rip ") && report.contains(" cr3 "), "{outcome}");
    // The last exit is the fault, at about the time of the report, in the same clock.
    let last = report.trim_end().lines().last().unwrap_or_default();
    let words = last.split_whitespace().collect::<Vec<_>>();
    let at = words.iter().position(|word| *word == "shutdown").with_context(|| outcome.to_string())?;
    let exit_ns = words[at - 2].parse::<f64>()?;
    let said_s = last.split(['[', ']']).nth(1).context("no time")?.trim().parse::<f64>()?;
    assert!((0.0..1.0).contains(&(said_s - exit_ns / 1e9)), "{last}");
    Ok(())
}

#[test]
fn sleep_is_refused_and_the_root_cell_goes_on() -> Result<()> {
    let steps = Node::new("sleep", Boot::Pvh).limit(LIMIT).steps(&[
        ("sleep", "echo deep >/sys/power/mem_sleep && echo mem >/sys/power/state"),
        ("dmesg", "dmesg"),
        ("cpus", "nproc"),
        ("log", "cellctl log"),
    ])?;
    steps.ok("sleep")?;
    // Linux went all the way, and found itself awake again.
    assert!(steps.ok("dmesg")?.contains("ACPI: PM: Waking up from system sleep state S3"), "{steps}");
    assert_eq!(steps.ok("cpus")?, "4\n", "{steps}");
    assert!(steps.ok("log")?.contains("root cell: refused sleep of type 1"), "{steps}");
    Ok(())
}

#[test]
fn the_log_goes_to_the_port_that_the_bundle_names() -> Result<()> {
    let dir = tempfile::tempdir()?;
    // What is logged before the bundle is read, and what after.
    let (early, late) = ("INFO  Bulkhead ", "INFO  root cell: ");
    for (console, on_com1, on_com2) in [
        ("com1", [true, true], [false, false]),
        ("com2", [true, false], [true, true]),
        ("none", [true, false], [false, false]),
    ] {
        let config = dir.path().join("node.toml");
        std::fs::write(&config, format!("console = \"{console}\""))?;
        // The second port is the job's as soon as the root cell runs.
        let steps =
            Node::new(console, Boot::Pvh).config(config).limit(LIMIT).steps(&[("log", "cellctl log")])?;
        let com2 = std::fs::read(steps.outcome.logs.join("job.log"))?;
        let before_job = com2.split(|byte| *byte == 0x1e).next().unwrap_or_default();
        let com2 = String::from_utf8_lossy(before_job);
        assert_eq!(
            [early, late].map(|line| steps.outcome.console.contains(line)),
            on_com1,
            "{console}\n{steps}"
        );
        assert_eq!([early, late].map(|line| com2.contains(line)), on_com2, "{console}: {com2}\n{steps}");
        let log = steps.ok("log")?;
        assert!([early, late].iter().all(|line| log.contains(line)), "{steps}");
    }
    Ok(())
}
