//! The virtio-mmio transport.
