//! Virtio devices over virtio-mmio (virtio 1.2).
//!
//! A device ([`VirtioDevice`]) sits in a transport ([`mmio::MmioTransport`]) that has its
//! registers and its [`queue::Queue`]s. Whatever a driver does wrong with the queues comes
//! to the transport as a [`queue::QueueError`] and stops this one device until the driver
//! resets it.

#[cfg(test)]
mod driver;
pub mod mmio;
pub mod queue;
pub mod vsock;

/// `VIRTIO_F_EVENT_IDX` (virtio 1.2, 6): both sides say from which index on they want to be
/// notified.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// `VIRTIO_F_VERSION_1` (virtio 1.2, 6): not a legacy device.
pub const F_VERSION_1: u64 = 1 << 32;

/// What the transport has to know of a device.
pub trait VirtioDevice {
    /// The device ID (virtio 1.2, 5).
    const DEVICE_ID: u32;
    /// The largest size of each queue, powers of two up to 32768; as many as the device has
    /// queues.
    const QUEUE_SIZES: &'static [u16];
    /// The device's own feature bits; those of the queues and the transport come on top.
    const FEATURES: u64;

    /// The device's configuration space, read-only for the driver.
    fn config(&self) -> &[u8];

    /// Forgets all that the driver has told the device and all buffers it holds: the driver
    /// has reset the device, or the device has failed.
    fn reset(&mut self);
}
