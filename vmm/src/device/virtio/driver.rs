//! The driver's side of a virtqueue and of the registers, for tests: what a guest would do.

use super::VirtioDevice;
use super::mmio::{MmioEffect, MmioTransport};
use crate::device::bus::Width;
use crate::memory::address::Gpa;
use crate::memory::guest::GuestMemory;
use std::collections::BTreeMap;
use std::vec::Vec;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// A queue as its driver sees it, laid out from `base` on.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) base: u64,
    pub(crate) size: u16,
    /// The available index, as published.
    pub(crate) avail: u16,
    /// The used index up to which buffers were taken back.
    used: u16,
    free: Vec<u16>,
    /// The descriptors of each buffer that the device has.
    chains: BTreeMap<u16, Vec<u16>>,
}

impl Ring {
    pub(crate) fn new(base: u64, size: u16) -> Self {
        Self { base, size, avail: 0, used: 0, free: (0..size).rev().collect(), chains: BTreeMap::new() }
    }

    pub(crate) fn driver(&self) -> u64 {
        self.base + 0x1000
    }

    pub(crate) fn device(&self) -> u64 {
        self.base + 0x2000
    }

    /// Sets the queue up by the registers, as Linux does.
    pub(crate) fn set_up<D: VirtioDevice>(&self, transport: &mut MmioTransport<D>, index: u32) {
        set(transport, 0x030, index);
        assert_eq!(get(transport, 0x044), 0, "in use already");
        assert!(u32::from(self.size) <= get(transport, 0x034));
        set(transport, 0x038, u32::from(self.size));
        for (register, address) in [(0x080, self.base), (0x090, self.driver()), (0x0a0, self.device())] {
            set(transport, register, u32::try_from(address & 0xffff_ffff).unwrap());
            set(transport, register + 4, u32::try_from(address >> 32).unwrap());
        }
        set(transport, 0x044, 1);
    }

    pub(crate) fn describe(
        &self,
        memory: &dyn GuestMemory,
        index: u16,
        gpa: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&gpa.to_le_bytes());
        raw[8..12].copy_from_slice(&len.to_le_bytes());
        raw[12..14].copy_from_slice(&flags.to_le_bytes());
        raw[14..].copy_from_slice(&next.to_le_bytes());
        memory.write(Gpa::new(self.base + 16 * u64::from(index)), &raw).unwrap();
    }

    /// Makes the chain at `head` available, whatever it is.
    pub(crate) fn offer(&mut self, memory: &dyn GuestMemory, head: u16) {
        let slot = self.driver() + 4 + 2 * u64::from(self.avail % self.size);
        memory.write(Gpa::new(slot), &head.to_le_bytes()).unwrap();
        self.avail = self.avail.wrapping_add(1);
        memory.write(Gpa::new(self.driver() + 2), &self.avail.to_le_bytes()).unwrap();
    }

    /// Makes a buffer available, given as (address, length, writable); `None` when too few
    /// descriptors are free. Else its head, and whether the device asks to be notified.
    pub(crate) fn add(
        &mut self,
        memory: &dyn GuestMemory,
        pieces: &[(u64, u32, bool)],
    ) -> Option<(u16, bool)> {
        let at = self.free.len().checked_sub(pieces.len())?;
        let indices = self.free.split_off(at);
        for (i, &(gpa, len, writable)) in pieces.iter().enumerate() {
            let next = indices.get(i + 1);
            let flags = if writable { WRITE } else { 0 } | next.map_or(0, |_| NEXT);
            self.describe(memory, indices[i], gpa, len, flags, next.copied().unwrap_or(0));
        }
        let head = indices[0];
        self.chains.insert(head, indices);
        let old = self.avail;
        self.offer(memory, head);
        let event = memory.read_u16(Gpa::new(self.device() + 4 + 8 * u64::from(self.size))).unwrap();
        Some((head, self.avail.wrapping_sub(event).wrapping_sub(1) < self.avail.wrapping_sub(old)))
    }

    /// The used index up to which buffers were taken back.
    pub(crate) const fn used(&self) -> u16 {
        self.used
    }

    /// Takes a used buffer back: its head and how much was written.
    pub(crate) fn take(&mut self, memory: &dyn GuestMemory) -> Option<(u16, u32)> {
        if memory.read_u16(Gpa::new(self.device() + 2)).unwrap() == self.used {
            return None;
        }
        let slot = self.device() + 4 + 8 * u64::from(self.used % self.size);
        let head = u16::try_from(memory.read_u32(Gpa::new(slot)).unwrap()).unwrap();
        let len = memory.read_u32(Gpa::new(slot + 4)).unwrap();
        self.used = self.used.wrapping_add(1);
        // Linux's used_event: an interrupt for the next one.
        memory
            .write(Gpa::new(self.driver() + 4 + 2 * u64::from(self.size)), &self.used.to_le_bytes())
            .unwrap();
        self.free.extend(self.chains.remove(&head).expect("a buffer the device did not have"));
        Some((head, len))
    }
}

pub(crate) fn get<D: VirtioDevice>(transport: &mut MmioTransport<D>, offset: u64) -> u32 {
    u32::try_from(transport.read(offset, Width::Dword)).unwrap()
}

pub(crate) fn set<D: VirtioDevice>(transport: &mut MmioTransport<D>, offset: u64, value: u32) -> MmioEffect {
    transport.write(offset, Width::Dword, u64::from(value))
}

/// Resets the device and goes up to FEATURES_OK (virtio 1.2, 3.1.1) with these features.
pub(crate) fn negotiate<D: VirtioDevice>(transport: &mut MmioTransport<D>, features: u64) {
    set(transport, 0x070, 0);
    set(transport, 0x070, 1);
    set(transport, 0x070, 3);
    for half in [0, 1] {
        set(transport, 0x024, half);
        set(transport, 0x020, u32::try_from(features >> (32 * half) & 0xffff_ffff).unwrap());
    }
    set(transport, 0x070, 11);
}
