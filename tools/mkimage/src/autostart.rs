//! The cells that start with the node: whether it will have what they need.

use bulkhead_abi::message::CellSpec;
use bulkhead_cell_file::{CellFile, CpuChoice, TooFew};

use crate::node_toml::NodeToml;
use crate::toml_reader::Problems;

/// What the hypervisor makes the cells of that `node` starts; `cells` are those in its bundle.
/// CPUs are given out in the order of their start, but none that another one names.
pub(crate) fn specs(node: &NodeToml, cells: &[CellFile]) -> Result<Vec<CellSpec>, Problems> {
    let mut problems = Vec::new();
    let mut started = Vec::new();
    for named in &node.autostart {
        match cells.iter().find(|cell| cell.name == named.name) {
            Some(cell) => started.push((named, cell)),
            None => {
                let names = list(cells.iter().map(|cell| cell.name.clone()));
                problems
                    .push(format!("{}: must be the name of a cell in the bundle: {names}", named.named_by));
            }
        }
    }
    let numbers = |cell: &CellFile| match &cell.cpus {
        CpuChoice::Numbers(numbers) => numbers.clone(),
        CpuChoice::Count(_) => Vec::new(),
    };
    let named_cpus: Vec<u32> = started.iter().flat_map(|(_, cell)| numbers(cell)).collect();
    let mut free_cpus = node.config.reserved_cpus.clone();
    let mut free_bytes = node.config.pool_bytes;
    let mut specs = Vec::new();
    for (named, cell) in started {
        let mut refuse = |found: String| problems.push(format!("{}: {found}", named.named_by));
        let open = free_cpus.iter().copied().filter(|cpu| !named_cpus.contains(cpu));
        let cpus = cell.cpus.resolve(open).unwrap_or_else(|TooFew { wanted, open }| {
            refuse(format!(
                "its cpus is {wanted}, must be at most the {open} of reserved_cpus that are left"
            ));
            Vec::new()
        });
        if let Some(cpu) = cpus.iter().find(|cpu| !free_cpus.contains(cpu)) {
            let left = list(free_cpus.iter().map(u32::to_string));
            refuse(format!("its cpus has {cpu}, must be among those of reserved_cpus that are left: {left}"));
        }
        free_cpus.retain(|cpu| !cpus.contains(cpu));
        let files = match cell.check_images() {
            Ok(files) => files,
            Err(error) => {
                problems.push(error.to_string());
                continue;
            }
        };
        let spec = CellSpec { origin: None, ..cell.spec(cpus, 0, files) };
        let needed = spec.memory.saturating_add(spec.files_memory());
        match free_bytes.checked_sub(needed) {
            Some(left) => free_bytes = left,
            None => refuse(format!(
                "has {} MiB with its files, must be at most the {} MiB left of the pool",
                needed >> 20,
                free_bytes >> 20
            )),
        }
        // What was a file's size here is for the node to find in its bundle.
        specs.push(CellSpec { files: None, ..spec });
    }
    Problems::none(problems).map(|()| specs)
}

/// What there is to choose from, for people.
fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<_> = items.collect();
    if items.is_empty() { "there is none".into() } else { items.join(", ") }
}
