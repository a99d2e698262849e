//! The virtio-vsock device: the management channel.
