//! One connection of the management channel: its buffers and what it is for.

use crate::device::stream::{StreamId, WINDOW};
use crate::hal::CellId;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use bulkhead_abi::frame::{self, Deframer, MAX_FRAME};
use bulkhead_abi::message::{ErrorCode, Failure, Reply, Request, Response};

/// The most bytes of a console or the log that wait for the peer.
pub(super) const PIECE: usize = 4096;

/// The most heap that one connection holds, in bytes: what the peer may send ahead, which grows
/// by doubling; a frame that is collected and the request in it; an answer and what it is made of.
pub(super) const CONNECTION_HEAP: u64 = 2 * WINDOW as u64 + 4 * MAX_FRAME as u64;

/// What a connection is for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    /// Not known yet: it waits for its hello.
    Unopened,
    /// Requests and responses.
    Management,
    /// The hypervisor's log from `position`.
    Log { position: u64, follow: bool },
    /// A console, its output from `position`.
    Console { cell: CellId, position: u64, follow: bool },
    /// The bytes of the file that was announced with this port.
    Load { port: u32 },
    /// Nothing any more: what arrives is dropped, and it ends when all is sent; with
    /// `after_peer` not before the peer has sent all it has, so that the peer is not
    /// disturbed before it reads why.
    Closing { after_peer: bool },
}

/// A connection. Bytes from the peer stay in it, and its window small, until they are
/// needed: what a peer can make it hold is bounded by the window and one frame.
#[derive(Debug)]
pub(super) struct Connection {
    stream: StreamId,
    port: u32,
    role: Role,
    /// When it was first looked at.
    since_ns: Option<u64>,
    input: VecDeque<u8>,
    consumed: usize,
    output: VecDeque<u8>,
    deframer: Deframer,
    /// A request is in progress: no other is begun.
    busy: bool,
    peer_done: bool,
}

impl Connection {
    pub(super) fn new(stream: StreamId, port: u32) -> Self {
        Self {
            stream,
            port,
            role: Role::Unopened,
            since_ns: None,
            input: VecDeque::new(),
            consumed: 0,
            output: VecDeque::new(),
            deframer: Deframer::default(),
            busy: false,
            peer_done: false,
        }
    }

    pub(super) fn stream(&self) -> StreamId {
        self.stream
    }

    /// The port it came to.
    pub(super) fn port(&self) -> u32 {
        self.port
    }

    pub(super) fn role(&self) -> Role {
        self.role
    }

    /// Makes it what it is for.
    pub(super) fn open(&mut self, role: Role) {
        self.role = role;
    }

    /// Nanoseconds since this was first called.
    pub(super) fn age_ns(&mut self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(*self.since_ns.get_or_insert(now_ns))
    }

    /// Whether it waits for what no stream will tell.
    pub(super) fn waits(&self) -> bool {
        match self.role {
            Role::Unopened | Role::Log { .. } | Role::Console { .. } => true,
            Role::Management | Role::Load { .. } | Role::Closing { .. } => false,
        }
    }

    /// The heap that it holds for bytes that wait, in bytes.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> u64 {
        (self.input.capacity() + self.output.capacity()) as u64
    }

    // From the peer.

    pub(super) fn receive(&mut self, data: &[u8]) -> usize {
        if let Role::Closing { .. } = self.role {
            return data.len();
        }
        self.input.extend(data);
        0
    }

    pub(super) fn take_consumed(&mut self) -> usize {
        core::mem::take(&mut self.consumed)
    }

    pub(super) fn peer_shutdown(&mut self) {
        self.peer_done = true;
    }

    /// Whether the peer will send no more than the input.
    pub(super) fn is_peer_done(&self) -> bool {
        self.peer_done
    }

    /// Bytes that have arrived, or the first part of them; not empty if there are any.
    pub(super) fn input(&self) -> &[u8] {
        self.input.as_slices().0
    }

    /// Drops the first `count` bytes of the input.
    pub(super) fn consume(&mut self, count: usize) {
        let count = count.min(self.input.len());
        self.input.drain(..count);
        self.consumed += count;
    }

    /// The next request, if the last one is answered, the answer has been sent, and there is
    /// one. Fails when the bytes are none; nothing more can then be had from this peer.
    pub(super) fn next_request(&mut self) -> Option<Result<Request, Failure>> {
        if self.busy || !self.output.is_empty() {
            return None;
        }
        while !self.input.is_empty() {
            let taken = self.deframer.take(self.input.as_slices().0);
            let (count, body) = match taken {
                Ok(taken) => taken,
                Err(error) => return Some(Err(malformed(&error))),
            };
            self.consume(count);
            if let Some(body) = body {
                return Some(frame::decode(&body).map_err(|e| malformed(&e)));
            }
        }
        if self.peer_done {
            self.close();
        }
        None
    }

    // To the peer.

    /// Queues the answer to request `id`, which ends it.
    pub(super) fn answer(&mut self, id: u32, result: Result<Reply, Failure>) {
        self.busy = false;
        let frame = frame::encode(&Response::new(id, result)).or_else(|error| {
            let failure = Failure::new(ErrorCode::TOO_LONG, alloc::format!("the answer is {error}"));
            frame::encode(&Response::new(id, Err(failure)))
        });
        self.output.extend(frame.unwrap_or_else(|_| Vec::new()));
    }

    /// The request in progress will be answered later.
    pub(super) fn wait(&mut self) {
        self.busy = true;
    }

    /// Whether the output has room for [`PIECE`] more bytes.
    pub(super) fn wants_output(&self) -> bool {
        self.output.len() < PIECE
    }

    pub(super) fn send(&mut self, data: &[u8]) {
        self.output.extend(data);
    }

    pub(super) fn transmit(&mut self, buf: &mut [u8]) -> usize {
        let count = buf.len().min(self.output.len());
        for (to, from) in buf.iter_mut().zip(self.output.drain(..count)) {
            *to = from;
        }
        count
    }

    /// Ends it when all is sent.
    pub(super) fn close(&mut self) {
        self.end(false);
    }

    /// Ends it when all is sent and the peer has no more to send.
    pub(super) fn close_after_peer(&mut self) {
        self.end(true);
    }

    fn end(&mut self, after_peer: bool) {
        self.role = Role::Closing { after_peer };
        self.consume(self.input.len());
    }

    pub(super) fn is_finished(&self) -> bool {
        match self.role {
            Role::Closing { after_peer } => self.output.is_empty() && (self.peer_done || !after_peer),
            _ => false,
        }
    }
}

fn malformed(error: &frame::FrameError) -> Failure {
    Failure::new(ErrorCode::MALFORMED, alloc::format!("what arrived is no request: {error}"))
}
