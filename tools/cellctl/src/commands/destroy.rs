//! `destroy`: a cell's memory and CPUs go back.

use crate::client::{Client, Connector};
use crate::cpus::Hotplug;
use crate::exit::Error;
use bulkhead_abi::message::{Body, CellSummary, CpuUse};

/// Destroys a cell and brings those of its CPUs online that are the root cell's then.
pub(super) fn destroy<C: Connector>(
    cell: &CellSummary,
    client: &mut Client<C>,
    hotplug: &Hotplug,
) -> Result<(), Error> {
    client.order(Body::Destroy { cell: cell.cell })?;
    let node = client.node()?;
    let back = node.cpus.iter().filter(|cpu| cpu.state == CpuUse::ROOT && cell.cpus.contains(&cpu.cpu));
    hotplug.bring_online(&back.map(|cpu| cpu.cpu).collect::<Vec<_>>())
}
