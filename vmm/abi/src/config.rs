//! Node configuration as the bundle carries it, and its limits.
