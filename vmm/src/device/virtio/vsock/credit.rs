//! Flow control of one connection (virtio 1.2, 5.10.6.3). All counts are of bytes since the
//! connection began, modulo 2^32.

use crate::device::stream::WINDOW;

/// The largest window of a peer that is made use of: far more than any has, and so small that
/// of two counts it is always clear which is the older.
const MAX_PEER_WINDOW: u32 = 1 << 30;

/// Bytes from the peer.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    received: u32,
    consumed: u32,
    /// `consumed` as the peer knows it.
    told: u32,
}

impl Inbound {
    /// Counts `len` bytes as received; `false` when the peer had no credit for them.
    pub(super) fn receive(&mut self, len: u32) -> bool {
        let fits = len <= self.free();
        if fits {
            self.received = self.received.wrapping_add(len);
        }
        fits
    }

    /// Counts bytes as consumed, of those received.
    pub(super) fn consume(&mut self, bytes: usize) {
        let held = self.received.wrapping_sub(self.consumed);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX).min(held);
        self.consumed = self.consumed.wrapping_add(bytes);
    }

    /// The count of consumed bytes, which the peer is now told.
    pub(super) fn tell(&mut self) -> u32 {
        self.told = self.consumed;
        self.told
    }

    /// Whether the peer should be told: a good part of the window is free again, or it
    /// believes that it must not send at all.
    pub(super) fn update_due(&self) -> bool {
        let news = self.consumed.wrapping_sub(self.told);
        news >= WINDOW / 4 || news != 0 && self.free() == 0
    }

    /// How much the peer may send, as it knows.
    fn free(&self) -> u32 {
        WINDOW.saturating_sub(self.received.wrapping_sub(self.told))
    }
}

/// Bytes to the peer.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    window: u32,
    sent: u32,
    acknowledged: u32,
}

impl Outbound {
    /// How many bytes the peer takes now.
    pub(super) fn credit(&self) -> u32 {
        self.window.saturating_sub(self.in_flight())
    }

    /// Counts bytes as sent, at most [`credit`](Self::credit).
    pub(super) fn send(&mut self, bytes: u32) {
        self.sent = self.sent.wrapping_add(bytes);
    }

    /// Takes what a packet says of the peer's window; `false` when the peer claims to have
    /// consumed what was never sent to it.
    pub(super) fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) -> bool {
        self.window = buf_alloc.min(MAX_PEER_WINDOW);
        let news = fwd_cnt.wrapping_sub(self.acknowledged);
        if news <= self.in_flight() {
            self.acknowledged = fwd_cnt;
            return true;
        }
        // Linux fills a header in before it queues the packet, so two of them may change
        // places: an older count is no fault.
        self.acknowledged.wrapping_sub(fwd_cnt) <= MAX_PEER_WINDOW
    }

    fn in_flight(&self) -> u32 {
        self.sent.wrapping_sub(self.acknowledged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inbound_counts_against_what_the_peer_was_told() {
        let mut inbound = Inbound { received: u32::MAX, consumed: u32::MAX, told: u32::MAX };
        assert!(!inbound.receive(WINDOW + 1));
        assert!(inbound.receive(WINDOW));
        assert!(!inbound.update_due());
        inbound.consume(1);
        assert!(inbound.update_due(), "the peer believes that it must not send");
        assert!(!inbound.receive(1), "consumed, but the peer does not know");
        assert_eq!(inbound.tell(), 0);
        assert!(!inbound.receive(2));
        assert!(inbound.receive(1));
        inbound.consume(usize::MAX);
        assert_eq!(inbound.tell(), WINDOW);
        assert!(inbound.receive(WINDOW / 4));
        inbound.consume(WINDOW as usize / 4 - 1);
        assert!(!inbound.update_due());
        inbound.consume(1);
        assert!(inbound.update_due());
    }

    #[test]
    fn outbound_follows_the_peers_window() {
        let mut outbound = Outbound { window: 0, sent: u32::MAX - 1, acknowledged: u32::MAX - 1 };
        assert_eq!(outbound.credit(), 0);
        assert!(outbound.update(10, u32::MAX - 1));
        assert_eq!(outbound.credit(), 10);
        outbound.send(8);
        assert_eq!(outbound.credit(), 2);
        assert!(outbound.update(5, u32::MAX - 1), "a smaller window");
        assert_eq!(outbound.credit(), 0);
        assert!(outbound.update(10, 6), "all of it, past the wrap");
        assert_eq!(outbound.credit(), 10);
        assert!(outbound.update(10, 3), "an older packet");
        assert_eq!(outbound.credit(), 10);
        assert!(!outbound.update(10, 7), "one that was never sent");
        assert!(outbound.update(u32::MAX, 6));
        assert_eq!(outbound.credit(), MAX_PEER_WINDOW);
    }
}
