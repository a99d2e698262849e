//! One connection: what is due to the peer and what the peer may still do.

use super::credit::{Inbound, Outbound};
use super::packet::{Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM};
use super::{GUEST_CID, HOST_CID};
use crate::device::stream::{StreamId, StreamServices, WINDOW};

/// An established connection. The peer is always the one that opened it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: StreamId,
    /// The hypervisor's port.
    port: u32,
    peer_port: u32,
    inbound: Inbound,
    outbound: Outbound,
    response_due: bool,
    credit_due: bool,
    peer_sends: bool,
    peer_receives: bool,
    shutdown_sent: bool,
}

/// What a packet of the peer's means for its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It goes on.
    Open,
    /// It has this much payload for the service.
    Payload(usize),
    /// It is over, and the peer is to be told by a reset.
    Over,
}

impl Connection {
    /// The connection that `request` opens.
    pub(super) fn new(id: StreamId, request: &Header) -> Self {
        Self {
            id,
            port: request.dst_port,
            peer_port: request.src_port,
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            response_due: true,
            credit_due: false,
            peer_sends: true,
            peer_receives: true,
            shutdown_sent: false,
        }
    }

    /// Whether a packet of the peer's belongs to this connection.
    pub(super) const fn is_of(&self, header: &Header) -> bool {
        self.port == header.dst_port && self.peer_port == header.src_port
    }

    /// Whether the service has closed it and only the peer's reset is missing.
    pub(super) const fn is_finished(&self) -> bool {
        self.shutdown_sent
    }

    /// Takes what each packet says of the peer's window; `false` when it can't be so.
    pub(super) fn update_credit(&mut self, header: &Header) -> bool {
        self.outbound.update(header.buf_alloc, header.fwd_cnt)
    }

    /// Takes a packet of the peer's other than a reset. `payload` is how many bytes follow
    /// the header.
    pub(super) fn take(
        &mut self,
        header: &Header,
        payload: usize,
        services: &mut dyn StreamServices,
    ) -> Verdict {
        if usize::try_from(header.len) != Ok(payload) || !self.update_credit(header) {
            return Verdict::Over;
        }
        match header.op {
            Op::RW => {
                if !self.peer_sends || !self.inbound.receive(header.len) {
                    return Verdict::Over;
                }
                if self.shutdown_sent {
                    // The service is done with it: nobody reads this.
                    self.consume(payload);
                    return Verdict::Open;
                }
                Verdict::Payload(payload)
            }
            _ if payload != 0 => Verdict::Over,
            Op::SHUTDOWN => {
                if header.flags & SHUTDOWN_SEND != 0 && self.peer_sends {
                    self.peer_sends = false;
                    services.peer_shutdown(self.id);
                }
                self.peer_receives &= header.flags & SHUTDOWN_RECEIVE == 0;
                if self.peer_sends || self.peer_receives { Verdict::Open } else { Verdict::Over }
            }
            Op::CREDIT_UPDATE => Verdict::Open,
            Op::CREDIT_REQUEST => {
                self.credit_due = true;
                Verdict::Open
            }
            _ => Verdict::Over,
        }
    }

    /// The service has consumed bytes.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.inbound.consume(bytes);
    }

    /// The next packet for the peer, whose payload, if it has any, is put in `payload`.
    pub(super) fn next_packet(
        &mut self,
        services: &mut dyn StreamServices,
        payload: &mut [u8],
    ) -> Option<Header> {
        self.inbound.consume(services.take_consumed(self.id));
        if core::mem::take(&mut self.response_due) {
            return Some(self.packet(Op::RESPONSE, 0, 0));
        }
        let mut said_all = !self.peer_receives;
        let credit = usize::try_from(self.outbound.credit()).unwrap_or(usize::MAX);
        if self.peer_receives && !self.shutdown_sent && credit != 0 {
            let room = credit.min(payload.len());
            let (payload, _) = payload.split_at_mut(room);
            let len = u32::try_from(services.transmit(self.id, payload).min(room)).unwrap_or(0);
            if len != 0 {
                self.outbound.send(len);
                return Some(self.packet(Op::RW, 0, len));
            }
            said_all = true;
        }
        if said_all && !self.shutdown_sent && services.finished(self.id) {
            self.shutdown_sent = true;
            return Some(self.packet(Op::SHUTDOWN, SHUTDOWN_RECEIVE | SHUTDOWN_SEND, 0));
        }
        if self.credit_due || self.inbound.update_due() {
            return Some(self.packet(Op::CREDIT_UPDATE, 0, 0));
        }
        None
    }

    /// The packet that tells the peer that the connection is gone.
    pub(super) fn reset(&mut self) -> Header {
        self.packet(Op::RST, 0, 0)
    }

    /// A packet to the peer; like each, it also says how large the window is.
    fn packet(&mut self, op: Op, flags: u32, len: u32) -> Header {
        self.credit_due = false;
        Header {
            src_cid: HOST_CID,
            dst_cid: GUEST_CID,
            src_port: self.port,
            dst_port: self.peer_port,
            len,
            kind: TYPE_STREAM,
            op,
            flags,
            buf_alloc: WINDOW,
            fwd_cnt: self.inbound.tell(),
        }
    }
}
