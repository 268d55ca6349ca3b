//! Uploads that are refused: each for its own reason.

use nodus_sandbox::ComponentRefusal as Refusal;

use crate::support::sandbox;
use crate::wat::{component, job, parse};

fn refusal(bytes: &[u8]) -> Refusal {
    let Err(refusal) = sandbox().validate(bytes) else { panic!("it was accepted") };
    let text = refusal.to_string();
    assert!(text.lines().count() <= 2 && !text.contains("/root") && !text.contains(".rs:"), "{text}");
    refusal
}

fn invalid(text: &str) -> String {
    match refusal(&parse(text)) {
        Refusal::Invalid { reason } => reason,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn a_minimal_job_is_accepted_and_known_by_the_digest_of_its_bytes() {
    let bytes = parse(&job("", "i32.const 0"));
    let valid = sandbox().validate(&bytes).unwrap();
    assert_eq!(valid.digest(), nodus_protocol::Digest::of(&bytes));
}

#[test]
fn other_forms_are_named() {
    assert_eq!(refusal(&parse("(module)")), Refusal::CoreModule);
    assert_eq!(refusal(b"(component)"), Refusal::Text);
    assert_eq!(refusal(b"  \n;; text\n(component)"), Refusal::Text);
    assert_eq!(refusal(b"\x7fELF\x02\x01\x01"), Refusal::Precompiled);
    assert_eq!(refusal(b"PK\x03\x04"), Refusal::NotWasm { begin: "50 4b 03 04".into() });
    assert_eq!(refusal(b""), Refusal::NotWasm { begin: "nothing, being empty".into() });
    // A version that never was.
    assert_eq!(refusal(b"\0asm\x63\0\0\0"), Refusal::NotWasm { begin: "00 61 73 6d 63 00 00 00".into() });
}

#[test]
fn size_is_checked_before_anything_is_parsed() {
    let bytes = vec![0; (64 << 20) + 1];
    assert_eq!(refusal(&bytes), Refusal::TooLarge { bytes: (64 << 20) + 1, allowed: 64 << 20 });
}

#[test]
fn no_beginning_of_a_component_is_accepted_and_none_panics() {
    let bytes = parse(&job("", "i32.const 0"));
    // After the last export there are only names, without which it is the same component.
    let last_export = bytes.windows(3).rposition(|window| window == b"run").unwrap();
    for end in 0..bytes.len() {
        let refused = sandbox().validate(&bytes[..end]).is_err();
        assert!(refused || end > last_export, "{end} of {} bytes", bytes.len());
    }
    for at in 8..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0xff;
        // Some changes are harmless (names); none may panic.
        drop(sandbox().validate(&changed));
    }
}

/// Found by the fuzzer: the parser's own text has a line for each byte.
#[test]
fn a_module_that_is_none_is_refused_in_one_line() {
    let bytes = b"\0asm\x0d\0\x01\0\x01\x08NOTWASM!";
    let Refusal::Invalid { reason } = refusal(bytes) else { panic!("refused otherwise") };
    assert!(reason.contains("bad magic number"), "{reason}");
}

#[test]
fn imports_from_outside_are_all_named() {
    let text = component(
        r#"(import "wasi:http/types@0.2.0" (instance))
           (import "wasi:cli/stdout@0.3.0" (instance))
           (import "wasi:io/poll@0.2.6" (instance))
           (import "nodus:gpu/job@0.2.0" (instance))
           (import "nodus:gpu/secrets@0.1.0" (instance))
           (import "launch-missiles" (func))"#,
        "i32.const 0",
    );
    let imports = ["wasi:http/types@0.2.0", "wasi:cli/stdout@0.3.0", "nodus:gpu/job@0.2.0", "nodus:gpu/secrets@0.1.0", "launch-missiles"];
    assert_eq!(refusal(&parse(&text)), Refusal::ForeignImports { imports: imports.map(str::to_owned).to_vec() });
}

#[test]
fn an_import_of_the_right_name_and_the_wrong_type_is_named() {
    for import in [
        r#"(import "nodus:gpu/job@0.1.0" (instance (export "seed" (func (result string)))))"#,
        r#"(import "nodus:gpu/job@0.1.0" (instance (export "should-stop" (func (param "soon" bool) (result bool)))))"#,
        r#"(import "nodus:gpu/job@0.1.0" (instance (export "secrets" (func (result string)))))"#,
        r#"(import "wasi:random/random@0.2.6" (instance (export "get-random-u64" (func (result u32)))))"#,
    ] {
        let Refusal::WrongImport { reason } = refusal(&parse(&component(import, "i32.const 0"))) else { panic!("{import}") };
        assert!(["nodus:gpu/job@0.1.0", "wasi:random/random@0.2.6"].iter().any(|name| reason.contains(name)), "{reason}");
    }
}

#[test]
fn run_must_be_there_and_be_the_function_of_the_world() {
    assert_eq!(refusal(&parse("(component)")), Refusal::NoRun);
    let lifted = |signature: &str, core: &str| {
        format!(
            r#"(component (core module $m (memory (export "memory") 1) (func (export "run") {core}))
                 (core instance $i (instantiate $m))
                 (func (export "run") {signature} (canon lift (core func $i "run") (memory (core memory $i "memory")))))"#
        )
    };
    for (text, found) in [
        (lifted("", ""), "a function with another result"),
        (lifted("(result u32)", "(result i32) i32.const 0"), "a function with another result"),
        (lifted("(result (result (error u32)))", "(result i32) i32.const 0"), "a function with another result"),
        (
            lifted("(param \"x\" u32) (result (result (error string)))", "(param i32) (result i32) i32.const 0"),
            "a function with parameters",
        ),
        (r#"(component (instance (export "run")))"#.to_owned(), "no function"),
    ] {
        assert_eq!(refusal(&parse(&text)), Refusal::WrongRun { found: found.into() }, "{text}");
    }
}

#[test]
fn proposals_that_are_off_are_refused() {
    for body in [
        "(memory i64 1)",
        "(memory 1) (memory 1)",
        "(memory 1 1 shared)",
        "(func $f return_call $f)",
        "(type (struct))",
        "(tag)",
        "(type $f (func)) (func (param (ref $f)) (call_ref $f (local.get 0)))",
        "(type $f (func)) (type $c (cont $f))",
        "(func (param v128 v128) (result v128) (i8x16.relaxed_swizzle (local.get 0) (local.get 1)))",
        "(func (param i64 i64) (result i64 i64) (i64.mul_wide_s (local.get 0) (local.get 1)))",
        "(memory 1 (pagesize 1))",
    ] {
        let reason = invalid(&format!("(component (core module {body}))"));
        assert!(reason.contains("offset"), "{body}: {reason}");
    }
}

#[test]
fn needs_beyond_the_limits_are_refused_before_the_start() {
    let with = |body: &str| refusal(&parse(&job(body, "i32.const 0")));
    assert_eq!(
        with("(core module $n (memory 4097)) (core instance (instantiate $n))"),
        Refusal::NeedsTooMuch { limit: "guest-memory-bytes", needed: 4097 << 16, allowed: 256 << 20 }
    );
    assert_eq!(
        with("(core module $n (table 100001 funcref)) (core instance (instantiate $n))"),
        Refusal::NeedsTooMuch { limit: "table-elements", needed: 100_001, allowed: 100_000 }
    );
    let four = "(core instance (instantiate $n))".repeat(4);
    assert_eq!(with(&format!("(core module $n (memory 1)) {four}")), Refusal::NeedsTooMuch { limit: "memories", needed: 5, allowed: 4 });
    let many = "(core instance (instantiate $n))".repeat(33);
    assert_eq!(
        with(&format!("(core module $n (table 1 funcref)) {many}")),
        Refusal::NeedsTooMuch { limit: "tables", needed: 33, allowed: 32 }
    );
    let imports_core = component(r#"(import "nodus:gpu/job@0.1.0" (instance (export "m" (core module))))"#, "i32.const 0");
    assert!(matches!(refusal(&parse(&imports_core)), Refusal::UnknownNeeds | Refusal::WrongImport { .. }));
}

/// 35: wasmtime's register of types has had races of this kind (CVE-2024-47813).
#[test]
fn components_are_compiled_and_dropped_on_several_threads_at_once() {
    let bytes = |n: usize| {
        let types: String = (0..=n).map(|i| format!("(type (func (param {})))", "i32 ".repeat(i + 1))).collect();
        parse(&job(&format!("(core module {types})"), "i32.const 0"))
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for round in 0..25 {
                    // Neighbours in time have types in common.
                    let own = bytes((thread + round) % 6);
                    let valid = sandbox().validate(&own).unwrap();
                    assert_eq!(valid.digest(), nodus_protocol::Digest::of(&own));
                    drop((valid.clone(), valid));
                }
            });
        }
    });
}
