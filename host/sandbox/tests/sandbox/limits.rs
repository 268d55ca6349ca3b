//! Every limit, hit by a guest that goes for it: the failure is exactly the one that is documented.

use nodus_sandbox::services::{Event, Level};
use nodus_sandbox::{Failure, Limits, Outcome};

use crate::support::{Engine, Job, Ran};

async fn fails(params: &str, change: impl FnOnce(&mut Limits)) -> (Failure, Ran) {
    let mut ran = Job::new(params).limits(change).run().await;
    match std::mem::replace(&mut ran.end.outcome, Outcome::Completed) {
        Outcome::Failed(failure) => (failure, ran),
        Outcome::Completed => panic!("it completed"),
    }
}

#[tokio::test]
async fn parameters_are_refused_before_the_start() {
    let (failure, ran) = fails("ok and more", |limits| limits.parameter_bytes = 10).await;
    assert!(matches!(failure, Failure::ParameterBytes { needed: 11, allowed: 10 }), "{failure:?}");
    assert!(ran.end.usage.cpu_time.is_zero());
}

#[tokio::test]
async fn cpu_time_without_an_answer_of_the_engine() {
    let (failure, ran) = fails("spin", |limits| limits.cpu_stretch_ms = 100).await;
    assert!(matches!(failure, Failure::CpuTime { limit: "cpu-stretch-ms", allowed: 100 }), "{failure:?}");
    let used = ran.end.usage.cpu_time.as_millis();
    assert!((100..1000).contains(&used), "{used} ms");
}

#[tokio::test]
async fn cpu_time_in_all() {
    // Every answer of the engine begins a new stretch, and none is long.
    let (failure, _) = fails("work-between-steps", |limits| limits.cpu_ms = 300).await;
    assert!(matches!(failure, Failure::CpuTime { limit: "cpu-ms", allowed: 300 }), "{failure:?}");
}

#[tokio::test]
async fn waiting_for_the_engine_is_wall_time_and_not_cpu_time() {
    let job = Job::on(Engine::Silent, "train 1").limits(|limits| {
        limits.wall_ms = 700;
        limits.cpu_ms = 500;
    });
    let ran = job.run().await;
    assert!(matches!(ran.end.outcome, Outcome::Failed(Failure::WallTime { allowed: 700 })), "{:?}", ran.end);
    assert!(ran.end.usage.wall_time.as_millis() >= 700 && ran.end.usage.cpu_time.as_millis() < 300, "{:?}", ran.end.usage);
    assert_eq!(ran.commands.last().unwrap(), "drop-job 3");
}

#[tokio::test]
async fn memory_that_cannot_be_done_without() {
    let (failure, ran) = fails("alloc", |limits| limits.guest_memory_bytes = 32 << 20).await;
    assert!(matches!(failure, Failure::Memory { needed, allowed: 0x200_0000 } if needed > 32 << 20), "{failure:?}");
    assert!(ran.end.usage.guest_memory_bytes <= 32 << 20, "{:?}", ran.end.usage);
}

#[tokio::test]
async fn memory_that_can_be_done_without() {
    let ran = Job::new("try-alloc").limits(|limits| limits.guest_memory_bytes = 32 << 20).run().await;
    ran.completed();
    assert!((20.0..32.0).contains(&ran.metric("held")[0]), "{:?}", ran.metric("held"));
}

#[tokio::test]
async fn memory_below_what_the_component_starts_with() {
    let (failure, _) = fails("ok", |limits| limits.guest_memory_bytes = 1 << 16).await;
    assert!(matches!(failure, Failure::Memory { allowed: 0x1_0000, .. }), "{failure:?}");
}

#[tokio::test]
async fn bytes_of_one_call_and_of_the_result() {
    for params in ["log-bytes 100001", "result-bytes 100001"] {
        let (failure, _) = fails(params, |limits| limits.host_call_bytes = 100_000).await;
        assert!(matches!(failure, Failure::HostCallBytes { allowed: 100_000 }), "{params}: {failure:?}");
    }
    Job::new("log-bytes 90000").limits(|limits| limits.host_call_bytes = 100_000).run().await.completed();
}

#[tokio::test]
async fn a_long_error_of_the_guest_is_cut() {
    let ran = Job::new("result-bytes 1000000").run().await;
    assert_eq!(ran.returned().len(), nodus_sandbox::limits::MESSAGE_BYTES_MAX);
}

#[tokio::test]
async fn a_flood_of_output_is_dropped_and_the_job_goes_on() {
    let ran = Job::new("print 100000").limits(|limits| limits.log_bytes = 1000).run().await;
    ran.completed();
    assert_eq!(ran.metric("printed"), [100_000.0]);
    let usage = ran.end.usage;
    assert!(usage.log_bytes <= 1000 && usage.log_bytes > 900, "{usage:?}");
    let text: u64 = (0..100_000u32).map(|i| format!("line {i}\n").len() as u64).sum::<u64>() + "to the error stream\n".len() as u64;
    assert_eq!(usage.log_bytes + usage.log_bytes_dropped, text);
    let (level, last) = *ran.log().last().unwrap();
    assert_eq!(
        (level, last),
        (Level::Warn, format!("over the limit log-bytes or log-lines: {} dropped", usage.log_bytes_dropped).as_str())
    );
}

#[tokio::test]
async fn reports_beyond_their_number_are_dropped_and_counted() {
    let ran = Job::new("metrics 10")
        .limits(|limits| {
            limits.metrics = 4;
            limits.progress_reports = 3;
        })
        .run()
        .await;
    ran.completed();
    let metrics: Vec<_> =
        ran.events.iter().filter_map(|e| if let Event::Metric { name, .. } = e { Some(name.len()) } else { None }).collect();
    assert_eq!(metrics, [128; 4], "names are cut");
    assert_eq!(ran.events.iter().filter(|event| matches!(event, Event::Progress { .. })).count(), 3);
    assert_eq!(ran.end.usage.reports_dropped, 6 + 7);
}

/// Limits whose refusal is an answer: the guest hands on what it was told.
#[tokio::test]
async fn quotas_are_answers() {
    type Change = fn(&mut Limits);
    let cases: [(&str, Change, &str, u64, u64); 11] = [
        ("leak-batches", |limits| limits.handles = 20, "handles", 21, 20),
        ("leak-batches", |limits| limits.batch_bytes = 80, "batch-bytes", 88, 80),
        ("own-batches", |limits| limits.batch_bytes = 10_000, "batch-bytes", 4 * 2592, 10_000),
        ("text 1001", |limits| limits.text_bytes = 1000, "text-bytes", 1001, 1000),
        ("adapters", |limits| limits.adapters = 3, "adapters", 4, 3),
        // One is dropped before the others are made.
        ("adapters", |limits| limits.adapters_made = 3, "adapters-made", 4, 3),
        // Rank 2 on q (8+8) and v (8+4) of 2 layers: 112 weights of 16 bytes.
        ("adapters", |limits| limits.device_bytes = 4000, "device-bytes", 3 * 112 * 16, 4000),
        ("large-batch 50", |limits| limits.batch_tokens = 49, "batch-tokens", 50, 49),
        ("large-batch 50", |limits| limits.batch_sequences = 49, "batch-sequences", 50, 49),
        ("round-trips 5", |limits| limits.evaluations = 3, "evaluations", 4, 3),
        ("train 1", |limits| limits.datasets = 0, "datasets", 1, 0),
    ];
    for (params, change, limit, needed, allowed) in cases {
        let ran = Job::new(params).limits(change).run().await;
        let text = ran.returned();
        let expected = format!("quota-exceeded: Quota {{ limit: {limit:?}, needed: {needed}, allowed: {allowed} }}");
        let plain = text.replace("Error::QuotaExceeded(", "quota-exceeded: ").replace("QuotaExceeded(", "quota-exceeded: ");
        assert!(plain.contains(&expected), "{params}: {text}");
    }
}

#[tokio::test]
async fn artifacts_count_by_name_and_the_latest_of_each() {
    // 112 weights of 4 bytes.
    Job::new("save-twice").limits(|limits| limits.artifact_bytes = 2 * 448).run().await.completed();
    let ran = Job::new("save-twice").limits(|limits| limits.artifact_bytes = 2 * 448 - 1).run().await;
    assert!(ran.returned().contains("artifact-bytes") && ran.returned().contains("896"), "{}", ran.returned());
    let ran = Job::new("save-twice").limits(|limits| limits.artifacts = 1).run().await;
    assert!(ran.returned().contains("\"artifacts\""), "{}", ran.returned());
}
