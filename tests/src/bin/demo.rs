//! Boots a node and does the hypervisor's main job in it, without a keyboard: an unmodified Linux in
//! the root cell makes a guest cell, runs an unmodified Linux in it, asks it, and takes it away again.
//!
//! Each step is a line; `target/demo/report.json` has them all and what was seen. What the root cell
//! does is in `demo.sh`.
#![forbid(unsafe_code)]

use std::{
    env, fs,
    io::{Write, stdout},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use bulkhead_tests::{Boot, End, Node, Session, nonce, target_dir};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const STEPS: usize = 9;
/// Most that a step may take.
const STEP: Duration = Duration::from_secs(120);
/// Most that the node may run.
const LIMIT: Duration = Duration::from_secs(300);
const CPUS: u32 = 4;
const GUEST_CPUS: u32 = 2;
const GUEST_CMDLINE: &str = "console=ttyS0";
/// Bytes of a nonce that a guest's console takes in reasonable time.
const LONGEST_NONCE: usize = 4096;

fn main() -> ExitCode {
    let dir = target_dir().join("demo");
    let mut demo = Demo { steps: Vec::new(), started: Instant::now() };
    let result = demo.run(&dir).and_then(|()| demo.report(&dir, None));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            if let Err(error) = demo.report(&dir, Some(&error)) {
                eprintln!("demo: no report: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

struct Demo {
    steps: Vec<Value>,
    started: Instant,
}

impl Demo {
    fn run(&mut self, dir: &Path) -> Result<()> {
        let nonce = match env::var_os("NONCE").filter(|nonce| !nonce.is_empty()) {
            Some(nonce) => nonce.into_vec(),
            None => nonce()?.into_bytes(),
        };
        let length = nonce.len();
        ensure!(length <= LONGEST_NONCE, "NONCE has {length} bytes; allowed are up to {LONGEST_NONCE}");
        let share = dir.join("share");
        fs::create_dir_all(&share).with_context(|| format!("cannot make {}", share.display()))?;
        let hash = sha256(&[&nonce[..], b"\n"].concat());
        let answer = format!("{hash}  -");
        fs::write(share.join("question"), question(&nonce))?;
        fs::write(share.join("answer"), &answer)?;
        let kernel = Kernel::of_the_distribution()?;

        let mut running = self.step("Bulkhead boots", || {
            let node =
                Node::new("demo", Boot::Pvh).cpus(CPUS).kernel(&kernel.file).share(&share).limit(LIMIT);
            let mut session = node.start(Some(include_str!("demo.sh")))?;
            session.wait_for("Bulkhead ", STEP)?;
            let version = session.wait_for(" ", STEP)?;
            session.wait_for("booted by ", STEP)?;
            let path = session.wait_for(",", STEP)?;
            let seen = json!({ "version": version.trim_end(), "boot": path.trim_end_matches(',') });
            Ok((session, String::new(), seen))
        })?;
        let session = &mut running;

        let what = format!("the root cell runs Debian's kernel {} on {CPUS} CPUs", kernel.release);
        let before = self.step(&what, || {
            part(session, "root", |seen| {
                expect("release and CPUs", seen.trim(), &format!("{}\n{CPUS}", kernel.release))
            })?;
            let node = part(session, "node", json)?;
            let seen = json!({
                "release": kernel.release, "cpus": CPUS, "kernel": kernel.report()?, "node": node,
            });
            Ok((node, String::new(), seen))
        })?;

        self.step("cellctl creates a guest cell from demo.cell.toml", || {
            let guest = part(session, "kernel", |seen| {
                let sha256 = first_word(seen);
                expect("SHA-256 of the guest's kernel", &sha256, &kernel.sha256)?;
                Ok(json!({ "file": "/cells/vmlinuz", "sha256": sha256 }))
            })?;
            let left = CPUS - GUEST_CPUS;
            let said = part(session, "created", |seen| {
                let (said, nproc) = seen.trim().rsplit_once('\n').unwrap_or(("", seen));
                expect("the root cell's CPUs", nproc, &left.to_string())?;
                Ok(said.to_owned())
            })?;
            Ok(((), said, json!({ "kernel": guest, "root_cpus": left })))
        })?;

        self.step(&format!("Debian's kernel starts in it, on {GUEST_CPUS} CPUs"), || {
            let version = part(session, "started", |seen| {
                let version = seen.lines().find_map(|line| line.find("Linux version ").map(|at| &line[at..]));
                let version = version.context("the guest has not said its version")?;
                ensure!(version.contains(&kernel.release), "the guest runs {version}");
                Ok(version.to_owned())
            })?;
            Ok(((), String::new(), json!({ "version": version })))
        })?;

        self.step("over cellctl console it answers what it is asked", || {
            let [release, cpus] = part(session, "answered", |seen| {
                let (seen, _) = seen.rsplit_once(&answer).context("no right SHA-256")?;
                // Its kernel may have something to say in between.
                let lines =
                    seen.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('['));
                let mut last = lines.rev().map(str::to_owned);
                let answers = [(); 2].map(|()| last.next().unwrap_or_default());
                expect("uname -r", &answers[0], &kernel.release)?;
                expect("nproc", &answers[1], &GUEST_CPUS.to_string())?;
                Ok(answers)
            })?;
            let shown = format!("nproc: {cpus}\nuname -r: {release}\necho $NONCE | sha256sum: {answer}");
            let nonce = String::from_utf8_lossy(&nonce);
            let seen = json!({ "nonce": nonce, "nproc": cpus, "uname": release, "sha256sum": answer });
            Ok(((), shown, seen))
        })?;

        self.step("cellctl lists cells and counts of exits", || {
            let text = part(session, "listed", |seen| Ok(seen.to_owned()))?;
            let cell = part(session, "shown", |seen| {
                let cell = json(seen)?;
                expect("state", cell["state"].as_str().unwrap_or_default(), "running")?;
                expect("command line", cell["cmdline"].as_str().unwrap_or_default(), GUEST_CMDLINE)?;
                let vcpus = cell["vcpus"].as_array().map_or(&[][..], Vec::as_slice);
                expect("vCPUs", &vcpus.len().to_string(), &GUEST_CPUS.to_string())?;
                for vcpu in vcpus {
                    let counted = vcpu["exits"].as_object().is_some_and(|exits| !exits.is_empty());
                    ensure!(counted, "a vCPU without exits: {vcpu}");
                }
                Ok(cell)
            })?;
            Ok(((), text, cell))
        })?;

        self.step("the cell is stopped and destroyed", || {
            part(session, "destroyed", |seen| expect("cells", seen.trim(), "there are no guest cells"))?;
            Ok(((), String::new(), json!({ "cells": [] })))
        })?;

        self.step(&format!("the root cell has {CPUS} CPUs online again"), || {
            part(session, "online", |seen| {
                expect("CPUs online", seen.trim(), &format!("0-{}\n{CPUS}", CPUS - 1))
            })?;
            let after = part(session, "node", |seen| {
                let after = json(seen)?;
                for key in ["cpus", "free_cpus", "root_memory", "free_memory"] {
                    expect(key, &after[key].to_string(), &before[key].to_string())?;
                }
                Ok(after)
            })?;
            Ok(((), String::new(), json!({ "cpus": CPUS, "node": after })))
        })?;

        self.step("the node powers off", || {
            let outcome = running.finish(|_| ())?;
            ensure!(outcome.end == End::Job(0) && outcome.powered_off, "{outcome}");
            let seconds = outcome.wall.as_secs_f32();
            Ok(((), String::new(), json!({ "logs": outcome.logs, "node_seconds": seconds })))
        })
    }

    /// Does a step and says so in a line, below which is what the step shows. What `work` returns is
    /// what later steps need, what is shown, and what is seen, for the report.
    fn step<T>(&mut self, what: &str, work: impl FnOnce() -> Result<(T, String, Value)>) -> Result<T> {
        let number = self.steps.len() + 1;
        print!("[{number}/{STEPS}] {what} … ");
        stdout().flush()?;
        let started = Instant::now();
        let result = work();
        let (ok, seconds) = (result.is_ok(), started.elapsed().as_secs_f32());
        println!("{} {seconds:.1} s", if ok { "ok" } else { "FAILED" });
        let mut step = json!({ "step": number, "what": what, "ok": ok, "seconds": seconds });
        let result = result.map(|(result, shown, seen)| {
            for line in shown.lines() {
                println!("{}", format!("      {line}").trim_end());
            }
            step["seen"] = seen;
            result
        });
        self.steps.push(step);
        result
    }

    fn report(&self, dir: &Path, error: Option<&anyhow::Error>) -> Result<()> {
        let report = json!({
            "ok": error.is_none(),
            "error": error.map(|error| format!("{error:#}")),
            "seconds": self.started.elapsed().as_secs_f32(),
            "steps": self.steps,
        });
        let file = dir.join("report.json");
        fs::write(&file, format!("{report:#}\n")).with_context(|| format!("cannot write {}", file.display()))
    }
}

/// Waits until the root cell has done the next part of its job, and has `check` look at what it printed.
fn part<T>(session: &mut Session, name: &str, check: impl FnOnce(&str) -> Result<T>) -> Result<T> {
    let mark = format!("=== {name}\n");
    let seen = session.wait_for_output(&mark, STEP)?.replace('\r', "");
    check(seen.trim_end_matches(&mark)).map_err(|error| anyhow!("{error:#}\n{}", session.last_output()))
}

fn expect(what: &str, seen: &str, expected: &str) -> Result<()> {
    ensure!(seen == expected, "{what}: {seen:?}; expected {expected:?}");
    Ok(())
}

fn json(text: &str) -> Result<Value> {
    serde_json::from_str(text).context("no JSON")
}

/// What is typed on the guest's console. A nonce that could mean something to a terminal, a shell or
/// `echo` goes through them as octal numbers, in lines that are short enough for them.
fn question(nonce: &[u8]) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._".contains(byte);
    if nonce.len() <= 64 && nonce.iter().all(is_plain) {
        return format!("nproc; uname -r; echo {} | sha256sum\n", String::from_utf8_lossy(nonce));
    }
    let mut lines = String::new();
    for piece in nonce.chunks(64) {
        let octal = piece.iter().map(|byte| format!("\\{byte:03o}")).collect::<String>();
        lines.push_str(&format!("printf '{octal}' >>nonce\n"));
    }
    lines + "nproc; uname -r; (cat nonce; echo) | sha256sum\n"
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// The kernel of root and guest cells, proven to be the distribution's.
struct Kernel {
    file: PathBuf,
    release: String,
    package: PathBuf,
    sha256: String,
    md5: String,
}

impl Kernel {
    /// Compares the kernel that is used with the unpacked package's file, and with the package's list
    /// of checksums.
    fn of_the_distribution() -> Result<Self> {
        let target = target_dir();
        let (unpacked, release) = newest(&target.join("guests/linux/boot"), "vmlinuz-")?;
        let (package, _) = newest(&target.join("downloads"), &format!("linux-image-{release}_"))?;
        let file = target.join("guests/vmlinuz");
        let sha256 = sha256(&fs::read(&file)?);
        expect(&format!("SHA-256 of {}", file.display()), &sha256, &self::sha256(&fs::read(&unpacked)?))?;
        let md5 = first_word(&output(Command::new("md5sum").arg(&file))?);
        let sums = output(Command::new("dpkg-deb").arg("--info").arg(&package).arg("md5sums"))?;
        let sum = sums.lines().find(|line| line.ends_with(&format!(" boot/vmlinuz-{release}")));
        expect(&format!("MD5 of {}", file.display()), &md5, &first_word(sum.unwrap_or_default()))?;
        Ok(Self { file, release, package, sha256, md5 })
    }

    fn report(&self) -> Result<Value> {
        Ok(json!({
            "file": self.file, "sha256": self.sha256, "md5": self.md5,
            "package": self.package, "package_sha256": sha256(&fs::read(&self.package)?),
        }))
    }
}

/// The newest file in `dir` whose name begins with `prefix`, and the rest of its name.
fn newest(dir: &Path, prefix: &str) -> Result<(PathBuf, String)> {
    let mut found = None;
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(prefix)) else { continue };
        found = found.max(Some((fs::metadata(&entry)?.modified()?, entry, rest.to_owned())));
    }
    let (_, file, rest) = found.with_context(|| format!("{} has no {prefix}*", dir.display()))?;
    Ok((file, rest))
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{command:?}: {}", errors.trim());
    Ok(text.into_owned())
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or_default().into()
}
