//! The CPU device: the readable truth.
