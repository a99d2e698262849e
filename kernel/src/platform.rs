//! What management has done: its effects on this kernel's cells and CPUs.

use crate::guest_cell::GuestCell;
use crate::host::{self, HostMachine};
use crate::logging;
use crate::memory::{access, heap};
use crate::node::node;
use crate::run::{Claim, Command};
use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bulkhead_abi::message::{FailureReport, VcpuDetails};
use bulkhead_vmm::cell::config::CellResources;
use bulkhead_vmm::hal::{CellId, CpuId, VcpuId};
use bulkhead_vmm::manage::platform::{
    CellStatus, ClaimState, Ending, HeapUse, Platform, PlatformError, StoredFile,
};
use bulkhead_vmm::memory::address::Hpa;
use bulkhead_vmm::x86::guest_board::StopReason;
use bulkhead_vmm::x86::machine::Machine;
use bulkhead_vmm::x86::vcpu::{VcpuCounts, exit_counts};

/// The kernel's side of management.
#[derive(Default)]
pub(crate) struct KernelPlatform {
    cells: BTreeMap<CellId, (Arc<GuestCell>, CellResources)>,
}

impl KernelPlatform {
    fn cell(&self, id: CellId) -> Result<&(Arc<GuestCell>, CellResources), PlatformError> {
        self.cells.get(&id).ok_or_else(|| PlatformError(alloc::format!("{id} has not been prepared")))
    }
}

fn details(vcpu: u32, cpu: CpuId, counts: &VcpuCounts) -> VcpuDetails {
    VcpuDetails { vcpu, cpu: cpu.0, exits: exit_counts(counts, host::ticks_to_ns) }
}

impl Platform for KernelPlatform {
    fn now_ns(&self) -> u64 {
        HostMachine.ns()
    }

    fn heap(&self) -> HeapUse {
        HeapUse { used: heap::used() as u64, total: heap::size() as u64 }
    }

    fn claim_cpu(&mut self, cpu: CpuId) {
        if let Some(control) = node().control(cpu) {
            control.ask();
            HostMachine.kick(cpu);
        }
    }

    fn claim_state(&mut self, cpu: CpuId) -> ClaimState {
        match node().control(cpu).map(|control| control.claim()) {
            Some(Claim::Left) => ClaimState::Claimed,
            Some(Claim::Asked) => ClaimState::Pending,
            Some(Claim::None) => ClaimState::Refused("nobody has asked for it".to_string()),
            None => ClaimState::Refused(alloc::format!("the machine has no {cpu}")),
        }
    }

    fn release_cpu(&mut self, cpu: CpuId) {
        let Some(control) = node().control(cpu) else { return };
        if !control.withdraw() && control.claim() == Claim::Left {
            // What was sent while the CPU was lent is void. What is sent from now on is not: the
            // root cell may start the CPU before it is back.
            if let Some(posted) = node().root().board.posted(VcpuId(cpu.0)) {
                posted.clear();
            }
            control.command(Command::ReturnToRoot);
            HostMachine.kick(cpu);
        }
    }

    fn zero(&mut self, base: Hpa, len: u64) {
        access::zero_pool(base, len);
    }

    fn prepare_cell(&mut self, cell: CellId, resources: &CellResources) -> Result<(), PlatformError> {
        let built = Arc::new(GuestCell::new(resources)?);
        self.cells.insert(cell, (built, resources.clone()));
        Ok(())
    }

    fn store(&mut self, base: Hpa, data: &[u8]) {
        access::write_pool(base, data);
    }

    fn plan_cell(
        &mut self,
        cell: CellId,
        resources: &CellResources,
        files: &[StoredFile],
    ) -> Result<(), PlatformError> {
        self.cell(cell)?.0.plan(resources, files)
    }

    fn build_cell(&mut self, cell: CellId) -> Result<bool, PlatformError> {
        self.cell(cell)?.0.build()
    }

    fn start_cell(&mut self, cell: CellId) -> Result<(), PlatformError> {
        let (cell, resources) = self.cell(cell)?;
        let controls: Option<Vec<_>> = resources.cpus.iter().map(|cpu| node().control(*cpu)).collect();
        let controls =
            controls.ok_or_else(|| PlatformError("the cell has a CPU that is none".to_string()))?;
        cell.begin()?;
        for ((id, cpu), control) in (0u32..).zip(&resources.cpus).zip(controls) {
            control.command(Command::Run(cell.clone(), VcpuId(id)));
            HostMachine.kick(*cpu);
        }
        Ok(())
    }

    fn stop_cell(&mut self, cell: CellId) {
        if let Ok((cell, _)) = self.cell(cell) {
            cell.board.stop(StopReason::Request);
        }
    }

    fn press_power_button(&mut self, cell: CellId) {
        if let Ok((cell, _)) = self.cell(cell) {
            cell.board.press_power_button();
        }
    }

    fn pause_cell(&mut self, cell: CellId) {
        if let Ok((cell, _)) = self.cell(cell) {
            cell.board.hold(true);
        }
    }

    fn resume_cell(&mut self, cell: CellId) {
        if let Ok((cell, _)) = self.cell(cell) {
            cell.board.hold(false);
        }
    }

    fn cell_status(&mut self, cell: CellId) -> CellStatus {
        match self.cell(cell) {
            Ok((cell, _)) => cell.status(),
            Err(_) => CellStatus::Off(Ending::Request),
        }
    }

    fn failure_report(&mut self, cell: CellId) -> FailureReport {
        self.cell(cell).ok().and_then(|(cell, _)| cell.report()).unwrap_or_default()
    }

    fn vcpus(&mut self, cell: CellId) -> Vec<VcpuDetails> {
        if cell == CellId::ROOT {
            let counts = (0u32..).zip(node().root().all_counts());
            return counts.map(|(n, counts)| details(n, CpuId(n), counts)).collect();
        }
        let Ok((cell, resources)) = self.cell(cell) else { return Vec::new() };
        (0u32..)
            .zip(&resources.cpus)
            .map(|(vcpu, cpu)| details(vcpu, *cpu, &cell.counts(VcpuId(vcpu))))
            .collect()
    }

    fn tear_down_cell(&mut self, cell: CellId) {
        self.cells.remove(&cell);
        if self.cells.is_empty() {
            // A map that has had something in it keeps a node.
            self.cells = BTreeMap::new();
        }
    }

    fn console_read(&mut self, cell: CellId, position: u64, buf: &mut [u8]) -> (u64, usize) {
        match self.cell(cell) {
            Ok((cell, _)) => cell.board.console_read(position, buf),
            Err(_) => (position, 0),
        }
    }

    fn console_write(&mut self, cell: CellId, data: &[u8]) -> usize {
        match self.cell(cell) {
            Ok((cell, _)) => cell.board.console_write(data),
            // A console that is gone swallows what comes.
            Err(_) => data.len(),
        }
    }

    fn log_read(&mut self, position: u64, buf: &mut [u8]) -> (u64, usize) {
        let (start, count) = logging::read_from(position, buf);
        (start + count as u64, count)
    }
}
