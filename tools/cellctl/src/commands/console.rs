//! `console`: a terminal, or a script, at a cell's serial port.

use super::Terminal;
use crate::cli::ConsoleArgs;
use crate::client::{Client, Connector, Stream, lost};
use crate::exit::{Error, Exit};
use bulkhead_abi::message::CellSummary;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Ctrl-].
const LEAVE: u8 = 0x1d;

/// How long a console must be silent to be left when its input has ended.
const SILENCE: Duration = Duration::from_secs(1);

/// Input that the cell has not taken yet: more is not read before there is room.
const MOST_PENDING: usize = 4096;

/// Attaches standard input and output to a cell's console.
pub(super) fn console<C: Connector>(
    args: &ConsoleArgs,
    client: &mut Client<C>,
    out: &mut Terminal<impl Write>,
) -> Result<(), Error> {
    let cell = client.find(&args.cell)?;
    let ends = Ends {
        until: args.until.as_ref().map(|text| Matcher::new(text.as_bytes())),
        deadline: args.timeout.map(|timeout| Instant::now() + timeout),
        with_input: args.until.is_none() && args.timeout.is_none(),
    };
    let end = attach(&cell, ends, client, out)?;
    match (&args.until, end) {
        (None, _) | (Some(_), End::Found | End::Left) => Ok(()),
        (Some(text), End::TimedOut) => {
            Err(Error::new(Exit::Timeout, format!("cell '{}' has not shown {text:?} in time", args.cell)))
        }
        (Some(text), End::Closed) => {
            let why = format!("cell '{}' is off, and has not shown {text:?}", args.cell);
            Err(Error::new(Exit::Timeout, why))
        }
    }
}

/// Attaches standard input and output to a cell's console until the cell is off or Ctrl-].
pub(super) fn follow<C: Connector>(
    cell: &CellSummary,
    client: &mut Client<C>,
    out: &mut Terminal<impl Write>,
) -> Result<End, Error> {
    attach(cell, Ends { until: None, deadline: None, with_input: false }, client, out)
}

/// What ends a session besides the cell's end and Ctrl-].
struct Ends {
    until: Option<Matcher>,
    deadline: Option<Instant>,
    /// The end of input that is no terminal, and silence.
    with_input: bool,
}

fn attach<C: Connector>(
    cell: &CellSummary,
    ends: Ends,
    client: &mut Client<C>,
    out: &mut Terminal<impl Write>,
) -> Result<End, Error> {
    let port = cell.console_port.ok_or_else(|| {
        let why = format!("cell '{}' has no console: its file says console.serial = false", cell.name);
        Error::new(Exit::Conflict, why)
    })?;
    let (stream, first) = client.attach(port, true)?;
    let typed = out.input.try_clone().map_err(|e| Error::new(Exit::Other, format!("standard input: {e}")))?;
    let terminal = if isatty(&typed) { Some(RawTerminal::enter(typed.as_fd())?) } else { None };
    let mut session = Session {
        stream,
        typed: Some(&typed),
        is_terminal: terminal.is_some(),
        pending: Vec::new(),
        until: ends.until,
        deadline: ends.deadline,
        ends_with_input: ends.with_input,
    };
    if terminal.is_some() {
        eprint!("(console of '{}'; Ctrl-] leaves)\r\n", cell.name);
    }
    session.run(&first, &mut |data| out.raw(data))
}

/// Why a session ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The text was shown.
    Found,
    /// Ctrl-], or the input ended and the console is silent.
    Left,
    /// The time is over.
    TimedOut,
    /// The cell is off or gone.
    Closed,
}

struct Session<S, I> {
    stream: S,
    /// What is typed, until it ends.
    typed: Option<I>,
    is_terminal: bool,
    pending: Vec<u8>,
    until: Option<Matcher>,
    deadline: Option<Instant>,
    ends_with_input: bool,
}

impl<S: Stream, I: Read + AsFd> Session<S, I> {
    /// Passes bytes both ways until there is a reason to end. `first` has been read already.
    fn run(&mut self, first: &[u8], show: &mut dyn FnMut(&[u8]) -> Result<(), Error>) -> Result<End, Error> {
        rustix::io::ioctl_fionbio(&self.stream, true).map_err(|e| lost(&e.into()))?;
        show(first)?;
        if self.found(first) {
            return Ok(End::Found);
        }
        let mut last_output = Instant::now();
        let mut buf = [0; 4096];
        loop {
            let silence_ends = (self.typed.is_none() && self.pending.is_empty() && self.ends_with_input)
                .then(|| last_output + SILENCE);
            let wake = [self.deadline, silence_ends].into_iter().flatten().min();
            let (readable, writable, typed) = self.wait(wake)?;
            if writable {
                self.send()?;
            }
            if readable {
                match self.stream.read(&mut buf) {
                    Ok(0) => return Ok(End::Closed),
                    Ok(count) => {
                        let data = buf.get(..count).unwrap_or_default();
                        show(data)?;
                        if self.found(data) {
                            return Ok(End::Found);
                        }
                        last_output = Instant::now();
                    }
                    Err(error) if is_transient(&error) => {}
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(End::Closed),
                    Err(error) => return Err(lost(&error)),
                }
            }
            if typed && self.take_input(&mut buf)? {
                return Ok(End::Left);
            }
            let now = Instant::now();
            if self.deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(End::TimedOut);
            }
            if silence_ends.is_some() && now >= last_output + SILENCE {
                return Ok(End::Left);
            }
        }
    }

    /// Waits until something can be done or `wake`. Returns whether the console can be read,
    /// whether it can be written, and whether there is input.
    fn wait(&self, wake: Option<Instant>) -> Result<(bool, bool, bool), Error> {
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, !self.pending.is_empty());
        let mut fds = vec![PollFd::new(&self.stream, wanted)];
        if let Some(typed) = self.typed.as_ref().filter(|_| self.pending.len() < MOST_PENDING) {
            fds.push(PollFd::new(typed, PollFlags::IN));
        }
        let left = wake.map(|wake| wake.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::new(Exit::Other, format!("poll: {error}"))),
        }
        let happened = |index: usize, flags| fds.get(index).is_some_and(|fd| fd.revents().intersects(flags));
        let end = PollFlags::HUP | PollFlags::ERR;
        Ok((happened(0, PollFlags::IN | end), happened(0, PollFlags::OUT), happened(1, PollFlags::IN | end)))
    }

    /// Sends what the console takes of the pending input.
    fn send(&mut self) -> Result<(), Error> {
        match self.stream.write(&self.pending) {
            Ok(count) => drop(self.pending.drain(..count)),
            Err(error) if is_transient(&error) => {}
            // Then reading tells that it is closed.
            Err(_) => self.pending.clear(),
        }
        Ok(())
    }

    /// Takes input. Returns whether it says to leave.
    fn take_input(&mut self, buf: &mut [u8]) -> Result<bool, Error> {
        let Some(typed) = &mut self.typed else { return Ok(false) };
        let count = match typed.read(buf) {
            Ok(count) => count,
            Err(error) if is_transient(&error) => return Ok(false),
            Err(error) => return Err(Error::new(Exit::Other, format!("standard input: {error}"))),
        };
        let data = buf.get(..count).unwrap_or_default();
        if data.is_empty() {
            self.typed = None;
        }
        let leave = self.is_terminal && data.contains(&LEAVE);
        self.pending.extend(data);
        Ok(leave)
    }

    fn found(&mut self, data: &[u8]) -> bool {
        self.until.as_mut().is_some_and(|matcher| matcher.feed(data))
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Looks for a text in what comes piece by piece.
struct Matcher {
    text: Vec<u8>,
    /// The end of what came, as long as it may begin the text.
    tail: Vec<u8>,
}

impl Matcher {
    fn new(text: &[u8]) -> Self {
        Self { text: text.into(), tail: Vec::new() }
    }

    /// Whether the text has come by the end of `data`.
    fn feed(&mut self, data: &[u8]) -> bool {
        self.tail.extend(data);
        if self.tail.windows(self.text.len()).any(|window| window == self.text) {
            return true;
        }
        let keep = self.text.len().saturating_sub(1);
        self.tail.drain(..self.tail.len().saturating_sub(keep));
        false
    }
}

/// A terminal in raw mode, until it is dropped.
struct RawTerminal<'a> {
    fd: BorrowedFd<'a>,
    before: Termios,
}

impl<'a> RawTerminal<'a> {
    fn enter(fd: BorrowedFd<'a>) -> Result<Self, Error> {
        let failed = |e: rustix::io::Errno| Error::new(Exit::Other, format!("the terminal: {e}"));
        let before = tcgetattr(fd).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(fd, OptionalActions::Now, &raw).map_err(failed)?;
        Ok(Self { fd, before })
    }
}

impl Drop for RawTerminal<'_> {
    fn drop(&mut self) {
        // There is nobody to tell if it cannot be put back.
        let _ = tcsetattr(self.fd, OptionalActions::Now, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    /// A session, the cell's end of its console, and the end that types.
    fn session(
        until: &str,
        timeout_ms: Option<u64>,
    ) -> (Session<UnixStream, UnixStream>, UnixStream, UnixStream) {
        let (stream, cell) = UnixStream::pair().unwrap();
        let (typed, typist) = UnixStream::pair().unwrap();
        let session = Session {
            stream,
            typed: Some(typed),
            is_terminal: true,
            pending: Vec::new(),
            until: (!until.is_empty()).then(|| Matcher::new(until.as_bytes())),
            deadline: timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms)),
            ends_with_input: until.is_empty() && timeout_ms.is_none(),
        };
        (session, cell, typist)
    }

    fn run(session: &mut Session<UnixStream, UnixStream>, first: &str) -> (End, String) {
        let mut shown = Vec::new();
        let end = session.run(first.as_bytes(), &mut |data| {
            shown.extend(data);
            Ok(())
        });
        (end.unwrap(), String::from_utf8(shown).unwrap())
    }

    #[test]
    fn it_ends_when_the_text_is_shown_even_before_or_in_pieces() {
        let (mut session, _cell, _typist) = session("login:", None);
        assert_eq!(run(&mut session, "host login: "), (End::Found, "host login: ".into()));
        let (mut session, mut cell, _typist) = self::session("login:", None);
        cell.write_all(b"gin: ").unwrap();
        assert_eq!(run(&mut session, "host lo"), (End::Found, "host login: ".into()));
    }

    #[test]
    fn it_ends_when_the_time_is_over_or_the_cell_is() {
        let (mut session, _cell, _typist) = session("login:", Some(20));
        assert_eq!(run(&mut session, "x").0, End::TimedOut);
        let (mut session, cell, _typist) = self::session("login:", None);
        drop(cell);
        assert_eq!(run(&mut session, "x").0, End::Closed);
    }

    #[test]
    fn what_is_typed_arrives_and_ctrl_bracket_leaves() {
        let (mut session, _cell, mut typist) = session("", None);
        typist.write_all(b"\x1d").unwrap();
        assert_eq!(run(&mut session, "").0, End::Left);
        // Input that ends is passed on, and waited for what comes of it.
        let (mut session, mut cell, mut typist) = self::session("", None);
        typist.write_all(b"nproc\n").unwrap();
        typist.shutdown(Shutdown::Write).unwrap();
        let answer = std::thread::spawn(move || {
            let mut typed = [0; 6];
            cell.read_exact(&mut typed).unwrap();
            cell.write_all(b"2\n").unwrap();
            (typed, cell)
        });
        assert_eq!(run(&mut session, ""), (End::Left, "2\n".into()));
        assert_eq!(&answer.join().unwrap().0, b"nproc\n");
    }

    proptest! {
        #[test]
        fn a_text_is_found_however_it_is_cut(text in "[ab]{1,4}", data in "[ab]{0,30}", cut in 1usize..9) {
            let mut matcher = Matcher::new(text.as_bytes());
            let found = data.as_bytes().chunks(cut).any(|piece| matcher.feed(piece));
            prop_assert_eq!(found, data.contains(&text));
        }
    }
}
