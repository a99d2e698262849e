//! Management: requests from `cellctl`, carried out in slices.
