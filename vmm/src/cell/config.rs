//! What a cell is made of.
