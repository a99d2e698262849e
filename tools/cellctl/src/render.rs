//! What is printed: tables for people, JSON for programs.

use bulkhead_abi::message::{
    Action, CellDetails, CellSummary, CpuInfo, FailureReport, NodeInfo, VcpuDetails,
};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// A table with this header and without lines.
fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    table
}

/// Bytes in MiB, or exactly where that is no whole number.
fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) { format!("{} MiB", bytes >> 20) } else { format!("{bytes} bytes") }
}

/// Numbers of CPUs: `1, 3`.
pub(crate) fn numbers(cpus: &[u32]) -> String {
    cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

pub(crate) fn cells_json(cells: &[CellSummary]) -> Value {
    cells.iter().map(summary_json).collect()
}

pub(crate) fn cells_text(cells: &[CellSummary]) -> String {
    if cells.is_empty() {
        return "there are no guest cells\n".into();
    }
    let mut table = table(&["CELL", "NAME", "STATE", "CPUS", "MEMORY"]);
    for cell in cells {
        table.add_row([
            cell.cell.to_string(),
            cell.name.clone(),
            cell.state.to_string(),
            numbers(&cell.cpus),
            size(cell.memory),
        ]);
    }
    format!("{}\n", table.trim_fmt())
}

pub(crate) fn summary_json(cell: &CellSummary) -> Value {
    let CellSummary { cell, name, state, cpus, memory, console_port } = cell;
    json!({
        "cell": cell, "name": name, "state": state.to_string(), "cpus": cpus, "memory": memory,
        "console_port": console_port,
    })
}

pub(crate) fn cell_json(cell: &CellDetails) -> Value {
    let CellDetails {
        summary,
        memory,
        cmdline,
        stopped,
        failure,
        vcpus,
        exit_code,
        restarts,
        on_reboot,
        on_crash,
        origin,
        files_memory,
    } = cell;
    let mut value = summary_json(summary);
    value["memory_ranges"] =
        memory.iter().map(|range| json!({"base": range.base, "len": range.len})).collect();
    value["cmdline"] = json!(cmdline);
    value["stopped"] = json!(stopped);
    value["failure"] = failure.as_ref().map_or(Value::Null, failure_json);
    value["vcpus"] = vcpus.iter().map(vcpu_json).collect();
    value["exit_code"] = json!(exit_code);
    value["restarts"] = json!(restarts);
    value["on"] = json!({"reboot": on_reboot.map(reboot), "crash": on_crash.map(crash)});
    value["origin"] = json!(origin);
    value["files_memory"] = json!(files_memory);
    value
}

/// [`CellDetails::on_reboot`] as cell files have it.
fn reboot(action: Action) -> String {
    action.to_string()
}

/// [`CellDetails::on_crash`] as cell files have it.
fn crash(action: Action) -> String {
    if action == Action::STOP { "keep".into() } else { action.to_string() }
}

fn failure_json(failure: &FailureReport) -> Value {
    let FailureReport { reason, vcpu, registers, exits } = failure;
    let registers = registers.iter().map(|register| (register.name.clone(), json!(register.value)));
    let exits = exits.iter().map(
        |exit| json!({"time_ns": exit.time_ns, "reason": exit.reason, "pc": exit.pc, "detail": exit.detail}),
    );
    json!({
        "reason": reason, "vcpu": vcpu,
        "registers": registers.collect::<serde_json::Map<_, _>>(),
        "exits": exits.collect::<Value>(),
    })
}

fn vcpu_json(vcpu: &VcpuDetails) -> Value {
    let VcpuDetails { vcpu, cpu, exits } = vcpu;
    let exits =
        exits.iter().map(|exit| (exit.reason.clone(), json!({"count": exit.count, "time_ns": exit.time_ns})));
    json!({"vcpu": vcpu, "cpu": cpu, "exits": exits.collect::<serde_json::Map<_, _>>()})
}

pub(crate) fn cell_text(cell: &CellDetails) -> String {
    let summary = &cell.summary;
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:10}{value}");
    };
    line("name", summary.name.clone());
    line("cell", summary.cell.to_string());
    line("state", summary.state.to_string());
    line("cpus", numbers(&summary.cpus));
    let ranges = cell.memory.iter().map(|range| format!("{} at {:#x}", size(range.len), range.base));
    let ranges = ranges.collect::<Vec<_>>().join(", ");
    line(
        "memory",
        if ranges.is_empty() { size(summary.memory) } else { format!("{} ({ranges})", size(summary.memory)) },
    );
    if let Some(bytes) = cell.files_memory {
        line("files", format!("{} of the pool", size(bytes)));
    }
    if !cell.cmdline.is_empty() {
        line("cmdline", cell.cmdline.clone());
    }
    if let Some(origin) = &cell.origin {
        line("origin", origin.clone());
    }
    if let (Some(on_reboot), Some(on_crash)) = (cell.on_reboot, cell.on_crash) {
        line("on", format!("reboot: {}, crash: {}", reboot(on_reboot), crash(on_crash)));
    }
    if let Some(restarts) = cell.restarts.filter(|restarts| *restarts > 0) {
        line("restarts", restarts.to_string());
    }
    if let Some(reason) = &cell.stopped {
        line("stopped", reason.clone());
    }
    if let Some(failure) = &cell.failure {
        line("failed", format!("vCPU {}: {}", failure.vcpu, failure.reason));
        for registers in failure.registers.chunks(4) {
            let registers = registers.iter().map(|r| format!("{:>6} {:016x}", r.name, r.value));
            line("", registers.collect::<Vec<_>>().join(" "));
        }
        if !failure.exits.is_empty() {
            let mut exits = table(&["TIME (ns)", "LAST EXITS", "PC", "DETAIL"]);
            for exit in &failure.exits {
                let (pc, detail) = (format!("{:#x}", exit.pc), format!("{:#x}", exit.detail));
                exits.add_row([exit.time_ns.to_string(), exit.reason.clone(), pc, detail]);
            }
            let _ = writeln!(text, "\n{}", exits.trim_fmt());
        }
    }
    let mut exits = table(&["VCPU", "CPU", "EXITS BY REASON", "COUNT", "TIME (us)"]);
    for vcpu in &cell.vcpus {
        for exit in &vcpu.exits {
            exits.add_row([
                vcpu.vcpu.to_string(),
                vcpu.cpu.to_string(),
                exit.reason.clone(),
                exit.count.to_string(),
                (exit.time_ns / 1000).to_string(),
            ]);
        }
    }
    if exits.row_count() > 0 {
        let _ = writeln!(text, "\n{}", exits.trim_fmt());
    }
    text
}

pub(crate) fn node_json(node: &NodeInfo) -> Value {
    let NodeInfo {
        name,
        version,
        commit,
        boot,
        backend,
        uptime_ns,
        counter_hz,
        counter_offset,
        cpus,
        free_cpus,
        root_memory,
        pool_memory,
        free_memory,
        heap_used,
        heap_total,
        generation,
    } = node;
    json!({
        "name": name, "version": version, "commit": commit, "boot": boot, "backend": backend,
        "uptime_ns": uptime_ns, "counter_hz": counter_hz, "counter_offset": counter_offset,
        "cpus": cpus.iter().map(cpu_json).collect::<Value>(), "free_cpus": free_cpus,
        "root_memory": root_memory, "pool_memory": pool_memory, "free_memory": free_memory,
        "heap_used": heap_used, "heap_total": heap_total, "generation": generation,
    })
}

fn cpu_json(cpu: &CpuInfo) -> Value {
    let CpuInfo { cpu, state, cell } = cpu;
    json!({"cpu": cpu, "state": state.to_string(), "cell": cell})
}

pub(crate) fn node_text(node: &NodeInfo) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:10}{value}");
    };
    line("name", node.name.clone());
    line("version", format!("{} ({})", node.version, node.commit));
    line("boot", format!("{}, {}", node.boot, node.backend));
    line("uptime", format!("{}.{:03} s", node.uptime_ns / 1_000_000_000, node.uptime_ns / 1_000_000 % 1000));
    line("counter", format!("{} Hz, offset {}", node.counter_hz, node.counter_offset));
    line("root cell", size(node.root_memory));
    line("pool", format!("{} of {} free", size(node.free_memory), size(node.pool_memory)));
    line("heap", format!("{} of {} bytes used", node.heap_used, node.heap_total));
    line("changes", format!("{} of ownership since boot", node.generation));
    let mut cpus = table(&["CPU", "USE", "CELL"]);
    for cpu in &node.cpus {
        let cell = cpu.cell.map_or_else(String::new, |cell| cell.to_string());
        cpus.add_row([cpu.cpu.to_string(), cpu.state.to_string(), cell]);
    }
    let _ = writeln!(text, "\n{}", cpus.trim_fmt());
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use bulkhead_abi::message::{CellState, CpuUse, ExitCount, LastExit, MemoryRange, Register};

    pub(crate) fn node(cpus: Vec<CpuInfo>) -> NodeInfo {
        NodeInfo {
            name: "n1".into(),
            version: "0.1.0".into(),
            commit: "abc".into(),
            boot: "pvh".into(),
            backend: "svm".into(),
            uptime_ns: 1_234_000_000,
            counter_hz: 1_000_000_000,
            counter_offset: 0,
            cpus,
            free_cpus: 1,
            root_memory: 1 << 30,
            pool_memory: 512 << 20,
            free_memory: 256 << 20,
            heap_used: 1000,
            heap_total: 2000,
            generation: 3,
        }
    }

    fn failed() -> CellDetails {
        CellDetails {
            summary: CellSummary {
                cell: 1,
                name: "web".into(),
                state: CellState::FAILED,
                cpus: vec![2, 3],
                memory: 4 << 20,
                console_port: Some(17),
            },
            memory: vec![MemoryRange { base: 0x4000_0000, len: 4 << 20 }],
            cmdline: "console=ttyS0".into(),
            stopped: None,
            failure: Some(FailureReport {
                reason: "triple fault".into(),
                vcpu: 1,
                registers: vec![Register { name: "rip".into(), value: 0xfff0 }],
                exits: vec![LastExit { time_ns: 5, reason: "shutdown".into(), pc: 0xfff0, detail: 1 }],
            }),
            vcpus: vec![VcpuDetails {
                vcpu: 0,
                cpu: 2,
                exits: vec![ExitCount { reason: "hlt".into(), count: 7, time_ns: 9000 }],
            }],
            exit_code: None,
            restarts: Some(2),
            on_reboot: Some(Action::RESTART),
            on_crash: Some(Action::STOP),
            origin: Some("/cells/web.cell.toml".into()),
            files_memory: Some(2 << 20),
        }
    }

    #[test]
    fn a_failed_cell_is_shown_with_all_that_is_known() {
        let text = cell_text(&failed());
        for part in [
            "files     2 MiB",
            "reboot: restart, crash: keep",
            "restarts  2",
            "state     failed",
            "vCPU 1: triple fault",
            "rip 000000000000fff0",
            "shutdown",
            "hlt",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json = cell_json(&failed());
        assert_eq!(json["failure"]["registers"]["rip"], 0xfff0);
        assert_eq!(json["vcpus"][0]["exits"]["hlt"]["count"], 7);
        assert_eq!(json["memory_ranges"][0]["base"], 0x4000_0000);
        assert_eq!(json["state"], "failed");
    }

    #[test]
    fn the_node_is_shown() {
        let cpus = vec![
            CpuInfo { cpu: 0, state: CpuUse::ROOT, cell: None },
            CpuInfo { cpu: 1, state: CpuUse::CELL, cell: Some(4) },
        ];
        let text = node_text(&node(cpus.clone()));
        assert!(text.contains("256 MiB of 512 MiB free") && text.contains("1.234 s"), "{text}");
        let json = node_json(&node(cpus));
        for key in ["version", "commit", "boot", "free_memory", "free_cpus", "heap_used", "generation"] {
            assert!(!json[key].is_null(), "{key}");
        }
        assert_eq!(json["cpus"][1], json!({"cpu": 1, "state": "cell", "cell": 4}));
    }

    #[test]
    fn cells_are_listed() {
        let text = cells_text(&[failed().summary]);
        assert!(text.contains("web") && text.contains("2, 3") && text.contains("4 MiB"), "{text}");
        assert_eq!(cells_json(&[]), json!([]));
    }
}
