//! The virtio-mmio transport (virtio 1.2, 4.2): the registers through which a driver finds,
//! sets up and notifies a device, and the device's one interrupt line.
//!
//! Register accesses run on the vCPU's exit and touch no guest memory; what a device does
//! with its queues happens in [`MmioTransport::serve`], when its owner finds time. Both are
//! to be called under one lock, the device's, and after both the interrupt line may have
//! changed.

#[cfg(test)]
mod tests;

use super::queue::{Part, Queue, QueueError};
use super::{F_EVENT_IDX, F_VERSION_1, VirtioDevice};
use crate::device::bus::Width;
use crate::memory::guest::GuestMemory;
use alloc::vec::Vec;

/// The size of the register block with its configuration space, in bytes.
pub const MMIO_BYTES: u64 = 0x200;

/// Register offsets (virtio 1.2, table 4.1).
mod reg {
    pub(super) const MAGIC_VALUE: u64 = 0x000;
    pub(super) const VERSION: u64 = 0x004;
    pub(super) const DEVICE_ID: u64 = 0x008;
    pub(super) const VENDOR_ID: u64 = 0x00c;
    pub(super) const DEVICE_FEATURES: u64 = 0x010;
    pub(super) const DEVICE_FEATURES_SEL: u64 = 0x014;
    pub(super) const DRIVER_FEATURES: u64 = 0x020;
    pub(super) const DRIVER_FEATURES_SEL: u64 = 0x024;
    pub(super) const QUEUE_SEL: u64 = 0x030;
    pub(super) const QUEUE_NUM_MAX: u64 = 0x034;
    pub(super) const QUEUE_NUM: u64 = 0x038;
    pub(super) const QUEUE_READY: u64 = 0x044;
    pub(super) const QUEUE_NOTIFY: u64 = 0x050;
    pub(super) const INTERRUPT_STATUS: u64 = 0x060;
    pub(super) const INTERRUPT_ACK: u64 = 0x064;
    pub(super) const STATUS: u64 = 0x070;
    pub(super) const QUEUE_DESC_LOW: u64 = 0x080;
    pub(super) const QUEUE_DESC_HIGH: u64 = 0x084;
    pub(super) const QUEUE_DRIVER_LOW: u64 = 0x090;
    pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x094;
    pub(super) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    pub(super) const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    pub(super) const SHM_LEN_LOW: u64 = 0x0b0;
    pub(super) const SHM_BASE_HIGH: u64 = 0x0bc;
    pub(super) const CONFIG_GENERATION: u64 = 0x0fc;
    pub(super) const CONFIG: u64 = 0x100;
}

/// Bits of the device status (virtio 1.2, 2.1).
mod status {
    pub(super) const ACKNOWLEDGE: u32 = 1;
    pub(super) const DRIVER: u32 = 2;
    pub(super) const DRIVER_OK: u32 = 4;
    pub(super) const FEATURES_OK: u32 = 8;
    pub(super) const NEEDS_RESET: u32 = 64;
    pub(super) const FAILED: u32 = 128;
}

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// Not a legacy device.
const VERSION: u32 = 2;
/// "BULK", little-endian; the specification leaves the value to the vendor.
const VENDOR: u32 = 0x4b4c_5542;
/// Interrupt status: the device has used a buffer.
const INTERRUPT_USED: u32 = 1;
/// Interrupt status: the device's status or configuration has changed.
const INTERRUPT_CONFIG: u32 = 2;

/// What a register write asks of the device's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MmioEffect {
    /// Nothing.
    None,
    /// The driver has made buffers available in this queue: serve the device.
    Notify(u16),
    /// The driver has reset the device: serve it, so that it lets go of what it held.
    Reset,
    /// The driver has acknowledged interrupts: look at the interrupt line again.
    InterruptAck,
}

/// A device behind its registers.
#[derive(Debug)]
pub struct MmioTransport<D> {
    device: D,
    queues: Vec<Queue>,
    status: u32,
    interrupt_status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    /// How often the device has failed, since it was made.
    faults: u32,
}

impl<D: VirtioDevice> MmioTransport<D> {
    /// `device` in its reset state.
    pub fn new(device: D) -> Self {
        Self {
            device,
            queues: D::QUEUE_SIZES.iter().map(|&max| Queue::new(max)).collect(),
            status: 0,
            interrupt_status: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            queue_sel: 0,
            faults: 0,
        }
    }

    /// The device.
    pub const fn device(&self) -> &D {
        &self.device
    }

    /// The device, to be changed.
    pub const fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// How often a driver's fault has stopped the device, since it was made.
    pub const fn faults(&self) -> u32 {
        self.faults
    }

    /// Whether the device asserts its level-triggered interrupt line.
    pub const fn interrupt_line(&self) -> bool {
        self.interrupt_status != 0
    }

    /// Reads a register or the configuration space. What is neither reads as 0, so do
    /// accesses to registers that are not of 32 aligned bits (virtio 1.2, 4.2.2.2).
    pub fn read(&mut self, offset: u64, width: Width) -> u64 {
        if let Some(offset) = offset.checked_sub(reg::CONFIG) {
            return self.read_config(offset, width);
        }
        if width != Width::Dword {
            return 0;
        }
        u64::from(match offset {
            reg::MAGIC_VALUE => MAGIC,
            reg::VERSION => VERSION,
            reg::DEVICE_ID => D::DEVICE_ID,
            reg::VENDOR_ID => VENDOR,
            reg::DEVICE_FEATURES => half(Self::OFFERED, self.device_features_sel),
            reg::QUEUE_NUM_MAX => self.queue().map_or(0, |queue| queue.max_size().into()),
            reg::QUEUE_READY => self.queue().is_some_and(|queue| queue.is_ready()).into(),
            reg::INTERRUPT_STATUS => self.interrupt_status,
            reg::STATUS => self.status,
            // A shared memory region that does not exist has the length -1 (4.2.2.1).
            reg::SHM_LEN_LOW..=reg::SHM_BASE_HIGH => u32::MAX,
            // The configuration space of a device never changes while the node runs.
            reg::CONFIG_GENERATION => 0,
            _ => 0,
        })
    }

    /// Writes a register. The configuration space and what is no register drop writes, so do
    /// registers that the device's state does not allow to be written: features after
    /// FEATURES_OK, queues after DRIVER_OK.
    pub fn write(&mut self, offset: u64, width: Width, value: u64) -> MmioEffect {
        let Ok(value) = u32::try_from(value & width.all_ones()) else { return MmioEffect::None };
        if width != Width::Dword {
            return MmioEffect::None;
        }
        match offset {
            reg::DEVICE_FEATURES_SEL => self.device_features_sel = value,
            reg::DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            reg::DRIVER_FEATURES => self.write_driver_features(value),
            reg::QUEUE_SEL => self.queue_sel = value,
            reg::QUEUE_NOTIFY => return self.notify(value),
            reg::INTERRUPT_ACK => {
                self.interrupt_status &= !value;
                return MmioEffect::InterruptAck;
            }
            reg::STATUS if value == 0 => {
                self.reset();
                return MmioEffect::Reset;
            }
            reg::STATUS => self.write_status(value),
            _ => self.write_queue(offset, value),
        }
        MmioEffect::None
    }

    /// Lets `work` serve the queues, unless the driver has not set the device up, and then
    /// raises the interrupts that the driver wants. An error of `work` stops the device:
    /// DEVICE_NEEDS_RESET. `None` when the device is stopped, before or now.
    pub fn serve<T>(
        &mut self,
        memory: &dyn GuestMemory,
        work: impl FnOnce(&mut D, &mut [Queue]) -> Result<T, QueueError>,
    ) -> Option<T> {
        if !self.is_live() {
            return None;
        }
        let result = work(&mut self.device, &mut self.queues).and_then(|done| {
            for queue in &mut self.queues {
                if queue.wants_interrupt(memory)? {
                    self.interrupt_status |= INTERRUPT_USED;
                }
            }
            Ok(done)
        });
        result.map_err(|error| self.fail(&error)).ok()
    }

    /// The features offered.
    const OFFERED: u64 = D::FEATURES | F_VERSION_1 | F_EVENT_IDX;

    const fn is_live(&self) -> bool {
        self.status & (status::DRIVER_OK | status::NEEDS_RESET | status::FAILED) == status::DRIVER_OK
    }

    fn queue(&mut self) -> Option<&mut Queue> {
        self.queues.get_mut(usize::try_from(self.queue_sel).ok()?)
    }

    /// The configuration space ends where the device says; beyond it all is 0.
    fn read_config(&self, offset: u64, width: Width) -> u64 {
        let config =
            usize::try_from(offset).ok().and_then(|offset| self.device.config().get(offset..)).unwrap_or(&[]);
        let mut bytes = [0; 8];
        for (to, from) in bytes.iter_mut().zip(config) {
            *to = *from;
        }
        u64::from_le_bytes(bytes) & width.all_ones()
    }

    fn write_driver_features(&mut self, value: u32) {
        if self.status & status::FEATURES_OK != 0 || self.driver_features_sel > 1 {
            return;
        }
        let shift = 32 * self.driver_features_sel;
        self.driver_features = self.driver_features & !(0xffff_ffff << shift) | u64::from(value) << shift;
    }

    fn notify(&self, queue: u32) -> MmioEffect {
        match u16::try_from(queue) {
            Ok(index)
                if self.is_live() && self.queues.get(usize::from(index)).is_some_and(Queue::is_ready) =>
            {
                MmioEffect::Notify(index)
            }
            _ => MmioEffect::None,
        }
    }

    /// A driver sets bits and never clears one but by a reset; each step needs those before
    /// it (virtio 1.2, 3.1.1).
    fn write_status(&mut self, value: u32) {
        for (bit, needs) in [
            (status::FAILED, 0),
            (status::ACKNOWLEDGE, 0),
            (status::DRIVER, status::ACKNOWLEDGE),
            (status::FEATURES_OK, status::DRIVER),
            (status::DRIVER_OK, status::FEATURES_OK),
        ] {
            let refused = bit == status::FEATURES_OK
                && self.driver_features & (!Self::OFFERED | F_VERSION_1) != F_VERSION_1;
            if value & bit != 0 && self.status & needs == needs && !refused {
                self.status |= bit;
            }
        }
        let event_idx = self.driver_features & F_EVENT_IDX != 0;
        self.queues.iter_mut().for_each(|queue| queue.set_event_idx(event_idx));
    }

    fn write_queue(&mut self, offset: u64, value: u32) {
        // Without VIRTIO_F_RING_RESET a queue of a running device stays as it is.
        if self.status & status::DRIVER_OK != 0 {
            return;
        }
        let Some(queue) = self.queue() else { return };
        match offset {
            reg::QUEUE_READY if value == 0 => queue.make_unready(),
            reg::QUEUE_READY => {
                if let Err(error) = queue.make_ready() {
                    self.fail(&error);
                }
            }
            // 4.2.2.2: not to be written while the queue is ready.
            _ if queue.is_ready() => {}
            reg::QUEUE_NUM => queue.set_size(value),
            reg::QUEUE_DESC_LOW => queue.set_address(Part::Descriptors, false, value),
            reg::QUEUE_DESC_HIGH => queue.set_address(Part::Descriptors, true, value),
            reg::QUEUE_DRIVER_LOW => queue.set_address(Part::Driver, false, value),
            reg::QUEUE_DRIVER_HIGH => queue.set_address(Part::Driver, true, value),
            reg::QUEUE_DEVICE_LOW => queue.set_address(Part::Device, false, value),
            reg::QUEUE_DEVICE_HIGH => queue.set_address(Part::Device, true, value),
            _ => {}
        }
    }

    /// Stops the device until the driver resets it (virtio 1.2, 2.1.2).
    fn fail(&mut self, error: &QueueError) {
        self.status |= status::NEEDS_RESET;
        if self.status & status::DRIVER_OK != 0 {
            self.interrupt_status |= INTERRUPT_CONFIG;
        }
        self.device.reset();
        self.faults = self.faults.saturating_add(1);
        // Once a fault at first, then ever more rarely: a guest must not fill the log.
        if self.faults.is_power_of_two() {
            log::warn!("virtio device {}: fault {} of its driver: {error}", D::DEVICE_ID, self.faults);
        }
    }

    fn reset(&mut self) {
        self.device.reset();
        self.queues.iter_mut().for_each(Queue::reset);
        (self.status, self.interrupt_status) = (0, 0);
        (self.device_features_sel, self.driver_features_sel, self.queue_sel) = (0, 0, 0);
        self.driver_features = 0;
    }
}

/// 32 of the feature bits: 0 the low, 1 the high ones; there are no others.
fn half(features: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = features.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}
