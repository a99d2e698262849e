//! `create`: a cell from its file to *ready*.

use super::Terminal;
use crate::client::{Client, Connector, unexpected};
use crate::cpus::{Hotplug, choose};
use crate::exit::{Error, Exit};
use crate::interrupt::Interrupt;
use crate::render;
use bulkhead_abi::message::{Body, CellSpec, CellState, CellSummary, LoadKind, Reply, console_port};
use bulkhead_cell_file::{CellFile, CpuChoice};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Makes the cell of a file and says so.
pub(super) fn create<C: Connector>(
    path: &Path,
    client: &mut Client<C>,
    hotplug: &Hotplug,
    interrupt: &Interrupt,
    out: &mut Terminal<impl Write>,
) -> Result<(), Error> {
    let summary = make(path, client, hotplug, interrupt)?;
    let text = || {
        let CellSummary { name, cpus, memory, .. } = &summary;
        format!("cell '{name}' is ready: CPUs {}, {} MiB\n", render::numbers(cpus), memory >> 20)
    };
    out.print(|| render::summary_json(&summary), text)
}

/// Gives a cell that is off the files of its cell file, or of another.
pub(super) fn reload<C: Connector>(
    name: &str,
    path: Option<&Path>,
    client: &mut Client<C>,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    let cell = client.find(name)?;
    let details = match client.ask(Body::Show { cell: cell.cell })? {
        Reply::Cell(details) => details,
        other => return Err(unexpected(&other)),
    };
    let origin = details.origin.as_ref().map(PathBuf::from);
    let path = path.map(Path::to_owned).or(origin).ok_or_else(|| {
        let why = format!("where the file of cell '{name}' is, is not known; say it: reload {name} FILE");
        Error::new(Exit::Usage, why)
    })?;
    let file = CellFile::read(&path)?;
    file.check_images()?;
    let fits = match &file.cpus {
        CpuChoice::Count(count) => usize::try_from(*count) == Ok(cell.cpus.len()),
        CpuChoice::Numbers(numbers) => *numbers == cell.cpus,
    };
    if file.name != cell.name || file.memory != cell.memory || !fits {
        let why = format!(
            "{}: name, cpus and memory must be those of cell '{name}' ({}, {} MiB); to change them, \
             destroy it and create it anew",
            path.display(),
            render::numbers(&cell.cpus),
            cell.memory >> 20
        );
        return Err(Error::new(Exit::BadFile, why));
    }
    client.order(Body::Reload { cell: cell.cell, cmdline: file.cmdline.clone() })?;
    load(&file, cell.cell, client, interrupt)
}

/// Makes the cell of a file. What can be found to be wrong is found before a CPU is switched;
/// what was done is put back if something fails later, or a signal comes.
pub(super) fn make<C: Connector>(
    path: &Path,
    client: &mut Client<C>,
    hotplug: &Hotplug,
    interrupt: &Interrupt,
) -> Result<CellSummary, Error> {
    let file = CellFile::read(path)?;
    let files = file.check_images()?;
    let node = client.node()?;
    let cpus = choose(&file.cpus, &node)?;
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let spec = file.spec(cpus.clone(), u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX), files);
    client.order(Body::Check { spec: spec.clone() })?;
    let taken = hotplug.take_offline(&node, &cpus, interrupt)?;
    let cell =
        build(&file, spec, client, interrupt).map_err(|error| error.and(hotplug.bring_online(&taken)))?;
    Ok(CellSummary {
        cell,
        name: file.name,
        state: CellState::READY,
        cpus,
        memory: file.memory,
        console_port: file.console.then(|| console_port(cell)),
    })
}

/// Has the hypervisor make the cell, and loads it. Returns its number.
fn build<C: Connector>(
    file: &CellFile,
    spec: CellSpec,
    client: &mut Client<C>,
    interrupt: &Interrupt,
) -> Result<u32, Error> {
    interrupt.check()?;
    let cell = match client.ask(Body::Create { spec })? {
        Reply::Created { cell } => cell,
        other => return Err(unexpected(&other)),
    };
    match load(file, cell, client, interrupt) {
        Ok(()) => Ok(cell),
        Err(error) => Err(error.and(client.order(Body::Destroy { cell }))),
    }
}

fn load<C: Connector>(
    file: &CellFile,
    cell: u32,
    client: &mut Client<C>,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    let initrd = file.initrd.as_ref().map(|path| (LoadKind::INITRD, path));
    for (what, path) in [(LoadKind::KERNEL, &file.kernel)].into_iter().chain(initrd) {
        let failed = |e: std::io::Error| Error::new(Exit::BadFile, format!("{}: {e}", path.display()));
        let mut image = File::open(path).map_err(failed)?;
        let size = image.metadata().map_err(failed)?.len();
        client.load(cell, what, path, &mut image, size, interrupt)?;
    }
    interrupt.check()?;
    client.order(Body::LoadFinish { cell })
}
