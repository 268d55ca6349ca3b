//! An upload: refused or compiled, and never more than its refusal says.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use nodus_protocol::Digest;
use nodus_sandbox::{Limits, Sandbox, SandboxOptions};

fuzz_target!(|data: &[u8]| {
    static SANDBOX: OnceLock<Sandbox> = OnceLock::new();
    let upload = Limits { component_bytes: 1 << 20, component_functions: 2000, ..Limits::DEFAULT };
    let sandbox = SANDBOX.get_or_init(|| Sandbox::new(SandboxOptions { upload }).expect("a sandbox"));
    match sandbox.validate(data) {
        Ok(component) => assert_eq!(component.digest(), Digest::of(data)),
        Err(refusal) => {
            let text = refusal.to_string();
            assert!(!text.is_empty() && text.lines().count() <= 2 && !text.contains(".rs:"), "{text}");
        }
    }
});
