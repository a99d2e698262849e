//! What the boards need of the real machine: safe operations, implemented by the kernel.

use crate::device::bus::Width;
use crate::hal::CpuId;

/// The machine.
pub trait Machine: Sync {
    /// The machine's counter.
    fn counter(&self) -> u64;
    /// Its frequency in Hz.
    fn counter_hz(&self) -> u64;
    /// Nanoseconds since boot.
    fn ns(&self) -> u64;
    /// Wall-clock nanoseconds since 1970 when the machine's counter was 0.
    fn wall_clock_base_ns(&self) -> u64;
    /// CPUID of the CPU it is called on.
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// Reads an MSR that the table in `msr.rs` lets be read, and that the CPU has.
    fn read_msr(&self, msr: u32) -> u64;
    /// Reads a port, for a cell that owns the machine's ports.
    fn read_port(&self, port: u16, width: Width) -> u64;
    /// Writes a port, for a cell that owns the machine's ports.
    fn write_port(&self, port: u16, width: Width, value: u64);
    /// Makes `cpu` look at what was posted, wherever it is.
    fn kick(&self, cpu: CpuId);
}
