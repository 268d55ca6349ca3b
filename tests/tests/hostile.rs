//! Hostile guests, each a real component: exactly the refusal or failure that is documented, and a neighbour whose every byte is as alone.
//!
//! The numbers are those of `tests/hostile/README.md`, which says where the attacks are that are not written as text.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeSet;
use std::fmt::Write as _;

use nodus_tests::{Host, assert_same, contents, golden, guest, root, text, token_lines};
use serde_json::Value;

/// Of a receipt, what depends on company and time.
const COMPANY: [&str; 4] = ["times", "previous_receipt", "lane", "co_resident_jobs"];
/// So that a guest that spins is soon found.
const LIMITS: [&str; 2] = ["--limit", "cpu-stretch-ms=1000"];

/// Guests by file name, each with what is said of it. A guest that is not there does not compile.
macro_rules! guests {
    ($($name:ident: $expected:expr;)+) => {
        [$((stringify!($name), include_str!(concat!("../hostile/", stringify!($name), ".wat")), $expected)),+]
    };
}

const SPUN: &str = "over the limit cpu-stretch-ms: the component used 1000 ms of CPU time";

fn run_and_fail() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    guests! {
        n01_infinite_loop: SPUN;
        n02_start_loop: SPUN;
        n03_realloc_loop: SPUN;
        n03_destructor_loop: SPUN;
        n03_post_return_loop: SPUN;
        n04_bulk_loop: SPUN;
        n06_zero_timeouts: SPUN;
        n10_memory_bomb: "over the limit guest-memory-bytes: 268500992 needed, 268435456 allowed";
        n10_several_memories: "over the limit guest-memory-bytes: 393281536 needed, 268435456 allowed";
        n11_table_bomb: "the component trapped: wasm `unreachable` instruction executed";
        n12_recursion: "the component trapped: call stack exhausted: expected less recursion";
        n15_oversized_string: "over the limit host-call-bytes: one call carried more than 16777216 bytes";
        n16_string_outside: "the component trapped: string pointer/length out of bounds of memory";
        n16_string_wraps: "the component trapped: string pointer/length out of bounds of memory";
        n16_no_utf8: "the component trapped: invalid utf-8 sequence";
        n16_misaligned_utf16: "the component trapped: string pointer not aligned to 2";
        n16_lone_surrogate: "the component trapped: ";
        n17_no_such_case: "the component trapped: unexpected discriminant: 9";
        n17_no_such_result: "the component trapped: invalid expected discriminant";
        n18_realloc_outside: "the component trapped: realloc return: beyond end of memory";
        n18_realloc_traps: "the component trapped: wasm `unreachable` instruction executed";
        n19_forged_handle: "the component trapped: unknown handle index 12345";
        n19_handle_zero: "the component trapped: unknown handle index 0";
        n19_double_drop: "the component trapped: unknown handle index 1";
        n19_use_after_drop: "the component trapped: unknown handle index 1";
        n20_handle_leak: "over the limit handles: more than 10000 resources at once";
        n38_forged_log: "the component trapped: wasm `unreachable` instruction executed";
        n40_random_bytes: "over the limit random-bytes: 1073741824 needed, 1048576 allowed";
    }
    .into_iter()
}

fn refused_at_upload() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    guests! {
        n11_first_memory: "the component needs 4294967296 guest-memory-bytes from the start, expected at most 268435456";
        n11_first_table: "the component needs 4294967295 table-elements from the start, expected at most 100000";
        n11_memory64: "the component is invalid: ";
        n31_foreign_import: "the component imports what the host does not offer: wasi:http/outgoing-handler@0.2.0";
        n31_other_version: "the component imports what the host does not offer: nodus:gpu/job@0.2.0";
        n31_other_type: "an import of the component does not fit the host: ";
        n31_no_run: "the component exports no `run`";
    }
    .into_iter()
}

/// A data folder with the tiny Llama as `llama` and the reference tokens as `tokens`.
fn prepared() -> Host {
    let host = Host::new();
    let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    std::fs::write(host.path("tokens"), lines).unwrap();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    host.ok(["data", "put", host.path("tokens").to_str().unwrap(), "--name", "tokens"]);
    host
}

fn refusal(host: &Host, component: &[u8]) -> String {
    let path = host.path("component.wasm");
    std::fs::write(&path, component).unwrap();
    let out = host.path("out");
    let args = ["run", path.to_str().unwrap(), "--model", "llama", "--data", "tokens", "--out", out.to_str().unwrap()];
    let error = host.refused(2, args);
    assert!(!out.exists());
    error
}

#[test]
fn every_guest_has_its_test() {
    let tested: BTreeSet<String> = run_and_fail().chain(refused_at_upload()).map(|(name, ..)| format!("{name}.wat")).collect();
    let files = std::fs::read_dir(root().join("tests/hostile")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.filter(|name| name.ends_with(".wat")).collect::<BTreeSet<_>>(), tested);
}

#[test]
fn each_fails_by_its_own_fault_and_the_neighbour_is_as_alone() {
    let host = prepared();
    let job = |name: &str, component: &str| {
        format!("[[jobs]]\nname = {name:?}\ncomponent = {component:?}\nmodel = \"llama\"\ndata = \"tokens\"\nheld_out_count = 6\n")
    };
    let neighbour = job("neighbour", guest("sft").to_str().unwrap()) + "params = { epochs = 3, dropout = 0.1, learning_rate = 0.01 }\n";
    let mut all = neighbour.clone();
    for (name, source, _) in run_and_fail() {
        std::fs::write(host.path(name), wat::parse_str(source).unwrap_or_else(|error| panic!("{name}: {error}"))).unwrap();
        write!(all, "{}", job(name, host.path(name).to_str().unwrap())).unwrap();
    }
    std::fs::write(host.path("alone.toml"), neighbour).unwrap();
    std::fs::write(host.path("all.toml"), all).unwrap();
    let run = |manifest: &str, out: &str| {
        let (manifest, out) = (host.path(manifest), host.path(out));
        let fixed = ["run", "--manifest", manifest.to_str().unwrap(), "--out", out.to_str().unwrap()];
        host.call(fixed.iter().chain(&LIMITS))
    };
    assert!(run("alone.toml", "alone").status.success());
    let output = run("all.toml", "all");
    let told = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(!told.contains('\u{1b}') && !told.contains("\nerror: forged"), "an escape or a forged line reached the terminal: {told:?}");

    let summary: Value = serde_json::from_slice(&std::fs::read(host.path("all/summary.json")).unwrap()).unwrap();
    let jobs = summary["jobs"].as_array().unwrap();
    let mut faults = String::new();
    for (name, _, expected) in run_and_fail() {
        let row = jobs.iter().find(|row| row["name"] == name).unwrap();
        let reason = row["reason"].as_str().unwrap_or_default();
        if row["status"] != "failed" || !reason.starts_with(expected) {
            writeln!(faults, "{name}: {} {reason:?}, expected {expected:?}", row["status"]).unwrap();
        }
        assert!(!reason.contains('/') || reason.contains("pointer/length"), "{name}: a path? {reason}");
        assert!(!host.path("all").join(name).exists(), "{name} left something");
    }
    assert!(faults.is_empty(), "{faults}");
    assert_same(&contents(&host.path("alone/neighbour"), &COMPANY), &contents(&host.path("all/neighbour"), &COMPANY), "the neighbour");

    // Device memory: all that was given is back.
    let ledger = host.ok(["audit", "ledger", "--json"]);
    let sums: Value = serde_json::from_str(ledger.lines().last().unwrap()).unwrap();
    let bytes = &sums["adapter_bytes"]["local"];
    assert!(bytes["allocated"].as_u64().unwrap() > 0 && bytes["allocated"] == bytes["zeroed"], "{sums}");
}

#[test]
fn what_is_no_training_job_is_refused_before_it_starts() {
    let host = prepared();
    for (name, source, expected) in refused_at_upload() {
        let error = refusal(&host, &wat::parse_str(source).unwrap_or_else(|error| panic!("{name}: {error}")));
        assert!(error.contains(expected), "{name}: {error}");
    }
    let sft = std::fs::read(guest("sft")).unwrap();
    let forms: [(&[u8], &str); 6] = [
        (b"", "nothing, being empty"),
        (b"(component)", "WebAssembly text"),
        (b"\0asm\x01\0\0\0", "a core module"),
        (b"\x7fELF\x02\x01\x01", "precompiled native code"),
        (&sft[..sft.len() / 2], "the component is invalid"),
        (b"%PDF-1.7", "no WebAssembly component"),
    ];
    for (bytes, expected) in forms {
        let error = refusal(&host, bytes);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// 32: what is cheap to write and dear to compile.
#[test]
fn bombs_are_refused_within_limits() {
    let host = prepared();
    let component = |inside: &str| wat::parse_str(format!("(component {inside})")).unwrap();
    let many = |count: usize, item: &str| item.repeat(count);
    let functions = component(&format!("(core module {})", many(300_000, "(func)")));
    assert!(refusal(&host, &functions).contains("300000 component-functions, expected at most 200000"));
    let imports = component(&format!("(core module {})", many(30_000, "(import \"\" \"\" (func))")));
    assert!(refusal(&host, &imports).contains("30000 component-imports, expected at most 20000"));
    let types = component(&many(150_000, "(type u8)"));
    assert!(refusal(&host, &types).contains("150000 component-types, expected at most 100000"));
    // Deep, but nothing in it: the compiler bears it.
    let error = refusal(&host, &nested(5000));
    assert!(error.contains("the component exports no `run`"), "{error}");
    let body = component(&format!("(core module (func {}))", many(8_000_000, "nop ")));
    let error = refusal(&host, &body);
    assert!(error.contains("the component is invalid"), "{error}");
    // A length that promises more than there is.
    let mut promise = b"\0asm\x0d\0\x01\0\x01\xff\xff\xff\xff\x0f".to_vec();
    promise.extend_from_slice(b"\0asm\x01\0\0\0");
    assert!(refusal(&host, &promise).contains("the component is invalid"));
}

/// Components within components.
fn nested(depth: usize) -> Vec<u8> {
    let begin = b"\0asm\x0d\0\x01\0".to_vec();
    (0..depth).fold(begin.clone(), |inner, _| {
        let mut length = inner.len();
        let mut outer = begin.clone();
        outer.push(4);
        while length >= 0x80 {
            outer.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        outer.push(length as u8);
        outer.extend(inner);
        outer
    })
}
