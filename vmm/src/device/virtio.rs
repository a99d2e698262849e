//! Virtio devices over virtio-mmio (virtio 1.2).

pub mod mmio;
pub mod queue;
pub mod vsock;
