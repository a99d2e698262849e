//! The root cell's board: the machine itself, with what must not be touched taken out and
//! one device added, the management channel.
//!
//! Locks: each device has its own, held only while it runs; none is held while a message is
//! sent. The order, where two are needed, is `channel`, then `virtual_io_apic`.

use super::interrupt::{DeliveryMode, InterruptMessage};
use super::io_apic::IoApic;
use super::machine::Machine;
use super::mediated_io_apic::{IoApicHardware, MediatedIoApic};
use super::posted::Posted;
use super::root_ports::{MachineEnd, PowerPorts, RootPorts};
use super::vcpu::Board;
use crate::device::bus::{Instant, Width};
use crate::device::stream::StreamServices;
use crate::device::virtio::mmio::{MmioEffect, MmioTransport};
use crate::device::virtio::vsock::Vsock;
use crate::hal::{CpuId, Role, VcpuId};
use crate::memory::address::{Gpa, PAGE_SIZE};
use crate::memory::guest::GuestMemory;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use spin::Mutex;

/// Where the root board's added devices are: pages inside the hypervisor's own RAM below
/// 4 GiB, which no device of the machine uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddedDevices {
    /// The virtual I/O APIC's page.
    pub io_apic: Gpa,
    /// Its ID.
    pub io_apic_id: u8,
    /// The management channel's page.
    pub channel: Gpa,
    /// The virtual I/O APIC's first global system interrupt.
    pub gsi_base: u32,
}

impl AddedDevices {
    /// The pin of the virtual I/O APIC that the management channel raises.
    pub const CHANNEL_PIN: u8 = 0;
}

/// The root cell's board.
pub struct RootBoard<M, G, I: IoApicHardware> {
    /// The machine behind it.
    pub machine: M,
    memory: G,
    /// What was posted to each vCPU; vCPU *n* is pCPU *n*.
    posted: Vec<Posted>,
    ports: RootPorts,
    added: AddedDevices,
    virtual_io_apic: Mutex<IoApic>,
    io_apics: Vec<(Gpa, Mutex<MediatedIoApic<I>>)>,
    channel: Mutex<MmioTransport<Vsock>>,
    channel_notified: AtomicBool,
    /// Accesses to memory that is not the root cell's.
    pub stray_accesses: AtomicU64,
}

impl<M: Machine, G: GuestMemory, I: IoApicHardware> RootBoard<M, G, I> {
    /// The board of a machine whose CPUs have these APIC IDs, in the order of their numbers.
    pub fn new(
        machine: M,
        memory: G,
        apic_ids: &[u32],
        power: PowerPorts,
        added: AddedDevices,
        io_apics: Vec<(Gpa, MediatedIoApic<I>)>,
    ) -> Self {
        Self {
            machine,
            memory,
            posted: apic_ids.iter().map(|id| Posted::new(*id)).collect(),
            ports: RootPorts::new(power),
            added,
            virtual_io_apic: Mutex::new(IoApic::new(added.io_apic_id, added.gsi_base)),
            io_apics: io_apics.into_iter().map(|(page, apic)| (page, Mutex::new(apic))).collect(),
            channel: Mutex::new(MmioTransport::new(Vsock::new())),
            channel_notified: AtomicBool::new(false),
            stray_accesses: AtomicU64::new(0),
        }
    }

    /// What was posted to `vcpu`.
    #[must_use]
    pub fn posted(&self, vcpu: VcpuId) -> Option<&Posted> {
        self.posted.get(usize::try_from(vcpu.0).ok()?)
    }

    /// A level-triggered interrupt of the machine has arrived at `vcpu`'s CPU: its line is
    /// held until the guest has ended it.
    pub fn level_arrived(&self, vcpu: VcpuId, vector: u8) {
        let Some(posted) = self.posted(vcpu) else { return };
        for (_, apic) in &self.io_apics {
            apic.lock()
                .level_arrived(vector, posted.apic_id(), &|destination| posted.matches(destination, false));
        }
    }

    /// Whether the driver of the management channel has asked for attention since the last
    /// call.
    pub fn take_channel_notification(&self) -> bool {
        self.channel_notified.load(Ordering::Relaxed) && self.channel_notified.swap(false, Ordering::Acquire)
    }

    /// Lets the management channel move up to `budget` packets; returns whether more wait.
    /// Only one CPU does so at a time; to the others there is nothing to do.
    pub fn poll_channel(&self, services: &mut dyn StreamServices, budget: usize) -> bool {
        let Some(mut channel) = self.channel.try_lock() else { return false };
        let outcome = channel.poll(&self.memory, services, budget);
        let line = channel.interrupt_line();
        let message = self.virtual_io_apic.lock().set_line(usize::from(AddedDevices::CHANNEL_PIN), line);
        drop(channel);
        if let Some(message) = message {
            self.deliver(message, None);
        }
        outcome.more_work
    }

    fn deliver(&self, message: InterruptMessage, sender: Option<VcpuId>) {
        let is_sender = |n: u32| sender == Some(VcpuId(n));
        deliver(&self.posted, message, is_sender, |vcpu| {
            if !is_sender(vcpu) {
                self.machine.kick(CpuId(vcpu));
            }
        });
    }

    /// How the root cell wants the machine to end, if it does: its write is held back until
    /// [`end_machine`](Self::end_machine).
    pub fn wanted_end(&self) -> Option<MachineEnd> {
        self.ports.wanted_end()
    }

    /// Carries out the write that was held back. The machine ends by it, or the root cell goes on
    /// behind it.
    pub fn end_machine(&self) {
        self.ports.end_machine(&self.machine);
    }

    fn stray(&self, what: &str, gpa: Gpa) {
        let count = self.stray_accesses.fetch_add(1, Ordering::Relaxed) + 1;
        // Every power of two: enough to see, too little to flood.
        if count.is_power_of_two() {
            log::warn!("root cell: {what} of {gpa}, which is not its memory ({count} so far)");
        }
    }
}

/// Offset of `gpa` in the page at `page`.
fn offset_in(gpa: Gpa, page: Gpa) -> Option<u64> {
    gpa.checked_offset_from(page).filter(|offset| *offset < PAGE_SIZE)
}

/// Posts `message` to the vCPUs it is for, and calls `kick` for each.
pub(super) fn deliver(
    posted: &[Posted],
    message: InterruptMessage,
    is_sender: impl Fn(u32) -> bool,
    kick: impl Fn(u32),
) {
    let targets =
        || (0u32..).zip(posted).filter(|(n, target)| target.matches(message.destination, is_sender(*n)));
    let post = |(n, target): (u32, &Posted)| {
        target.post_vector(message.vector, message.level);
        kick(n);
    };
    match message.mode {
        DeliveryMode::FIXED => targets().for_each(post),
        // Any one of them that can take it; its priority is known to itself alone.
        DeliveryMode::LOWEST_PRIORITY => {
            targets().find(|(_, target)| target.is_enabled()).into_iter().for_each(post);
        }
        DeliveryMode::NMI => targets().for_each(|(n, target)| {
            target.post_nmi();
            kick(n);
        }),
        DeliveryMode::INIT => targets().for_each(|(n, target)| {
            target.post_init();
            kick(n);
        }),
        DeliveryMode::STARTUP => targets().for_each(|(n, target)| {
            target.post_startup(message.vector);
            kick(n);
        }),
        // SMI, ExtINT and reserved modes go to nobody.
        _ => {}
    }
}

impl<M: Machine, G: GuestMemory, I: IoApicHardware> Board for RootBoard<M, G, I> {
    type Memory = G;

    fn role(&self) -> Role {
        Role::Root
    }

    fn host_counter(&self) -> u64 {
        self.machine.counter()
    }

    fn instant(&self) -> Instant {
        Instant { ns: self.machine.ns() }
    }

    fn counter_hz(&self) -> u64 {
        self.machine.counter_hz()
    }

    fn wall_clock_base_ns(&self) -> u64 {
        self.machine.wall_clock_base_ns()
    }

    fn memory(&self) -> &G {
        &self.memory
    }

    fn machine_cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.machine.cpuid(leaf, subleaf)
    }

    fn machine_msr(&self, msr: u32) -> u64 {
        self.machine.read_msr(msr)
    }

    fn vcpus(&self) -> u32 {
        u32::try_from(self.posted.len()).unwrap_or(u32::MAX)
    }

    fn read_port(&self, port: u16, width: Width) -> u64 {
        self.ports.read(&self.machine, port, width, self.instant())
    }

    fn write_port(&self, port: u16, width: Width, value: u64) {
        self.ports.write(&self.machine, port, width, value, self.instant());
    }

    fn read_memory(&self, gpa: Gpa, width: Width) -> u64 {
        for (page, apic) in &self.io_apics {
            if let Some(offset) = offset_in(gpa, *page) {
                return apic.lock().read(offset, width);
            }
        }
        if let Some(offset) = offset_in(gpa, self.added.io_apic) {
            return self.virtual_io_apic.lock().read(offset, width);
        }
        if let Some(offset) = offset_in(gpa, self.added.channel) {
            return self.channel.lock().read(offset, width);
        }
        self.stray("read", gpa);
        width.all_ones()
    }

    fn write_memory(&self, gpa: Gpa, width: Width, value: u64) {
        for (page, apic) in &self.io_apics {
            if let Some(offset) = offset_in(gpa, *page) {
                apic.lock().write(offset, width, value);
                return;
            }
        }
        if let Some(offset) = offset_in(gpa, self.added.io_apic) {
            let mut messages: heapless::Vec<InterruptMessage, 4> = heapless::Vec::new();
            self.virtual_io_apic.lock().write(offset, width, value, &mut |message| {
                // A write concerns one pin, and a pin sends at most one message for it.
                let _ = messages.push(message);
            });
            for message in messages {
                self.deliver(message, None);
            }
            return;
        }
        if let Some(offset) = offset_in(gpa, self.added.channel) {
            let mut channel = self.channel.lock();
            let effect = channel.write(offset, width, value);
            let line = channel.interrupt_line();
            // Before the channel is let go: two CPUs must not tell its line in the wrong order.
            let message = self.virtual_io_apic.lock().set_line(usize::from(AddedDevices::CHANNEL_PIN), line);
            drop(channel);
            if !matches!(effect, MmioEffect::None) {
                self.channel_notified.store(true, Ordering::Release);
            }
            if let Some(message) = message {
                self.deliver(message, None);
            }
            return;
        }
        self.stray("write", gpa);
    }

    fn send(&self, message: InterruptMessage, sender: VcpuId) {
        self.deliver(message, Some(sender));
    }

    fn end_of_interrupt(&self, vector: u8, vcpu: VcpuId) {
        if let Some(posted) = self.posted(vcpu) {
            for (_, apic) in &self.io_apics {
                apic.lock().eoi(vector, posted.apic_id());
            }
        }
        let mut messages: heapless::Vec<InterruptMessage, 24> = heapless::Vec::new();
        self.virtual_io_apic.lock().eoi(vector, &mut |message| {
            // One for each pin at most.
            let _ = messages.push(message);
        });
        for message in messages {
            self.deliver(message, None);
        }
    }
    fn vcpu_reset(&self, vcpu: VcpuId) {
        if let Some(posted) = self.posted(vcpu) {
            for (_, apic) in &self.io_apics {
                apic.lock().release_all_for(posted.apic_id());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::interrupt::Destination;
    use core::cell::RefCell;
    use std::vec;

    /// Who is kicked, and what was posted, for a message to three vCPUs of which the middle one
    /// has its APIC on.
    fn delivered(mode: DeliveryMode, destination: Destination) -> (vec::Vec<u32>, vec::Vec<bool>) {
        let posted: vec::Vec<_> = (0..3).map(Posted::new).collect();
        for (n, target) in (0u32..).zip(&posted) {
            target.publish(n, 0x0100_0000 << n, Posted::FLAT | if n == 1 { Posted::ENABLED } else { 0 });
        }
        let kicked = RefCell::new(vec![]);
        let message = InterruptMessage { destination, mode, vector: 0x41, level: false };
        deliver(&posted, message, |n| n == 0, |n| kicked.borrow_mut().push(n));
        (kicked.into_inner(), posted.iter().map(Posted::is_pending).collect())
    }

    #[test]
    fn messages_find_their_vcpus() {
        let all = Destination::All;
        assert_eq!(delivered(DeliveryMode::FIXED, all), (vec![0, 1, 2], vec![true; 3]));
        assert_eq!(delivered(DeliveryMode::NMI, Destination::Others), (vec![1, 2], vec![false, true, true]));
        assert_eq!(delivered(DeliveryMode::INIT, Destination::Physical(2)).0, [2]);
        assert_eq!(delivered(DeliveryMode::STARTUP, Destination::Logical(5)).0, [0, 2]);
        assert_eq!(delivered(DeliveryMode::SMI, all), (vec![], vec![false; 3]));
    }

    #[test]
    fn lowest_priority_goes_to_one_that_can_take_it() {
        assert_eq!(delivered(DeliveryMode::LOWEST_PRIORITY, Destination::All).0, [1]);
        assert_eq!(delivered(DeliveryMode::LOWEST_PRIORITY, Destination::Physical(2)).0, []);
    }
}
