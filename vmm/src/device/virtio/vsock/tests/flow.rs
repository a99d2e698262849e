//! Property tests: bytes under any interleaving, and rings that change while they are read.

use super::guest::{Guest, Services, Told, packet};
use crate::device::stream::StreamId;
use crate::device::virtio::vsock::packet::{Header, Op};
use crate::memory::address::Gpa;
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use core::cell::Cell;
use proptest::prelude::*;
use std::vec::Vec;

/// One step of the guest, the service or the device.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// The program in the guest writes so many bytes.
    Write { socket: usize, len: usize },
    /// It reads so many, and its kernel tells the device or not.
    Read { socket: usize, len: usize, tell: bool },
    /// The driver gives receive buffers.
    Refill(usize),
    /// The service sends so many of the bytes that it got back, which consumes them.
    Echo { socket: usize, len: usize },
    /// The device runs.
    Poll(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let socket = 0usize..3;
    prop_oneof![
        (socket.clone(), 1usize..70_000).prop_map(|(socket, len)| Step::Write { socket, len }),
        (socket.clone(), 1usize..20_000, any::<bool>()).prop_map(|(socket, len, tell)| Step::Read {
            socket,
            len,
            tell
        }),
        (1usize..6).prop_map(Step::Refill),
        (socket, 1usize..80_000).prop_map(|(socket, len)| Step::Echo { socket, len }),
        (0usize..20).prop_map(Step::Poll),
    ]
}

/// A socket of the guest, with the counts that its kernel keeps.
struct Socket {
    port: u32,
    window: u32,
    written: u32,
    peer_window: u32,
    peer_consumed: u32,
    arrived: Vec<u8>,
    read: u32,
    told: u32,
    /// How far the service has echoed.
    echoed: usize,
}

impl Socket {
    fn header(&self, op: Op, len: u32) -> Header {
        Header { buf_alloc: self.window, fwd_cnt: self.read, ..packet(self.port, op, len) }
    }

    fn byte(port: u32, at: usize) -> u8 {
        u8::try_from((at * 31 + at / 251 + port as usize) & 0xff).unwrap()
    }
}

/// The guest's three sockets and the services, all open.
struct World {
    guest: Guest,
    services: Services,
    sockets: Vec<Socket>,
}

impl World {
    fn new(windows: [u32; 3], rx_payload: u32) -> Self {
        let mut world = Self {
            guest: Guest::new(8, 0),
            services: Services { slow: true, ..Services::default() },
            sockets: Vec::new(),
        };
        world.guest.rx_payload = rx_payload;
        for (port, window) in (700..).zip(windows) {
            let request = Header { buf_alloc: window, ..packet(port, Op::REQUEST, 0) };
            assert!(world.guest.send(&request, &[]));
            world.sockets.push(Socket {
                port,
                window,
                written: 0,
                peer_window: 0,
                peer_consumed: 0,
                arrived: Vec::new(),
                read: 0,
                told: 0,
                echoed: 0,
            });
            world.step(Step::Poll(16));
        }
        world
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Write { socket, len } => {
                let socket = &mut self.sockets[socket];
                let credit = socket.peer_window - socket.written.wrapping_sub(socket.peer_consumed);
                let len = credit.min(0x1_0000).min(u32::try_from(len).unwrap());
                let from = socket.written as usize;
                let payload: Vec<u8> =
                    (from..from + len as usize).map(|at| Socket::byte(socket.port, at)).collect();
                let header = socket.header(Op::RW, len);
                if len != 0 && self.guest.send(&header, &payload) {
                    socket.written += len;
                    socket.told = socket.read;
                }
            }
            Step::Read { socket, len, tell } => {
                let socket = &mut self.sockets[socket];
                let unread = u32::try_from(socket.arrived.len()).unwrap() - socket.read;
                socket.read += unread.min(u32::try_from(len).unwrap());
                if tell {
                    let header = socket.header(Op::CREDIT_UPDATE, 0);
                    if self.guest.send(&header, &[]) {
                        socket.told = socket.read;
                    }
                }
            }
            Step::Refill(count) => (0..count).for_each(|_| {
                self.guest.give_buffer();
            }),
            Step::Echo { socket, len } => {
                let socket = &mut self.sockets[socket];
                let stream =
                    self.services.streams.values_mut().find(|s| s.told[0] == Told::Connect(1, socket.port));
                let Some(stream) = stream else { return };
                let to = stream.incoming.len().min(socket.echoed + len);
                stream.outgoing.extend_from_slice(&stream.incoming[socket.echoed..to]);
                stream.consumed += to - socket.echoed;
                socket.echoed = to;
            }
            Step::Poll(budget) => {
                self.guest.poll(&mut self.services, budget);
            }
        }
        for (header, payload) in self.guest.received() {
            let socket = self.sockets.iter_mut().find(|socket| socket.port == header.dst_port).unwrap();
            (socket.peer_window, socket.peer_consumed) = (header.buf_alloc, header.fwd_cnt);
            match header.op {
                Op::RESPONSE | Op::CREDIT_UPDATE => {}
                Op::RW => {
                    for (at, byte) in (socket.arrived.len()..).zip(&payload) {
                        assert_eq!(*byte, Socket::byte(socket.port, at), "byte {at} of port {}", socket.port);
                    }
                    socket.arrived.extend_from_slice(&payload);
                    let held = u32::try_from(socket.arrived.len()).unwrap() - socket.read;
                    assert!(held <= socket.window, "{held} bytes in a window of {}", socket.window);
                }
                op => panic!("{op:?} to a peer that keeps the rules"),
            }
        }
    }

    /// Lets all go on until every byte written has come back; the device runs only when it
    /// was notified, had more work, or its services had something.
    fn drain(&mut self) {
        let mut more = true;
        for _ in 0..20_000 {
            if self.sockets.iter().all(|s| s.read == s.written) {
                return;
            }
            for socket in 0..3 {
                let waiting = self.services.streams.values().map(|s| s.incoming.len()).sum::<usize>()
                    - self.sockets.iter().map(|s| s.echoed).sum::<usize>();
                self.step(Step::Echo { socket, len: 1 << 20 });
                more |= waiting != 0;
                let Socket { arrived, told, .. } = &self.sockets[socket];
                let tell = arrived.len() != *told as usize;
                self.step(Step::Read { socket, len: 1 << 20, tell });
            }
            self.step(Step::Refill(8));
            if more || self.guest.notified {
                more = self.guest.poll(&mut self.services, 5);
                self.step(Step::Refill(1));
            }
        }
        panic!("bytes are stuck");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Any interleaving delivers every byte, in order, within the windows of both sides.
    #[test]
    fn every_byte_comes_back(
        windows in [1u32..10_000, 1u32..200, 1u32..300_000],
        rx_payload in prop_oneof![Just(4096u32), 1u32..4096],
        steps in prop::collection::vec(step(), 0..200),
    ) {
        // A window of a few bytes would take a packet for each of 64 KiB.
        let mut world = World::new(windows.map(|w| w.max(500)), rx_payload.max(200));
        world.step(Step::Refill(4));
        world.step(Step::Poll(16));
        for step in steps {
            world.step(step);
        }
        world.drain();
        for (socket, stream) in world.sockets.iter().zip(world.services.streams.values()) {
            prop_assert_eq!(socket.arrived.len(), socket.written as usize);
            prop_assert_eq!(stream.incoming.len(), socket.written as usize);
        }
    }
}

#[test]
fn a_large_image_comes_back_whole() {
    let mut world = World::new([0x4_0000; 3], 4096);
    world.step(Step::Refill(4));
    world.step(Step::Poll(16));
    while world.sockets[0].written < 8 << 20 {
        world.step(Step::Write { socket: 0, len: 0x1_0000 });
        world.step(Step::Poll(8));
        world.step(Step::Echo { socket: 0, len: 1 << 20 });
        world.step(Step::Read { socket: 0, len: 1 << 20, tell: true });
        world.step(Step::Refill(4));
    }
    world.drain();
    assert_eq!(world.services.streams[&StreamId(0)].incoming.len(), world.sockets[0].written as usize);
}

/// Memory that another CPU writes to while the device reads.
struct Racing<'a> {
    memory: &'a dyn GuestMemory,
    reads: Cell<usize>,
    changes: &'a [(usize, u64, u16)],
}

impl GuestMemory for Racing<'_> {
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), GuestMemoryError> {
        let now = self.reads.replace(self.reads.get() + 1);
        assert!(now < 20_000, "the device reads for ever");
        for &(when, at, value) in self.changes {
            if when == now {
                self.memory.write(Gpa::new(at), &value.to_le_bytes())?;
            }
        }
        self.memory.read(gpa, buf)
    }
    fn write(&self, gpa: Gpa, data: &[u8]) -> Result<(), GuestMemoryError> {
        self.memory.write(gpa, data)
    }
}

proptest! {
    /// A guest that writes to rings, headers and payload at any moment gets an answer or a
    /// device that needs a reset; and after a reset the device works.
    #[test]
    fn a_racing_guest_harms_itself_alone(
        changes in prop::collection::vec(
            (0usize..80, prop_oneof![0x1_0000u64..0x1_0080, 0x1_1000u64..0x1_1020, 0x2_0000u64..0x2_0080,
                0x2_1000u64..0x2_1020, 0x40_0000u64..0x40_0030], prop_oneof![0u16..16, any::<u16>()]),
            0..30),
        budget in 0usize..30,
    ) {
        let (mut guest, mut services) = (Guest::new(8, 4), Services::default());
        guest.send(&packet(700, Op::REQUEST, 0), &[]);
        guest.send(&packet(700, Op::RW, 500), &[1; 500]);
        guest.send(&packet(701, Op::REQUEST, 0), &[]);
        let Guest { transport, memory, .. } = &mut guest;
        let racing = Racing { memory, reads: Cell::new(0), changes: &changes };
        for _ in 0..20 {
            transport.poll(&racing, &mut services, budget);
            if let Some(stream) = services.streams.values_mut().next() {
                stream.outgoing = std::vec![1; 100];
                if stream.told.last() == Some(&Told::Closed) {
                    break;
                }
            }
        }
        guest.bring_up(8, 4);
        prop_assert_eq!(guest.exchange(&mut services, &packet(900, Op::REQUEST, 0), &[]), [Op::RESPONSE]);
        let open = services.streams.values().filter(|s| s.told.last() != Some(&Told::Closed)).count();
        prop_assert_eq!(open, 1);
    }
}
