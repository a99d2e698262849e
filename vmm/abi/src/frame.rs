//! Length-prefixed framing of messages on a byte stream.
//!
//! A frame is a little-endian `u32` length, 1 to [`MAX_FRAME`], then that many bytes of
//! CBOR. [`encode`] makes one, a [`Deframer`] takes them out of a stream piece by piece,
//! [`decode`] reads what is in them. Everything that arrives is hostile.

use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use thiserror::Error;

/// The most bytes that a frame's body has.
pub const MAX_FRAME: usize = 64 * 1024;

/// Bytes of the length before a frame's body.
pub const PREFIX: usize = 4;

/// A frame or its body that cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The length is out of bounds; where the next frame would begin is unknown, so that
    /// the stream is of no more use.
    #[error("a frame of {len} bytes; allowed are 1 to {MAX_FRAME}")]
    Length {
        /// The length that was given.
        len: u64,
    },
    /// The body is not the CBOR that was expected.
    #[error("the frame's body: {0}")]
    Body(String),
    /// The body goes on after the message.
    #[error("{extra} bytes after the end of the message; allowed are none")]
    Trailing {
        /// How many bytes too many there are.
        extra: usize,
    },
}

/// Encodes `message` as one frame, length included.
///
/// # Errors
/// When the message needs more than [`MAX_FRAME`] bytes.
pub fn encode<T: minicbor::Encode<()>>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = alloc::vec![0; PREFIX];
    if minicbor::encode(message, &mut frame).is_err() {
        return Err(FrameError::Body("the message cannot be written as CBOR".into()));
    }
    let body = frame.len() - PREFIX;
    let len = u32::try_from(body).ok().filter(|_| body <= MAX_FRAME);
    let len = len.ok_or(FrameError::Length { len: body as u64 })?;
    if let Some(prefix) = frame.first_chunk_mut::<PREFIX>() {
        *prefix = len.to_le_bytes();
    }
    Ok(frame)
}

/// Decodes the body of a frame, all of it.
///
/// # Errors
/// When it is not a `T`, or something follows it.
pub fn decode<'a, T: minicbor::Decode<'a, ()>>(body: &'a [u8]) -> Result<T, FrameError> {
    let mut decoder = minicbor::Decoder::new(body);
    let message = decoder.decode().map_err(|e| FrameError::Body(e.to_string()))?;
    match body.len().saturating_sub(decoder.position()) {
        0 => Ok(message),
        extra => Err(FrameError::Trailing { extra }),
    }
}

/// Takes one frame after another out of a byte stream; holds at most one.
#[derive(Debug, Default)]
pub struct Deframer {
    held: Vec<u8>,
}

impl Deframer {
    /// Takes bytes from the front of `data` up to the end of the current frame. Returns how
    /// many it took, and the frame's body if that completed it; then there may be more
    /// frames in the rest of `data`.
    ///
    /// # Errors
    /// When a length is out of bounds; every later call then fails as well.
    pub fn take(&mut self, data: &[u8]) -> Result<(usize, Option<Vec<u8>>), FrameError> {
        let mut taken = self.fill(PREFIX, data);
        let Some(prefix) = self.held.first_chunk::<PREFIX>() else {
            return Ok((taken, None));
        };
        let len = u32::from_le_bytes(*prefix);
        let body = usize::try_from(len).ok().filter(|body| (1..=MAX_FRAME).contains(body));
        let body = body.ok_or(FrameError::Length { len: len.into() })?;
        taken += self.fill(PREFIX + body, data.get(taken..).unwrap_or_default());
        if self.held.len() < PREFIX + body {
            return Ok((taken, None));
        }
        let frame = self.held.split_off(PREFIX);
        self.held.clear();
        Ok((taken, Some(frame)))
    }

    /// Whether part of a frame has been taken and its end has not.
    pub fn is_amid(&self) -> bool {
        !self.held.is_empty()
    }

    /// Takes from `data` until `target` bytes are held; returns how many.
    fn fill(&mut self, target: usize, data: &[u8]) -> usize {
        let missing = target.saturating_sub(self.held.len());
        let piece = data.get(..missing).unwrap_or(data);
        self.held.extend_from_slice(piece);
        piece.len()
    }
}
