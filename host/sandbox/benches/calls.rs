//! What a call costs: one that the sandbox answers itself, one round trip to an engine's thread, and one start of a known component.

#[path = "../tests/sandbox/support.rs"]
#[expect(dead_code, clippy::unwrap_used, clippy::indexing_slicing, reason = "shared with the tests")]
mod support;

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use tokio::runtime::Runtime;

/// Runs a guest's behaviour so many times within one run, and says how long the run took.
fn run(runtime: &Runtime, behaviour: &str, times: u64, sockets: usize) -> Duration {
    let job = support::Job::new(&format!("{behaviour} {times}"));
    let job = match sockets {
        0 => job,
        1 => job.over_a_socket(),
        _ => job.over_two_sockets(),
    };
    let ran = runtime.block_on(job.run());
    ran.completed();
    ran.end.usage.wall_time
}

fn calls(criterion: &mut Criterion) {
    let Ok(runtime) = Runtime::new() else { return };
    support::guest();
    criterion.bench_function("a call that the sandbox answers itself", |bencher| {
        bencher.iter_custom(|times| run(&runtime, "calls", times, 0));
    });
    criterion.bench_function("a round trip to an engine thread (evaluate and wait)", |bencher| {
        bencher.iter_custom(|times| run(&runtime, "round-trips", times, 0));
    });
    criterion.bench_function("the same with the engine behind a socket", |bencher| {
        bencher.iter_custom(|times| run(&runtime, "round-trips", times, 1));
    });
    criterion.bench_function("the same with the engine behind two sockets", |bencher| {
        bencher.iter_custom(|times| run(&runtime, "round-trips", times, 2));
    });
    criterion.bench_function("start and end of a known component", |bencher| {
        bencher.iter_custom(|times| {
            let jobs: Vec<_> = (0..times).map(|_| support::Job::new("ok")).collect();
            let start = Instant::now();
            for job in jobs {
                runtime.block_on(job.run());
            }
            start.elapsed()
        });
    });
}

criterion_group!(benches, calls);
criterion_main!(benches);
