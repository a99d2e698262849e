//! A guest cell's board: devices, interrupt controller, and the way out.
//!
//! Addresses and ports are in [`board`]. Each device has its own lock, held
//! until its interrupt line is set: the I/O APIC's lock comes after it. None is held while a
//! message is sent.

use super::board;
use super::interrupt::InterruptMessage;
use super::io_apic::IoApic;
use super::machine::Machine;
use super::posted::Posted;
use super::root_board::deliver;
use super::vcpu::{Board, Failure, low};
use crate::device::acpi_pm::AcpiPm;
use crate::device::bus::{BusDevice, Instant, Width};
use crate::device::cmos::Cmos;
use crate::device::uart16550::Uart16550;
use crate::hal::{CpuId, Role, VcpuId};
use crate::memory::address::{Gpa, PAGE_SIZE};
use crate::memory::guest::GuestMemory;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use spin::{Mutex, MutexGuard};

const COM1: u16 = board::COM1_PORT;
const COM1_LAST: u16 = COM1 + 7;
const COM1_PIN: usize = board::COM1_GSI as usize;
const SCI_PIN: usize = board::SCI_GSI as usize;
const CMOS_DATA: u16 = board::CMOS_PORT + 1;
/// The last byte of the PM timer.
const PM_LAST: u16 = board::PM_TIMER_PORT + 3;

/// Why a guest cell has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StopReason {
    /// It turned itself off through ACPI.
    #[error("the guest turned itself off")]
    PowerOff,
    /// It asked for a reset.
    #[error("the guest asked for a reset")]
    Reset,
    /// It wrote this to its exit port.
    #[error("the guest wrote {0} to its exit port")]
    Exit(u32),
    /// It was told to from outside.
    #[error("stopped by request")]
    Request,
    /// It cannot go on.
    #[error("vcpu{vcpu}: {failure}")]
    Failed {
        /// The vCPU that failed.
        vcpu: u32,
        /// Why.
        failure: Failure,
    },
}

/// A guest cell's board.
pub struct GuestBoard<M, G> {
    /// The machine behind it.
    pub machine: M,
    memory: G,
    cpus: Vec<CpuId>,
    posted: Vec<Posted>,
    /// Node nanoseconds when the board was made: device time begins there.
    made_ns: u64,
    /// Node nanoseconds when the cell started: its counter begins there.
    started_ns: AtomicU64,
    /// Wall-clock nanoseconds when the node booted.
    boot_wall_clock_ns: u64,
    io_apic: Mutex<IoApic>,
    uart: Mutex<Uart16550>,
    cmos: Mutex<Cmos>,
    pm: Mutex<AcpiPm>,
    stop: Mutex<Option<StopReason>>,
    stopping: AtomicBool,
    held: AtomicBool,
    output: AtomicBool,
    /// Accesses to ports and memory of nobody.
    pub stray_accesses: AtomicU64,
}

impl<M: Machine, G: GuestMemory> GuestBoard<M, G> {
    /// The board of a cell whose vCPU *n* runs on `cpus[n]`, and whose clock shows
    /// `boot_wall_clock_ns` (nanoseconds since 1970) when the node booted.
    pub fn new(machine: M, memory: G, cpus: Vec<CpuId>, boot_wall_clock_ns: u64) -> Self {
        let made_ns = machine.ns();
        Self {
            posted: (0u32..).zip(&cpus).map(|(id, _)| Posted::new(id)).collect(),
            memory,
            cpus,
            made_ns,
            started_ns: AtomicU64::new(made_ns),
            boot_wall_clock_ns,
            io_apic: Mutex::new(IoApic::new(board::IO_APIC_ID, 0)),
            uart: Mutex::new(Uart16550::new()),
            cmos: Mutex::new(Cmos::new(boot_wall_clock_ns.saturating_add(made_ns))),
            pm: Mutex::new(AcpiPm::new()),
            stop: Mutex::new(None),
            stopping: AtomicBool::new(false),
            held: AtomicBool::new(false),
            output: AtomicBool::new(false),
            stray_accesses: AtomicU64::new(0),
            machine,
        }
    }

    /// What was posted to `vcpu`.
    #[must_use]
    pub fn posted(&self, vcpu: VcpuId) -> Option<&Posted> {
        self.posted.get(usize::try_from(vcpu.0).ok()?)
    }

    /// The cell starts now: its counter shows 0.
    pub fn note_start(&self) {
        self.started_ns.store(self.machine.ns(), Ordering::Relaxed);
    }

    /// The cell's memory.
    pub fn ram(&self) -> &G {
        &self.memory
    }

    /// Whether the vCPUs must leave the guest for good.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Stops the cell; the first reason counts. Kicks all of its CPUs.
    pub fn stop(&self, reason: StopReason) {
        self.stop.lock().get_or_insert(reason);
        self.stopping.store(true, Ordering::Release);
        self.kick_all();
    }

    /// Whether the vCPUs must stand still.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// Lets the vCPUs stand still, or go on. Kicks all of the cell's CPUs.
    pub fn hold(&self, held: bool) {
        self.held.store(held, Ordering::Release);
        self.kick_all();
    }

    fn kick_all(&self) {
        for cpu in &self.cpus {
            self.machine.kick(*cpu);
        }
    }

    /// Presses and releases the power button.
    pub fn press_power_button(&self) {
        let mut pm = self.pm.lock();
        pm.press_power_button();
        let line = pm.sci_level();
        self.set_line(pm, SCI_PIN, line);
    }

    /// Puts all devices into the state after a reset, once no vCPU is on. The console keeps its
    /// bytes, and the clock goes on.
    pub fn reset(&self) {
        *self.io_apic.lock() = IoApic::new(board::IO_APIC_ID, 0);
        self.uart.lock().reset();
        *self.pm.lock() = AcpiPm::new();
        for posted in &self.posted {
            posted.clear();
        }
        *self.stop.lock() = None;
        self.held.store(false, Ordering::Release);
        self.stopping.store(false, Ordering::Release);
    }

    /// Why the cell stops or has stopped.
    pub fn stop_reason(&self) -> Option<StopReason> {
        *self.stop.lock()
    }

    /// Whether the guest has written to its console since the last call.
    pub fn take_output_notification(&self) -> bool {
        self.output.load(Ordering::Relaxed) && self.output.swap(false, Ordering::Acquire)
    }

    /// Copies console output from `position` on to `buf`: returns the position behind it and
    /// how many bytes.
    pub fn console_read(&self, position: u64, buf: &mut [u8]) -> (u64, usize) {
        self.uart.lock().console().read_from(position, buf)
    }

    /// Gives input to the console; returns how many bytes it took.
    pub fn console_write(&self, data: &[u8]) -> usize {
        let mut uart = self.uart.lock();
        let taken = uart.push_input(data);
        let line = uart.irq_level();
        self.set_line(uart, COM1_PIN, line);
        taken
    }

    /// Sets a device's line to `level`, and lets go of the device: not before, or two CPUs
    /// could tell the line in the wrong order, and an interrupt would be lost.
    fn set_line<D>(&self, device: MutexGuard<'_, D>, gsi: usize, level: bool) {
        let message = self.io_apic.lock().set_line(gsi, level);
        drop(device);
        if let Some(message) = message {
            self.deliver(message, None);
        }
    }

    fn deliver(&self, message: InterruptMessage, sender: Option<VcpuId>) {
        let is_sender = |n: u32| sender == Some(VcpuId(n));
        deliver(&self.posted, message, is_sender, |vcpu| {
            let cpu = usize::try_from(vcpu).ok().and_then(|n| self.cpus.get(n));
            if let (Some(cpu), false) = (cpu, is_sender(vcpu)) {
                self.machine.kick(*cpu);
            }
        });
    }

    fn stray(&self) {
        // Stock kernels probe what is not there; it is counted, not told.
        self.stray_accesses.fetch_add(1, Ordering::Relaxed);
    }
}

impl<M: Machine, G: GuestMemory> Board for GuestBoard<M, G> {
    type Memory = G;

    fn role(&self) -> Role {
        Role::Guest
    }

    fn host_counter(&self) -> u64 {
        self.machine.counter()
    }

    fn instant(&self) -> Instant {
        Instant { ns: self.machine.ns().saturating_sub(self.made_ns) }
    }

    fn counter_hz(&self) -> u64 {
        self.machine.counter_hz()
    }

    fn wall_clock_base_ns(&self) -> u64 {
        self.boot_wall_clock_ns.saturating_add(self.started_ns.load(Ordering::Relaxed))
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
        let now = self.instant();
        match port {
            COM1..=COM1_LAST => {
                let mut uart = self.uart.lock();
                let value = uart.read(u64::from(port - COM1), width, now);
                let line = uart.irq_level();
                self.set_line(uart, COM1_PIN, line);
                value
            }
            board::CMOS_PORT..=CMOS_DATA => {
                self.cmos.lock().read(u64::from(port - board::CMOS_PORT), width, now)
            }
            board::PM1A_EVENT_PORT..=PM_LAST => {
                self.pm.lock().read(u64::from(port - board::PM1A_EVENT_PORT), width, now)
            }
            _ => {
                self.stray();
                width.all_ones()
            }
        }
    }

    fn write_port(&self, port: u16, width: Width, value: u64) {
        let now = self.instant();
        match port {
            COM1..=COM1_LAST => {
                let mut uart = self.uart.lock();
                uart.write(u64::from(port - COM1), width, value, now);
                let line = uart.irq_level();
                self.set_line(uart, COM1_PIN, line);
                if port == COM1 {
                    self.output.store(true, Ordering::Release);
                }
            }
            board::CMOS_PORT..=CMOS_DATA => {
                self.cmos.lock().write(u64::from(port - board::CMOS_PORT), width, value, now);
            }
            board::PM1A_EVENT_PORT..=PM_LAST => {
                let mut pm = self.pm.lock();
                pm.write(u64::from(port - board::PM1A_EVENT_PORT), width, value, now);
                let off = pm.take_power_off();
                let line = pm.sci_level();
                self.set_line(pm, SCI_PIN, line);
                if off {
                    self.stop(StopReason::PowerOff);
                }
            }
            board::EXIT_PORT => self.stop(StopReason::Exit(low(value & width.all_ones()))),
            board::RESET_PORT if value & 0xff == u64::from(board::RESET_VALUE) => {
                self.stop(StopReason::Reset)
            }
            _ => self.stray(),
        }
    }

    fn read_memory(&self, gpa: Gpa, width: Width) -> u64 {
        match gpa.checked_offset_from(Gpa::new(board::IO_APIC_ADDRESS.into())) {
            Some(offset @ 0..PAGE_SIZE) => self.io_apic.lock().read(offset, width),
            _ => {
                self.stray();
                width.all_ones()
            }
        }
    }

    fn write_memory(&self, gpa: Gpa, width: Width, value: u64) {
        let Some(offset @ 0..PAGE_SIZE) = gpa.checked_offset_from(Gpa::new(board::IO_APIC_ADDRESS.into()))
        else {
            self.stray();
            return;
        };
        let mut messages: heapless::Vec<InterruptMessage, 4> = heapless::Vec::new();
        self.io_apic.lock().write(offset, width, value, &mut |message| {
            // A write concerns one pin, and a pin sends at most one message for it.
            let _ = messages.push(message);
        });
        for message in messages {
            self.deliver(message, None);
        }
    }

    fn send(&self, message: InterruptMessage, sender: VcpuId) {
        self.deliver(message, Some(sender));
    }

    fn end_of_interrupt(&self, vector: u8, _vcpu: VcpuId) {
        let mut messages: heapless::Vec<InterruptMessage, 24> = heapless::Vec::new();
        self.io_apic.lock().eoi(vector, &mut |message| {
            // One for each pin at most.
            let _ = messages.push(message);
        });
        for message in messages {
            self.deliver(message, None);
        }
    }
    fn vcpu_reset(&self, _vcpu: VcpuId) {}
}
