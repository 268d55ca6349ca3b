//! How a job's end is told, and what a guest sees of the world.

use nodus_sandbox::services::{Event, Level};
use nodus_sandbox::{Failure, Limits, Outcome};

use crate::support::{Job, Ran, guest, sandbox};

fn failure(ran: &Ran) -> &Failure {
    match &ran.end.outcome {
        Outcome::Failed(failure) => failure,
        Outcome::Completed => panic!("it completed"),
    }
}

#[tokio::test]
async fn a_job_that_returns_completes() {
    let ran = Job::new("ok").run().await;
    ran.completed();
    assert!(ran.events.is_empty(), "{:?}", ran.events);
}

#[tokio::test]
async fn the_guests_own_error_is_told_in_its_words() {
    assert_eq!(Job::new("fail no more data").run().await.returned(), "no more data");
}

#[tokio::test]
async fn a_panic_is_told_with_its_place_and_message() {
    let ran = Job::new("panic 17 is no prime\nsecond line").run().await;
    let Failure::Panicked { message } = failure(&ran) else { panic!("{:?}", ran.end) };
    assert!(message.starts_with("src/lib.rs:") && message.ends_with(": 17 is no prime\nsecond line"), "{message}");
    assert!(ran.log().iter().any(|(level, line)| *level == Level::Warn && line.contains("panicked at")), "{:?}", ran.log());
}

#[tokio::test]
async fn exit_is_not_a_way_to_return() {
    for (params, expected) in [("exit 0", 0), ("exit 3", 1)] {
        let ran = Job::new(params).run().await;
        assert!(matches!(failure(&ran), Failure::Exited { code } if *code == expected), "{:?}", ran.end);
    }
}

#[tokio::test]
async fn recursion_is_a_trap() {
    let ran = Job::new("recurse").run().await;
    let Failure::Trapped { trap, .. } = failure(&ran) else { panic!("{:?}", ran.end) };
    assert!(trap.contains("stack"), "{trap}");
}

#[tokio::test]
async fn nothing_outside_is_in_reach() {
    Job::new("reach").run().await.completed();
}

#[tokio::test]
async fn output_becomes_lines_of_the_log() {
    let ran = Job::new("print 2").run().await;
    ran.completed();
    assert_eq!(ran.log(), [(Level::Info, "line 0"), (Level::Info, "line 1"), (Level::Warn, "to the error stream")]);
    // Lines come before the events that followed them.
    assert!(matches!(ran.events.last(), Some(Event::Metric { .. })), "{:?}", ran.events);
}

#[tokio::test]
async fn clocks_and_randomness_are_functions_of_the_seed() {
    let run = async |seed| {
        let mut job = Job::new("clock-and-random");
        job.spec.seed = seed;
        let start = std::time::Instant::now();
        let ran = job.run().await;
        ran.completed();
        assert!(start.elapsed().as_secs() < 30, "an hour's sleep is over at once");
        (ran.metric("seed"), ran.log().into_iter().map(|(_, line)| line.to_owned()).collect::<Vec<_>>())
    };
    let (seed, first) = run(7).await;
    assert_eq!((seed, &first), (vec![7.0], &run(7).await.1));
    let other = run(8).await.1;
    assert_ne!(first[0], other[0], "the hash keys come from the seed");
    assert_eq!(first[1], other[1], "the clock does not");
    assert!(first[0].starts_with("wall 1735689600.00"), "{first:?}");
    assert!(first[1].starts_with("slept 3600.00"), "{first:?}");
}

#[tokio::test]
async fn a_loop_that_watches_the_clock_ends() {
    Job::new("wait-on-clock").run().await.completed();
}

#[tokio::test]
async fn the_guest_reads_its_own_limits() {
    let ran = Job::new("limits").limits(|limits| limits.adapters = 5).run().await;
    ran.completed();
    let expected = Limits { adapters: 5, wall_ms: 60_000, ..Limits::DEFAULT };
    for (name, value) in expected.entries() {
        assert_eq!(ran.metric(name), [value as f64], "{name}");
    }
}

#[tokio::test]
async fn a_stop_request_is_seen_and_its_end_is_told_as_such() {
    let job = Job::new("until-stop");
    let stop = job.spec.stop.clone();
    let running = tokio::spawn(job.run());
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    stop.request();
    let ran = running.await.unwrap();
    assert_eq!(ran.noted, ran.end.stopped_at.into_iter().collect::<Vec<_>>(), "once, and before it was answered");
    assert!(matches!(failure(&ran), Failure::Cancelled(text) if text == "stopped early"), "{:?}", ran.end);
}

#[tokio::test]
async fn a_component_of_another_sandbox_is_our_own_mistake() {
    let other = nodus_sandbox::Sandbox::new(nodus_sandbox::SandboxOptions::default()).unwrap();
    let job = Job::new("ok");
    let end = guest().run(&other, job.spec, Box::new(job.services)).await;
    assert!(matches!(end.outcome, Outcome::Failed(Failure::Internal(_))), "{end:?}");
    drop(other);
    // The first sandbox's ticker is still at work.
    let ran = Job::new("spin").limits(|limits| limits.cpu_ms = 50).run().await;
    assert!(matches!(failure(&ran), Failure::CpuTime { .. }), "{:?}", ran.end);
    let _ = sandbox();
}

/// 25: it ends the task of its job, and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_the_hosts_own_code_ends_its_job_alone() {
    let alone = Job::new("train 20").run().await;
    let (job, beside) = (Job::new("step-and-open defect"), Job::new("train 20"));
    let commands = job.commands.clone();
    let (broken, beside) = tokio::join!(tokio::spawn(job.run()), tokio::spawn(beside.run()));
    assert!(broken.unwrap_err().is_panic());
    assert_eq!(beside.unwrap().events, alone.events);
    // The engine holds nothing of the job; nobody waits for that, so it may come a moment later.
    let began = std::time::Instant::now();
    while commands.lock().unwrap().last().is_none_or(|last| last != "drop-job 3") {
        assert!(began.elapsed().as_secs() < 30, "{commands:?}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    // No lock of the sandbox is poisoned.
    assert_eq!(Job::new("train 20").run().await.events, alone.events);
}
