//! Components in the text format, for what no compiler emits; and what running them shows.

use nodus_sandbox::{Failure, Outcome};

use crate::support::{Job, Ran, sandbox};

pub(crate) fn parse(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// A component with these imports whose `run` has this body; it leaves a pointer to the result, and memory is zero: 0 is success.
pub(crate) fn component(imports: &str, run: &str) -> String {
    job(imports, run)
}

/// A component with these definitions before its own, whose `run` has this body.
pub(crate) fn job(before: &str, run: &str) -> String {
    with_core(before, "", "", run)
}

/// The same, whose core module also has these imports and fields; `instances` are passed when it is instantiated.
fn with_core(before: &str, instances: &str, core: &str, run: &str) -> String {
    format!(
        r#"(component
  {before}
  (core module $main
    {core}
    (memory (export "memory") 1)
    (func (export "run") (result i32) {run}))
  (core instance $main (instantiate $main {instances}))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))"#
    )
}

async fn run(text: &str) -> Ran {
    let component = sandbox().validate(&parse(text)).unwrap();
    Job::new("").limits(|limits| limits.cpu_stretch_ms = 100).run_component(&component).await
}

fn failure(ran: Ran) -> Failure {
    match ran.end.outcome {
        Outcome::Failed(failure) => failure,
        Outcome::Completed => panic!("it completed"),
    }
}

#[tokio::test]
async fn a_minimal_job_completes() {
    run(&job("", "i32.const 0")).await.completed();
}

#[tokio::test]
async fn each_trap_is_named() {
    for (body, name) in [
        ("unreachable", "wasm `unreachable` instruction executed"),
        ("(i32.load (i32.const -1))", "out of bounds memory access"),
        ("(i32.div_s (i32.const 1) (i32.const 0))", "integer divide by zero"),
        ("(i32.div_s (i32.const 0x80000000) (i32.const -1))", "integer overflow"),
    ] {
        let Failure::Trapped { trap, .. } = failure(run(&job("", body)).await) else { panic!("{body}") };
        assert!(trap.starts_with(name), "{trap}");
    }
    let recursion = with_core("", "", "(func $f (result i32) (call $f))", "call $f");
    let Failure::Trapped { trap, backtrace } = failure(run(&recursion).await) else { panic!() };
    assert!(trap.starts_with("call stack exhausted"), "{trap}");
    assert!(backtrace.len() <= 4, "{backtrace:?}");
}

#[tokio::test]
async fn a_result_outside_the_memory_or_of_no_case_is_a_trap() {
    for body in ["i32.const 65535", "i32.const -4", "(i32.store8 (i32.const 0) (i32.const 7)) i32.const 0"] {
        let ended = failure(run(&job("", body)).await);
        assert!(matches!(ended, Failure::Trapped { .. }), "{body}: {ended:?}");
    }
}

#[tokio::test]
async fn a_start_function_that_spins_is_stopped() {
    let text = job("(core module $s (func $f (loop (br 0))) (start $f)) (core instance (instantiate $s))", "i32.const 0");
    let ended = failure(run(&text).await);
    assert!(matches!(ended, Failure::CpuTime { limit: "cpu-stretch-ms", allowed: 100 }), "{ended:?}");
}

#[tokio::test]
async fn a_loop_of_bulk_copies_is_stopped() {
    let copy = "(loop (memory.fill (i32.const 0) (i32.const 0) (i32.const 65536)) (br 0)) i32.const 0";
    let ended = failure(run(&job("", copy)).await);
    assert!(matches!(ended, Failure::CpuTime { .. }), "{ended:?}");
}

#[tokio::test]
async fn several_memories_share_one_limit() {
    // Each may have 100 MiB alone; the third is refused, and says so by -1.
    let other = |i: u32| {
        format!(
            r#"(core module $o{i} (memory 0) (func (export "grow") (result i32) (memory.grow (i32.const 1600))))
               (core instance $o{i} (instantiate $o{i}))"#
        )
    };
    let before: String = (0..3).map(other).collect();
    let instances = r#"(with "o0" (instance $o0)) (with "o1" (instance $o1)) (with "o2" (instance $o2))"#;
    let imports = r#"(import "o0" "grow" (func $g0 (result i32))) (import "o1" "grow" (func $g1 (result i32)))
                     (import "o2" "grow" (func $g2 (result i32)))"#;
    let run_body = "(if (call $g0) (then unreachable)) (if (call $g1) (then unreachable))
                    (if (i32.ne (call $g2) (i32.const -1)) (then unreachable)) i32.const 0";
    let ran = run(&with_core(&before, instances, imports, run_body)).await;
    ran.completed();
    assert_eq!(ran.end.usage.guest_memory_bytes, (2 * 1600 + 1) << 16);
}

#[tokio::test]
async fn a_table_grows_to_its_limit_and_no_further() {
    let table = r#"(table $t 0 funcref)"#;
    let body = "(if (i32.ne (table.grow $t (ref.null func) (i32.const 100000)) (i32.const 0)) (then unreachable))
                (if (i32.ne (table.grow $t (ref.null func) (i32.const 1)) (i32.const -1)) (then unreachable)) i32.const 0";
    run(&with_core("", "", table, body)).await.completed();
}

const POLL: &str = r#"(import "wasi:io/poll@0.2.0" (instance $poll
    (export "pollable" (type $p (sub resource)))
    (export "[method]pollable.ready" (func (param "self" (borrow $p)) (result bool)))))
  (alias export $poll "pollable" (type $pollable))
  (core func $ready (canon lower (func $poll "[method]pollable.ready")))
  (core func $drop (canon resource.drop $pollable))"#;

#[tokio::test]
async fn forged_handles_are_traps() {
    let instances = r#"(with "p" (instance (export "ready" (func $ready)) (export "drop" (func $drop))))"#;
    let imports = r#"(import "p" "ready" (func $ready (param i32) (result i32))) (import "p" "drop" (func $drop (param i32)))"#;
    for handle in [0, 1, 12345, i32::MAX, -1] {
        for body in [format!("(call $ready (i32.const {handle}))"), format!("(call $drop (i32.const {handle})) i32.const 0")] {
            let ended = failure(run(&with_core(POLL, instances, imports, &body)).await);
            let Failure::Trapped { trap, .. } = &ended else { panic!("{body}: {ended:?}") };
            assert!(trap.contains("handle index"), "{trap}");
        }
    }
}

#[tokio::test]
async fn handles_leaked_where_no_error_can_be_answered_end_the_job() {
    let before = format!(
        r#"{POLL}
  (import "wasi:clocks/monotonic-clock@0.2.0" (instance $clock
    (alias outer 1 $pollable (type $pollable))
    (export "pollable" (type $q (eq $pollable)))
    (export "subscribe-duration" (func (param "when" u64) (result (own $q))))))
  (core func $subscribe (canon lower (func $clock "subscribe-duration")))"#
    );
    let instances = r#"(with "c" (instance (export "subscribe" (func $subscribe))))"#;
    let imports = r#"(import "c" "subscribe" (func $subscribe (param i64) (result i32)))"#;
    let body = "(loop (drop (call $subscribe (i64.const 1))) (br 0)) i32.const 0";
    let ended = failure(run(&with_core(&before, instances, imports, body)).await);
    assert!(matches!(ended, Failure::Handles { allowed: 10_000 }), "{ended:?}");
}

#[tokio::test]
async fn a_giant_request_for_random_bytes_ends_the_job() {
    let before = r#"(import "wasi:random/random@0.2.0" (instance $r (export "get-random-bytes" (func (param "len" u64) (result (list u8))))))
  (core module $alloc (memory (export "memory") 1) (func (export "realloc") (param i32 i32 i32 i32) (result i32) i32.const 64))
  (core instance $alloc (instantiate $alloc))
  (core func $bytes (canon lower (func $r "get-random-bytes") (memory (core memory $alloc "memory")) (realloc (core func $alloc "realloc"))))"#;
    let instances = r#"(with "r" (instance (export "bytes" (func $bytes))))"#;
    let imports = r#"(import "r" "bytes" (func $bytes (param i64 i32)))"#;
    let body = |count: u64| format!("(call $bytes (i64.const {count}) (i32.const 16)) i32.const 0");
    run(&with_core(before, instances, imports, &body(1000))).await.completed();
    let ended = failure(run(&with_core(before, instances, imports, &body(1 << 30))).await);
    assert!(matches!(ended, Failure::RandomBytes { needed: 0x4000_0000, allowed: 0x10_0000 }), "{ended:?}");
}

#[tokio::test]
async fn an_allocator_of_the_guest_that_lies_or_spins_harms_only_the_guest() {
    let before = |realloc: &str| {
        format!(
            r#"(import "nodus:gpu/job@0.1.0" (instance $j (export "params" (func (result string)))))
  (core module $alloc (memory (export "memory") 1) (func (export "realloc") (param i32 i32 i32 i32) (result i32) {realloc}))
  (core instance $alloc (instantiate $alloc))
  (core func $params (canon lower (func $j "params") (memory (core memory $alloc "memory")) (realloc (core func $alloc "realloc"))))"#
        )
    };
    let instances = r#"(with "j" (instance (export "params" (func $params))))"#;
    let imports = r#"(import "j" "params" (func $params (param i32)))"#;
    let body = "(call $params (i32.const 16)) i32.const 0";
    for (realloc, is_right) in [
        ("i32.const -1", (|f: &Failure| matches!(f, Failure::Trapped { .. })) as fn(&Failure) -> bool),
        ("unreachable", |f| matches!(f, Failure::Trapped { .. })),
        ("(loop (br 0)) i32.const 0", |f| matches!(f, Failure::CpuTime { .. })),
    ] {
        let component = sandbox().validate(&parse(&with_core(&before(realloc), instances, imports, body))).unwrap();
        let ran = Job::new("some parameters").limits(|limits| limits.cpu_stretch_ms = 100).run_component(&component).await;
        let ended = failure(ran);
        assert!(is_right(&ended), "{realloc}: {ended:?}");
    }
}

#[tokio::test]
async fn too_many_core_instances_do_not_start() {
    let many = "(core instance (instantiate $n))".repeat(64);
    let ended = failure(run(&job(&format!("(core module $n) {many}"), "i32.const 0")).await);
    assert!(matches!(ended, Failure::Instances { allowed: 64 }), "{ended:?}");
}

#[tokio::test]
async fn a_refused_growth_does_not_explain_a_later_fault() {
    let body = "(drop (memory.grow (i32.const 60000))) (i32.load (i32.const -1))";
    let ended = failure(run(&job("", body)).await);
    assert!(matches!(ended, Failure::Trapped { .. }), "{ended:?}");
}
