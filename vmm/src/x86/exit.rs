//! Exits of a vCPU in terms that SVM and VMX share.
