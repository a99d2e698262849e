//! A job of several steps, so that one node serves many checks: each step has a name, an output
//! and a status of its own.
use std::fmt::{self, Write as _};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{
    node::Node,
    session::{End, Outcome, tail},
};

/// The group separator, around each step's output.
const MARK: char = '\x1d';

/// What came of a step.
#[derive(Debug)]
struct Step {
    name: String,
    output: String,
    status: u8,
}

/// What came of a job of steps.
#[derive(Debug)]
pub struct Steps {
    /// The node's end and what it left.
    pub outcome: Outcome,
    steps: Vec<Step>,
}

impl Node {
    /// Boots the node, runs each of `steps` (a name and a command of the shell) after the other,
    /// each in a shell of its own, and waits for the end. A step that fails does not keep the
    /// others from running.
    ///
    /// # Errors
    /// As [`Node::run`]; and when not all steps came to an end, or the node did not power off.
    pub fn steps(self, steps: &[(&str, &str)]) -> Result<Steps> {
        let mut script = String::new();
        for (name, command) in steps {
            // The new line ends a comment in the command, or a here-document.
            writeln!(script, "printf '\\035%s\\n' {name}\n(\n{command}\n) 2>&1\nprintf '\\035%d' $?")?;
        }
        let outcome = self.run(&script)?;
        ensure!(matches!(outcome.end, End::Job(_)) && outcome.powered_off, "{outcome}");
        let steps = parse(&outcome.text()).with_context(|| outcome.to_string())?;
        Ok(Steps { outcome, steps })
    }
}

impl Steps {
    /// The output and the status of the step `name`.
    ///
    /// # Errors
    /// There was no such step.
    pub fn get(&self, name: &str) -> Result<(&str, u8)> {
        let step = self.steps.iter().find(|step| step.name == name);
        let step = step.with_context(|| format!("there was no step {name}"))?;
        Ok((&step.output, step.status))
    }

    /// The output of the step `name`, which succeeded.
    ///
    /// # Errors
    /// It did not; with the output of all steps.
    pub fn ok(&self, name: &str) -> Result<&str> {
        match self.get(name)? {
            (output, 0) => Ok(output),
            (_, status) => bail!("{name} ended with {status}\n{self}"),
        }
    }

    /// The JSON that the step `name` printed.
    ///
    /// # Errors
    /// It failed, or what it printed is no JSON.
    pub fn json(&self, name: &str) -> Result<Value> {
        serde_json::from_str(self.ok(name)?).with_context(|| format!("{name} printed no JSON\n{self}"))
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Step { name, output, status } in &self.steps {
            writeln!(f, "--- {name} ended with {status}\n{}", tail(output, 50))?;
        }
        write!(f, "--- logs in {}", self.outcome.logs.display())
    }
}

/// Reads `MARK name \n output MARK status`, again and again.
fn parse(text: &str) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let mut parts = text.split(MARK);
    ensure!(parts.next() == Some(""), "the job printed something before its first step");
    while let Some(head) = parts.next() {
        let (name, output) = head.split_once('\n').context("a step has no output")?;
        let status = parts.next().with_context(|| format!("step {name} did not end"))?;
        let status = status.parse().with_context(|| format!("step {name} ended with {status:?}"))?;
        steps.push(Step { name: name.into(), output: output.into(), status });
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_taken_apart() -> Result<()> {
        let steps = parse("\x1done\na\nb\n\x1d0\x1dtwo\n\x1d7")?;
        let found = steps.iter().map(|step| (step.name.as_str(), step.output.as_str(), step.status));
        assert_eq!(found.collect::<Vec<_>>(), [("one", "a\nb\n", 0), ("two", "", 7)]);
        for bad in ["x", "\x1done\nhangs", "\x1done\n\x1dx"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        Ok(())
    }
}
