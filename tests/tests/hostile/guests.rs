//! The hostile guests by file name, each with how the ledger calls its end and with what is said of it.
//!
//! A guest that is not there does not compile; one that is in no table fails a test.

use std::collections::BTreeSet;

use nodus_tests::root;

/// A guest: its file's name, its text, the ledger's code for its end, and what is said of it.
pub(crate) type Guest = (&'static str, &'static str, &'static str, &'static str);

macro_rules! guests {
    ($($name:ident: $code:literal, $expected:expr;)+) => {
        vec![$((stringify!($name), include_str!(concat!("../../hostile/", stringify!($name), ".wat")), $code, $expected)),+]
    };
}

const SPUN: &str = "over the limit cpu-stretch-ms: the component used 1000 ms of CPU time";
const UNREACHABLE: &str = "the component trapped: wasm `unreachable` instruction executed";
const OUTSIDE: &str = "the component trapped: string pointer/length out of bounds of memory";

/// Those that run, and fail by their own fault.
pub(crate) fn run_and_fail() -> Vec<Guest> {
    guests! {
        n01_infinite_loop: "cpu-stretch-ms", SPUN;
        n02_start_loop: "cpu-stretch-ms", SPUN;
        n03_realloc_loop: "cpu-stretch-ms", SPUN;
        n03_destructor_loop: "cpu-stretch-ms", SPUN;
        n03_post_return_loop: "cpu-stretch-ms", SPUN;
        n04_bulk_loop: "cpu-stretch-ms", SPUN;
        n06_zero_timeouts: "cpu-stretch-ms", SPUN;
        n10_memory_bomb: "guest-memory-bytes", "over the limit guest-memory-bytes: 268500992 needed, 268435456 allowed";
        n10_several_memories: "guest-memory-bytes", "over the limit guest-memory-bytes: 393281536 needed, 268435456 allowed";
        n11_table_bomb: "trapped", UNREACHABLE;
        n12_recursion: "trapped", "the component trapped: call stack exhausted: expected less recursion";
        n15_oversized_string: "host-call-bytes", "over the limit host-call-bytes: one call carried more than 16777216 bytes";
        n16_string_outside: "trapped", OUTSIDE;
        n16_string_wraps: "trapped", OUTSIDE;
        n16_no_utf8: "trapped", "the component trapped: invalid utf-8 sequence of 1 bytes from index 0";
        n16_misaligned_utf16: "trapped", "the component trapped: string pointer not aligned to 2";
        n16_lone_surrogate: "trapped", "the component trapped: unpaired surrogate found: d800";
        n17_no_such_case: "trapped", "the component trapped: unexpected discriminant: 9";
        n17_no_such_result: "trapped", "the component trapped: invalid expected discriminant";
        n18_realloc_outside: "trapped", "the component trapped: realloc return: beyond end of memory";
        n18_realloc_traps: "trapped", UNREACHABLE;
        n19_forged_handle: "trapped", "the component trapped: unknown handle index 12345";
        n19_handle_zero: "trapped", "the component trapped: unknown handle index 0";
        n19_double_drop: "trapped", "the component trapped: unknown handle index 1";
        n19_use_after_drop: "trapped", "the component trapped: unknown handle index 1";
        n20_handle_leak: "handles", "over the limit handles: more than 10000 resources at once";
        n24_callback: "trapped", "the component trapped: cannot enter component instance";
        n24_call_in_allocator: "trapped", "the component trapped: cannot leave component instance";
        n24_call_after_return: "trapped", "the component trapped: cannot leave component instance";
        n38_forged_log: "trapped", UNREACHABLE;
        n40_random_bytes: "random-bytes", "over the limit random-bytes: 1073741824 needed, 1048576 allowed";
    }
}

/// Those that are refused before anything starts; what is said stands within the error.
pub(crate) fn refused_at_upload() -> Vec<Guest> {
    guests! {
        n11_first_memory: "guest-memory-bytes", "the component needs 4294967296 guest-memory-bytes from the start, expected at most 268435456";
        n11_first_table: "table-elements", "the component needs 4294967295 table-elements from the start, expected at most 100000";
        n11_memory64: "component-invalid", "the component is invalid: ";
        n31_foreign_import: "component-foreign-imports", "the component imports what the host does not offer: wasi:http/outgoing-handler@0.2.0";
        n31_other_version: "component-foreign-imports", "the component imports what the host does not offer: nodus:gpu/job@0.2.0";
        n31_other_type: "component-wrong-import", "an import of the component does not fit the host: ";
        n31_no_run: "component-no-run", "the component exports no `run`";
    }
}

/// Those with a test of their own.
pub(crate) const FULL_DISK: (&str, &str) = ("n37_full_disk", include_str!("../../hostile/n37_full_disk.wat"));

/// A guest's bytes.
pub(crate) fn component((name, text): (&str, &str)) -> Vec<u8> {
    wat::parse_str(text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn every_guest_has_its_test() {
    let tables = run_and_fail().into_iter().chain(refused_at_upload()).map(|(name, ..)| name);
    let tested: BTreeSet<String> = tables.chain([FULL_DISK.0]).map(|name| format!("{name}.wat")).collect();
    let files = std::fs::read_dir(root().join("tests/hostile")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.filter(|name| name.ends_with(".wat")).collect::<BTreeSet<_>>(), tested);
}
