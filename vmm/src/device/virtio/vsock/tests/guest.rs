//! A guest with Linux's vsock driver, and services to talk to.

use super::super::packet::{HEADER_BYTES, Header, Op, TYPE_STREAM};
use super::super::{GUEST_CID, HOST_CID, Vsock};
use crate::device::stream::{StreamId, StreamServices};
use crate::device::virtio::driver::{Ring, get, negotiate, set};
use crate::device::virtio::mmio::MmioTransport;
use crate::device::virtio::{F_EVENT_IDX, F_VERSION_1};
use crate::memory::address::Gpa;
use crate::memory::guest::GuestMemory;
use crate::memory::guest::fake::FakeMemory;
use std::collections::BTreeMap;
use std::vec::Vec;

/// The port that the services of these tests refuse.
pub(crate) const REFUSED: u32 = 99;
const RX_BUFFERS: u64 = 0x10_0000;
const RX_STRIDE: u64 = 0x2000;
const TX_BUFFERS: u64 = 0x40_0000;
const TX_STRIDE: u64 = 0x1_1000;

pub(crate) struct Guest {
    pub(crate) transport: MmioTransport<Vsock>,
    pub(crate) memory: FakeMemory,
    pub(crate) rx: Ring,
    pub(crate) tx: Ring,
    /// How large the payload part of a receive buffer is.
    pub(crate) rx_payload: u32,
    /// Whether the device was notified since it was last polled.
    pub(crate) notified: bool,
}

impl Guest {
    /// A guest whose driver is up, with `buffers` receive buffers given to the device.
    pub(crate) fn new(size: u16, buffers: usize) -> Self {
        let mut guest = Self {
            transport: MmioTransport::new(Vsock::new()),
            memory: FakeMemory::new(0, usize::try_from(TX_BUFFERS + TX_STRIDE * u64::from(size)).unwrap()),
            rx: Ring::new(0, 0),
            tx: Ring::new(0, 0),
            rx_payload: 4096,
            notified: false,
        };
        guest.bring_up(size, buffers);
        guest
    }

    /// Resets the device and sets it up.
    pub(crate) fn bring_up(&mut self, size: u16, buffers: usize) {
        for base in [0x1_0000u64, 0x2_0000, 0x3_0000] {
            self.memory.write(Gpa::new(base), &[0; 0x3000]).unwrap();
        }
        negotiate(&mut self.transport, F_VERSION_1 | F_EVENT_IDX);
        self.rx = Ring::new(0x1_0000, size);
        self.tx = Ring::new(0x2_0000, size);
        self.rx.set_up(&mut self.transport, 0);
        self.tx.set_up(&mut self.transport, 1);
        Ring::new(0x3_0000, 16).set_up(&mut self.transport, 2);
        set(&mut self.transport, 0x070, 15);
        assert_eq!(get(&mut self.transport, 0x070), 15);
        for _ in 0..buffers {
            assert!(self.give_buffer());
        }
    }

    /// Gives a receive buffer to the device, as Linux 6.1 does: header and payload apart.
    pub(crate) fn give_buffer(&mut self) -> bool {
        // A free place is one that no available buffer uses: as many as half the descriptors.
        let at = RX_BUFFERS + RX_STRIDE * u64::from(self.rx.avail % (self.rx.size / 2));
        let Some((_, notify)) =
            self.rx.add(&self.memory, &[(at, 44, true), (at + 0x1000, self.rx_payload, true)])
        else {
            return false;
        };
        self.notified |= notify;
        true
    }

    /// Sends a packet, header and payload apart; `false` when the ring is full.
    pub(crate) fn send(&mut self, header: &Header, payload: &[u8]) -> bool {
        // Linux's places are allocations; here a place of the ring is as good, for the device
        // gives transmit buffers back in order.
        let at = TX_BUFFERS + TX_STRIDE * u64::from(self.tx.avail % self.tx.size);
        let len = u32::try_from(payload.len()).unwrap();
        let pieces = [(at, 44, false), (at + 0x1000, len, false)];
        while self.tx.take(&self.memory).is_some() {}
        let Some((_, notify)) = self.tx.add(&self.memory, &pieces[..if payload.is_empty() { 1 } else { 2 }])
        else {
            return false;
        };
        self.memory.write(Gpa::new(at), &header.to_bytes()).unwrap();
        self.memory.write(Gpa::new(at + 0x1000), payload).unwrap();
        self.notified |= notify;
        true
    }

    pub(crate) fn poll(&mut self, services: &mut dyn StreamServices, budget: usize) -> bool {
        self.notified = false;
        self.transport.poll(&self.memory, services, budget).more_work
    }

    /// Polls until there is no more work.
    pub(crate) fn settle(&mut self, services: &mut dyn StreamServices) {
        for _ in 0..10_000 {
            if !self.poll(services, 16) {
                return;
            }
        }
        panic!("there is always more work");
    }

    /// Takes the packets that have arrived, and leaves their buffers to the driver.
    pub(crate) fn received(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut packets = Vec::new();
        let first = self.rx.used();
        while let Some((_, written)) = self.rx.take(&self.memory) {
            let nth = first.wrapping_add(u16::try_from(packets.len()).unwrap());
            let at = RX_BUFFERS + RX_STRIDE * u64::from(nth % (self.rx.size / 2));
            let mut bytes = [0; HEADER_BYTES];
            self.memory.read(Gpa::new(at), &mut bytes).unwrap();
            let header = Header::from_bytes(&bytes);
            assert_eq!(written as usize, HEADER_BYTES + header.len as usize);
            let mut payload = std::vec![0; header.len as usize];
            self.memory.read(Gpa::new(at + 0x1000), &mut payload).unwrap();
            packets.push((header, payload));
        }
        packets
    }

    /// Sends one packet, lets the device work, and returns its answers' operations; buffers
    /// are given back.
    pub(crate) fn exchange(
        &mut self,
        services: &mut dyn StreamServices,
        header: &Header,
        payload: &[u8],
    ) -> Vec<Op> {
        assert!(self.send(header, payload));
        self.settle(services);
        let answers = self.received();
        for _ in &answers {
            assert!(self.give_buffer());
        }
        answers.iter().map(|(header, _)| header.op).collect()
    }
}

/// A packet from the guest's `port` to the hypervisor's port 1.
pub(crate) fn packet(port: u32, op: Op, len: u32) -> Header {
    Header {
        src_cid: GUEST_CID,
        dst_cid: HOST_CID,
        src_port: port,
        dst_port: 1,
        len,
        kind: TYPE_STREAM,
        op,
        flags: 0,
        buf_alloc: 0x4_0000,
        fwd_cnt: 0,
    }
}

/// What a service was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Connect(u32, u32),
    Shutdown,
    Closed,
}

/// One stream as its service sees it.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) told: Vec<Told>,
    pub(crate) incoming: Vec<u8>,
    pub(crate) outgoing: Vec<u8>,
    pub(crate) consumed: usize,
    pub(crate) finished: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Services {
    pub(crate) streams: BTreeMap<StreamId, Stream>,
    /// Whether bytes are consumed as they come; otherwise `consumed` says.
    pub(crate) slow: bool,
}

impl Services {
    pub(crate) fn last(&mut self) -> &mut Stream {
        self.streams.last_entry().expect("no stream").into_mut()
    }

    fn open(&mut self, id: StreamId) -> &mut Stream {
        let stream = self.streams.get_mut(&id).expect("a stream that was never connected");
        assert!(!stream.told.contains(&Told::Closed), "used after it was closed");
        stream
    }
}

impl StreamServices for Services {
    fn connect(&mut self, id: StreamId, port: u32, source_port: u32) -> bool {
        if port == REFUSED {
            return false;
        }
        let old = self
            .streams
            .insert(id, Stream { told: std::vec![Told::Connect(port, source_port)], ..Stream::default() });
        assert!(old.is_none(), "an id was used twice");
        true
    }
    fn receive(&mut self, id: StreamId, data: &[u8]) -> usize {
        let slow = self.slow;
        self.open(id).incoming.extend_from_slice(data);
        if slow { 0 } else { data.len() }
    }
    fn take_consumed(&mut self, id: StreamId) -> usize {
        core::mem::take(&mut self.open(id).consumed)
    }
    fn transmit(&mut self, id: StreamId, buf: &mut [u8]) -> usize {
        let stream = self.open(id);
        let len = buf.len().min(stream.outgoing.len());
        buf[..len].copy_from_slice(&stream.outgoing[..len]);
        stream.outgoing.drain(..len);
        len
    }
    fn finished(&self, id: StreamId) -> bool {
        self.streams[&id].finished
    }
    fn peer_shutdown(&mut self, id: StreamId) {
        self.open(id).told.push(Told::Shutdown);
    }
    fn closed(&mut self, id: StreamId) {
        self.open(id).told.push(Told::Closed);
    }
}
