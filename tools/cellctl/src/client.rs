//! Connections to the hypervisor.

use crate::exit::{Error, Exit};
use crate::interrupt::Interrupt;
use bulkhead_abi::frame::{self, Deframer};
use bulkhead_abi::message::{
    ABI_VERSION, Body, CellDetails, CellState, CellSummary, HYPERVISOR_CID, LoadKind, MANAGEMENT_PORT,
    NodeInfo, PRIVILEGED_PORTS, Reply, Request, Response, Token,
};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

/// How long one request may take: creating a large cell zeroes all its memory.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Where Linux shows the boot's token to root.
const TOKEN_FILE: &str = "/sys/firmware/acpi/tables/BLKH";

/// Any context, for the own end of a vsock connection (`VMADDR_CID_ANY`).
const ANY_CID: u32 = u32::MAX;

/// A byte stream to the hypervisor.
pub(crate) trait Stream: Read + Write + AsFd {}

impl<S: Read + Write + AsFd> Stream for S {}

/// Makes byte streams to the hypervisor.
pub(crate) trait Connector {
    type Stream: Stream;

    /// Connects to a port of the hypervisor.
    fn connect(&self, port: u32) -> Result<Self::Stream, Error>;
}

/// Connects over vsock.
pub(crate) struct Vsock;

impl Connector for Vsock {
    type Stream = Socket;

    fn connect(&self, port: u32) -> Result<Socket, Error> {
        let unreachable = |what: &str, error: &io::Error| {
            Error::new(Exit::NoNode, format!("vsock to the hypervisor, port {port}: {what}: {error}"))
        };
        let socket = Socket::new(Domain::VSOCK, Type::STREAM, None).map_err(|e| {
            unreachable("this Linux has no vsock (module vmw_vsock_virtio_transport loaded?)", &e)
        })?;
        bind_privileged(&socket).map_err(|e| unreachable("no source port below 1024 (are you root?)", &e))?;
        socket
            .connect(&SockAddr::vsock(HYPERVISOR_CID, port))
            .map_err(|e| unreachable("not taken (too many connections, or no such service?)", &e))?;
        Ok(socket)
    }
}

/// Binds to the highest privileged port that is not in use.
fn bind_privileged(socket: &Socket) -> io::Result<()> {
    let mut result = Ok(());
    for port in (1..PRIVILEGED_PORTS).rev() {
        result = socket.bind(&SockAddr::vsock(ANY_CID, port));
        match &result {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            _ => break,
        }
    }
    result
}

/// Reads the boot's token.
pub(crate) fn token() -> Result<Token, Error> {
    read_token(Path::new(TOKEN_FILE))
}

fn read_token(path: &Path) -> Result<Token, Error> {
    let table = fs::read(path).map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::NotFound => "this is not the root cell of a Bulkhead node".into(),
            io::ErrorKind::PermissionDenied => "only root may read it; run cellctl as root".into(),
            _ => error.to_string(),
        };
        Error::new(Exit::NoNode, format!("{}: {why}", path.display()))
    })?;
    let why = || Error::new(Exit::NoNode, format!("{}: not the table of a Bulkhead node", path.display()));
    Token::from_table(&table).ok_or_else(why)
}

/// A management connection, and what it takes to open further ones.
pub(crate) struct Client<C: Connector> {
    connector: C,
    token: Token,
    channel: Channel<C::Stream>,
}

/// A stream on which requests are sent, one at a time.
struct Channel<S> {
    stream: S,
    deframer: Deframer,
    /// Bytes that were read behind the last response.
    rest: Vec<u8>,
    last_id: u32,
    /// How long an answer may take; `None`: for ever.
    limit: Option<Duration>,
}

impl<C: Connector> Client<C> {
    /// Opens a management connection.
    pub(crate) fn open(connector: C, token: Token) -> Result<Self, Error> {
        let channel = Channel::open(connector.connect(MANAGEMENT_PORT)?, token, None)?;
        Ok(Self { connector, token, channel })
    }

    /// Sends a request and waits for its reply.
    pub(crate) fn ask(&mut self, body: Body) -> Result<Reply, Error> {
        self.channel.ask(body)
    }

    /// Sends a request that is answered by nothing but that it is done.
    pub(crate) fn order(&mut self, body: Body) -> Result<(), Error> {
        match self.ask(body)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Waits until a cell is in one of these states, for as long as `limit`; then the exit code is
    /// [`Exit::Timeout`].
    pub(crate) fn wait(
        &self,
        cell: u32,
        states: Vec<CellState>,
        limit: Option<Duration>,
    ) -> Result<CellDetails, Error> {
        let mut channel = Channel::open(self.connector.connect(MANAGEMENT_PORT)?, self.token, None)?;
        channel.set_limit(limit)?;
        match channel.ask(Body::Wait { cell, states })? {
            Reply::Cell(cell) => Ok(cell),
            other => Err(unexpected(&other)),
        }
    }

    /// Facts of the node.
    pub(crate) fn node(&mut self) -> Result<NodeInfo, Error> {
        match self.ask(Body::NodeInfo)? {
            Reply::Node(info) => Ok(info),
            other => Err(unexpected(&other)),
        }
    }

    /// All guest cells.
    pub(crate) fn list(&mut self) -> Result<Vec<CellSummary>, Error> {
        match self.ask(Body::List)? {
            Reply::Cells(cells) => Ok(cells),
            other => Err(unexpected(&other)),
        }
    }

    /// The cell with this name.
    pub(crate) fn find(&mut self, name: &str) -> Result<CellSummary, Error> {
        let mut cells = self.list()?;
        if let Some(index) = cells.iter().position(|cell| cell.name == name) {
            return Ok(cells.swap_remove(index));
        }
        let names: Vec<_> = cells.iter().map(|cell| cell.name.as_str()).collect();
        let there = if names.is_empty() { "there are none".into() } else { names.join(", ") };
        Err(Error::new(Exit::NotFound, format!("there is no cell '{name}'; guest cells: {there}")))
    }

    /// Opens a console or the log: raw bytes, of which the first may have come already.
    pub(crate) fn attach(&self, port: u32, follow: bool) -> Result<(C::Stream, Vec<u8>), Error> {
        let channel = Channel::open(self.connector.connect(port)?, self.token, Some(follow))?;
        Ok((channel.stream, channel.rest))
    }

    /// Loads a file of `size` bytes into a cell. `name` is that of the file, for errors.
    pub(crate) fn load(
        &mut self,
        cell: u32,
        what: LoadKind,
        name: &Path,
        file: &mut dyn Read,
        size: u64,
        interrupt: &Interrupt,
    ) -> Result<(), Error> {
        let port = match self.ask(Body::LoadBegin { cell, what, size })? {
            Reply::LoadPort { port } => port,
            other => return Err(unexpected(&other)),
        };
        let mut channel = Channel::open(self.connector.connect(port)?, self.token, None)?;
        match send_file(&mut channel.stream, name, file, size, interrupt) {
            // The hypervisor may have said why it did not take it.
            Err(error) if error.exit != Exit::NoNode => return Err(error),
            _ => {}
        }
        match channel.receive()? {
            Reply::Loaded { bytes } if bytes == size => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}

fn send_file(
    stream: &mut impl Stream,
    name: &Path,
    file: &mut dyn Read,
    size: u64,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    let mut left = size;
    let mut buf = vec![0; 64 * 1024];
    while left > 0 {
        interrupt.check()?;
        let count = file
            .read(&mut buf)
            .map_err(|e| Error::new(Exit::Other, format!("{}: cannot be read: {e}", name.display())))?;
        let piece = buf.get(..count).unwrap_or_default();
        let piece = piece.get(..usize::try_from(left).unwrap_or(usize::MAX)).unwrap_or(piece);
        if piece.is_empty() {
            break;
        }
        stream.write_all(piece).map_err(|e| lost(&e))?;
        left -= piece.len() as u64;
    }
    rustix::net::shutdown(stream, rustix::net::Shutdown::Write).map_err(|e| lost(&e.into()))?;
    if left > 0 {
        let why = format!("{}: ended {left} of {size} bytes early: it changed meanwhile", name.display());
        return Err(Error::new(Exit::BadFile, why));
    }
    Ok(())
}

impl<S: Stream> Channel<S> {
    /// Introduces itself on a new stream.
    fn open(stream: S, token: Token, follow: Option<bool>) -> Result<Self, Error> {
        let (deframer, rest, last_id) = (Deframer::default(), Vec::new(), 0);
        let mut channel = Self { stream, deframer, rest, last_id, limit: None };
        channel.set_limit(Some(ANSWER_TIMEOUT))?;
        match channel.ask(Body::Hello { abi: ABI_VERSION, token, follow })? {
            Reply::Welcome { .. } => Ok(channel),
            other => Err(unexpected(&other)),
        }
    }

    /// Sets how long an answer may take; `None`: for ever.
    fn set_limit(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        // 0 means for ever to the system.
        let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
        rustix::net::sockopt::set_socket_timeout(&self.stream, rustix::net::sockopt::Timeout::Recv, limit)
            .map_err(|e| lost(&e.into()))?;
        self.limit = limit;
        Ok(())
    }

    fn ask(&mut self, body: Body) -> Result<Reply, Error> {
        self.last_id += 1;
        let request = Request { id: self.last_id, body: Some(body) };
        let frame = frame::encode(&request)
            .map_err(|error| Error::new(Exit::Other, format!("the request cannot be sent: {error}")))?;
        self.stream.write_all(&frame).map_err(|e| lost(&e))?;
        self.receive()
    }

    /// Waits for a response and takes its result. There is one request at a time, so that
    /// the id says nothing new, except that errors about no request in particular have 0.
    fn receive(&mut self) -> Result<Reply, Error> {
        let garbled =
            |error| Error::new(Exit::Refused, format!("what the hypervisor sent is no response: {error}"));
        let mut buf = [0; 4096];
        loop {
            let (taken, body) = self.deframer.take(&self.rest).map_err(garbled)?;
            self.rest.drain(..taken);
            if let Some(body) = body {
                return Ok(frame::decode::<Response>(&body).map_err(garbled)?.result()?);
            }
            let count = match self.stream.read(&mut buf) {
                Ok(0) => return Err(lost(&io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let limit = self.limit.unwrap_or_default();
                    let why = format!("the hypervisor has not answered within {limit:?}");
                    return Err(Error::new(Exit::Timeout, why));
                }
                Err(error) => return Err(lost(&error)),
            };
            self.rest.extend(buf.get(..count).unwrap_or_default());
        }
    }
}

/// The connection broke.
pub(crate) fn lost(error: &io::Error) -> Error {
    Error::new(Exit::NoNode, format!("the connection to the hypervisor is lost: {error}"))
}

pub(crate) fn unexpected(reply: &Reply) -> Error {
    Error::new(Exit::Refused, format!("the hypervisor answered something else than was asked: {reply:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bulkhead_abi::message::{TOKEN_OFFSET, TOKEN_SIZE, TOKEN_TABLE};

    #[test]
    fn the_token_is_read_from_its_table_or_it_is_said_why_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("BLKH");
        let missing = read_token(&path).unwrap_err();
        assert_eq!(missing.exit, Exit::NoNode);
        assert!(missing.to_string().contains("not the root cell"), "{missing}");
        fs::write(&path, TOKEN_TABLE).unwrap();
        assert!(read_token(&path).unwrap_err().to_string().contains("not the table"));
        let mut table = TOKEN_TABLE.to_vec();
        table.resize(TOKEN_OFFSET, 0);
        table.resize(TOKEN_OFFSET + TOKEN_SIZE, 3);
        fs::write(&path, table).unwrap();
        assert!(read_token(&path).unwrap().matches(&Token::new([3; TOKEN_SIZE])));
    }
}
