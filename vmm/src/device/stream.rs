//! Byte streams between programs of the root cell and services of the hypervisor: what a
//! stream transport (virtio-vsock) offers to the services behind it.

/// The most bytes that a peer sends before some of them are consumed.
pub const WINDOW: u32 = 256 * 1024;

/// One connection, unique since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// The services behind a stream transport. The transport calls; a service never blocks.
pub trait StreamServices {
    /// Whether a connection from `source_port` to `port` is taken; `false` resets it.
    fn connect(&mut self, id: StreamId, port: u32, source_port: u32) -> bool;

    /// Takes bytes that arrived, all of them: a peer never sends more than the window that
    /// the transport has told it. Returns how many of them are consumed at once; for the
    /// rest the window stays smaller until [`take_consumed`](Self::take_consumed) tells.
    fn receive(&mut self, id: StreamId, data: &[u8]) -> usize;

    /// How many bytes received earlier have been consumed since the last call.
    fn take_consumed(&mut self, id: StreamId) -> usize;

    /// Fills `buf` with bytes for the peer and returns how many; 0 when there are none now.
    fn transmit(&mut self, id: StreamId, buf: &mut [u8]) -> usize;

    /// Whether the service wants the connection closed once all it had to say is sent.
    fn finished(&self, id: StreamId) -> bool;

    /// The peer will send no more, but may still read.
    fn peer_shutdown(&mut self, id: StreamId);

    /// The connection is gone; `id` is not used again.
    fn closed(&mut self, id: StreamId);
}
