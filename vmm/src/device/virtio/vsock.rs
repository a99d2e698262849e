//! The virtio-vsock device (virtio 1.2, 5.10): the management channel.
//!
//! The guest opens byte streams to the hypervisor (CID 2), where [`StreamServices`] answer;
//! the hypervisor opens none. All of it runs in [`MmioTransport::poll`], which never waits:
//! what can't be sent for lack of receive buffers or credit stays a flag of its connection,
//! and replies to packets without one stand in a short list; while that is full, nothing
//! more is taken from the guest. So the memory used has a bound that the guest can't move.

mod connection;
mod credit;
mod packet;
#[cfg(test)]
mod tests;

use super::VirtioDevice;
use super::mmio::MmioTransport;
use super::queue::{Chain, Queue, QueueError};
use crate::device::stream::{StreamId, StreamServices};
use crate::memory::guest::GuestMemory;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use connection::{Connection, Verdict};
use packet::{HEADER_BYTES, Header, Op, TYPE_STREAM};

/// The guest's context identifier.
pub const GUEST_CID: u64 = 3;
/// The hypervisor's context identifier, which vsock gives to every host.
pub const HOST_CID: u64 = 2;
/// How many connections there can be at a time; requests for more are reset.
pub const MAX_CONNECTIONS: usize = 64;

/// How many resets can wait for receive buffers.
const MAX_RESETS: usize = 64;
/// One packet makes at most so many resets: its own, and that of a connection whose place it
/// takes.
const RESETS_PER_PACKET: usize = 2;
/// Payload is copied in pieces of this size, which is also that of Linux's receive buffers.
const PIECE_BYTES: usize = 4096;

/// What [`MmioTransport::poll`] has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollOutcome {
    /// There may be more to do now. Otherwise there is nothing until the driver notifies or
    /// a service has bytes, has consumed some, or is finished.
    pub more_work: bool,
}

/// The device.
#[derive(Debug)]
pub struct Vsock {
    /// The configuration space: the guest's CID.
    config: [u8; 8],
    connections: Vec<Connection>,
    /// Resets that wait to be sent.
    resets: VecDeque<Header>,
    /// Streams whose connections went with a reset of the device; their services don't know yet.
    orphans: Vec<StreamId>,
    next_id: u64,
    /// Whose turn it was to send.
    turn: usize,
    tx: Chain,
    rx: Chain,
    /// Whether `rx` is a buffer taken from the queue and not yet used.
    rx_held: bool,
    piece: Box<[u8; PIECE_BYTES]>,
}

impl VirtioDevice for Vsock {
    const DEVICE_ID: u32 = 19;
    /// Receive, transmit, event.
    const QUEUE_SIZES: &'static [u16] = &[256, 256, 16];
    const FEATURES: u64 = 0;

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn reset(&mut self) {
        self.orphans.extend(self.connections.drain(..).map(|connection| connection.id));
        self.resets.clear();
        self.rx_held = false;
    }
}

impl Default for Vsock {
    fn default() -> Self {
        Self::new()
    }
}

impl MmioTransport<Vsock> {
    /// Carries up to `budget` packets, both directions together; less than 2 count as 2, for
    /// each direction has its share. To be called after [`super::mmio::MmioEffect::Notify`]
    /// and [`super::mmio::MmioEffect::Reset`], while it says that there is more work, and
    /// when a service has something for its peer. It never blocks.
    pub fn poll(
        &mut self,
        memory: &dyn GuestMemory,
        services: &mut dyn StreamServices,
        budget: usize,
    ) -> PollOutcome {
        self.device_mut().close_orphans(services);
        let more_work = self.serve(memory, |vsock, queues| match queues {
            [rx, tx, ..] => vsock.run(memory, rx, tx, services, budget.max(2)),
            _ => Ok(false),
        });
        self.device_mut().close_orphans(services);
        PollOutcome { more_work: more_work.unwrap_or(false) }
    }
}

impl Vsock {
    /// A device without connections.
    pub fn new() -> Self {
        Self {
            config: GUEST_CID.to_le_bytes(),
            connections: Vec::with_capacity(MAX_CONNECTIONS),
            resets: VecDeque::with_capacity(MAX_RESETS),
            orphans: Vec::with_capacity(MAX_CONNECTIONS),
            next_id: 0,
            turn: 0,
            tx: Chain::default(),
            rx: Chain::default(),
            rx_held: false,
            piece: Box::new([0; PIECE_BYTES]),
        }
    }

    /// How many connections there are.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    fn close_orphans(&mut self, services: &mut dyn StreamServices) {
        self.orphans.drain(..).for_each(|id| services.closed(id));
    }

    /// Sends and takes by turns until nothing moves or the budget is used up; whether there
    /// may be more to do.
    fn run(
        &mut self,
        memory: &dyn GuestMemory,
        rx: &mut Queue,
        tx: &mut Queue,
        services: &mut dyn StreamServices,
        mut budget: usize,
    ) -> Result<bool, QueueError> {
        loop {
            let before = budget;
            // A flood in one direction leaves the other its half.
            let kept = budget / 2;
            while budget > kept && self.send(memory, rx, services)? {
                budget -= 1;
            }
            while budget > 0 && self.take(memory, tx, services)? {
                budget -= 1;
            }
            if budget == 0 {
                return Ok(true);
            }
            if budget == before {
                break;
            }
        }
        let can_take = tx.arm(memory)? && self.has_room_for_resets();
        let can_send = !self.rx_held && rx.arm(memory)?;
        Ok(can_take || can_send)
    }

    fn has_room_for_resets(&self) -> bool {
        self.resets.len() + RESETS_PER_PACKET <= MAX_RESETS
    }

    /// Sends one packet, if there is one and a buffer for it.
    fn send(
        &mut self,
        memory: &dyn GuestMemory,
        rx: &mut Queue,
        services: &mut dyn StreamServices,
    ) -> Result<bool, QueueError> {
        if !self.rx_held {
            if !rx.pop(memory, &mut self.rx)? {
                return Ok(false);
            }
            if self.rx.writable_len() <= HEADER_BYTES {
                return Err(too_short(&self.rx, self.rx.writable_len(), HEADER_BYTES + 1));
            }
            self.rx_held = true;
        }
        let room = (self.rx.writable_len() - HEADER_BYTES).min(PIECE_BYTES);
        let (payload, _) = self.piece.split_at_mut(room);
        let Some(header) = self.resets.pop_front().or_else(|| {
            let count = self.connections.len();
            (0..count).find_map(|_| {
                self.turn = (self.turn + 1) % count;
                self.connections.get_mut(self.turn)?.next_packet(services, payload)
            })
        }) else {
            return Ok(false);
        };
        self.rx.write(memory, 0, &header.to_bytes())?;
        let len = (header.len as usize).min(room);
        let (payload, _) = payload.split_at(len);
        self.rx.write(memory, HEADER_BYTES, payload)?;
        self.rx_held = false;
        rx.push_used(memory, self.rx.head(), u32::try_from(HEADER_BYTES + len).unwrap_or(u32::MAX))?;
        Ok(true)
    }

    /// Takes one packet of the guest's, if there is one and room for what it may cause.
    fn take(
        &mut self,
        memory: &dyn GuestMemory,
        tx: &mut Queue,
        services: &mut dyn StreamServices,
    ) -> Result<bool, QueueError> {
        if !self.has_room_for_resets() || !tx.pop(memory, &mut self.tx)? {
            return Ok(false);
        }
        let len = self.tx.readable_len();
        let Some(payload) = len.checked_sub(HEADER_BYTES) else {
            return Err(too_short(&self.tx, len, HEADER_BYTES));
        };
        let mut bytes = [0; HEADER_BYTES];
        self.tx.read(memory, 0, &mut bytes)?;
        self.handle(memory, &Header::from_bytes(&bytes), payload, services)?;
        tx.push_used(memory, self.tx.head(), 0)?;
        Ok(true)
    }

    /// Handles a packet with `payload` bytes behind its header in `self.tx`.
    fn handle(
        &mut self,
        memory: &dyn GuestMemory,
        header: &Header,
        payload: usize,
        services: &mut dyn StreamServices,
    ) -> Result<(), QueueError> {
        // A packet between others than the two of us is of no connection of ours.
        let ours = header.src_cid == GUEST_CID && header.dst_cid == HOST_CID;
        let found = self.connections.iter_mut().enumerate().find(|(_, it)| ours && it.is_of(header));
        let Some((index, connection)) = found else {
            if header.op != Op::RST && !(ours && self.open(header, payload, services)) {
                self.refuse(header);
            }
            return Ok(());
        };
        if header.op == Op::RST {
            self.close(index, services);
            return Ok(());
        }
        let verdict = match header.kind {
            TYPE_STREAM => connection.take(header, payload, services),
            _ => Verdict::Over,
        };
        match verdict {
            Verdict::Open => {}
            Verdict::Payload(len) => {
                let mut done = 0;
                while done < len {
                    let (piece, _) = self.piece.split_at_mut((len - done).min(PIECE_BYTES));
                    self.tx.read(memory, HEADER_BYTES + done, piece)?;
                    connection.consume(services.receive(connection.id, piece));
                    done += piece.len();
                }
            }
            Verdict::Over => {
                self.close(index, services);
                self.refuse(header);
            }
        }
        Ok(())
    }

    /// Opens a connection, if the packet asks for one and the service takes it.
    fn open(&mut self, header: &Header, payload: usize, services: &mut dyn StreamServices) -> bool {
        if header.op != Op::REQUEST || header.kind != TYPE_STREAM || header.len != 0 || payload != 0 {
            return false;
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            // One that only waits for its peer to let go gives way.
            let Some(index) = self.connections.iter().position(Connection::is_finished) else { return false };
            self.resets.extend(self.connections.get_mut(index).map(Connection::reset));
            self.close(index, services);
        }
        let id = StreamId(self.next_id);
        self.next_id += 1;
        let mut connection = Connection::new(id, header);
        if !connection.update_credit(header) || !services.connect(id, header.dst_port, header.src_port) {
            return false;
        }
        self.connections.push(connection);
        true
    }

    /// Has a reset sent in reply to a packet.
    fn refuse(&mut self, to: &Header) {
        self.resets.push_back(Header {
            src_cid: to.dst_cid,
            dst_cid: GUEST_CID,
            src_port: to.dst_port,
            dst_port: to.src_port,
            len: 0,
            kind: to.kind,
            op: Op::RST,
            flags: 0,
            buf_alloc: 0,
            fwd_cnt: 0,
        });
    }

    /// Forgets the connection at `index`.
    fn close(&mut self, index: usize, services: &mut dyn StreamServices) {
        services.closed(self.connections.swap_remove(index).id);
    }
}

fn too_short(chain: &Chain, len: usize, need: usize) -> QueueError {
    QueueError::TooShort { head: chain.head(), len, need }
}
