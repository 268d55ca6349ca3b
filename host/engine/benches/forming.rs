//! The time it takes to decide what runs next, for so many jobs that wait: it comes on top of every pass.

use std::collections::BTreeSet;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use nodus_engine::form::{Item, View, Work, decide};
use nodus_protocol::{AdapterSlot, JobSlot, TrunkSlot};

fn forming(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    for jobs in [1_u32, 16, 256] {
        let item = |job| {
            let adapter = AdapterSlot { job: JobSlot(job), index: 0 };
            Item { adapter, work: Work::Pass { trunk: TrunkSlot(0), rows: 192 }, is_urgent: false, sent_us: u64::from(job) }
        };
        let (items, previous): (Vec<Item>, BTreeSet<JobSlot>) = ((0..jobs).map(item).collect(), (0..jobs).map(JobSlot).collect());
        let view = View {
            items: &items,
            previous: Some((TrunkSlot(0), &previous)),
            previous_end_us: 0,
            now_us: 100,
            linger_us: 2_000,
            rows_max: 192 * jobs as usize,
        };
        group.bench_function(BenchmarkId::from_parameter(jobs), |bencher| bencher.iter(|| decide(black_box(&view))));
    }
    group.finish();
}

criterion_group!(benches, forming);
criterion_main!(benches);
