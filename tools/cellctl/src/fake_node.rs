//! A node in a thread, for tests: the hypervisor's own management over Unix sockets, on a
//! platform without hardware.

use crate::client::Connector;
use crate::exit::Error;
use bulkhead_abi::message::{TOKEN_SIZE, Token};
use bulkhead_vmm::cell::config::HostRange;
use bulkhead_vmm::device::stream::{StreamId, StreamServices as _};
use bulkhead_vmm::manage::fake::FakePlatform;
use bulkhead_vmm::manage::platform::NodeFacts;
use bulkhead_vmm::manage::{Node, Progress};
use bulkhead_vmm::memory::address::Hpa;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What every fake node's root has.
pub(crate) const TOKEN: Token = Token::new([5; TOKEN_SIZE]);

/// CPUs of a fake node.
pub(crate) const CPUS: u32 = 4;

/// Bytes that a peer may send before they are consumed.
const WINDOW: usize = 16 * 1024;

struct Connection {
    id: StreamId,
    socket: UnixStream,
    unconsumed: usize,
    /// Bytes for the peer that its socket had no room for.
    outbound: Vec<u8>,
    peer_done: bool,
}

struct State {
    node: Node,
    platform: FakePlatform,
    connections: Vec<Connection>,
    last_id: u64,
    /// The root cell's `/sys/devices/system/cpu`.
    cpus: PathBuf,
}

/// A fake node; connects to itself.
#[derive(Clone)]
pub(crate) struct FakeNode(Arc<Mutex<State>>);

impl FakeNode {
    /// Starts a node with 64 MiB for cells, whose root cell's CPUs are switched in `cpus`.
    pub(crate) fn start(cpus: &Path) -> Self {
        let pool = HostRange { base: Hpa::new(1 << 30), len: 64 << 20 };
        let facts = NodeFacts { name: "fake".into(), ..NodeFacts::default() };
        let state = State {
            node: Node::new(facts, TOKEN, CPUS, &[], &[pool]),
            platform: FakePlatform::default(),
            connections: Vec::new(),
            last_id: 0,
            cpus: cpus.into(),
        };
        let node = Self(Arc::new(Mutex::new(state)));
        let weak = Arc::downgrade(&node.0);
        std::thread::spawn(move || {
            while let Some(state) = weak.upgrade() {
                let idle = state.lock().unwrap().turn();
                drop(state);
                if idle {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        node
    }

    /// Changes the platform.
    pub(crate) fn platform<T>(&self, change: impl FnOnce(&mut FakePlatform) -> T) -> T {
        change(&mut self.0.lock().unwrap().platform)
    }
}

impl Connector for FakeNode {
    type Stream = UnixStream;

    fn connect(&self, port: u32) -> Result<UnixStream, Error> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut state = self.0.lock().unwrap();
        state.last_id += 1;
        let id = StreamId(state.last_id);
        assert!(state.node.connect(id, port, 1023), "port {port}");
        let connection =
            Connection { id, socket: ours, unconsumed: 0, outbound: Vec::new(), peer_done: false };
        state.connections.push(connection);
        Ok(theirs)
    }
}

impl State {
    /// Moves bytes, gives the node a slice. Returns whether there is nothing to do now.
    fn turn(&mut self) -> bool {
        let off = crate::cpus::tests::offline(&self.cpus, CPUS);
        self.platform.offline = off.into_iter().collect();
        let node = &mut self.node;
        self.connections.retain_mut(|connection| {
            let open = connection.exchange(node);
            if !open {
                node.closed(connection.id);
            }
            open
        });
        let progress = node.work(&mut self.platform);
        if progress == Progress::Waiting {
            self.platform.now_ns += 10_000_000;
        }
        progress != Progress::More
    }
}

impl Connection {
    /// Moves bytes both ways. Returns whether the connection goes on.
    fn exchange(&mut self, node: &mut Node) -> bool {
        let mut buf = [0; WINDOW];
        self.unconsumed -= node.take_consumed(self.id);
        let room = &mut buf[..WINDOW - self.unconsumed];
        if !room.is_empty() && !self.peer_done {
            match self.socket.read(room) {
                Ok(0) => {
                    self.peer_done = true;
                    node.peer_shutdown(self.id);
                }
                Ok(count) => {
                    self.unconsumed += count - node.receive(self.id, &room[..count]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
        if self.outbound.is_empty() {
            let count = node.transmit(self.id, &mut buf);
            self.outbound.extend(&buf[..count]);
        }
        match self.socket.write(&self.outbound) {
            Ok(count) => drop(self.outbound.drain(..count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default())).unwrap();
        let hung_up = fds[0].revents().contains(PollFlags::HUP);
        let finished = self.outbound.is_empty() && node.finished(self.id);
        !(hung_up || finished)
    }
}
