//! Messages as hostile bytes, and the rules of a cell's specification.

use super::*;
use crate::frame::{self, Deframer, FrameError, MAX_FRAME, PREFIX};
use alloc::vec;
use proptest::prelude::*;

fn spec() -> CellSpec {
    CellSpec {
        name: "a".into(),
        cpus: vec![3, 2],
        memory: 256 << 20,
        cmdline: "console=ttyS0".into(),
        console: true,
        wall_clock_ns: 1,
        on_reboot: None,
        on_crash: None,
        origin: None,
        files: None,
    }
}

fn create() -> Request {
    Request { id: 7, body: Some(Body::Create { spec: spec() }) }
}

/// The body of the frame of `message`.
fn body<T: Encode<()>>(message: &T) -> Vec<u8> {
    frame::encode(message).unwrap().split_off(PREFIX)
}

#[test]
fn a_request_survives_the_wire() {
    let request: Request = frame::decode(&body(&create())).unwrap();
    assert_eq!(request.id, 7);
    assert!(matches!(request.body, Some(Body::Create { spec: got }) if got == spec()));
}

/// Written by hand from RFC 8949, so that the format cannot change unseen.
#[test]
fn the_bytes_are_as_the_format_says() {
    // [7, [3, [5]]]
    let show = Request { id: 7, body: Some(Body::Show { cell: 5 }) };
    assert_eq!(frame::encode(&show).unwrap(), [6, 0, 0, 0, 0x82, 0x07, 0x82, 0x03, 0x81, 0x05]);
    // [0, [0, [1, h'42…', false]]]
    let token = Token::new([0x42; TOKEN_SIZE]);
    let hello = Request { id: 0, body: Some(Body::Hello { abi: 1, token, follow: Some(false) }) };
    let mut bytes = vec![0x82, 0x00, 0x82, 0x00, 0x83, 0x01, 0x58, 0x20];
    bytes.extend([0x42; TOKEN_SIZE]);
    bytes.push(0xf4);
    assert_eq!(body(&hello), bytes);
    // [7, null, [6, "m"]]: trailing absent fields are left out.
    let failed = Response::new(7, Err(Failure::new(ErrorCode::INVALID, "m")));
    assert_eq!(body(&failed), [0x83, 0x07, 0xf6, 0x82, 0x06, 0x61, b'm']);
}

#[test]
fn a_truncated_message_is_an_error_at_every_byte() {
    let bytes = body(&create());
    for len in 0..bytes.len() {
        assert!(matches!(frame::decode::<Request>(&bytes[..len]), Err(FrameError::Body(_))), "{len}");
    }
}

#[test]
fn a_message_with_something_after_it_is_an_error() {
    let mut bytes = body(&create());
    bytes.push(0);
    assert_eq!(frame::decode::<Request>(&bytes).unwrap_err(), FrameError::Trailing { extra: 1 });
}

#[test]
fn unknown_requests_fields_and_replies_are_known_as_such() {
    // [7, [99, [1, "x"]]]: the id is there for the answer.
    let unknown = [0x82, 0x07, 0x82, 0x18, 99, 0x82, 0x01, 0x61, b'x'];
    let request: Request = frame::decode(&unknown).unwrap();
    assert_eq!(request.id, 7);
    assert!(request.body.is_none());
    // [7, [3, [5, "new"]], "new"]: fields of a later version are ignored.
    let later = [0x83, 0x07, 0x82, 0x03, 0x82, 0x05, 0x63, b'n', b'e', b'w', 0x63, b'n', b'e', b'w'];
    let request: Request = frame::decode(&later).unwrap();
    assert!(matches!(request.body, Some(Body::Show { cell: 5 })));
    // [7, [99, []]]
    let response: Response = frame::decode(&[0x82, 0x07, 0x82, 0x18, 99, 0x80]).unwrap();
    assert_eq!(response.result().unwrap_err().code, ErrorCode::UNKNOWN_REPLY);
}

#[test]
fn wrong_types_are_errors() {
    // The id as a text; the body as a number; the token with 31 bytes.
    assert!(frame::decode::<Request>(&[0x82, 0x61, b'x', 0xf6]).is_err());
    assert!(frame::decode::<Request>(&[0x82, 0x07, 0x05]).is_err());
    let mut short = vec![0x82, 0x00, 0x82, 0x00, 0x82, 0x01, 0x58, 31];
    short.extend([0; 31]);
    assert!(frame::decode::<Request>(&short).is_err());
}

#[test]
fn frames_beyond_their_bounds_are_errors() {
    for len in [0, MAX_FRAME + 1, u32::MAX as usize] {
        let prefix = u32::try_from(len).unwrap().to_le_bytes();
        let error = FrameError::Length { len: len as u64 };
        let mut deframer = Deframer::default();
        assert_eq!(deframer.take(&prefix), Err(error.clone()));
        assert_eq!(deframer.take(&[]), Err(error), "stays an error");
    }
    let long = Failure::new(ErrorCode::INVALID, "x".repeat(MAX_FRAME));
    assert!(matches!(frame::encode(&long), Err(FrameError::Length { .. })));
}

#[test]
fn the_token_is_found_in_its_table_alone() {
    let mut table = vec![0; TOKEN_OFFSET + TOKEN_SIZE];
    table[TOKEN_OFFSET..].fill(9);
    assert!(Token::from_table(&table).is_none(), "no signature");
    table[..4].copy_from_slice(&TOKEN_TABLE);
    assert!(Token::from_table(&table).unwrap().matches(&Token::new([9; TOKEN_SIZE])));
    assert!(Token::from_table(&table[..table.len() - 1]).is_none(), "too short");
}

#[test]
fn a_token_matches_only_itself() {
    let token = Token::new([7; TOKEN_SIZE]);
    for byte in 0..TOKEN_SIZE {
        let mut other = [7; TOKEN_SIZE];
        other[byte] ^= 0x80;
        assert!(!token.matches(&Token::new(other)), "{byte}");
    }
    assert_eq!(alloc::format!("{token:?}"), "Token(…)");
}

#[test]
fn consoles_stay_below_the_bulk_ports() {
    assert_eq!(console_port(1), 17);
    assert_eq!(console_port(1007), 1023);
    assert_eq!(console_port(1008), 16);
    assert!((CONSOLE_PORTS..BULK_PORTS).contains(&console_port(u32::MAX)));
}

/// Each rule of the specification, the field to blame, and a word of the reason.
#[test]
fn each_mistake_in_a_specification_names_its_field() {
    type Change = fn(&mut CellSpec);
    let mistakes: &[(&str, &str, Change)] = &[
        ("name", "1 to 32", |s| s.name.clear()),
        ("name", "1 to 32", |s| s.name = "x".repeat(33)),
        ("name", "\"A\"", |s| s.name = "A".into()),
        ("name", "\"-a\"", |s| s.name = "-a".into()),
        ("name", "\"root\"", |s| s.name = "root".into()),
        ("cpus", "0 CPUs", |s| s.cpus.clear()),
        ("cpus", "65 CPUs", |s| s.cpus = (1..66).collect()),
        ("cpus", "CPU 0", |s| s.cpus = vec![1, 0]),
        ("cpus", "2 twice", |s| s.cpus = vec![2, 1, 2]),
        ("memory", "0 bytes", |s| s.memory = 0),
        ("memory", "multiple of 2 MiB", |s| s.memory += 1),
        ("cmdline", "2048 bytes", |s| s.cmdline = "x".repeat(2048)),
        ("cmdline", "offset 1", |s| s.cmdline = "a\0b".into()),
    ];
    assert_eq!(spec().validate(), Ok(()));
    for (field, word, change) in mistakes {
        let mut spec = spec();
        change(&mut spec);
        let failure = spec.validate().unwrap_err();
        assert_eq!(failure.code, ErrorCode::INVALID);
        assert_eq!(failure.field.as_deref(), Some(*field));
        assert!(failure.message.contains(word), "{failure}");
    }
}

proptest! {
    /// However a stream is cut into pieces, the same frames come out of it.
    #[test]
    fn frames_come_out_whole(bodies in prop::collection::vec("[a-z]{1,80}", 0..6), cut in 1usize..40) {
        let mut stream = Vec::new();
        for text in &bodies {
            stream.extend(frame::encode(text).unwrap());
        }
        let mut deframer = Deframer::default();
        let mut got = Vec::new();
        for mut piece in stream.chunks(cut) {
            while !piece.is_empty() {
                let (taken, frame) = deframer.take(piece).unwrap();
                piece = &piece[taken..];
                got.extend(frame.map(|f| frame::decode::<String>(&f).unwrap()));
            }
        }
        prop_assert_eq!(got, bodies);
        prop_assert!(!deframer.is_amid());
    }

    /// No bytes make a decoder panic, and what it takes is taken again after encoding.
    #[test]
    fn hostile_bytes_are_only_errors(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = frame::decode::<Response>(&bytes);
        if let Ok(request) = frame::decode::<Request>(&bytes) {
            prop_assert!(frame::decode::<Request>(&body(&request)).is_ok());
        }
    }

    /// Nor do those that differ from a good message in a byte.
    #[test]
    fn nearly_good_bytes_are_only_errors(at in any::<prop::sample::Index>(), value: u8) {
        let mut bytes = body(&create());
        let at = at.index(bytes.len());
        bytes[at] = value;
        let _ = frame::decode::<Request>(&bytes);
    }
}
