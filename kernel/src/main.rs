//! The Bulkhead hypervisor image.
//!
//! [`bulkhead_boot`] is called by the first instructions (`arch`'s `boot`) and brings the
//! machine up in this order: log, exceptions, what the loader told, memory, ACPI, local
//! APIC, counter, other CPUs. Then the boot CPU goes on in [`node()`] and the others in
//! [`secondary`].
#![no_std]
#![no_main]
// UNSAFETY: the steps of bringing up the machine owe each other their order.
#![expect(unsafe_code, reason = "entry, and steps that rely on their order")]

extern crate alloc;

mod acpi;
mod apic;
mod boot;
mod counter;
mod guest_cell;
mod host;
mod interrupts;
mod logging;
mod machine;
mod memory;
mod node;
mod panic;
mod percpu;
mod platform;
mod root_cell;
mod run;
mod smp;
mod stage2;
mod symbols;

use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use boot::BootInfo;
use bulkhead_abi::bundle::Bundle;
use bulkhead_abi::message::Token;
use bulkhead_arch::x86_64::boot::image_layout;
use bulkhead_arch::x86_64::ops;
use bulkhead_arch::x86_64::svm::{self, SvmHost};
use bulkhead_drivers::pic;
use bulkhead_vmm::cell::config::HostRange;
use bulkhead_vmm::hal::CpuId;
use bulkhead_vmm::manage::Node as Manager;
use bulkhead_vmm::manage::platform::NodeFacts;
use bulkhead_vmm::memory::address::Hpa;
use bulkhead_vmm::memory::map::{Kind, MemoryMap, PageRange};
use bulkhead_vmm::x86::emulate;
use core::cell::UnsafeCell;
use machine::Machine;
use memory::access;
use node::Node;
use percpu::{PerCpu, Stacks};
use root_cell::RootCell;
use run::CpuControl;
use spin::Once;

/// Stacks for exceptions until there are guarded ones.
#[repr(C, align(16))]
struct EarlyStack(UnsafeCell<[u8; 16 << 10]>);

// SAFETY: only the CPU's exception entry uses it, on the boot CPU.
unsafe impl Sync for EarlyStack {}

static EARLY_STACK: EarlyStack = EarlyStack(UnsafeCell::new([0; 16 << 10]));

/// What `svm.disable=` on the command line turns off, for tests.
static SVM_DISABLED: Once<String> = Once::new();

/// What the boot CPU carries from its first stack to the next.
struct Handover {
    boot: BootInfo,
    memory: MemoryMap,
    stacks: Stacks,
    bundle: &'static [u8],
}

/// The first Rust code: `protocol` says who loaded the image, `info` what it left where,
/// `image` where the image was loaded.
// SAFETY: no other function has this name.
#[unsafe(no_mangle)]
extern "C" fn bulkhead_boot(protocol: u32, info: u32, image: u32) -> ! {
    counter::init();
    memory::heap::init_early();
    let cpu = PerCpu::new(CpuId(0), own_apic_id());
    cpu.install();
    percpu::add(cpu);
    logging::init();
    interrupts::init();
    let top = bulkhead_vmm::memory::address::Hva::new(EARLY_STACK.0.get().addr() as u64 + (16 << 10));
    // SAFETY: a stack for whichever of the three comes first; the report it makes is the last.
    unsafe { percpu::load_descriptors(percpu::new_descriptors([top; 3])) };
    log::info!("Bulkhead {} at {image:#x}", env!("CARGO_PKG_VERSION"));

    // SAFETY: the first page tables are still in use.
    let boot = unsafe { boot::read(protocol, info) };
    if let Some(level) = Machine::option(&boot.command_line, "log") {
        logging::set_level(level);
    }
    log::info!("boot={} command line: {}", boot.path, boot.command_line);
    let image = Hpa::new(u64::from(image));
    let (memory, bundle) = memory_map(&boot, image);
    let mut memory = memory;
    // SAFETY: the first page tables are in use, and the map is the loader's.
    if let Err(error) = unsafe { memory::init(&mut memory, image) } {
        panic!("no memory to run in: {error}");
    }
    let stacks = Stacks::new().expect("a fresh region has memory for stacks");
    let bundle = bundle.map_or(&[][..], |(at, len)| memory::bundle(at, len));
    let handover = Box::leak(Box::new(Handover { boot, memory, stacks, bundle }));
    // SAFETY: the stack was made for this CPU, and the old one is left for good.
    unsafe { ops::continue_on_stack(stacks.own, bring_up, (&raw mut *handover).cast()) }
}

/// The boot CPU's APIC ID: of 32 bits where CPUID has the topology leaf.
fn own_apic_id() -> u32 {
    let topology = ops::cpuid(0xb, 0);
    if ops::cpuid(0, 0).eax >= 0xb && topology.ebx != 0 { topology.edx } else { ops::cpuid(1, 0).ebx >> 24 }
}

/// The memory map, with image and bundle in it; and the bundle, if it is in usable memory.
fn memory_map(boot: &BootInfo, image: Hpa) -> (MemoryMap, Option<(Hpa, u64)>) {
    let mut map = MemoryMap::normalise(&boot.memory, |oddity| log::warn!("{oddity}"));
    let layout = image_layout();
    let range = PageRange::covering(image, layout.image_end - layout.image_start);
    match range
        .ok_or("it is nowhere")
        .and_then(|r| map.occupy(r, Kind::IMAGE).map_err(|_| "it is not in usable memory"))
    {
        Ok(()) => {}
        Err(error) => panic!("the memory map can't be right about the image at {image}: {error}"),
    }
    let bundle = boot.bundle.filter(|&(at, len)| {
        let taken = PageRange::covering(at, len).map(|range| map.occupy(range, Kind::BUNDLE));
        match taken {
            Some(Ok(())) => return true,
            Some(Err(error)) => log::error!("{error}: left out"),
            None => log::error!("the bundle at {at} with {len} bytes is none: left out"),
        }
        false
    });
    (map, bundle)
}

/// The boot CPU, on its own stack.
extern "C" fn bring_up(handover: *mut ()) -> ! {
    // SAFETY: `bulkhead_boot` has leaked it for this.
    let Handover { boot, memory, stacks, bundle } = unsafe { *Box::from_raw(handover.cast::<Handover>()) };
    // SAFETY: the stacks were made for this CPU.
    unsafe { percpu::load_descriptors(percpu::new_descriptors(stacks.ist)) };
    for region in memory.regions() {
        log::info!("{} {}", region.range, region.kind);
    }
    let firmware = match acpi::read(boot.rsdp, memory::map_firmware) {
        Ok(firmware) => firmware,
        Err(error) => panic!("{error}"),
    };
    pic::mask_all();
    apic::init().expect("memory for the mapping of the local APIC");
    let frequencies = match counter::calibrate(&firmware) {
        Ok(frequencies) => frequencies,
        Err(error) => panic!("{error}"),
    };
    let counter_bound = smp::start_all(&firmware.apic_ids, &memory);
    node(Machine {
        boot_path: boot.path,
        command_line: boot.command_line,
        memory,
        firmware,
        cpus: percpu::count(),
        bundle,
        frequencies,
        counter_bound,
    })
}

/// The boot CPU, when all is up.
fn node(machine: Machine) -> ! {
    let Machine { frequencies: f, firmware, .. } = &machine;
    log::info!(
        "TSC {} Hz ±{} ({}), APIC timer {} Hz ±{}",
        f.tsc.hz,
        f.tsc.error_hz,
        f.source,
        f.apic_timer.hz,
        f.apic_timer.error_hz
    );
    log::info!("{} CPUs, counters within {} counts of each other", machine.cpus, machine.counter_bound);
    for table in &firmware.tables {
        log::debug!(
            "ACPI {} at {}, {} bytes",
            table.signature.escape_ascii(),
            table.address,
            table.bytes.len()
        );
    }
    for apic in &firmware.io_apics {
        log::info!("I/O APIC {} at {} from GSI {}", apic.id, apic.address, apic.gsi_base);
    }
    for id in 1..machine.cpus {
        apic::kick(CpuId(id));
    }
    log::info!(
        "booted by {}, {} bytes are the root cell's",
        machine.boot_path,
        machine.memory.size_of(Kind::USABLE)
    );
    log::info!("heap: {} of {} bytes used", memory::heap::used(), memory::heap::size());
    log::info!("bundle: {} bytes", machine.bundle.len());
    assert!(Machine::option(&machine.command_line, "test.panic").is_none(), "test.panic was asked for");
    let svm = match enable_svm(&machine.command_line) {
        Ok(svm) => svm,
        Err(error) => stop(&error),
    };
    if !svm.redirects_init() {
        log::info!("this CPU lets INIT reset it: a device that forges one can stop the node");
    }
    if let Err(error) = assemble(machine) {
        stop(&error);
    }
    run::run(CpuId(0), &svm)
}

/// Every other CPU, when all are up.
fn secondary(cpu: CpuId) -> ! {
    // Kicked by `assemble`; a machine that cannot become a node leaves it asleep.
    while !node::is_installed() {
        host::wait_for_interrupt();
    }
    match enable_svm("") {
        Ok(svm) => run::run(cpu, &svm),
        Err(error) => panic!("{cpu}: {error}, unlike the boot CPU"),
    }
}

/// Turns SVM on for this CPU.
fn enable_svm(command_line: &str) -> Result<SvmHost, String> {
    let features = svm::probe().map_err(|error| error.to_string())?;
    let disabled =
        SVM_DISABLED.call_once(|| Machine::option(command_line, "svm.disable").unwrap_or("").to_string());
    let features = features.without(disabled.split(',').filter(|name| !name.is_empty()))?;
    // SAFETY: everything on the heap or in the image has the physical address that
    // `physical_of` tells, and the value lives as long as this CPU runs: `run` never returns.
    Ok(unsafe { SvmHost::enable(features, access::physical_of) })
}

/// Puts the node together: the bundle's configuration, the pool, the root cell, management, and the
/// cells that start with it.
fn assemble(mut machine: Machine) -> Result<(), String> {
    if machine.bundle.is_empty() {
        return Err("the boot loader has passed no bundle".to_string());
    }
    let bundle = Bundle::parse(machine.bundle).map_err(|error| alloc::format!("bundle: {error}"))?;
    let config = &bundle.config;
    logging::set_console(config.console);
    if let Some(cpu) = config.reserved_cpus.iter().find(|cpu| **cpu >= machine.cpus) {
        return Err(alloc::format!(
            "reserved_cpus: {cpu}, but the machine has CPUs 0 to {}",
            machine.cpus - 1
        ));
    }
    if Machine::option(&machine.command_line, "log").is_none()
        && let Some(level) = config.log_level.name()
    {
        logging::set_level(level);
    }
    let pool =
        machine.memory.take_pool(config.pool_bytes).map_err(|error| alloc::format!("pool: {error}"))?;
    let left = machine.memory.size_of(Kind::USABLE);
    if let Some(bytes) = config.root.memory.filter(|bytes| *bytes > left) {
        return Err(alloc::format!("root.memory: {bytes} bytes, but {left} are left for the root cell"));
    }
    memory::note_map(&machine.memory);
    let pool: Vec<HostRange> =
        pool.iter().map(|range| HostRange { base: range.start(), len: range.size() }).collect();

    let token = Token::new(ops::random_bytes().ok_or("the CPU has no source of random numbers (RDRAND)")?);
    let root = RootCell::new(&machine, &bundle, &token)?;
    let facts = NodeFacts {
        name: config.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        commit: env!("BULKHEAD_COMMIT").to_string(),
        boot: machine.boot_path.to_string(),
        backend: "svm".to_string(),
        counter_hz: machine.frequencies.tsc.hz,
        counter_offset: 0,
        root_memory: root.memory,
    };
    let kept_back: Vec<CpuId> = config.reserved_cpus.iter().map(|cpu| CpuId(*cpu)).collect();
    let controls: Vec<CpuControl> = (0..machine.cpus).map(|_| CpuControl::default()).collect();
    for cpu in &kept_back {
        if let Some(control) = controls.get(cpu.0 as usize) {
            control.keep_back();
        }
    }
    host::note_wall_clock();
    emulate::warm_up();
    log::info!("root cell: {} MiB, {} CPUs", root.memory >> 20, machine.cpus as usize - kept_back.len());
    let manager = Manager::new(facts, token, machine.cpus, &kept_back, &pool);
    Node::install(root, controls, manager, machine.frequencies.tsc.hz);
    for id in 1..machine.cpus {
        apic::kick(CpuId(id));
    }
    node::node().start_bundled(&bundle);
    logging::release_serial();
    Ok(())
}

/// The machine cannot become a node: says why in one line, and stops.
fn stop(reason: &str) -> ! {
    log::error!("Bulkhead cannot run here: {reason}");
    ops::halt_forever()
}
