//! String instructions.

use super::*;

#[test]
fn that_move() {
    // rep stosb: one iteration at a time
    let mut board = Board::new(64, &[0xf3, 0xaa]);
    for left in (0..3).rev() {
        assert_eq!(board.cpu.rip, CODE);
        assert_eq!(board.run(), Ok(()));
        assert_eq!((board.get(Gpr::Rcx), board.get(Gpr::Rdi)), (left, DEVICE + 3 - left));
    }
    assert_eq!(board.cpu.rip, CODE + 2);
    assert_eq!(board.device(0), OLD & !0xff_ffff | 0x11_1111);

    // movsd RAM → device, device → RAM, with DF
    let mut board = Board::new(64, &[0xa5]);
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.device(0) as u32, 0xa4a3_a2a1);
    assert_eq!((board.get(Gpr::Rsi), board.get(Gpr::Rdi), board.cpu.rip), (DATA + 4, DEVICE + 4, CODE + 1));

    let mut board = Board::new(64, &[0xf3, 0x48, 0xa5]);
    board.cpu.gpr.swap(Gpr::Rsi as usize, Gpr::Rdi as usize);
    board.cpu.gpr[Gpr::Rcx as usize] = 1;
    board.cpu.rflags |= RFLAGS_DF;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.memory.read_u64(Gpa::new(DATA)), Ok(OLD));
    assert_eq!((board.get(Gpr::Rsi), board.get(Gpr::Rdi)), (DEVICE - 8, DATA - 8));
    assert_eq!((board.get(Gpr::Rcx), board.cpu.rip), (0, CODE + 3));

    // lodsw in real mode moves SI alone
    let mut board = Board::new(16, &[0xad]);
    board.cpu.gpr[Gpr::Rsi as usize] = 0xffff_fffe;
    board.cpu.segments[SegmentName::Ds as usize].base = DEVICE - 0xfffe;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.get(Gpr::Rsi), 0xffff_0000);
    assert_eq!(board.get(Gpr::Rax) & 0xffff, 0x8788);

    // A repeat of nothing touches nothing.
    let mut board = Board::new(64, &[0xf3, 0xaa]);
    board.cpu.gpr[Gpr::Rcx as usize] = 0;
    assert_eq!(board.run(), Err(EmulateError::Retry));
    assert!(board.bus.log.is_empty());
}

#[test]
fn that_compare() {
    // repe cmpsb: the device's 0x88, 0x87, … against RAM's 0x88, 0x87, 0: stops behind the third
    let mut board = Board::new(64, &[0xf3, 0xa6]);
    board.cpu.gpr.swap(Gpr::Rsi as usize, Gpr::Rdi as usize);
    board.cpu.gpr[Gpr::Rcx as usize] = 9;
    board.memory.write(Gpa::new(DATA), &[0x88, 0x87, 0]).unwrap();
    for (left, rip, zf) in [(8, CODE, true), (7, CODE, true), (6, CODE + 2, false)] {
        assert_eq!(board.run(), Ok(()));
        assert_eq!((board.get(Gpr::Rcx), board.cpu.rip), (left, rip));
        assert_eq!(board.cpu.rflags & RFLAGS_ZF != 0, zf);
    }
    assert_eq!((board.get(Gpr::Rsi), board.get(Gpr::Rdi)), (DEVICE + 3, DATA + 3));

    // repne scasb for 0x87: stops behind it, with ZF
    let mut board = Board::new(64, &[0xf2, 0xae]);
    board.cpu.gpr[Gpr::Rax as usize] = 0x87;
    for (rip, zf) in [(CODE, false), (CODE + 2, true)] {
        assert_eq!(board.run(), Ok(()));
        assert_eq!((board.cpu.rip, board.cpu.rflags & RFLAGS_ZF != 0), (rip, zf));
    }
    assert_eq!((board.get(Gpr::Rdi), board.get(Gpr::Rcx)), (DEVICE + 2, 1));
    // Its count runs out.
    let mut board = Board::new(64, &[0xf2, 0xaf]);
    board.cpu.gpr[Gpr::Rcx as usize] = 1;
    assert_eq!(board.run(), Ok(()));
    assert_eq!((board.cpu.rip, board.get(Gpr::Rdi)), (CODE + 2, DEVICE + 4));
    // scasw alone: 0x1111 - 0x8788 borrows
    let mut board = Board::new(64, &[0x66, 0xaf]);
    assert_eq!(board.run(), Ok(()));
    assert_eq!((board.cpu.rip, board.cpu.rflags & 1), (CODE + 2, 1));
}
