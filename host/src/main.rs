//! nodus-host.
fn main() {}
