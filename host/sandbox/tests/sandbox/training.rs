//! Training calls: what the engine is asked, what is told, and that nothing is left behind.

use std::time::Duration;

use nodus_sandbox::services::Event;
use nodus_sandbox::{Failure, Outcome};

use crate::support::{Engine, Job, Ran};

/// Steps, evaluations and saves, each in short.
fn told(ran: &Ran) -> Vec<String> {
    let short = |event: &Event| match event {
        Event::Step { adapter, report, learning_rate } => Some(format!("step {} of {adapter} at {learning_rate}", report.step)),
        Event::Evaluation { adapter, step, data, sums } => {
            Some(format!("evaluation of {adapter} on {} after {step}: {}", data.name(), sums.sequences))
        }
        Event::Saved { adapter, step, name, .. } => Some(format!("saved {adapter} after {step} as {name}")),
        _ => None,
    };
    ran.events.iter().filter_map(short).collect()
}

#[tokio::test]
async fn a_training_job_tells_its_steps_and_leaves_nothing_behind() {
    let ran = Job::new("train 2").run().await;
    ran.completed();
    let expected = ["step 1 of 0 at 0.5", "step 2 of 0 at 0.5", "evaluation of 0 on train after 2: 2", "saved 0 after 2 as adapter"];
    assert_eq!(told(&ran), expected);
    assert_eq!(ran.metric("loss"), [1.0, 0.5]);
    assert_eq!(ran.commands, ["create 0", "step 0", "step 0", "evaluate 0 3", "export 0", "drop-adapter 0", "drop-job 3"]);
    assert_eq!(ran.end.usage.artifact_bytes, 448);
}

#[tokio::test]
async fn calls_nobody_waits_for_are_told_in_order() {
    // More calls than may be on their way, so that some are told before the end.
    let ran = Job::new("fire-and-forget 5").limits(|limits| limits.calls_in_flight = 3).run().await;
    ran.completed();
    let mut expected = Vec::new();
    for step in 1..=5 {
        expected.push(format!("step {step} of 0 at {}", step - 1));
        expected.push(format!("evaluation of 0 on train after {step}: 1"));
    }
    expected.push("evaluation of 0 on train after 5: 1".into());
    assert_eq!(told(&ran), expected);
}

#[tokio::test]
async fn steps_are_told_even_if_the_guest_panics() {
    let ran = Job::new("train-then-panic").run().await;
    assert!(matches!(ran.end.outcome, Outcome::Failed(Failure::Panicked { .. })), "{:?}", ran.end);
    assert_eq!(told(&ran), ["step 1 of 0 at 0.1"]);
    assert_eq!(ran.commands.last().unwrap(), "drop-job 3");
}

#[tokio::test]
async fn a_job_cut_off_by_its_cpu_time_leaves_nothing_behind() {
    let ran = Job::new("step-and-spin").limits(|limits| limits.cpu_stretch_ms = 100).run().await;
    assert!(matches!(ran.end.outcome, Outcome::Failed(Failure::CpuTime { .. })), "{:?}", ran.end);
    assert_eq!(told(&ran), ["step 1 of 0 at 0.5"]);
    assert_eq!(ran.commands.last().unwrap(), "drop-job 3");
}

#[tokio::test]
async fn adapters_keep_their_own_order_and_a_wait_tells_what_came_before_it() {
    let ran = Job::new("two-adapters").run().await;
    ran.completed();
    assert_eq!(told(&ran), ["step 1 of 1 at 0.5", "step 1 of 0 at 0.25", "step 2 of 0 at 0.75"]);
    assert_eq!(ran.metric("step"), [2.0, 1.0]);
}

#[tokio::test]
async fn an_answer_outlives_its_adapter() {
    let ran = Job::new("outlive").run().await;
    ran.completed();
    assert_eq!(ran.metric("step"), [1.0]);
    assert_eq!(ran.commands, ["create 0", "step 0", "drop-adapter 0", "drop-job 3"]);
}

#[tokio::test]
async fn an_answer_is_taken_once() {
    let ran = Job::new("wait-twice").run().await;
    assert!(ran.returned().contains("already taken by an earlier wait"), "{}", ran.returned());
}

#[tokio::test]
async fn a_non_finite_adapter_answers_the_same_ever_after_and_is_never_saved() {
    let ran = Job::on(Engine::NonFinite, "poisoned").run().await;
    assert!(ran.returned().contains("NonFinite(\"the loss is NaN at step 1\")"), "{}", ran.returned());
    let log = ran.log();
    assert!(log.len() == 2 && log.iter().all(|(_, line)| line.contains("the loss is NaN at step 1")), "{log:?}");
    assert!(told(&ran).is_empty() && !ran.commands.contains(&"export 0".to_owned()), "{:?}", ran.commands);
}

#[tokio::test]
async fn a_defect_of_the_engine_is_ours_and_not_the_guests() {
    let ran = Job::on(Engine::Defective, "evaluate-all 2").run().await;
    let Outcome::Failed(failure @ Failure::Internal(_)) = &ran.end.outcome else { panic!("{:?}", ran.end) };
    assert_eq!(failure.to_string(), "internal error of the host");
    assert_eq!(ran.commands.last().unwrap(), "drop-job 3");
}

#[tokio::test]
async fn a_failure_of_the_services_is_ours_and_the_guest_never_reads_it() {
    let ran = Job::new("open broken").run().await;
    let Outcome::Failed(failure @ Failure::Internal(cause)) = &ran.end.outcome else { panic!("{:?}", ran.end) };
    assert!(cause.to_string().contains("input/output error"), "{cause}");
    assert_eq!((failure.code(), failure.to_string().as_str()), ("internal", "internal error of the host"));
}

#[tokio::test]
async fn a_large_evaluation_is_split_with_equal_bits_and_told_once() {
    // Examples have 1 to 10 rows, and each counts as 128 of the 2048 of a piece.
    let pieces =
        |ran: &Ran| -> Vec<u64> { ran.commands.iter().filter_map(|command| command.strip_prefix("evaluate 0 ")?.parse().ok()).collect() };
    let large = Job::new("evaluate-all 75").run().await;
    large.completed();
    assert_eq!(told(&large), ["evaluation of 0 on train after 0: 75"]);
    assert_eq!((pieces(&large).len(), pieces(&large).iter().sum::<u64>()), (5, 7 * 55 + 15));
    let whole = Job::new("evaluate-all 25").run().await;
    let split = Job::new("evaluate-all 25").limits(|limits| limits.batch_tokens = 12).run().await;
    for ran in [&whole, &split] {
        ran.completed();
        assert_eq!(told(ran), ["evaluation of 0 on train after 0: 25"]);
    }
    assert_eq!(whole.log(), split.log());
    assert_eq!((pieces(&whole).len(), pieces(&split).len()), (2, 25));
    let firsts = |ran: &Ran| ran.commands.iter().filter_map(|command| command.strip_prefix("from ")?.parse().ok()).collect::<Vec<u64>>();
    assert_eq!((firsts(&whole), firsts(&split)), (vec![16], (1..25).collect()));
    let done = |ran: &Ran| {
        let of = |event: &Event| if let Event::Evaluating { done, total: 25 } = event { Some(*done) } else { None };
        ran.events.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert!(done(&whole).is_empty() && done(&split).is_sorted() && done(&split).len() == 25, "{:?}", done(&split));
    assert_eq!(done(&split).last(), Some(&25));
}

#[tokio::test]
async fn a_stop_ends_a_long_evaluation_after_the_pieces_that_are_under_way() {
    let job = Job::new("evaluate-all 25").limits(|limits| limits.batch_tokens = 12);
    job.spec.stop.request();
    let ran = job.run().await;
    assert!(matches!(&ran.end.outcome, Outcome::Failed(Failure::Cancelled(text)) if text.contains("Cancelled")), "{:?}", ran.end);
    assert!(told(&ran).is_empty(), "half an evaluation is none");
    assert_eq!(ran.commands.iter().filter(|command| command.starts_with("evaluate ")).count(), 2);
    assert_eq!(ran.commands.last().unwrap(), "drop-job 3");
    assert_eq!((ran.end.stopped_at, ran.noted), (Some(1), vec![1]));
}

#[tokio::test]
async fn saved_adapters_load_again_and_others_are_not_there() {
    let foreign = nodus_protocol::Digest::of(b"somebody else's");
    let ran = Job::new(&format!("load {foreign}")).run().await;
    assert_eq!(ran.metric("rank"), [2.0]);
    assert!(ran.returned().contains("NotFound"), "{}", ran.returned());
    assert!(ran.commands.contains(&"load 1".to_owned()), "{:?}", ran.commands);
}

#[tokio::test]
async fn names_of_artifacts_are_plain() {
    for good in ["adapter", "best-2.a_B"] {
        Job::new(&format!("save {good}")).run().await.completed();
    }
    for bad in ["", ".", "..", ".hidden", "a/b", "a b", "\u{e9}", &"x".repeat(65)] {
        let ran = Job::new(&format!("save {bad}")).run().await;
        assert!(ran.returned().contains("InvalidArgument") && ran.returned().contains("expected 1 to 64"), "{bad}: {}", ran.returned());
        assert!(!ran.commands.contains(&"export 0".to_owned()));
    }
}

#[tokio::test]
async fn every_mistake_is_answered_with_what_would_be_right() {
    let ran = Job::new("mistakes").run().await;
    ran.completed();
    let expected = [
        ("trunk", "NotFound(\"trunk `other`\")"),
        ("dataset", "NotFound(\"data set `other`\")"),
        ("short", "max-length is 1, expected 2 to 128, the trunk's context"),
        ("long", "max-length is 1000, expected 2 to 128, the trunk's context"),
        ("no indices", "indices is empty, expected at least one"),
        ("index", "indices[1] is 99, expected below 10, the number of examples"),
        ("example", "index is 99, expected below 10, the number of examples"),
        ("token", "examples[1]: tokens[0] is 1000, expected below the vocabulary of 100"),
        ("weight", "examples[0]: weights[0] is NaN, expected a finite number, 0 or more"),
        ("rank", "rank is 0, expected 1 to 512"),
        ("target", "targets: `head` is no linear module: expected one of"),
        ("overrides", "overrides has 100 entries, expected at most 14, the number of linear modules"),
        ("digest", "`sha256:xyz` is no digest"),
        ("nothing", "nothing is accumulated, expected a forward-backward before optim-step"),
        ("beta", "beta1 is 1, expected 0 to below 1"),
        ("zero weights", "sum to zero, expected at least one above 0"),
        ("zero weights accumulated", "sum to zero, expected at least one above 0"),
        ("now fine", "None"),
        ("name", "name is \\\"../adapter\\\", expected 1 to 64"),
    ];
    let log = ran.log();
    assert_eq!(log.len(), expected.len(), "{log:#?}");
    for ((_, line), (what, text)) in log.iter().zip(expected) {
        assert!(line.starts_with(&format!("{what}: ")) && line.contains(text), "{what}: {line}");
    }
}

#[tokio::test]
async fn a_job_cannot_tell_an_engine_behind_a_socket() {
    for params in ["train 5", "two-adapters", "save-twice", "load", "wait-twice"] {
        let near = Job::new(params).run().await;
        for far in [Job::new(params).over_a_socket(), Job::new(params).over_two_sockets()] {
            let far = far.run().await;
            assert_eq!(format!("{:?}", near.events), format!("{:?}", far.events), "{params}");
            assert_eq!(format!("{:?}", near.end.outcome), format!("{:?}", far.end.outcome), "{params}");
            // The connection's end gives the job up once more, perhaps by now.
            let (same, more) = far.commands.split_at(near.commands.len());
            assert_eq!(near.commands, same, "{params}");
            assert!(more.iter().all(|command| command == "drop-job 3"), "{params}: {more:?}");
        }
    }
}

#[tokio::test]
async fn a_dropped_run_has_the_engine_give_up_everything() {
    let job = Job::on(Engine::Silent, "train 1");
    let commands = job.commands.clone();
    let seen = |wanted: &str| commands.lock().unwrap().iter().any(|command| command == wanted);
    let running = tokio::spawn(job.run());
    wait_until(|| seen("step 0")).await;
    assert!(!seen("drop-job 3"));
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    wait_until(|| seen("drop-job 3")).await;
}

async fn wait_until(condition: impl Fn() -> bool) {
    for _ in 0..500 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not happen within 5 seconds");
}
