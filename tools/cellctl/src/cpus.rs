//! The root cell's CPUs: which of them a cell gets, and how Linux lets them be turned on and off.

use crate::exit::{Error, Exit};
use crate::interrupt::Interrupt;
use bulkhead_abi::message::{CpuUse, NodeInfo};
use bulkhead_cell_file::{CpuChoice, TooFew};
use std::fs;
use std::path::PathBuf;

/// The numbers of the CPUs that a cell gets on this node. Whether they can be had is for the
/// hypervisor to say; a count is filled from those that belong to no guest cell.
pub(crate) fn choose(choice: &CpuChoice, node: &NodeInfo) -> Result<Vec<u32>, Error> {
    let open = |state| state == CpuUse::ROOT || state == CpuUse::FREE;
    let open = node.cpus.iter().filter(|c| c.cpu != 0 && open(c.state)).map(|c| c.cpu);
    choice.resolve(open).map_err(|TooFew { wanted, open }| {
        let why = format!(
            "cpus is {wanted}, but of this node's {} CPUs {open} belong to no guest cell, not counting \
             CPU 0; allowed: up to {open}",
            node.cpus.len(),
        );
        Error::new(Exit::Conflict, why)
    })
}

/// CPU hotplug of the root cell's Linux.
pub(crate) struct Hotplug {
    root: PathBuf,
}

impl Default for Hotplug {
    fn default() -> Self {
        Self { root: "/sys/devices/system/cpu".into() }
    }
}

impl Hotplug {
    #[cfg(test)]
    pub(crate) fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Turns off those of `cpus` that the root cell has and that are on. Returns them. If one
    /// cannot be turned off, or a signal comes, those before it are turned on again.
    pub(crate) fn take_offline(
        &self,
        node: &NodeInfo,
        cpus: &[u32],
        interrupt: &Interrupt,
    ) -> Result<Vec<u32>, Error> {
        let roots = |cpu: u32| node.cpus.iter().any(|c| c.cpu == cpu && c.state == CpuUse::ROOT);
        let mut taken = Vec::new();
        for &cpu in cpus.iter().filter(|cpu| roots(**cpu)) {
            match interrupt.check().and_then(|()| self.switch(cpu, false)) {
                Ok(true) => taken.push(cpu),
                Ok(false) => {}
                Err(error) => return Err(error.and(self.bring_online(&taken))),
            }
        }
        Ok(taken)
    }

    /// Turns CPUs on, all that can be; fails with those that can't.
    pub(crate) fn bring_online(&self, cpus: &[u32]) -> Result<(), Error> {
        let mut result = Ok(());
        for cpu in cpus {
            let one = self.switch(*cpu, true).map(drop);
            result = match result {
                Ok(()) => one,
                Err(error) => Err(Error::and(error, one)),
            };
        }
        result
    }

    /// Turns a CPU on or off. Returns whether it was not so already.
    fn switch(&self, cpu: u32, on: bool) -> Result<bool, Error> {
        let path = self.root.join(format!("cpu{cpu}/online"));
        let wanted = if on { "1" } else { "0" };
        let failed = |error: std::io::Error| {
            let state = if on { "online" } else { "offline" };
            let why = format!("CPU {cpu} cannot be taken {state}: {}: {error}", path.display());
            Error::new(Exit::Other, why)
        };
        if fs::read_to_string(&path).map_err(failed)?.trim() == wanted {
            return Ok(false);
        }
        fs::write(&path, wanted).map_err(failed)?;
        Ok(true)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use bulkhead_abi::message::CpuInfo;
    use std::path::Path;

    /// A directory like Linux's with CPUs 0..`count`, all on; CPU 0 has no switch.
    pub(crate) fn fake_cpus(root: &Path, count: u32) {
        for cpu in 0..count {
            let dir = root.join(format!("cpu{cpu}"));
            fs::create_dir(&dir).unwrap();
            if cpu > 0 {
                fs::write(dir.join("online"), "1\n").unwrap();
            }
        }
    }

    /// The CPUs that are off in such a directory.
    pub(crate) fn offline(root: &Path, count: u32) -> Vec<u32> {
        let off = |cpu: &u32| {
            let state = fs::read_to_string(root.join(format!("cpu{cpu}/online"))).unwrap();
            state.trim() == "0"
        };
        (1..count).filter(off).collect()
    }

    fn node(states: &[CpuUse]) -> NodeInfo {
        let cpus = states.iter().zip(0..).map(|(state, cpu)| CpuInfo { cpu, state: *state, cell: None });
        crate::render::tests::node(cpus.collect())
    }

    #[test]
    fn a_count_is_taken_from_the_highest_down_and_never_cpu_0() {
        let node = node(&[CpuUse::ROOT, CpuUse::ROOT, CpuUse::CELL, CpuUse::FREE, CpuUse::ROOT]);
        assert_eq!(choose(&CpuChoice::Count(2), &node).unwrap(), [3, 4]);
        assert_eq!(choose(&CpuChoice::Count(3), &node).unwrap(), [1, 3, 4]);
        let error = choose(&CpuChoice::Count(4), &node).unwrap_err();
        assert_eq!(error.exit, Exit::Conflict);
        assert!(error.to_string().contains("up to 3"), "{error}");
    }

    #[test]
    fn only_the_root_cells_cpus_are_switched_and_back_if_one_fails() {
        let dir = tempfile::tempdir().unwrap();
        fake_cpus(dir.path(), 4);
        let hotplug = Hotplug::at(dir.path());
        let node = node(&[CpuUse::ROOT, CpuUse::ROOT, CpuUse::CELL, CpuUse::ROOT, CpuUse::ROOT]);
        let never = Interrupt::never();
        assert_eq!(hotplug.take_offline(&node, &[3, 2, 9], &never).unwrap(), [3]);
        assert_eq!(offline(dir.path(), 4), [3]);
        assert_eq!(hotplug.take_offline(&node, &[3], &never).unwrap(), [0; 0], "it was off already");
        // There is no CPU 4 in this directory.
        let error = hotplug.take_offline(&node, &[1, 4], &never).unwrap_err();
        assert!(error.to_string().contains("CPU 4 cannot be taken offline"), "{error}");
        assert_eq!(offline(dir.path(), 4), [3]);
        let error = hotplug.bring_online(&[4, 3]).unwrap_err();
        assert!(error.to_string().contains("CPU 4 cannot be taken online"), "{error}");
        assert_eq!(offline(dir.path(), 4), [0; 0]);
    }
}
