//! The other socket of a guest process: its words and its parent's.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nodus_host::fuzzing::words(data));
