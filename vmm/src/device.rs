//! Device models and the bus that reaches them.

pub mod acpi_pm;
pub mod bus;
pub mod cmos;
pub mod console;
pub mod silent_pic;
pub mod stream;
pub mod uart16550;
pub mod virtio;
