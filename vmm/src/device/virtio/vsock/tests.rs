//! The device against a driver like Linux's, a hostile one among them.

mod flow;
mod guest;

use super::*;
use crate::device::stream::WINDOW;
use crate::device::virtio::driver::{INDIRECT, NEXT, get};
use crate::memory::address::Gpa;
use guest::{Guest, REFUSED, Services, Told, packet};
use packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

const BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

fn shutdown(port: u32, flags: u32) -> Header {
    Header { flags, ..packet(port, Op::SHUTDOWN, 0) }
}

/// A guest with an open connection from its port 700.
fn connected() -> (Guest, Services) {
    let (mut guest, mut services) = (Guest::new(64, 16), Services::default());
    assert_eq!(guest.exchange(&mut services, &packet(700, Op::REQUEST, 0), &[]), [Op::RESPONSE]);
    (guest, services)
}

#[test]
fn a_connection_opens_carries_bytes_and_closes() {
    let (mut guest, mut services) = (Guest::new(64, 16), Services::default());
    assert!(guest.notified);
    assert!(guest.send(&packet(700, Op::REQUEST, 0), &[]));
    guest.settle(&mut services);
    assert!(guest.transport.interrupt_line());
    let expected = Header {
        src_cid: 2,
        dst_cid: 3,
        src_port: 1,
        dst_port: 700,
        len: 0,
        kind: 1,
        op: Op::RESPONSE,
        flags: 0,
        buf_alloc: WINDOW,
        fwd_cnt: 0,
    };
    assert_eq!(guest.received(), [(expected, std::vec![])]);
    assert_eq!(services.last().told, [Told::Connect(1, 700)]);

    assert_eq!(guest.exchange(&mut services, &packet(700, Op::RW, 5), b"hello"), []);
    assert_eq!(services.last().incoming, b"hello");
    services.last().outgoing = b"welcome".to_vec();
    guest.settle(&mut services);
    let answer = Header { op: Op::RW, len: 7, fwd_cnt: 5, ..expected };
    assert_eq!(guest.received(), [(answer, b"welcome".to_vec())]);

    assert_eq!(guest.exchange(&mut services, &shutdown(700, BOTH), &[]), [Op::RST]);
    assert_eq!(services.last().told[1..], [Told::Shutdown, Told::Closed]);
    assert_eq!(guest.transport.device().connections(), 0);
}

#[test]
fn the_guests_cid_is_in_the_configuration() {
    let mut guest = Guest::new(64, 0);
    assert_eq!(get(&mut guest.transport, 0x008), 19);
    assert_eq!(get(&mut guest.transport, 0x100), 3);
    assert_eq!(get(&mut guest.transport, 0x104), 0);
}

#[test]
fn a_refused_connection_is_reset() {
    let (mut guest, mut services) = (Guest::new(64, 16), Services::default());
    let request = Header { dst_port: REFUSED, ..packet(700, Op::REQUEST, 0) };
    assert_eq!(guest.exchange(&mut services, &request, &[]), [Op::RST]);
    assert_eq!(guest.transport.device().connections(), 0);
    assert!(services.streams.is_empty());
}

#[test]
fn the_service_closes_after_its_last_byte() {
    let (mut guest, mut services) = connected();
    assert_eq!(guest.exchange(&mut services, &shutdown(700, SHUTDOWN_SEND), &[]), []);
    assert_eq!(guest.exchange(&mut services, &shutdown(700, SHUTDOWN_SEND), &[]), []);
    assert_eq!(services.last().told[1..], [Told::Shutdown], "told once");
    services.last().outgoing = std::vec![7; 5000];
    services.last().finished = true;
    guest.settle(&mut services);
    let packets = guest.received();
    let seen: Vec<_> = packets.iter().map(|(header, _)| (header.op, header.len, header.flags)).collect();
    assert_eq!(seen, [(Op::RW, 4096, 0), (Op::RW, 904, 0), (Op::SHUTDOWN, 0, BOTH)]);
    guest.settle(&mut services);
    assert_eq!(guest.received(), [], "said once");
    assert_eq!(guest.exchange(&mut services, &packet(700, Op::RST, 0), &[]), []);
    assert_eq!(services.last().told[1..], [Told::Shutdown, Told::Closed]);
}

#[test]
fn bytes_that_cross_the_services_close_are_dropped() {
    let (mut guest, mut services) = connected();
    services.last().finished = true;
    guest.settle(&mut services);
    for _ in 0..8 {
        guest.exchange(&mut services, &packet(700, Op::RW, 0x1_0000), &[1; 0x1_0000]);
    }
    assert!(services.last().incoming.is_empty());
    assert_eq!(guest.exchange(&mut services, &shutdown(700, BOTH), &[]), [Op::RST]);
}

#[test]
fn nothing_is_sent_to_a_peer_that_receives_no_more() {
    let (mut guest, mut services) = connected();
    assert_eq!(guest.exchange(&mut services, &shutdown(700, SHUTDOWN_RECEIVE), &[]), []);
    services.last().outgoing = std::vec![7; 100];
    guest.settle(&mut services);
    assert_eq!(guest.received(), []);
    services.last().finished = true;
    guest.settle(&mut services);
    assert_eq!(guest.received().len(), 1, "the shutdown");
}

#[test]
fn a_reset_ends_a_connection_in_each_state() {
    type Prepare = fn(&mut Guest, &mut Services);
    let states: [(&str, Prepare); 5] = [
        ("open", |_, _| {}),
        ("bytes to send", |_, services| services.last().outgoing = std::vec![1; 100_000]),
        ("half closed by the guest", |guest, services| {
            guest.exchange(services, &shutdown(700, SHUTDOWN_SEND), &[]);
        }),
        ("not receiving", |guest, services| {
            guest.exchange(services, &shutdown(700, SHUTDOWN_RECEIVE), &[]);
        }),
        ("finished", |guest, services| {
            services.last().finished = true;
            guest.settle(services);
        }),
    ];
    for (name, prepare) in states {
        let (mut guest, mut services) = connected();
        prepare(&mut guest, &mut services);
        assert!(guest.send(&packet(700, Op::RST, 0), &[]));
        guest.settle(&mut services);
        assert_eq!(guest.transport.device().connections(), 0, "{name}");
        assert_eq!(services.last().told.last(), Some(&Told::Closed), "{name}");
        assert!(
            guest.received().iter().all(|(header, _)| header.op != Op::RST),
            "{name}: a reset was answered"
        );
    }
    // Before the response could be sent.
    let (mut guest, mut services) = (Guest::new(64, 0), Services::default());
    assert!(guest.send(&packet(700, Op::REQUEST, 0), &[]));
    guest.settle(&mut services);
    assert_eq!(guest.transport.device().connections(), 1);
    assert!(guest.send(&packet(700, Op::RST, 0), &[]));
    guest.give_buffer();
    guest.settle(&mut services);
    assert_eq!(guest.transport.device().connections(), 0);
}

#[test]
fn what_breaks_the_protocol_resets_its_connection() {
    let over = WINDOW + 1;
    let good = packet(700, Op::RW, 4);
    let cases = [
        ("second request", packet(700, Op::REQUEST, 0), 0),
        ("response", packet(700, Op::RESPONSE, 0), 0),
        ("operation 0", packet(700, Op(0), 0), 0),
        ("operation 8", packet(700, Op(8), 0), 0),
        ("seqpacket", Header { kind: 2, ..good }, 4),
        ("length above the payload", good, 3),
        ("length below the payload", good, 5),
        ("length without payload", Header { len: over, ..good }, 0),
        ("payload of a credit update", packet(700, Op::CREDIT_UPDATE, 4), 4),
        ("payload of a shutdown", packet(700, Op::SHUTDOWN, 4), 4),
        ("count of what was never sent", Header { fwd_cnt: 1, ..good }, 4),
    ];
    for (name, header, payload) in cases {
        let (mut guest, mut services) = connected();
        assert_eq!(guest.exchange(&mut services, &header, &[9; 8][..payload]), [Op::RST], "{name}");
        assert_eq!(guest.transport.device().connections(), 0, "{name}");
        assert_eq!(services.last().told[1..], [Told::Closed], "{name}");
        assert!(services.last().incoming.is_empty(), "{name}");
        assert_eq!(get(&mut guest.transport, 0x070), 15, "{name}: the device goes on");
    }
    let (mut guest, mut services) = connected();
    guest.exchange(&mut services, &shutdown(700, SHUTDOWN_SEND), &[]);
    assert_eq!(guest.exchange(&mut services, &good, b"more"), [Op::RST], "bytes after a shutdown");
}

#[test]
fn sending_without_credit_resets_the_connection() {
    let (mut guest, mut services) = connected();
    services.slow = true;
    for _ in 0..4 {
        assert_eq!(guest.exchange(&mut services, &packet(700, Op::RW, 0x1_0000), &[1; 0x1_0000]), []);
    }
    assert_eq!(guest.exchange(&mut services, &packet(700, Op::RW, 1), &[1]), [Op::RST]);
    assert_eq!(services.last().incoming.len(), WINDOW as usize);
}

#[test]
fn the_window_opens_again_when_the_service_consumes() {
    let (mut guest, mut services) = connected();
    services.slow = true;
    for _ in 0..4 {
        guest.exchange(&mut services, &packet(700, Op::RW, 0x1_0000), &[1; 0x1_0000]);
    }
    services.last().consumed = 1000;
    guest.settle(&mut services);
    let packets = guest.received();
    assert_eq!(
        packets.iter().map(|(header, _)| (header.op, header.fwd_cnt)).collect::<Vec<_>>(),
        [(Op::CREDIT_UPDATE, 1000)]
    );
    guest.give_buffer();
    assert_eq!(guest.exchange(&mut services, &packet(700, Op::RW, 1000), &[1; 1000]), []);
    assert_eq!(guest.exchange(&mut services, &packet(700, Op::CREDIT_REQUEST, 0), &[]), [Op::CREDIT_UPDATE]);
    assert_eq!(guest.exchange(&mut services, &packet(700, Op::RW, 1), &[1]), [Op::RST]);
}

#[test]
fn packets_of_others_are_reset_and_harm_no_connection() {
    for (src_cid, dst_cid) in [(4, 2), (3, 5), (3, 0), (3 | 1 << 32, 2), (3, 2 | 1 << 32), (0, u64::MAX)] {
        for op in [Op::REQUEST, Op::RW, Op::SHUTDOWN, Op::RST] {
            let (mut guest, mut services) = connected();
            let foreign = Header { src_cid, dst_cid, flags: BOTH, ..packet(700, op, 0) };
            assert!(guest.send(&foreign, &[]));
            guest.settle(&mut services);
            let answers = guest.received();
            if op == Op::RST {
                assert_eq!(answers, []);
            } else {
                let [(header, _)] = &answers[..] else { panic!("{answers:?}") };
                assert_eq!((header.op, header.src_cid, header.dst_cid), (Op::RST, dst_cid, 3));
                assert_eq!((header.src_port, header.dst_port), (1, 700));
            }
            assert_eq!(guest.transport.device().connections(), 1);
        }
    }
}

#[test]
fn packets_without_a_connection_are_reset() {
    let (mut guest, mut services) = connected();
    for op in [Op::RESPONSE, Op::SHUTDOWN, Op::RW, Op::CREDIT_UPDATE, Op::CREDIT_REQUEST, Op(77)] {
        assert_eq!(guest.exchange(&mut services, &packet(701, op, 0), &[]), [Op::RST], "{op:?}");
    }
    for bad in [
        Header { kind: 2, ..packet(701, Op::REQUEST, 0) },
        Header { fwd_cnt: 9, ..packet(701, Op::REQUEST, 0) },
    ] {
        assert_eq!(guest.exchange(&mut services, &bad, &[]), [Op::RST]);
    }
    assert_eq!(guest.exchange(&mut services, &packet(701, Op::RST, 0), &[]), []);
    assert_eq!(guest.transport.device().connections(), 1);
}

#[test]
fn one_connection_too_many_is_reset_unless_one_is_finished() {
    let (mut guest, mut services) = (Guest::new(64, 16), Services::default());
    let mut port = 0;
    let mut request = |guest: &mut Guest, services: &mut Services| {
        port += 1;
        guest.exchange(services, &packet(port, Op::REQUEST, 0), &[])
    };
    for _ in 0..MAX_CONNECTIONS {
        assert_eq!(request(&mut guest, &mut services), [Op::RESPONSE]);
    }
    assert_eq!(request(&mut guest, &mut services), [Op::RST]);
    services.last().finished = true;
    guest.settle(&mut services);
    assert_eq!(guest.received().len(), 1, "the shutdown");
    guest.give_buffer();
    assert_eq!(request(&mut guest, &mut services), [Op::RST, Op::RESPONSE]);
    assert_eq!(guest.transport.device().connections(), MAX_CONNECTIONS);
    assert_eq!(request(&mut guest, &mut services), [Op::RST]);
}

#[test]
fn a_thousand_connections_come_and_go() {
    let (mut guest, mut services) = connected();
    for n in 0..1000 {
        let port = 1000 + n;
        assert_eq!(guest.exchange(&mut services, &packet(port, Op::REQUEST, 0), &[]), [Op::RESPONSE]);
        services.last().outgoing = std::vec![1; 10];
        assert_eq!(guest.exchange(&mut services, &packet(port, Op::RW, 3), b"abc"), [Op::RW]);
        assert_eq!(services.last().incoming, b"abc");
        let end = if n % 2 == 0 { shutdown(port, BOTH) } else { packet(port, Op::RST, 0) };
        guest.exchange(&mut services, &end, &[]);
        assert_eq!(services.last().told.last(), Some(&Told::Closed));
        assert_eq!(guest.transport.device().connections(), 1);
    }
}

#[test]
fn without_receive_buffers_resets_wait_and_the_guest_with_them() {
    let (mut guest, mut services) = (Guest::new(256, 0), Services::default());
    for port in 0..200 {
        assert!(guest.send(&packet(port, Op::RW, 0), &[]));
    }
    assert!(guest.notified);
    guest.settle(&mut services);
    assert!(guest.transport.device().resets.len() <= MAX_RESETS);
    let mut ports = Vec::new();
    for _ in 0..200 {
        assert!(guest.give_buffer());
        assert!(guest.notified, "the device waits for buffers and must be told");
        guest.settle(&mut services);
        ports.extend(guest.received().into_iter().map(|(header, _)| header.dst_port));
    }
    assert_eq!(ports, (0..200).collect::<Vec<_>>());
}

#[test]
fn a_budget_is_kept_and_both_directions_move() {
    let (mut guest, mut services) = connected();
    services.last().outgoing = std::vec![1; 40_960];
    for _ in 0..8 {
        assert!(guest.send(&packet(700, Op::RW, 1), &[1]));
    }
    assert!(guest.poll(&mut services, 6));
    assert_eq!(guest.received().len(), 3);
    assert_eq!(services.last().incoming.len(), 3);
    assert!(guest.poll(&mut services, 0));
    assert_eq!((guest.received().len(), services.last().incoming.len()), (1, 4));
}

#[test]
fn a_reset_of_the_device_closes_its_streams() {
    let (mut guest, mut services) = connected();
    guest.bring_up(64, 16);
    guest.settle(&mut services);
    assert_eq!(services.last().told[1..], [Told::Closed]);
    assert_eq!(guest.received(), []);
    assert_eq!(guest.exchange(&mut services, &packet(700, Op::REQUEST, 0), &[]), [Op::RESPONSE]);
    assert_eq!(services.streams.len(), 2);
}

#[test]
fn a_malformed_queue_stops_the_device_until_reset() {
    type Spoil = fn(&mut Guest);
    let spoils: [(&str, Spoil); 8] = [
        ("index jumps", |g| g.memory.write(Gpa::new(g.tx.driver() + 2), &0x4000u16.to_le_bytes()).unwrap()),
        ("receive index jumps", |g| {
            g.memory.write(Gpa::new(g.rx.driver() + 2), &0x4000u16.to_le_bytes()).unwrap()
        }),
        ("head out of range", |g| g.tx.offer(&g.memory, 64)),
        ("loop", |g| {
            g.tx.describe(&g.memory, 0, 0x40_0000, 64, NEXT, 0);
            g.tx.offer(&g.memory, 0);
        }),
        ("indirect", |g| {
            g.tx.describe(&g.memory, 0, 0x40_0000, 64, INDIRECT, 0);
            g.tx.offer(&g.memory, 0);
        }),
        ("wild address", |g| {
            g.tx.describe(&g.memory, 0, 1 << 60, 64, 0, 0);
            g.tx.offer(&g.memory, 0);
        }),
        ("shorter than a header", |g| {
            g.tx.describe(&g.memory, 0, 0x40_0000, 43, 0, 0);
            g.tx.offer(&g.memory, 0);
        }),
        ("wild payload", |g| {
            let header = packet(700, Op::RW, 8).to_bytes();
            g.memory.write(Gpa::new(0x40_0000), &header).unwrap();
            g.tx.describe(&g.memory, 0, 0x40_0000, 44, NEXT, 1);
            g.tx.describe(&g.memory, 1, 1 << 60, 8, 0, 0);
            g.tx.offer(&g.memory, 0);
        }),
    ];
    for (name, spoil) in spoils {
        let (mut guest, mut services) = connected();
        // All receive buffers are used up, so that the device looks for a new one.
        services.last().outgoing = std::vec![1; 16 * 4096];
        guest.settle(&mut services);
        crate::device::virtio::driver::set(&mut guest.transport, 0x064, 3);
        spoil(&mut guest);
        assert!(!guest.poll(&mut services, 16), "{name}");
        assert_eq!(get(&mut guest.transport, 0x070), 15 | 64, "{name}");
        assert_eq!(get(&mut guest.transport, 0x060), 2, "{name}");
        assert_eq!(services.last().told.last(), Some(&Told::Closed), "{name}");
        assert!(!guest.poll(&mut services, 16), "{name}");

        guest.bring_up(64, 16);
        assert_eq!(
            guest.exchange(&mut services, &packet(700, Op::REQUEST, 0), &[]),
            [Op::RESPONSE],
            "{name}"
        );
    }
}

#[test]
fn receive_buffers_need_room_for_more_than_a_header() {
    let (mut guest, mut services) = (Guest::new(64, 0), Services::default());
    guest.rx.add(&guest.memory, &[(0x10_0000, 44, true), (0x10_1000, 8, false)]);
    guest.poll(&mut services, 16);
    assert_eq!(get(&mut guest.transport, 0x070), 15 | 64, "readable after writable");
    guest.bring_up(64, 0);
    guest.rx.add(&guest.memory, &[(0x10_0000, 44, true)]);
    guest.poll(&mut services, 16);
    assert_eq!(get(&mut guest.transport, 0x070), 15 | 64);
}
