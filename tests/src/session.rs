//! A node that runs: its console, its job, its end.
//!
//! QEMU writes the console and the job's port to files in the node's log directory; the session
//! follows them. No thread, no socket: what was seen is what stays in the logs.
use std::{
    fmt,
    fs::File,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    job::{Job, Output, find, unpack_out},
    node::NodeDir,
};

/// Exit status of a job that ran into its limit, as `timeout` has it.
pub const STATUS_TIME_LIMIT: u8 = 124;

/// Exit status when the node died before its job ended.
pub const STATUS_DIED: u8 = 125;

/// How often the files and QEMU are looked at.
const POLL: Duration = Duration::from_millis(10);

/// How long a node may take to power off after its job.
const POWER_OFF: Duration = Duration::from_secs(10);

/// A node that has died has finished its report when it is silent for so long.
const SILENCE: Duration = Duration::from_secs(1);

/// How long a node that has died may take to report.
const REPORT: Duration = Duration::from_secs(20);

/// What a console shows when there is no going on: the hypervisor's panic, the last line of any
/// end of the hypervisor, its refusal of a machine or a bundle, Linux's panic.
const LAST_WORDS: [&str; 4] =
    ["bulkhead: PANIC", "bulkhead: halted", "Bulkhead cannot run here", "Kernel panic - not syncing"];

/// What is waited for something to appear in.
#[derive(Clone, Copy)]
enum Log {
    Console,
    Output,
}

/// How a node came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The job ended with this status.
    Job(u8),
    /// The limit was reached first.
    TimeLimit,
    /// The node died first, for the reason stated.
    Died(String),
    /// There was no job, and the node powered off.
    PoweredOff,
}

impl End {
    /// The exit status that stands for it.
    pub fn status(&self) -> u8 {
        match self {
            Self::Job(status) => *status,
            Self::TimeLimit => STATUS_TIME_LIMIT,
            Self::Died(_) => STATUS_DIED,
            Self::PoweredOff => 0,
        }
    }
}

/// What is left of a node.
#[derive(Debug)]
pub struct Outcome {
    /// How it ended.
    pub end: End,
    /// What the job printed.
    pub output: Vec<u8>,
    /// What hypervisor and root cell wrote to the console.
    pub console: String,
    /// Whether the node switched itself off, rather than having to be killed.
    pub powered_off: bool,
    /// From QEMU's start to its end.
    pub wall: Duration,
    /// The directory with `console.log`, `job.log` and `qemu.log`.
    pub logs: PathBuf,
}

impl Outcome {
    /// What the job printed, as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }

    /// The end of the console, for a report.
    pub fn last_words(&self) -> String {
        format!("--- end of the console:\n{}\n---", tail(&self.console, 30))
    }

    /// Returns the job's output if its status was 0.
    ///
    /// # Errors
    /// Any other end, with the last lines of output and console.
    pub fn success(&self) -> Result<String> {
        match self.end {
            End::Job(0) => Ok(self.text()),
            _ => bail!("{self}"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the node ended after {:.1} s: {:?}", self.wall.as_secs_f32(), self.end)?;
        writeln!(f, "--- end of its output:\n{}", tail(&self.text(), 30))?;
        write!(f, "{}\nlogs in {}", self.last_words(), self.logs.display())
    }
}

/// The last `count` lines of `text`.
pub(crate) fn tail(text: &str, count: usize) -> &str {
    let text = text.trim_end();
    let start = text.rmatch_indices('\n').nth(count.saturating_sub(1)).map_or(0, |(at, _)| at + 1);
    &text[start..]
}

/// A file that somebody else appends to.
#[derive(Debug)]
struct Follower {
    file: File,
}

impl Follower {
    fn next(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// A running node. It is killed when the session is dropped, and by the system when the thread that
/// started it ends, so a session stays on its thread.
#[derive(Debug)]
pub struct Session {
    qemu: Child,
    keyboard: ChildStdin,
    console_log: Follower,
    job_log: Follower,
    console: Vec<u8>,
    /// How far [`Session::wait_for`] has read.
    read: usize,
    /// How far [`Session::last_words`] has looked.
    checked: usize,
    parser: Option<Output>,
    output: Vec<u8>,
    printed: usize,
    out: Option<PathBuf>,
    started: Instant,
    limit: Duration,
    dir: NodeDir,
}

impl Session {
    pub(crate) fn new(
        mut command: Command,
        dir: NodeDir,
        job: Option<Job>,
        out: Option<PathBuf>,
        limit: Duration,
    ) -> Result<Self> {
        let create = |name: &str| {
            let path = dir.logs.join(name);
            File::create(&path).with_context(|| format!("cannot create {}", path.display()))
        };
        let mut errors = create("qemu.log")?;
        writeln!(errors, "{command:?}")?;
        command.stdin(Stdio::piped()).stdout(create("console.log")?).stderr(errors);
        create("job.log")?;
        let follow = |name: &str| File::open(dir.logs.join(name)).map(|file| Follower { file });
        let (console_log, job_log) = (follow("console.log")?, follow("job.log")?);
        let mut qemu = command.spawn().context("cannot run setpriv (of util-linux)")?;
        let keyboard = qemu.stdin.take().context("QEMU has no standard input")?;
        Ok(Self {
            qemu,
            keyboard,
            console_log,
            job_log,
            console: Vec::new(),
            read: 0,
            checked: 0,
            parser: job.map(|job| Output::new(&job.nonce)),
            output: Vec::new(),
            printed: 0,
            out,
            started: Instant::now(),
            limit,
            dir,
        })
    }

    /// The directory with `console.log`, `job.log` and `qemu.log`.
    pub fn logs(&self) -> &Path {
        &self.dir.logs
    }

    /// Types `text` on the console.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn send(&mut self, text: &str) -> Result<()> {
        self.keyboard.write_all(text.as_bytes()).context("the node takes no input")
    }

    /// Waits until the console shows `text` after what an earlier call found, and returns what
    /// came up to and with it.
    ///
    /// # Errors
    /// `limit` or the node's own limit has passed, or the node has died; with the last of the console.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> Result<String> {
        self.wait(Log::Console, text, limit)
    }

    /// The same for what the job prints; what it returns is not given to [`Session::finish`]'s `print`.
    ///
    /// # Errors
    /// As [`Session::wait_for`], or the job has ended.
    pub fn wait_for_output(&mut self, text: &str, limit: Duration) -> Result<String> {
        self.wait(Log::Output, text, limit)
    }

    fn wait(&mut self, log: Log, text: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let end = self.poll()?;
            let (stream, read) = match log {
                Log::Console => (&self.console, &mut self.read),
                Log::Output => (&self.output, &mut self.printed),
            };
            let new = &stream[*read..];
            if let Some(at) = find(new, text.as_bytes()) {
                let length = at + text.len();
                *read += length;
                return Ok(String::from_utf8_lossy(&new[..length]).into_owned());
            }
            let reason = match &end {
                Some(end) => format!("{end:?}"),
                None if Instant::now() >= deadline => format!("not within {limit:?}"),
                None => {
                    thread::sleep(POLL);
                    continue;
                }
            };
            let log = if matches!(end, Some(End::Died(_))) { Log::Console } else { log };
            bail!("no {text:?}: {reason}\n{}", self.end_of(log));
        }
    }

    /// The end of what the job has printed, and where all of it is, for a report.
    pub fn last_output(&self) -> String {
        self.end_of(Log::Output)
    }

    fn end_of(&self, log: Log) -> String {
        let (stream, file) = match log {
            Log::Console => (&self.console, "console.log"),
            Log::Output => (&self.output, "job.log"),
        };
        let seen = String::from_utf8_lossy(stream);
        format!("--- end of {}:\n{}\n---", self.logs().join(file).display(), tail(&seen, 30))
    }

    /// Waits for the end, gives each piece of the job's output to `print`, fetches `/out`, and
    /// takes the node down.
    ///
    /// # Errors
    /// The log files could not be read, or `/out` not be unpacked.
    pub fn finish(mut self, mut print: impl FnMut(&[u8])) -> Result<Outcome> {
        let end = loop {
            let end = self.poll()?;
            print(&self.output[self.printed..]);
            self.printed = self.output.len();
            if let Some(end) = end {
                break end;
            }
            thread::sleep(POLL);
        };
        let powered_off = match end {
            End::TimeLimit => false,
            End::Job(_) | End::PoweredOff => self.wait_exit(POWER_OFF)?,
            End::Died(_) => self.wait_silence()?,
        };
        // Before its disks are read.
        self.kill();
        self.poll_logs()?;
        if let (End::Job(_), Some(out)) = (&end, &self.out) {
            unpack_out(&self.dir.scratch, out)?;
        }
        Ok(Outcome {
            end,
            output: std::mem::take(&mut self.output),
            console: String::from_utf8_lossy(&self.console).into_owned(),
            powered_off,
            wall: self.started.elapsed(),
            logs: self.dir.logs.clone(),
        })
    }

    /// Looks at everything once; says so if it is over.
    fn poll(&mut self) -> Result<Option<End>> {
        // First, or what QEMU wrote last could be missed.
        let exit = self.qemu.try_wait()?;
        self.poll_logs()?;
        if let Some(status) = self.parser.as_ref().and_then(Output::status) {
            return Ok(Some(End::Job(status)));
        }
        if let Some(words) = self.last_words() {
            return Ok(Some(End::Died(words)));
        }
        Ok(match exit {
            Some(exit) if exit.success() && self.parser.is_none() => Some(End::PoweredOff),
            Some(exit) => Some(End::Died(self.explain(exit))),
            None if self.started.elapsed() >= self.limit => Some(End::TimeLimit),
            None => None,
        })
    }

    /// The line of the console that says that it is over.
    fn last_words(&mut self) -> Option<String> {
        let new = &self.console[self.checked..];
        let complete = new.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let lines = String::from_utf8_lossy(&new[..complete]);
        let found = lines.lines().find(|line| LAST_WORDS.iter().any(|words| line.contains(words)));
        let found = found.map(|line| line.trim().to_owned());
        if found.is_none() {
            self.checked += complete;
        }
        found
    }

    fn poll_logs(&mut self) -> Result<()> {
        self.console.extend(self.console_log.next()?);
        let bytes = self.job_log.next()?;
        if let Some(parser) = &mut self.parser {
            self.output.extend(parser.feed(&bytes));
        }
        Ok(())
    }

    fn explain(&self, exit: std::process::ExitStatus) -> String {
        let when = match &self.parser {
            Some(parser) if parser.started() => "while its job ran",
            Some(_) => "before its job began",
            None => "by itself",
        };
        let errors = std::fs::read_to_string(self.dir.logs.join("qemu.log")).unwrap_or_default();
        // The first line is the command.
        let last = errors.lines().skip(1).filter(|line| !line.contains("warning:")).last();
        format!("QEMU ended {when} ({exit}){}", last.map(|line| format!(": {line}")).unwrap_or_default())
    }

    fn wait_exit(&mut self, limit: Duration) -> Result<bool> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(exit) = self.qemu.try_wait()? {
                return Ok(exit.success());
            }
            thread::sleep(POLL);
        }
        Ok(false)
    }

    /// Lets a node that has died finish its report.
    fn wait_silence(&mut self) -> Result<bool> {
        let deadline = Instant::now() + REPORT;
        loop {
            let seen = self.console.len();
            if self.wait_exit(SILENCE)? {
                return Ok(true);
            }
            self.poll_logs()?;
            if self.console.len() == seen || Instant::now() >= deadline {
                return Ok(false);
            }
        }
    }

    fn kill(&mut self) {
        // Both fail only when it is gone already.
        _ = self.qemu.kill();
        _ = self.qemu.wait();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.kill();
    }
}
