//! One vCPU: its models put together, and what is done about each exit.
