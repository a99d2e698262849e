//! The bundle: the file with a node's configuration, kernels and initial file systems.
