//! The header of a vsock packet (virtio 1.2, 5.10.6).

/// Size of a header, in bytes.
pub(super) const HEADER_BYTES: usize = 44;
/// The socket type of byte streams, the only one.
pub(super) const TYPE_STREAM: u16 = 1;
/// SHUTDOWN: the sender will receive no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// SHUTDOWN: the sender will send no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Op(pub(super) u16);

impl Op {
    pub(super) const REQUEST: Self = Self(1);
    pub(super) const RESPONSE: Self = Self(2);
    pub(super) const RST: Self = Self(3);
    pub(super) const SHUTDOWN: Self = Self(4);
    pub(super) const RW: Self = Self(5);
    pub(super) const CREDIT_UPDATE: Self = Self(6);
    pub(super) const CREDIT_REQUEST: Self = Self(7);
}

/// A packet's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    /// Bytes of payload behind the header.
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: Op,
    pub(super) flags: u32,
    /// The sender's window for this connection, in bytes.
    pub(super) buf_alloc: u32,
    /// How many bytes of the connection the sender has consumed, modulo 2^32.
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        let quad = |at: usize| u64::from_le_bytes(field(bytes, at));
        let long = |at: usize| u32::from_le_bytes(field(bytes, at));
        let word = |at: usize| u16::from_le_bytes(field(bytes, at));
        Self {
            src_cid: quad(0),
            dst_cid: quad(8),
            src_port: long(16),
            dst_port: long(20),
            len: long(24),
            kind: word(28),
            op: Op(word(30)),
            flags: long(32),
            buf_alloc: long(36),
            fwd_cnt: long(40),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.0.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    core::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_that_of_the_specification() {
        let header = Header {
            src_cid: 0x0102_0304_0506_0708,
            dst_cid: 0x1112_1314_1516_1718,
            src_port: 0x2122_2324,
            dst_port: 0x3132_3334,
            len: 0x4142_4344,
            kind: 0x5152,
            op: Op(0x6162),
            flags: 0x7172_7374,
            buf_alloc: 0x8182_8384,
            fwd_cnt: 0x9192_9394,
        };
        let bytes = [
            0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12,
            0x11, //
            0x24, 0x23, 0x22, 0x21, 0x34, 0x33, 0x32, 0x31, 0x44, 0x43, 0x42, 0x41, 0x52, 0x51, 0x62,
            0x61, //
            0x74, 0x73, 0x72, 0x71, 0x84, 0x83, 0x82, 0x81, 0x94, 0x93, 0x92, 0x91,
        ];
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(Header::from_bytes(&bytes), header);
    }
}
