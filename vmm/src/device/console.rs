//! A cell's console: what the cell has printed last, and what waits to be read by it.
//!
//! Output never blocks the cell: the ring forgets its oldest bytes. Readers keep a position
//! of their own, counted from the console's first byte on, so that any number of them can
//! follow and each finds out how much it has missed.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;

/// Bytes of output that are kept.
const OUTPUT_SIZE: usize = 64 * 1024;
/// Bytes of input that may wait. More is not accepted, and stays with the sender.
const INPUT_SIZE: usize = 4096;

/// The output ring and input queue of one console.
#[derive(Debug)]
pub struct ConsoleRing {
    output: Box<[u8]>,
    /// Bytes printed since the console began.
    end: u64,
    input: VecDeque<u8>,
}

impl Default for ConsoleRing {
    fn default() -> Self {
        Self::new()
    }
}

impl ConsoleRing {
    /// An empty console. All memory that it will ever need is allocated here.
    pub fn new() -> Self {
        Self {
            output: vec![0; OUTPUT_SIZE].into_boxed_slice(),
            end: 0,
            input: VecDeque::with_capacity(INPUT_SIZE),
        }
    }

    /// Prints `bytes`.
    pub fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let at = self.index(self.end);
            if let Some(slot) = self.output.get_mut(at) {
                *slot = byte;
            }
            self.end += 1;
        }
    }

    /// The position after the last byte printed.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Copies what was printed from `position` on to `buf`. The result is the position to go
    /// on from and the number of bytes copied. A position that the ring has forgotten stands
    /// for the oldest that it has, one that it has not reached for its end.
    pub fn read_from(&self, position: u64, buf: &mut [u8]) -> (u64, usize) {
        let mut position = position.clamp(self.end.saturating_sub(OUTPUT_SIZE as u64), self.end);
        let mut copied = 0;
        for slot in buf {
            if position == self.end {
                break;
            }
            *slot = self.output.get(self.index(position)).copied().unwrap_or_default();
            position += 1;
            copied += 1;
        }
        (position, copied)
    }

    /// Queues input for the cell. The result is how many of `bytes`, from the first on, were
    /// accepted; the rest is to be offered again when the cell has read some.
    pub fn push_input(&mut self, bytes: &[u8]) -> usize {
        let accepted = bytes.len().min(INPUT_SIZE - self.input.len());
        self.input.extend(bytes.iter().take(accepted));
        accepted
    }

    /// Takes the next byte of input.
    pub fn pop_input(&mut self) -> Option<u8> {
        self.input.pop_front()
    }

    /// Where in the ring the byte at `position` is.
    #[expect(clippy::cast_possible_truncation, reason = "the remainder is below 64 KiB")]
    fn index(&self, position: u64) -> usize {
        (position % OUTPUT_SIZE as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    proptest! {
        /// Against all that was ever printed: any reader sees its last 64 KiB, in order.
        #[test]
        fn readers_see_the_last_64_kib(
            pieces in proptest::collection::vec((0usize..40_000, any::<u8>()), 1..8),
            position in 0u64..200_000,
            room in 0usize..70_000,
        ) {
            let (mut console, mut all) = (ConsoleRing::new(), Vec::new());
            for (len, seed) in pieces {
                let piece: Vec<u8> = (0..251u8).cycle().take(len).map(|n| seed.wrapping_add(n)).collect();
                console.push(&piece);
                all.extend(piece);
            }
            prop_assert_eq!(console.end(), all.len() as u64);
            let mut buf = std::vec![0; room];
            let (next, copied) = console.read_from(position, &mut buf);
            let start = usize::try_from(position).unwrap().clamp(all.len().saturating_sub(65536), all.len());
            prop_assert_eq!(copied, room.min(all.len() - start));
            prop_assert_eq!(&buf[..copied], &all[start..start + copied]);
            prop_assert_eq!(next, (start + copied) as u64);
        }
    }

    #[test]
    fn input_is_bounded_and_in_order() {
        let mut console = ConsoleRing::new();
        assert_eq!(console.push_input(&[7; 4000]), 4000);
        assert_eq!(console.push_input(&[8; 4000]), 96);
        assert_eq!(console.push_input(&[9]), 0);
        assert_eq!(console.pop_input(), Some(7));
        assert_eq!(console.push_input(&[9, 9]), 1);
        let rest: Vec<u8> = core::iter::from_fn(|| console.pop_input()).collect();
        assert_eq!((rest.len(), rest[3998], rest[3999], rest[4094], rest[4095]), (4096, 7, 8, 8, 9));
    }
}
