//! Device models and the bus that reaches them.

pub mod bus;
pub mod cmos;
pub mod pm_timer;
pub mod stream;
pub mod uart16550;
pub mod virtio;
