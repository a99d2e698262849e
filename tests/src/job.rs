//! What the starter and the root cell's init (`guests/root-init.sh`) say to each other: the disks
//! that carry a job in and its files out, and the marks around its output on the second serial port.
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

/// Most that a job can leave in `/out`, in bytes. The disk's file is sparse.
const OUT_SIZE: u64 = 1 << 30;

/// The record separator, first byte of a mark.
const MARK: u8 = 0o36;

/// A disk for the root cell, found there by its serial number.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    pub(crate) serial: &'static str,
    pub(crate) file: PathBuf,
    pub(crate) read_only: bool,
}

/// The disks of a job, and the word that its marks carry.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) nonce: String,
    pub(crate) disks: Vec<Disk>,
}

impl Job {
    /// Writes the disks into `scratch`: the script `cmd`, the files of `share`, room for `/out`.
    pub(crate) fn new(scratch: &Path, cmd: &str, share: Option<&Path>) -> Result<Self> {
        let nonce = nonce()?;
        let files = scratch.join("job");
        fs::create_dir(&files)?;
        fs::write(files.join("nonce"), &nonce)?;
        fs::write(files.join("cmd"), cmd)?;
        let mut disks = vec![archive(&files, scratch.join("job.img"), "bulkhead-job")?];
        if let Some(share) = share {
            ensure!(share.is_dir(), "{} is no directory to share", share.display());
            disks.push(archive(share, scratch.join("share.img"), "bulkhead-share")?);
        }
        let out = scratch.join("out.img");
        File::create(&out)?.set_len(OUT_SIZE)?;
        disks.push(Disk { serial: "bulkhead-out", file: out, read_only: false });
        Ok(Self { nonce, disks })
    }
}

/// Unpacks the disk that the job's `/out` was written to into `dir`.
pub(crate) fn unpack_out(scratch: &Path, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    tar(&["--no-same-owner", "-x"], &scratch.join("out.img"), dir, &[])
}

fn archive(dir: &Path, file: PathBuf, serial: &'static str) -> Result<Disk> {
    tar(&["--owner=0", "--group=0", "-c"], &file, dir, &["."])?;
    Ok(Disk { serial, file, read_only: true })
}

fn tar(options: &[&str], file: &Path, dir: &Path, members: &[&str]) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(options).arg("-f").arg(file).arg("-C").arg(dir).args(members);
    let output = command.output().context("cannot run tar")?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// 16 random hexadecimal digits: nothing that a job prints contains them by chance.
///
/// # Errors
/// The system gives no random bytes.
pub fn nonce() -> Result<String> {
    use std::io::Read;
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

/// Takes a job's output out of what comes from the second serial port.
#[derive(Debug)]
pub(crate) struct Output {
    start: Vec<u8>,
    end: Vec<u8>,
    state: State,
    pending: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Before,
    Running,
    Ended(u8),
}

impl Output {
    pub(crate) fn new(nonce: &str) -> Self {
        let mark = |word: &str| [&[MARK], nonce.as_bytes(), b":", word.as_bytes()].concat();
        Self { start: mark("start\n"), end: mark(""), state: State::Before, pending: Vec::new() }
    }

    /// The job's exit status, once it has ended.
    pub(crate) fn status(&self) -> Option<u8> {
        match self.state {
            State::Ended(status) => Some(status),
            State::Before | State::Running => None,
        }
    }

    /// Whether the job has begun to run.
    pub(crate) fn started(&self) -> bool {
        self.state != State::Before
    }

    /// Takes the next bytes from the port and returns what of them is known to be the job's output.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.pending.extend_from_slice(bytes);
        if self.state == State::Before {
            // Firmware may have written here too.
            let Some(at) = find(&self.pending, &self.start) else { return Vec::new() };
            self.pending.drain(..at + self.start.len());
            self.state = State::Running;
        }
        if self.state != State::Running {
            return Vec::new();
        }
        let Some(at) = find(&self.pending, &self.end) else {
            let held = partial(&self.pending, &self.end);
            return self.pending.drain(..self.pending.len() - held).collect();
        };
        let digits = &self.pending[at + self.end.len()..];
        if let Some(length) = digits.iter().position(|&byte| byte == b'\n') {
            let status = str::from_utf8(&digits[..length]).ok().and_then(|digits| digits.parse().ok());
            self.state = State::Ended(status.unwrap_or(u8::MAX));
        }
        self.pending.drain(..at).collect()
    }
}

pub(crate) fn find(bytes: &[u8], word: &[u8]) -> Option<usize> {
    bytes.windows(word.len()).position(|window| window == word)
}

/// Length of the longest end of `bytes` with which `word` begins.
fn partial(bytes: &[u8], word: &[u8]) -> usize {
    (1..word.len()).rev().find(|&length| bytes.ends_with(&word[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn output_is_exact_however_it_is_cut(
            noise in "[a-z\n]{0,20}",
            output in proptest::collection::vec(prop_oneof![Just(MARK), Just(b'n'), Just(b':'), any::<u8>()], 0..60),
            status: u8,
            cuts in proptest::collection::vec(1_usize..9, 1..99),
        ) {
            let mut stream = noise.into_bytes();
            stream.extend_from_slice(b"\x1enonce:start\n");
            stream.extend_from_slice(&output);
            stream.extend_from_slice(format!("\x1enonce:{status}\nlater").as_bytes());
            let mut parser = Output::new("nonce");
            let mut seen = Vec::new();
            let mut rest = &stream[..];
            let mut cuts = cuts.into_iter().cycle();
            while !rest.is_empty() {
                let (chunk, next) = rest.split_at(cuts.next().map_or(1, |cut| cut.min(rest.len())));
                seen.extend(parser.feed(chunk));
                rest = next;
            }
            prop_assert_eq!(seen, output);
            prop_assert_eq!(parser.status(), Some(status));
        }
    }

    #[test]
    fn output_is_not_held_back() {
        let mut parser = Output::new("nonce");
        assert_eq!(parser.feed(b"\x1enonce:start\nprompt> "), b"prompt> ");
        assert!(parser.started());
        assert_eq!(parser.status(), None);
    }
}
