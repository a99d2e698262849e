//! States of a cell and which command leads where.
