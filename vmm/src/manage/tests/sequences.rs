//! Any sequence of requests, lost connections and failures.

use super::*;
use bulkhead_abi::bundle::Role;
use bulkhead_abi::message::Action;
use proptest::prelude::*;

/// What can happen, from outside or inside.
#[derive(Debug, Clone)]
enum Event {
    Open,
    Request(usize, Body),
    /// Sends so many bytes of a file to one of the ports that were named.
    Data(usize, usize),
    Close(usize),
    PeerShutdown(usize),
    Work(u32),
    Wait(u64),
    Offline(u32, bool),
    FailAfter(u32),
    End(u32, Ending),
    Shutdown,
}

fn body() -> impl Strategy<Value = Body> {
    let cell = 1u32..5;
    let cpus = prop::collection::vec(0u32..7, 1..4);
    let create = ("[ab]", cpus, 1u64..9);
    prop_oneof![
        4 => create.prop_map(|(name, cpus, units)| Body::Create {
            spec: CellSpec {
                on_crash: Some(if units > 4 { Action::RESTART } else { Action::STOP }),
                ..spec(&name, &cpus, units)
            }
        }),
        3 => (cell.clone(), 0u8..3, 1u64..200)
            .prop_map(|(cell, what, size)| Body::LoadBegin { cell, what: LoadKind(what), size }),
        3 => cell.clone().prop_map(|cell| Body::LoadFinish { cell }),
        3 => cell.clone().prop_map(|cell| Body::Start { cell }),
        2 => cell.clone().prop_map(|cell| Body::Stop { cell }),
        1 => (1u32..7).prop_map(|cpu| Body::Check { spec: spec("b", &[cpu], 3) }),
        2 => cell.clone().prop_map(|cell| Body::Destroy { cell }),
        2 => cell.clone().prop_map(|cell| Body::Pause { cell }),
        2 => cell.clone().prop_map(|cell| Body::Resume { cell }),
        1 => cell.clone().prop_map(|cell| Body::PressPower { cell }),
        2 => cell.clone().prop_map(|cell| Body::Reload { cell, cmdline: "new".into() }),
        1 => (cell.clone(), 0u8..11)
            .prop_map(|(cell, state)| Body::Wait { cell, states: [CellState(state)].into() }),
        1 => cell.prop_map(|cell| Body::Show { cell }),
        1 => Just(Body::NodeInfo),
    ]
}

fn ending() -> impl Strategy<Value = Ending> {
    prop_oneof![
        Just(Ending::PowerOff),
        Just(Ending::Reset),
        any::<u32>().prop_map(Ending::Exit),
        Just(Ending::Failed),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => Just(Event::Open),
        10 => (0usize..4, body()).prop_map(|(i, body)| Event::Request(i, body)),
        5 => (0usize..4, 1usize..200).prop_map(|(i, len)| Event::Data(i, len)),
        1 => (0usize..4).prop_map(Event::Close),
        1 => (0usize..4).prop_map(Event::PeerShutdown),
        8 => (1u32..30).prop_map(Event::Work),
        2 => (1u64..1_500_000_000).prop_map(Event::Wait),
        1 => (1u32..5, any::<bool>()).prop_map(|(cpu, offline)| Event::Offline(cpu, offline)),
        1 => (0u32..20).prop_map(Event::FailAfter),
        2 => (1u32..5, ending()).prop_map(|(cell, ending)| Event::End(cell, ending)),
        1 => Just(Event::Shutdown),
    ]
}

impl Bench {
    fn pick(&self, index: usize) -> Option<StreamId> {
        let count = self.node.connections.len();
        Some(self.node.connections.get(index.checked_rem(count)?)?.stream())
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Open => {
                if self.node.connections.len() < 4 {
                    let id = self.connect(MANAGEMENT_PORT);
                    let hello = Body::Hello { abi: ABI_VERSION, token: TOKEN, follow: None };
                    self.send_request(id, 0, hello);
                }
            }
            Event::Request(index, body) => {
                if let Some(id) = self.pick(index) {
                    self.send_request(id, 1, body);
                }
            }
            Event::Data(index, len) => {
                let ports: Vec<_> = (BULK_PORTS..BULK_PORTS + 40).collect();
                let port = ports[index * 10 + len % 10];
                if self.node.connections.len() < 8 && self.node.cells.accept_load(port).is_ok() {
                    let id = self.connect(port);
                    let hello = Body::Hello { abi: ABI_VERSION, token: TOKEN, follow: None };
                    self.send_request(id, 0, hello);
                    self.send(id, &vec![0; len]);
                }
            }
            Event::Close(index) => {
                if let Some(id) = self.pick(index) {
                    self.node.closed(id);
                }
            }
            Event::PeerShutdown(index) => {
                if let Some(id) = self.pick(index) {
                    self.node.peer_shutdown(id);
                }
            }
            Event::Work(steps) => {
                for _ in 0..steps {
                    self.step();
                }
            }
            Event::Wait(ns) => self.platform.now_ns += ns,
            Event::Offline(cpu, true) => drop(self.platform.offline.insert(cpu)),
            Event::Offline(cpu, false) => drop(self.platform.offline.remove(&cpu)),
            Event::FailAfter(calls) => self.platform.fail_after = Some(calls),
            Event::End(cell, ending) => self.platform.end_cell(CellId(cell), ending),
            Event::Shutdown => self.node.begin_shutdown(),
        }
        self.audit();
    }

    /// Brings every cell to its end, and says how the node is then.
    fn end(&mut self) -> NodeInfo {
        self.platform.fail_after = None;
        let streams: Vec<_> = self.node.connections.iter().map(Connection::stream).collect();
        streams.into_iter().for_each(|id| self.node.closed(id));
        self.run();
        let id = self.open(MANAGEMENT_PORT);
        while let Ok(Reply::Cells(cells)) = self.ask(id, Body::List) {
            let Some(cell) = cells.first() else { break };
            assert_eq!(self.ask(id, Body::Destroy { cell: cell.cell }), Ok(Reply::Done));
        }
        self.node_info(id)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever happens, [`Bench::audit`] holds after each step, and in the end all is as it
    /// was in the beginning.
    #[test]
    fn nothing_is_lost_whatever_happens(
        bundled: bool,
        events in prop::collection::vec(event(), 1..120),
    ) {
        let mut bench = Bench::new();
        let before = bench.end();
        if bundled {
            let started = bench.start("a", &[KEPT_BACK.0], 3, &[("cell/a/kernel", Role::CELL_KERNEL, b"kernel")]);
            prop_assert_eq!(started, Ok(()));
        }
        for event in events {
            bench.happen(event);
        }
        let after = bench.end();
        prop_assert_eq!(
            NodeInfo { generation: before.generation, uptime_ns: before.uptime_ns, ..after },
            before
        );
        prop_assert_eq!(bench.platform.cells().count(), 0);
    }

    /// Creation, loading and start with a failure at any call: either it is reported and the
    /// cell can be destroyed, or it came too late to matter.
    #[test]
    fn a_failure_at_any_call_is_reported_and_put_back(calls in 0u32..14) {
        let mut bench = Bench::new();
        let before = bench.end();
        let id = bench.open(MANAGEMENT_PORT);
        bench.platform.fail_after = Some(calls);
        let mut go = || -> Result<(), Failure> {
            let Reply::Created { cell } = bench.ask(id, Body::Create { spec: spec("a", &[3, 2], 3) })?
            else { panic!("not created") };
            bench.load(id, cell, LoadKind::KERNEL, b"kernel")?;
            bench.load(id, cell, LoadKind::INITRD, b"initrd")?;
            bench.ask(id, Body::LoadFinish { cell })?;
            bench.ask(id, Body::Start { cell }).map(drop)
        };
        match go() {
            Ok(()) => prop_assert!(bench.platform.fail_after.is_some(), "a failure was not reported"),
            Err(failure) => prop_assert!(failure.message.contains(FAILURE), "{}", failure),
        }
        let after = bench.end();
        prop_assert_eq!(
            NodeInfo { generation: before.generation, uptime_ns: before.uptime_ns, ..after },
            before
        );
    }
}
