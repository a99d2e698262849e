//! Length-prefixed framing of messages on a byte stream.
