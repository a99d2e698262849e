//! The root cell: the machine, less what the hypervisor keeps, and the Linux that gets it.

use crate::host::{self, HostIoApic, HostMachine};
use crate::logging;
use crate::machine::Machine;
use crate::memory::access;
use crate::stage2::{Access, Stage2};
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use bulkhead_abi::bundle::Bundle;
use bulkhead_abi::message::{FailureReport, LoadKind, Token};
use bulkhead_arch::guest_ram::{GuestRam, RamRegion};
use bulkhead_arch::x86_64::svm::Permissions;
use bulkhead_drivers::local_apic;
use bulkhead_vmm::hal::{Role, VcpuId};
use bulkhead_vmm::memory::address::{Gpa, Hpa, PAGE_SIZE};
use bulkhead_vmm::memory::guest::GuestMemory;
use bulkhead_vmm::x86::acpi::root::{self as acpi, Additions};
use bulkhead_vmm::x86::boot::e820::{E820Entry, E820Kind};
use bulkhead_vmm::x86::boot::{self, Entry, Handover};
use bulkhead_vmm::x86::mediated_io_apic::MediatedIoApic;
use bulkhead_vmm::x86::posted::Posted;
use bulkhead_vmm::x86::root_board::{AddedDevices, RootBoard};
use bulkhead_vmm::x86::vcpu::VcpuCounts;

/// Pages of the hypervisor's memory that the root cell sees: two for the added devices
/// (which trap), the rest for ACPI tables (which it may read).
const WINDOW_PAGES: u64 = 18;
const TABLES_OFFSET: u64 = 2 * PAGE_SIZE;

/// An address of the hypervisor's window, which lies below 4 GiB.
#[expect(clippy::cast_possible_truncation, reason = "the window is allocated below 4 GiB")]
fn low(gpa: Gpa) -> u32 {
    gpa.raw() as u32
}

/// The root cell.
pub(crate) struct RootCell {
    /// Its board.
    pub(crate) board: RootBoard<HostMachine, GuestRam, HostIoApic>,
    /// The registers of its kernel's first instruction.
    pub(crate) entry: Entry,
    stage2: Stage2,
    permissions: Arc<Permissions>,
    counts: Vec<Arc<VcpuCounts>>,
    /// Bytes of its RAM.
    pub(crate) memory: u64,
}

impl RootCell {
    /// Gives the machine to a new root cell and loads its kernel from the bundle.
    ///
    /// # Errors
    /// What cannot be done, for the console: the node does not come up then.
    pub(crate) fn new(machine: &Machine, bundle: &Bundle<'_>, token: &Token) -> Result<Self, String> {
        let text = |e: &dyn core::fmt::Display| e.to_string();
        let window = access::allocate_window(WINDOW_PAGES * PAGE_SIZE)
            .ok_or_else(|| "no memory for the root cell's ACPI tables".to_string())?;
        let at = |offset: u64| Gpa::new(window.raw() + offset);
        // The map: what the firmware said, with the hypervisor's parts taken out.
        let map: Vec<E820Entry> = machine.root_map(bundle.config.root.memory);
        let regions: Vec<RamRegion> = map
            .iter()
            .filter(|entry| entry.kind == E820Kind::RAM)
            .map(|entry| RamRegion { gpa: entry.base, hpa: Hpa::new(entry.base.raw()), len: entry.size })
            .collect();
        let memory = regions.iter().map(|r| r.len).sum();
        let ram = host::guest_ram(regions);

        let mut stage2 = Stage2::new().map_err(|e| text(&e))?;
        stage2
            .map(Gpa::new(0), Hpa::new(0), host::physical_address_space(), Access::ALL)
            .map_err(|e| text(&e))?;
        for range in machine.kept_ranges() {
            stage2.unmap(Gpa::new(range.start().raw()), range.size()).map_err(|e| text(&e))?;
        }
        for apic in &machine.firmware.io_apics {
            stage2.unmap(Gpa::new(apic.address.raw()).page_base(), PAGE_SIZE).map_err(|e| text(&e))?;
        }
        let (start, end) = (host::MSI_WINDOW.start, host::MSI_WINDOW.end);
        stage2.unmap(Gpa::new(start), end - start).map_err(|e| text(&e))?;
        // Where the firmware has left the registers, should that be elsewhere.
        stage2.unmap(Gpa::new(local_apic::page()), PAGE_SIZE).map_err(|e| text(&e))?;

        let firmware = machine.firmware_tables();
        let apic_ids = machine.apic_ids();
        let kept_back: Vec<u32> = bundle
            .config
            .reserved_cpus
            .iter()
            .filter_map(|cpu| apic_ids.get(usize::try_from(*cpu).ok()?).copied())
            .collect();
        let pins = |address: Gpa| host::io_apic_pins(Hpa::new(address.raw()));
        let additions = Additions {
            io_apic_pins: &pins,
            kept_back: &kept_back,
            io_apic: low(at(0)),
            virtio: low(at(PAGE_SIZE)),
            virtio_size: low(Gpa::new(PAGE_SIZE)),
            virtio_pin: AddedDevices::CHANNEL_PIN.into(),
            token: *token.bytes(),
        };
        let rsdp = at(TABLES_OFFSET);
        let tables = acpi::build(&firmware, &additions, rsdp).map_err(|e| text(&e))?;
        let added = AddedDevices {
            io_apic: at(0),
            io_apic_id: tables.io_apic_id,
            channel: at(PAGE_SIZE),
            gsi_base: tables.gsi_base,
        };
        let size = tables.bytes.len() as u64;
        if size > WINDOW_PAGES * PAGE_SIZE - TABLES_OFFSET {
            return Err(alloc::format!("the root cell's ACPI tables have {size} bytes, too many"));
        }
        access::write_window(Hpa::new(at(TABLES_OFFSET).raw()), &tables.bytes);
        let pages = size.next_multiple_of(PAGE_SIZE);
        stage2
            .map(at(TABLES_OFFSET), Hpa::new(at(TABLES_OFFSET).raw()), pages, Access::READ)
            .map_err(|e| text(&e))?;

        // A bundle's root kernel is a bzImage, which takes memory as it is found, not only zeros.
        let kernel = bundle.root_kernel.data;
        let initrd = bundle.root_initrd.as_ref().map(|entry| entry.data);
        let handover = Handover {
            map: &map,
            cmdline: bundle.config.root.cmdline.as_bytes(),
            initrd: initrd.map(|data| data.len() as u64),
            rsdp: Some(rsdp),
        };
        let unfit = |e: &dyn core::fmt::Display| alloc::format!("root {e}");
        let mut plan = boot::plan(&kernel, &handover).map_err(|e| unfit(&e))?;
        while let Some(piece) = plan.next_piece(u64::MAX) {
            let file = if piece.file == LoadKind::KERNEL { kernel } else { initrd.unwrap_or_default() };
            let (start, len) = (usize::try_from(piece.offset), usize::try_from(piece.len));
            let bytes = start.ok().zip(len.ok()).and_then(|(start, len)| file.get(start..)?.get(..len));
            ram.write(piece.to, bytes.unwrap_or_default()).map_err(|e| text(&e))?;
        }
        let entry = plan.finish(&ram).map_err(|e| unfit(&e))?;

        let power = machine.power_ports();
        let permissions = Arc::new(host::permissions(Role::Root, power.trapped()));
        let io_apics = machine
            .firmware
            .io_apics
            .iter()
            .map(|apic| {
                let hardware = HostIoApic::new(apic.address).ok_or("no memory to map an I/O APIC")?;
                Ok((Gpa::new(apic.address.raw()).page_base(), MediatedIoApic::new(hardware)))
            })
            .collect::<Result<Vec<_>, String>>()?;
        Ok(Self {
            board: RootBoard::new(HostMachine, ram, &apic_ids, power, added, io_apics),
            entry,
            stage2,
            permissions,
            counts: apic_ids.iter().map(|_| Arc::default()).collect(),
            memory,
        })
    }

    /// The root of its stage-2 tables.
    pub(crate) fn nested_root(&self) -> Hpa {
        self.stage2.root()
    }

    /// What its vCPUs may touch without an exit.
    pub(crate) fn permissions(&self) -> Arc<Permissions> {
        self.permissions.clone()
    }

    /// The counters of a vCPU.
    pub(crate) fn counts(&self, vcpu: VcpuId) -> Arc<VcpuCounts> {
        let index = usize::try_from(vcpu.0).unwrap_or(usize::MAX);
        self.counts.get(index).cloned().unwrap_or_default()
    }

    /// The counters of all its vCPUs, in the order of their numbers.
    pub(crate) fn all_counts(&self) -> &[Arc<VcpuCounts>] {
        &self.counts
    }

    /// An interrupt of the machine has arrived at the CPU of `vcpu`.
    pub(crate) fn arrived(&self, vcpu: VcpuId, posted: &Posted, vector: u8, level: bool) {
        if level {
            self.board.level_arrived(vcpu, vector);
        }
        posted.post_vector(vector, level);
    }

    /// The root cell cannot go on, and with it the node: says why, and resets the machine.
    pub(crate) fn failed(&self, report: &FailureReport) -> ! {
        // Nobody can ask for the log any more.
        logging::reclaim_serial();
        log::error!("the root cell failed at vcpu{}: {}", report.vcpu, report.reason);
        for line in report.registers.chunks(4) {
            let mut text = String::new();
            for register in line {
                text += &alloc::format!("  {:9} {:#018x}", register.name, register.value);
            }
            log::error!("{text}");
        }
        for exit in &report.exits {
            log::error!(
                "  {:>14} ns {:16} at {:#x} ({:#x})",
                exit.time_ns,
                exit.reason,
                exit.pc,
                exit.detail
            );
        }
        host::reset_machine()
    }
}
