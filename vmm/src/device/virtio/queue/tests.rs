//! Queues with all that can be wrong with them.

use super::*;
use crate::device::virtio::driver::{INDIRECT, NEXT, Ring, WRITE};
use crate::memory::guest::fake::FakeMemory;
use core::cell::{Cell, RefCell};
use proptest::prelude::*;
use std::vec::Vec;

const SIZE: u16 = 8;
const RAM: usize = 0x10000;

fn queue(ring: &Ring) -> Queue {
    let mut queue = Queue::new(256);
    queue.set_size(u32::from(ring.size));
    for (part, gpa) in
        [(Part::Descriptors, ring.base), (Part::Driver, ring.driver()), (Part::Device, ring.device())]
    {
        queue.set_address(part, false, u32::try_from(gpa & 0xffff_ffff).unwrap());
        queue.set_address(part, true, u32::try_from(gpa >> 32).unwrap());
    }
    queue.make_ready().unwrap();
    queue
}

fn set_up() -> (FakeMemory, Ring, Queue, Chain) {
    let ring = Ring::new(0x1000, SIZE);
    let queue = queue(&ring);
    (FakeMemory::new(0, RAM), ring, queue, Chain::default())
}

#[test]
fn a_chain_is_read_and_written_across_its_pieces() {
    let (memory, mut ring, mut queue, mut chain) = set_up();
    memory.write(Gpa::new(0x8000), b"abc").unwrap();
    memory.write(Gpa::new(0x9000), b"defgh").unwrap();
    let pieces =
        [(0x8000, 3, false), (0x8800, 0, false), (0x9000, 5, false), (0xa000, 2, true), (0xb000, 4, true)];
    let (head, _) = ring.add(&memory, &pieces).unwrap();
    assert_eq!(queue.pop(&memory, &mut chain), Ok(true));
    assert_eq!((chain.head(), chain.readable_len(), chain.writable_len()), (head, 8, 6));
    let mut buf = [0; 5];
    chain.read(&memory, 2, &mut buf).unwrap();
    assert_eq!(&buf, b"cdefg");
    chain.read(&memory, 3, &mut buf).unwrap();
    assert_eq!(&buf, b"defgh");
    assert_eq!(chain.read(&memory, 4, &mut buf), Err(QueueError::TooShort { head, len: 8, need: 9 }));
    assert!(chain.read(&memory, usize::MAX, &mut buf).is_err());
    chain.write(&memory, 1, b"XYZ").unwrap();
    assert_eq!(memory.read_u16(Gpa::new(0xa000)).unwrap().to_le_bytes(), *b"\0X");
    assert_eq!(memory.read_u32(Gpa::new(0xb000)).unwrap().to_le_bytes(), *b"YZ\0\0");
    assert_eq!(queue.pop(&memory, &mut chain), Ok(false));
    queue.push_used(&memory, head, 4).unwrap();
    assert_eq!(ring.take(&memory), Some((head, 4)));
}

#[test]
fn indices_go_round() {
    let (memory, mut ring, mut queue, mut chain) = set_up();
    for i in 0..70_000u32 {
        let (head, _) = ring.add(&memory, &[(0x8000, 16, true)]).unwrap();
        assert_eq!(queue.pop(&memory, &mut chain), Ok(true));
        queue.push_used(&memory, head, i).unwrap();
        assert_eq!(ring.take(&memory), Some((head, i)));
    }
}

#[test]
fn a_queue_that_is_not_ready_is_empty() {
    let (memory, mut ring, mut queue, mut chain) = set_up();
    ring.add(&memory, &[(0x8000, 16, true)]).unwrap();
    queue.make_unready();
    assert_eq!(queue.pop(&memory, &mut chain), Ok(false));
    assert_eq!(queue.arm(&memory), Ok(false));
}

#[test]
fn the_whole_queue_may_be_one_chain() {
    let (memory, mut ring, mut queue, mut chain) = set_up();
    ring.add(&memory, &[(0x8000, 1, false); SIZE as usize]).unwrap();
    assert_eq!(queue.pop(&memory, &mut chain), Ok(true));
    assert_eq!(chain.readable_len(), usize::from(SIZE));
}

#[test]
fn what_is_malformed_is_an_error() {
    type Spoil = fn(&FakeMemory, &mut Ring);
    let wild = |gpa: u64, len: u64| QueueError::Memory(GuestMemoryError { gpa: Gpa::new(gpa), len });
    let cases: [(&str, Spoil, QueueError); 12] = [
        (
            "available index too far",
            |memory, ring| memory.write(Gpa::new(ring.driver() + 2), &(SIZE + 1).to_le_bytes()).unwrap(),
            QueueError::AvailableIndex { idx: SIZE + 1, next: 0, size: SIZE },
        ),
        (
            "available index back",
            |memory, ring| memory.write(Gpa::new(ring.driver() + 2), &[0xff, 0xff]).unwrap(),
            QueueError::AvailableIndex { idx: 0xffff, next: 0, size: SIZE },
        ),
        (
            "head",
            |memory, ring| ring.offer(memory, SIZE),
            QueueError::DescriptorIndex { index: SIZE, size: SIZE },
        ),
        (
            "next",
            |memory, ring| {
                ring.describe(memory, 0, 0x8000, 8, NEXT, 0xffff);
                ring.offer(memory, 0);
            },
            QueueError::DescriptorIndex { index: 0xffff, size: SIZE },
        ),
        (
            "loop to itself",
            |memory, ring| {
                ring.describe(memory, 3, 0x8000, 8, NEXT, 3);
                ring.offer(memory, 3);
            },
            QueueError::Loop { head: 3, size: SIZE },
        ),
        (
            "loop of two",
            |memory, ring| {
                ring.describe(memory, 1, 0x8000, 0, NEXT | WRITE, 2);
                ring.describe(memory, 2, 0x8000, 8, NEXT | WRITE, 1);
                ring.offer(memory, 1);
            },
            QueueError::Loop { head: 1, size: SIZE },
        ),
        (
            "indirect",
            |memory, ring| {
                ring.describe(memory, 0, 0x8000, 32, INDIRECT, 0);
                ring.offer(memory, 0);
            },
            QueueError::Indirect { index: 0 },
        ),
        (
            "readable after writable",
            |memory, ring| {
                ring.describe(memory, 0, 0x8000, 32, WRITE | NEXT, 1);
                ring.describe(memory, 1, 0x9000, 32, 0, 0);
                ring.offer(memory, 0);
            },
            QueueError::Order { index: 1 },
        ),
        (
            "empty",
            |memory, ring| {
                ring.describe(memory, 0, 0x8000, 0, NEXT, 1);
                ring.describe(memory, 1, 0x8000, 0, 0, 0);
                ring.offer(memory, 0);
            },
            QueueError::TooShort { head: 0, len: 0, need: 1 },
        ),
        (
            "too long",
            |memory, ring| {
                ring.describe(memory, 0, 0, u32::MAX, NEXT, 1);
                ring.describe(memory, 1, 0, 1, 0, 0);
                ring.offer(memory, 0);
            },
            QueueError::TooLong { head: 0 },
        ),
        (
            "past the end of addresses",
            |memory, ring| {
                ring.describe(memory, 0, u64::MAX - 3, 8, 0, 0);
                ring.offer(memory, 0);
            },
            wild(u64::MAX - 3, 8),
        ),
        (
            "past the end of RAM",
            |memory, ring| {
                ring.describe(memory, 0, RAM as u64 - 4, 8, 0, 0);
                ring.offer(memory, 0);
            },
            wild(RAM as u64 - 4, 8),
        ),
    ];
    for (name, spoil, error) in cases {
        let (memory, mut ring, mut queue, mut chain) = set_up();
        spoil(&memory, &mut ring);
        let result = queue.pop(&memory, &mut chain).and_then(|_| chain.read(&memory, 0, &mut [0; 8]));
        assert_eq!(result, Err(error), "{name}");
    }
}

#[test]
fn rings_outside_ram_are_errors() {
    for gpa in [RAM as u64, u64::MAX - 15] {
        for part in [Part::Descriptors, Part::Driver, Part::Device] {
            let (memory, mut ring, mut queue, mut chain) = set_up();
            let (head, _) = ring.add(&memory, &[(0x8000, 16, false)]).unwrap();
            queue.set_address(part, false, u32::try_from(gpa & 0xffff_ffff).unwrap());
            queue.set_address(part, true, u32::try_from(gpa >> 32).unwrap());
            let result = queue.pop(&memory, &mut chain).and_then(|_| queue.push_used(&memory, head, 0));
            assert!(matches!(result, Err(QueueError::Memory(_))), "{part:?} at {gpa:#x}: {result:?}");
        }
    }
}

/// Memory that another CPU writes to: before the `n`-th read a change takes place.
struct Racing {
    memory: FakeMemory,
    reads: Cell<usize>,
    changes: RefCell<Vec<(usize, u64, u16)>>,
}

impl GuestMemory for Racing {
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), GuestMemoryError> {
        let now = self.reads.replace(self.reads.get() + 1);
        for &(when, at, value) in self.changes.borrow().iter() {
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

#[test]
fn the_available_index_is_read_once() {
    let (memory, mut ring, mut queue, mut chain) = set_up();
    ring.add(&memory, &[(0x8000, 16, false)]).unwrap();
    let racing = Racing {
        memory,
        reads: Cell::new(0),
        changes: RefCell::new(std::vec![(1, ring.driver() + 2, 0x8000)]),
    };
    assert_eq!(queue.pop(&racing, &mut chain), Ok(true));
    assert_eq!(chain.readable_len(), 16);
    assert!(matches!(queue.pop(&racing, &mut chain), Err(QueueError::AvailableIndex { idx: 0x8000, .. })));
}

proptest! {
    /// Whatever changes under its hands, a queue yields chains of at most its size and
    /// no more of them than there were indices, or an error.
    #[test]
    fn changing_rings_do_no_harm(
        chains in prop::collection::vec(prop::collection::vec((0x4000u64..0x10100, 0u32..0x200, any::<bool>()), 1..4), 1..4),
        changes in prop::collection::vec((0usize..60, 0u64..0x60, prop_oneof![0u16..10, any::<u16>()]), 0..40),
        region in 0usize..3,
    ) {
        let (memory, mut ring, mut queue, mut chain) = set_up();
        for pieces in &chains {
            ring.add(&memory, pieces);
        }
        let base = [ring.base, ring.driver(), ring.device()][region];
        let changes = changes.into_iter().map(|(when, at, value)| (when, base + at * 2, value)).collect();
        let racing = Racing { memory, reads: Cell::new(0), changes: RefCell::new(changes) };
        for _ in 0..100 {
            let before = racing.reads.get();
            match queue.pop(&racing, &mut chain) {
                Ok(true) => {
                    prop_assert!(chain.readable_len() + chain.writable_len() <= u32::MAX as usize);
                    prop_assert!(chain.head() < SIZE);
                    let mut buf = [0; 16];
                    let read = chain.read(&racing, 0, &mut buf);
                    prop_assert!(read.is_ok() || chain.readable_len() < 16 || matches!(read, Err(QueueError::Memory(_))));
                    if queue.push_used(&racing, chain.head(), 0).is_err() {
                        break;
                    }
                }
                Ok(false) => {}
                Err(_) => break,
            }
            // Index, head, and one descriptor each, then the pieces of one read.
            prop_assert!(racing.reads.get() - before <= 2 + 2 * usize::from(SIZE));
        }
    }
}
