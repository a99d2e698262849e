//! The cells that run before the root cell does: the bundle says which.
//!
//! The boot asks for them as `cellctl` asks for others, and waits for each answer: nothing else
//! goes on yet that it could hold up.

use super::Node;
use super::cells::Client;
use super::platform::Platform;
use alloc::format;
use bulkhead_abi::bundle::{Bundle, Entry, Role, cell_initrd, cell_kernel};
use bulkhead_abi::message::{Body, CellSpec, ErrorCode, Failure, LoadKind, Reply};

impl Node {
    /// Creates, loads and starts the cells that `bundle` says, one after the other, before there
    /// are connections. The log tells which of them cannot be had, and why: those are left out.
    /// When the node booted, the time of day was `boot_wall_clock_ns` nanoseconds since 1970.
    pub fn start_bundled(
        &mut self,
        bundle: &Bundle<'_>,
        boot_wall_clock_ns: u64,
        platform: &mut dyn Platform,
    ) {
        for spec in &bundle.config.autostart {
            let spec = CellSpec {
                wall_clock_ns: boot_wall_clock_ns.saturating_add(platform.now_ns()),
                ..spec.clone()
            };
            let name = spec.name.clone();
            if let Err(failure) = self.start_one(spec, &bundle.entries, platform) {
                log::error!("autostart of {name:?}: {failure}");
            }
        }
    }

    /// Creates, loads and starts one cell, or leaves nothing of it.
    pub(super) fn start_one(
        &mut self,
        spec: CellSpec,
        entries: &[Entry<'_>],
        platform: &mut dyn Platform,
    ) -> Result<(), Failure> {
        let file = |name, role| entries.iter().find(|entry| entry.name == name && entry.role == role);
        let kernel = file(cell_kernel(&spec.name), Role::CELL_KERNEL);
        let initrd = file(cell_initrd(&spec.name), Role::CELL_INITRD);
        let files = || {
            let kinds = [(LoadKind::KERNEL, kernel), (LoadKind::INITRD, initrd)];
            kinds.into_iter().filter_map(|(what, entry)| Some((what, entry?.data)))
        };
        self.cells.check_kept_back(&spec.cpus)?;
        let spec = CellSpec { files: Some(files().map(|(_, data)| data.len() as u64).collect()), ..spec };
        let cell = match self.ask(Body::Create { spec }, platform)? {
            Reply::Created { cell } => cell,
            other => return Err(unexpected(&other)),
        };
        let started = self.load_and_start(cell, files(), platform);
        started.or_else(|failure| self.ask(Body::Destroy { cell }, platform).and(Err(failure)))
    }

    fn load_and_start<'a>(
        &mut self,
        cell: u32,
        files: impl Iterator<Item = (LoadKind, &'a [u8])>,
        platform: &mut dyn Platform,
    ) -> Result<(), Failure> {
        for (what, data) in files {
            let size = data.len() as u64;
            let port = match self.ask(Body::LoadBegin { cell, what, size }, platform)? {
                Reply::LoadPort { port } => port,
                other => return Err(unexpected(&other)),
            };
            self.cells.load_data(port, data, platform).1.transpose()?;
        }
        self.ask(Body::LoadFinish { cell }, platform)?;
        self.ask(Body::Start { cell }, platform).map(drop)
    }

    /// Carries out a request and the work that it takes.
    fn ask(&mut self, body: Body, platform: &mut dyn Platform) -> Result<Reply, Failure> {
        if let Some(reply) = self.cells.request(Client::Boot, 0, body, platform)? {
            return Ok(reply);
        }
        loop {
            // No request of the boot's waits for anything outside.
            self.cells.work(platform);
            if let Some((.., result)) = self.cells.take_answers().pop() {
                return result;
            }
        }
    }
}

fn unexpected(reply: &Reply) -> Failure {
    Failure::new(ErrorCode::UNKNOWN_REPLY, format!("{reply:?} is no answer to this"))
}
