//! The commands.

mod console;
mod create;
mod destroy;
mod ending;

use crate::cli::{Cli, Command};
use crate::client::{self, Client, Connector, Vsock, unexpected};
use crate::cpus::Hotplug;
use crate::exit::{Error, Exit};
use crate::interrupt::Interrupt;
use crate::render;
use bulkhead_abi::message::{Body, LOG_PORT, ROOT_CELL, ROOT_NAME, Reply};
use bulkhead_cell_file::CellFile;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Read as _, Write};
use std::os::fd::AsFd as _;
use std::path::Path;

/// Carries out the command line on this machine. Returns the exit code.
pub(crate) fn run(cli: Cli) -> Result<u8, Error> {
    // Not through `Stdin`, whose buffer would hide from poll what has been read.
    let input = io::stdin().as_fd().try_clone_to_owned();
    let input = input.map_err(|e| Error::new(Exit::Other, format!("standard input: {e}")))?;
    let mut out = Terminal { json: cli.json, input: input.into(), to: io::stdout() };
    if let Command::Check { file } = &cli.command {
        return check(file, &mut out).map(|()| 0);
    }
    if let Command::Create { file } | Command::Run { file, .. } = &cli.command {
        // A file that is wrong is told before anything is asked of the node.
        CellFile::read(file)?.check_images()?;
    }
    let mut client = Client::open(Vsock, client::token()?)?;
    // A destruction that has begun is brought to its end, a creation is put back.
    let interrupt = match &cli.command {
        Command::Create { .. } | Command::Run { .. } | Command::Reload { .. } | Command::Destroy { .. } => {
            Interrupt::catch()?
        }
        _ => Interrupt::never(),
    };
    carry_out(cli.command, &mut client, &Hotplug::default(), &interrupt, &mut out)
}

/// Where input comes from, where results go, and in which form.
struct Terminal<W> {
    json: bool,
    input: File,
    to: W,
}

impl<W: Write> Terminal<W> {
    /// Prints a result.
    fn print(&mut self, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) -> Result<(), Error> {
        let result =
            if self.json { writeln!(self.to, "{:#}", json()) } else { write!(self.to, "{}", text()) };
        result.map_err(|e| unprinted(&e))
    }

    /// Passes bytes on.
    fn raw(&mut self, data: &[u8]) -> Result<(), Error> {
        self.to.write_all(data).and_then(|()| self.to.flush()).map_err(|e| unprinted(&e))
    }
}

fn unprinted(error: &io::Error) -> Error {
    Error::new(Exit::Other, format!("standard output: {error}"))
}

fn carry_out<C: Connector>(
    command: Command,
    client: &mut Client<C>,
    hotplug: &Hotplug,
    interrupt: &Interrupt,
    out: &mut Terminal<impl Write>,
) -> Result<u8, Error> {
    match command {
        Command::Run { file, keep } => return ending::run(&file, keep, client, hotplug, interrupt, out),
        Command::Wait { cell, state, timeout } => {
            let cell = client.find(&cell)?;
            return ending::wait(&cell, state, timeout, client);
        }
        Command::Check { file } => check(&file, out),
        Command::Create { file } => create::create(&file, client, hotplug, interrupt, out),
        Command::Start { cell } => {
            let cell = client.find(&cell)?.cell;
            client.order(Body::Start { cell })
        }
        Command::Pause { cell } => {
            let cell = client.find(&cell)?.cell;
            client.order(Body::Pause { cell })
        }
        Command::Resume { cell } => {
            let cell = client.find(&cell)?.cell;
            client.order(Body::Resume { cell })
        }
        Command::Stop { cell, timeout: _, force: true } => {
            let cell = client.find(&cell)?.cell;
            client.order(Body::Stop { cell })
        }
        Command::Stop { cell, timeout, force: false } => {
            let cell = client.find(&cell)?;
            ending::stop(&cell, timeout, client)
        }
        Command::Reload { cell, file } => create::reload(&cell, file.as_deref(), client, interrupt),
        Command::Destroy { cell } => {
            let cell = client.find(&cell)?;
            destroy::destroy(&cell, client, hotplug)
        }
        Command::List => {
            let cells = client.list()?;
            out.print(|| render::cells_json(&cells), || render::cells_text(&cells))
        }
        Command::Show { cell } => {
            let cell = if cell == ROOT_NAME { ROOT_CELL } else { client.find(&cell)?.cell };
            match client.ask(Body::Show { cell })? {
                Reply::Cell(cell) => out.print(|| render::cell_json(&cell), || render::cell_text(&cell)),
                other => Err(unexpected(&other)),
            }
        }
        Command::Console(args) => console::console(&args, client, out),
        Command::Log { follow } => {
            let (mut stream, first) = client.attach(LOG_PORT, follow)?;
            out.raw(&first)?;
            let mut buf = [0; 4096];
            loop {
                match stream.read(&mut buf) {
                    Ok(0) => return Ok(0),
                    Ok(count) => out.raw(buf.get(..count).unwrap_or_default())?,
                    // Silence is no error here.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(client::lost(&error)),
                }
            }
        }
        Command::Node => {
            let node = client.node()?;
            out.print(|| render::node_json(&node), || render::node_text(&node))
        }
    }?;
    Ok(0)
}

fn check(path: &Path, out: &mut Terminal<impl Write>) -> Result<(), Error> {
    let file = CellFile::read(path)?;
    file.check_images()?;
    out.print(|| json!({"name": file.name, "memory": file.memory}), || format!("{}: ok\n", path.display()))
}

#[cfg(test)]
mod tests;
