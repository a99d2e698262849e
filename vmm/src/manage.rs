//! Management: requests from `cellctl`, carried out in slices.
//!
//! [`Node`] is the ledger of the node's cells and the services behind the management
//! channel. A stream transport calls it as [`StreamServices`], which only moves bytes in and
//! out of buffers; all else happens in [`Node::work`], a slice at a time, with effects on a
//! [`Platform`]. `Node` belongs behind one lock, under which no guest runs.
//!
//! Neighbours: `cells` carries out requests, `autostart` makes them at boot, `connection` has the buffers of one
//! connection, [`platform`] is what the kernel provides; messages are in `bulkhead_abi`.

mod autostart;
mod cells;
mod connection;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod platform;

use crate::cell::config::HostRange;
use crate::device::stream::{StreamId, StreamServices};
use crate::hal::CpuId;
use alloc::format;
use alloc::vec::Vec;
use bulkhead_abi::message::{
    ABI_VERSION, BULK_PORTS, Body, CONSOLE_PORTS, ErrorCode, Failure, LOG_PORT, MANAGEMENT_PORT,
    PRIVILEGED_PORTS, Reply, Request, Token,
};
use cells::{Cells, Client};
use connection::{Connection, Role};
use platform::{NodeFacts, Platform};

/// The most bytes zeroed in one slice of work: 1 MiB.
pub const ZERO_SLICE: u64 = 1 << 20;

/// The most connections at a time; further ones are reset.
pub const MAX_CONNECTIONS: usize = 32;

/// How long a connection may take to open itself by its first frame.
const HELLO_TIMEOUT_NS: u64 = 10_000_000_000;

/// When [`Node::work`] wants to be called again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Soon: there is more to do.
    More,
    /// After a millisecond or so: something outside is waited for.
    Waiting,
    /// When a stream has brought something.
    Idle,
}

/// What a sender has shown that it may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Authority {
    /// Nothing yet.
    Anyone,
    /// It has the boot's token: it is the root user of the root cell.
    RootToken,
}

/// The authority that each request needs. This table is all there is: it is looked at before
/// a request gets to its handler, and handlers do not check.
const fn required(body: &Body) -> Authority {
    match body {
        Body::Hello { .. } => Authority::Anyone,
        Body::NodeInfo
        | Body::List
        | Body::Show { .. }
        | Body::Check { .. }
        | Body::Create { .. }
        | Body::LoadBegin { .. }
        | Body::LoadFinish { .. }
        | Body::Start { .. }
        | Body::Stop { .. }
        | Body::Destroy { .. }
        | Body::Pause { .. }
        | Body::Resume { .. }
        | Body::PressPower { .. }
        | Body::Reload { .. }
        | Body::Wait { .. } => Authority::RootToken,
    }
}

/// The node's cells and the services that manage them.
#[derive(Debug)]
pub struct Node {
    token: Token,
    cells: Cells,
    connections: Vec<Connection>,
}

impl Node {
    /// A node without guest cells. `cpus`, `kept_back` and `pool` are as in
    /// [`Ownership::new`](crate::cell::ownership::Ownership::new); who has `token` may manage.
    pub fn new(facts: NodeFacts, token: Token, cpus: u32, kept_back: &[CpuId], pool: &[HostRange]) -> Self {
        Self { token, cells: Cells::new(facts, cpus, kept_back, pool), connections: Vec::new() }
    }

    /// Does one slice of what there is to do, at most about 1 MiB of zeroing.
    ///
    /// To be called from a CPU that has nothing better to do: after a transport has called,
    /// and as the answer says.
    pub fn work(&mut self, platform: &mut dyn Platform) -> Progress {
        let mut more = false;
        let mut waiting = false;
        for index in 0..self.connections.len() {
            let Some(connection) = self.connections.get_mut(index) else { break };
            more |= serve(connection, &mut self.cells, &self.token, platform);
            waiting |= connection.waits();
        }
        more |= self.cells.work(platform);
        waiting |= self.cells.is_waiting();
        for (client, id, result) in self.cells.take_answers() {
            let asked = |c: &&mut Connection| Client::Stream(c.stream()) == client;
            if let Some(connection) = self.connections.iter_mut().find(asked) {
                connection.answer(id, result);
            }
            more = true;
        }
        match (more, waiting) {
            (true, _) => Progress::More,
            (false, true) => Progress::Waiting,
            (false, false) => Progress::Idle,
        }
    }

    /// Begins to turn off all cells, before the machine is turned off: the newest first, by its
    /// power button, and by force when that takes more than 30 s. [`work`](Self::work) does it.
    pub fn begin_shutdown(&mut self) {
        self.cells.begin_shutdown();
    }

    /// The names of the guest cells that are on.
    pub fn cells_on(&self) -> impl Iterator<Item = &str> {
        self.cells.names_on()
    }

    /// Whether no guest cell is on.
    pub fn is_off(&self) -> bool {
        self.cells.is_off()
    }

    fn find(&mut self, id: StreamId) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|c| c.stream() == id)
    }
}

impl StreamServices for Node {
    fn connect(&mut self, id: StreamId, port: u32, source_port: u32) -> bool {
        let known = port == MANAGEMENT_PORT || port == LOG_PORT || port >= CONSOLE_PORTS;
        let taken = known && source_port < PRIVILEGED_PORTS && self.connections.len() < MAX_CONNECTIONS;
        if taken {
            self.connections.push(Connection::new(id, port));
        }
        taken
    }

    fn receive(&mut self, id: StreamId, data: &[u8]) -> usize {
        self.find(id).map_or(data.len(), |connection| connection.receive(data))
    }

    fn take_consumed(&mut self, id: StreamId) -> usize {
        self.find(id).map_or(0, Connection::take_consumed)
    }

    fn transmit(&mut self, id: StreamId, buf: &mut [u8]) -> usize {
        self.find(id).map_or(0, |connection| connection.transmit(buf))
    }

    fn finished(&self, id: StreamId) -> bool {
        self.connections.iter().find(|c| c.stream() == id).is_none_or(Connection::is_finished)
    }

    fn peer_shutdown(&mut self, id: StreamId) {
        if let Some(connection) = self.find(id) {
            connection.peer_shutdown();
        }
    }

    fn closed(&mut self, id: StreamId) {
        self.connections.retain(|c| c.stream() != id);
        self.connections.shrink_to_fit();
        self.cells.creator_gone(id);
    }
}

/// Does what `connection` wants now, up to one request or one buffer. Returns whether it
/// wants more.
fn serve(connection: &mut Connection, cells: &mut Cells, token: &Token, platform: &mut dyn Platform) -> bool {
    match connection.role() {
        Role::Unopened => serve_unopened(connection, cells, token, platform.now_ns()),
        Role::Management => serve_management(connection, cells, platform),
        Role::Log { .. } | Role::Console { .. } if !connection.wants_output() => false,
        Role::Log { position, follow } => {
            let mut buf = [0; connection::PIECE];
            let (next, len) = platform.log_read(position, &mut buf);
            connection.send(buf.get(..len).unwrap_or_default());
            connection.open(Role::Log { position: next, follow });
            if len == 0 && !follow {
                connection.close();
            }
            len > 0
        }
        Role::Console { cell, position, follow } => {
            let Some(alive) = cells.console_alive(cell) else {
                connection.close();
                return true;
            };
            let typed = connection.input();
            let taken = if typed.is_empty() { 0 } else { platform.console_write(cell, typed) };
            connection.consume(taken);
            let mut buf = [0; connection::PIECE];
            let (next, len) = platform.console_read(cell, position, &mut buf);
            connection.send(buf.get(..len).unwrap_or_default());
            connection.open(Role::Console { cell, position: next, follow });
            if len == 0 && !(follow && alive) {
                connection.close();
            }
            len > 0 || taken > 0
        }
        Role::Load { port } => serve_load(connection, port, cells, platform),
        Role::Closing { .. } => false,
    }
}

fn serve_unopened(connection: &mut Connection, cells: &Cells, token: &Token, now_ns: u64) -> bool {
    if connection.age_ns(now_ns) > HELLO_TIMEOUT_NS {
        connection.close();
        return true;
    }
    let Some(request) = connection.next_request() else { return false };
    match request.and_then(|request| hello(connection.port(), request, cells, token)) {
        Ok((id, role)) => {
            connection.open(role);
            connection.answer(id, Ok(Reply::Welcome { abi: ABI_VERSION, version: cells.version().into() }));
        }
        Err(failure) => {
            log::warn!("management: a connection to port {} is refused: {failure}", connection.port());
            connection.answer(0, Err(failure));
            connection.close();
        }
    }
    true
}

fn serve_management(connection: &mut Connection, cells: &mut Cells, platform: &mut dyn Platform) -> bool {
    let Some(request) = connection.next_request() else { return false };
    let Request { id, body } = match request {
        Ok(request) => request,
        Err(failure) => {
            connection.answer(0, Err(failure));
            connection.close();
            return true;
        }
    };
    let outcome = body.ok_or_else(unknown_request).and_then(|body| {
        admit(&body, Authority::RootToken)?;
        cells.request(Client::Stream(connection.stream()), id, body, platform)
    });
    match outcome {
        Ok(Some(reply)) => connection.answer(id, Ok(reply)),
        Ok(None) => connection.wait(),
        Err(failure) => connection.answer(id, Err(failure)),
    }
    true
}

fn serve_load(
    connection: &mut Connection,
    port: u32,
    cells: &mut Cells,
    platform: &mut dyn Platform,
) -> bool {
    let data = connection.input();
    let (taken, result) = match (data.is_empty(), connection.is_peer_done()) {
        (false, _) => cells.load_data(port, data, platform),
        (true, true) => (0, Some(Err(cells.load_cut_short(port)))),
        (true, false) => return false,
    };
    connection.consume(taken);
    if let Some(result) = result {
        connection.answer(0, result);
        connection.close_after_peer();
    }
    true
}

/// Opens a connection to `port`: checks the first request, and says what the connection is.
fn hello(port: u32, request: Request, cells: &Cells, token: &Token) -> Result<(u32, Role), Failure> {
    let body = request.body.ok_or_else(unknown_request)?;
    admit(&body, Authority::Anyone)?;
    let Body::Hello { abi, token: shown, follow } = body else {
        return Err(Failure::new(ErrorCode::INVALID, "the first request on a connection is to be a hello"));
    };
    if abi != ABI_VERSION {
        let allowed = format!("{ABI_VERSION}");
        let why = format!(
            "abi is {abi} and the hypervisor's {ABI_VERSION}; allowed: the cellctl of version {}",
            cells.version()
        );
        return Err(Failure::field(ErrorCode::VERSION, "abi", abi, &allowed).saying(why));
    }
    if !token.matches(&shown) {
        let why = "token is not this boot's; allowed: the one in the ACPI table BLKH, which root can read";
        return Err(Failure::field(ErrorCode::AUTHORITY, "token", "another", "this boot's").saying(why));
    }
    let follow = follow.unwrap_or(true);
    let role = match port {
        MANAGEMENT_PORT => Role::Management,
        LOG_PORT => Role::Log { position: 0, follow },
        BULK_PORTS.. => {
            cells.accept_load(port)?;
            Role::Load { port }
        }
        _ => Role::Console { cell: cells.console(port)?, position: 0, follow },
    };
    Ok((request.id, role))
}

/// Whether somebody with the authority `held` may ask for `body`.
fn admit(body: &Body, held: Authority) -> Result<(), Failure> {
    if held >= required(body) {
        return Ok(());
    }
    let why = "this request needs the boot's token: open the connection with a hello first";
    Err(Failure::new(ErrorCode::AUTHORITY, why))
}

fn unknown_request() -> Failure {
    let why = format!("the request is none that this hypervisor (messages version {ABI_VERSION}) knows");
    Failure::new(ErrorCode::UNKNOWN_REQUEST, why)
}

#[cfg(test)]
mod tests;
