//! The machine's own disk and network, driven by the root cell's Linux through the hypervisor's
//! interrupt controllers, under load: no interrupt may be lost, none be spurious.
//!
//! `BULKHEAD_READS` sets the number of reads, 10,000 unless said otherwise.
#![forbid(unsafe_code)]

use std::{collections::BTreeMap, fmt::Write as _, fs, time::Duration};

use anyhow::{Context, Result};
use bulkhead_tests::{Boot, Interrupts, Node};
use sha2::{Digest, Sha256};

const LIMIT: Duration = Duration::from_secs(300);
const BLOCK: usize = 4096;
const JOBS: usize = 4;
/// So many reads for each ping.
const READS_PER_PING: usize = 20;

/// Bytes that nobody reads by mistake.
fn content(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        // Marsaglia's xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes
}

/// The lines of `/proc/interrupts` of the machine's own virtio devices. The management device is
/// the hypervisor's, at the only pin of an I/O APIC that is its too.
fn virtio_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| line.contains("virtio") && !line.contains(" 0-fasteoi "))
}

/// The interrupts that they have had, by number.
fn virtio_interrupts(text: &str) -> BTreeMap<String, u64> {
    virtio_lines(text)
        .filter_map(|line| {
            let (number, rest) = line.trim().split_once(':')?;
            let counts = rest.split_whitespace().map_while(|word| word.parse::<u64>().ok());
            Some((number.to_owned(), counts.sum()))
        })
        .collect()
}

/// Reads a disk by `JOBS` jobs and pings at once, with the devices' interrupts of this kind.
fn under_load(name: &str, interrupts: Interrupts, kind: &str) -> Result<()> {
    let reads = std::env::var("BULKHEAD_READS").map_or(Ok(10_000), |text| text.parse::<usize>())?;
    let blocks = reads.div_ceil(JOBS);
    let pings = reads.div_ceil(READS_PER_PING);
    let dir = tempfile::tempdir()?;
    let content = content(blocks * JOBS * BLOCK);
    fs::write(dir.path().join("disk"), &content)?;

    let load = format!(
        "for d in /sys/block/*; do [ \"$(cat $d/serial 2>/dev/null)\" = blocks ] && disk=/dev/${{d##*/}}; done
        ping -A -c {pings} 10.0.2.2 >/tmp/ping 2>&1 &
        for job in $(seq 0 {last}); do
            dd if=$disk bs={BLOCK} count={blocks} skip=$((job * {blocks})) iflag=direct 2>/tmp/dd.$job |
                sha256sum >/tmp/sum.$job &
        done
        wait
        for job in $(seq 0 {last}); do cut -d' ' -f1 /tmp/sum.$job; grep 'records in' /tmp/dd.$job; done",
        last = JOBS - 1,
    );
    let steps = Node::new(name, Boot::Pvh)
        .interrupts(interrupts)
        .disk("blocks", dir.path().join("disk"))
        .limit(LIMIT);
    let steps = steps.steps(&[
        ("before", "cat /proc/interrupts"),
        ("load", &format!("time sh -c '{}'", load.replace('\'', "'\\''"))),
        ("ping", "cat /tmp/ping"),
        ("after", "cat /proc/interrupts"),
        (
            "unhandled",
            "cd /proc/irq; for n in [0-9]*; do echo $n $(sed -n 's/^unhandled //p' $n/spurious); done",
        ),
        ("dmesg", "dmesg"),
    ])?;

    // Every block was read, and is what the disk has there; every ping was answered.
    let mut all_read = String::new();
    for part in content.chunks(blocks * BLOCK) {
        let sum = Sha256::digest(part).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        writeln!(all_read, "{sum}\n{blocks}+0 records in")?;
    }
    let load = steps.ok("load")?;
    assert!(load.starts_with(&all_read), "{all_read}\n{steps}");
    // `ping` sends one more when an answer takes longer than a second: that is no loss yet.
    let answers = steps.ok("ping")?.lines().filter_map(|line| {
        let (_, rest) = line.split_once("seq=")?;
        let (number, rest) = rest.split_once(' ')?;
        let (_, time) = rest.split_once("time=")?;
        Some((number.parse::<usize>().ok()?, time.strip_suffix(" ms")?.parse::<f64>().ok()?))
    });
    let answers = answers.collect::<BTreeMap<_, _>>();
    let numbers = answers.keys().copied().collect::<Vec<_>>();
    assert_eq!(numbers, (0..pings).collect::<Vec<_>>(), "{steps}");
    let slowest = answers.values().copied().fold(0.0, f64::max);

    // By interrupts of that kind, on every device.
    let (before, after) = (steps.ok("before")?, steps.ok("after")?);
    assert!(virtio_lines(after).all(|line| line.contains(kind)), "{steps}");
    let old = virtio_interrupts(before);
    let new = virtio_interrupts(after);
    let came = new.iter().map(|(number, count)| count - old.get(number).unwrap_or(&0));
    let came = came.sum::<u64>();
    assert!(came >= pings as u64, "only {came} interrupts\n{steps}");

    // None that nobody wanted.
    for what in ["ERR:", "MIS:", "SPU:"] {
        let line = after.lines().find(|line| line.trim_start().starts_with(what)).context(what)?;
        assert!(line.split_whitespace().skip(1).all(|word| word.parse::<u64>().unwrap_or(0) == 0), "{steps}");
    }
    let dmesg = steps.ok("dmesg")?.to_lowercase();
    for words in ["nobody cared", "spurious", "no irq handler", "lost interrupt", "timed out", "call trace"] {
        assert!(!dmesg.contains(words), "{words}\n{steps}");
    }
    let unhandled = steps.ok("unhandled")?;
    // But for Linux itself: it looks at a network card's sent packets when one has come, too, and
    // finds nothing when the interrupt for them arrives, without a hypervisor as well.
    let sent = virtio_lines(after).filter(|line| line.ends_with("-output.0"));
    let sent =
        sent.filter_map(|line| line.trim().split_once(':').map(|(number, _)| number)).collect::<Vec<_>>();
    for line in unhandled.lines() {
        let (number, count) = line.split_once(' ').with_context(|| format!("{line}\n{steps}"))?;
        assert!(
            count == "0" || !new.contains_key(number) || sent.contains(&number),
            "unhandled: {line}\n{steps}"
        );
    }
    let time = load.lines().find(|line| line.starts_with("real")).unwrap_or_default();
    println!(
        "{name}: {reads} reads and {pings} pings by {came} interrupts, {time}, slowest ping {slowest} ms"
    );
    Ok(())
}

#[test]
fn no_message_is_lost_and_none_spurious() -> Result<()> {
    under_load("msix", Interrupts::MsiX, "MSI")
}

#[test]
fn no_level_triggered_line_is_lost_and_none_spurious() -> Result<()> {
    under_load("intx", Interrupts::IntX, "fasteoi")
}

/// Makes QEMU's teaching device send messages: `send CPU DATA`.
const FORGER: &str = r#"
for d in /sys/bus/pci/devices/*; do
    [ "$(cat $d/vendor) $(cat $d/device)" = "0x1234 0x11e8" ] && edu=$d
done
byte() { od -An -tu1 -j $1 -N 1 $edu/config | tr -d ' '; }
put() { at=$1; shift; printf "$(printf '\\x%02x' $*)" | dd of=$edu/config bs=1 seek=$at conv=notrunc 2>/dev/null; }
echo 1 >$edu/enable
# Memory and bus master.
put 4 6
cap=$(byte 52)
while [ $(byte $cap) != 5 ]; do cap=$(byte $((cap + 1))); done
bar=$(sed -n '1s/ .*//p' $edu/resource)
# Enabled, with a 64-bit address; the device sends at each request, served or not.
send() {
    put $((cap + 2)) 1 0 0 $(($1 % 16 * 16)) $((0xe0 | $1 / 16)) 254 0 0 0 0 $(($2 % 256)) $(($2 / 256))
    devmem $((bar + 0x60)) 32 1
}
"#;

#[test]
fn forged_messages_do_not_stop_the_node() -> Result<()> {
    let to_all = |data: &str| format!("{FORGER}\nfor cpu in 0 1 2 3; do {data}; done");
    let steps = Node::new("forged", Boot::Pvh).qemu(&["-device", "edu"]).limit(LIMIT);
    let steps = steps.steps(&[
        // Every vector that an exception may have, and those between.
        ("vectors", &to_all("for vector in $(seq 0 31); do send $cpu $vector; done")),
        ("nmi", &to_all("send $cpu $((0x400))")),
        // What an 8259 gives that has nothing to give.
        ("8259", &to_all("send $cpu $((0x700))")),
        ("cpus", "nproc; cellctl node >/dev/null && echo managed"),
        ("log", "cellctl log"),
    ])?;
    for step in ["vectors", "nmi", "8259"] {
        steps.ok(step)?;
    }
    assert_eq!(steps.ok("cpus")?, "4\nmanaged\n", "{steps}");
    // Told of at every power of two.
    let log = steps.ok("log")?;
    for count in [1, 2, 64] {
        let line = format!("which nobody sends ({count} so far)");
        assert_eq!(log.matches(&line).count(), 1, "{line}\n{steps}");
    }
    Ok(())
}

#[test]
fn logical_destinations_find_their_cpus() -> Result<()> {
    // In xAPIC mode Linux numbers up to 8 CPUs by bits of logical IDs, and sends devices there.
    const PINGS: u64 = 20;
    let script = format!(
        "irq=$(sed -n 's/^ *\\([0-9]*\\):.*virtio0-input.0/\\1/p' /proc/interrupts)
        line() {{ grep \"^ *$irq:\" /proc/interrupts; }}
        for cpu in 0 1 2 3; do
            printf %x $((1 << cpu)) >/proc/irq/$irq/smp_affinity
            ping -c 2 10.0.2.2 >/dev/null
            line
            ping -A -c {PINGS} 10.0.2.2 | grep received
            line
        done"
    );
    let node = Node::new("logical", Boot::Pvh)
        .cpu_flag("-x2apic")
        .root_cmdline("nox2apic iomem=relaxed")
        .limit(LIMIT);
    let steps = node.steps(&[("ldr", "devmem 0xfee000d0 32"), ("spread", &script)])?;
    // The CPU it was read on has one of the four bits.
    let ldr = ["0x01000000", "0x02000000", "0x04000000", "0x08000000"];
    assert!(ldr.contains(&steps.ok("ldr")?.trim()), "{steps}");
    let counts = |line: &str| {
        line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).collect::<Vec<_>>()
    };
    let lines = steps.ok("spread")?.lines().collect::<Vec<_>>();
    assert_eq!(lines.len(), 12, "{steps}");
    for (cpu, part) in lines.chunks(3).enumerate() {
        let [before, pings, after] = part else { panic!("{steps}") };
        assert!(pings.contains(&format!("{PINGS} packets received")), "{steps}");
        let came = counts(before).into_iter().zip(counts(after)).map(|(old, new)| new - old);
        let came = came.collect::<Vec<_>>();
        assert!(came.len() == 4 && came[cpu] >= PINGS / 2, "{came:?} by CPU {cpu}\n{steps}");
        let elsewhere = came.iter().sum::<u64>() - came[cpu];
        assert_eq!(elsewhere, 0, "{came:?} by CPU {cpu}\n{steps}");
    }
    Ok(())
}
