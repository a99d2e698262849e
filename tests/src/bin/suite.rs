//! Runs all tests of the workspace by Cargo and closes with their number.
//!
//! Arguments go to the test programs: a filter, for example.
#![forbid(unsafe_code)]

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context, Result};
use bulkhead_tests::tally::Tally;

/// Nodes at a time: one a core of a small machine.
const THREADS: &str = "2";

fn main() -> Result<ExitCode> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut child = Command::new(cargo)
        // Kernel and guest link only for a bare machine; what a host can test is elsewhere.
        .args(["test", "--workspace", "--exclude", "bulkhead", "--exclude", "bulkhead-guests"])
        .args(["--no-fail-fast", "--"])
        .args(["--test-threads", THREADS])
        .args(env::args_os().skip(1))
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run cargo")?;
    let mut tally = Tally::default();
    for line in BufReader::new(child.stdout.take().context("cargo has no output")?).lines() {
        let line = line?;
        tally.add(&line);
        println!("{line}");
    }
    // A test program that did not build or that crashed has no closing line.
    if !child.wait()?.success() && tally.failed == 0 {
        tally.failed = 1;
    }
    let strict = env::var_os("CI").is_some_and(|ci| !ci.is_empty());
    if strict && tally.skipped != 0 {
        println!("skipped tests count as failed here, since CI is set");
    }
    println!("{tally}");
    let good = tally.failed == 0 && tally.passed != 0 && !(strict && tally.skipped != 0);
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
