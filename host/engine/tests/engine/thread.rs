//! The engine's thread: several clients at once, its end, and its failure.

use std::time::Instant;

use nodus_engine::{Engine, Options};
use nodus_protocol::{Architecture, Client, Command, ErrorKind, JobSlot, LayerSelection, ModelConfig, Module, Reply};

use crate::broken::{Broken, How};
use crate::support::{TRUNK, all_linear, batch, bits, create, engine, lora, model, slot, tensors, train};

async fn job(client: Client, model: ModelConfig, number: u32) -> Vec<String> {
    let mut replies = vec![bits(&client.call(create(slot(number), all_linear(), Some(1))).await)];
    for key in 0..4 {
        replies.push(bits(&client.call(train(slot(number), &batch(&model, key, &[9, 4]))).await));
    }
    replies.push(bits(&client.call(Command::Export { slot: slot(number) }).await));
    replies
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn clients_at_once_get_what_each_gets_alone_and_share_passes() {
    let model = model(Architecture::Llama);
    let runtime = runtime();
    let alone = {
        let (client, handle) = engine(&model).spawn(8).unwrap();
        let replies = runtime.block_on(job(client, model.clone(), 0));
        handle.join().unwrap();
        replies
    };
    let (client, handle) = engine(&model).spawn(2).unwrap();
    assert!(handle.class(TRUNK).iter().any(|(name, _)| name == "backend"), "{:?}", handle.class(TRUNK));
    let together = runtime.block_on(async {
        let jobs: Vec<_> = (0..4).map(|number| tokio::spawn(job(client.clone(), model.clone(), number))).collect();
        let mut replies = Vec::new();
        for job in jobs {
            replies.push(job.await.unwrap());
        }
        replies
    });
    assert!(together.iter().all(|replies| replies == &alone));
    let counts = handle.counts();
    assert_eq!(counts.rows, 4 * 4 * 13);
    assert!(counts.passes < 16, "{} passes for 16 steps: nothing shared one", counts.passes);
    drop(client);
    handle.join().unwrap();
}

/// Times are those of the thread: all of a pass is booked, and without a thread nothing is.
#[test]
fn the_time_of_a_pass_is_booked_below_and_above_the_lowest_cut() {
    let model = model(Architecture::Llama);
    let high = lora(2, &[Module::DownProj], LayerSelection::Last(1));
    let (client, handle) = engine(&model).spawn(8).unwrap();
    let start = Instant::now();
    // The least of some passes: whoever else is on the machine only adds to one.
    let times = |config| {
        let before = handle.counts();
        let least = runtime().block_on(async {
            client.call(create(slot(0), config, None)).await.unwrap();
            let (mut least, mut so_far) = ((u64::MAX, u64::MAX), handle.counts());
            for _ in 0..20 {
                client.call(train(slot(0), &batch(&model, 1, &[60, 50]))).await.unwrap();
                let now = handle.counts();
                least = (least.0.min(now.trunk_ns - so_far.trunk_ns), least.1.min(now.above_ns - so_far.above_ns));
                so_far = now;
            }
            client.call(Command::DropJob { job: JobSlot(0) }).await.unwrap();
            least
        });
        let after = handle.counts();
        assert_eq!((after.members - before.members, after.passes - before.passes), (20, 20));
        assert!(after.step_ns > before.step_ns && after.forming_ns > before.forming_ns);
        least
    };
    let ((low_trunk, low_above), (high_trunk, high_above)) = (times(all_linear()), times(high));
    // With the cut at the bottom there is nothing below it but the embedding; with the cut at the top there is all but one layer's half.
    assert!(low_trunk < low_above / 4, "{low_trunk} below, {low_above} above");
    assert!(high_trunk > high_above / 4, "{high_trunk} below, {high_above} above");
    let counts = handle.counts();
    let booked = counts.trunk_ns + counts.above_ns + counts.step_ns + counts.forming_ns;
    assert!(u128::from(booked) <= start.elapsed().as_nanos(), "more time is booked than went by");
    drop(client);
    handle.join().unwrap();

    let mut without = engine(&model);
    without.execute(create(slot(0), all_linear(), None)).unwrap();
    without.execute(train(slot(0), &batch(&model, 1, &[9]))).unwrap();
    let counts = without.counts();
    assert_eq!([counts.trunk_ns, counts.above_ns, counts.step_ns, counts.forming_ns], [0; 4]);
}

#[test]
fn a_dropped_job_takes_its_waiting_commands_along() {
    let model = model(Architecture::Llama);
    let (client, handle) = engine(&model).spawn(64).unwrap();
    let baseline = handle.counts().allocated_bytes;
    runtime().block_on(async {
        client.call(create(slot(0), all_linear(), None)).await.unwrap();
        let mut waiting = Vec::new();
        for _ in 0..20 {
            waiting.push(client.send(train(slot(0), &batch(&model, 1, &[60; 8]))).await.unwrap());
        }
        assert!(matches!(client.call(Command::DropJob { job: JobSlot(0) }).await, Ok(Reply::Done)));
        let mut dropped = 0;
        for pending in waiting {
            dropped += usize::from(pending.await.is_err());
        }
        assert!(dropped > 0, "all ran");
    });
    drop(client);
    let counters = handle.counts();
    handle.join().unwrap();
    assert_eq!(counters.allocated_bytes, baseline);
}

/// A defect in the engine answers everything, also what comes later, and hangs nobody.
#[test]
fn a_panic_answers_everything() {
    for (how, says) in [(How::Panics, "internal error"), (How::Fails, "the device failed")] {
        let model = model(Architecture::Llama);
        let mut engine = Engine::new(Broken::new(how), Options::default());
        assert_eq!(engine.add_trunk(&model, &tensors(&model)).unwrap(), TRUNK);
        let (client, handle) = engine.spawn(8).unwrap();
        runtime().block_on(async {
            let first = client.send(create(slot(0), all_linear(), None)).await.unwrap();
            let second = client.send(create(slot(1), all_linear(), None)).await.unwrap();
            let third = client.call(create(slot(2), all_linear(), None)).await;
            for reply in [first.await, second.await, third] {
                let error = reply.unwrap_err();
                assert_eq!(error.kind, ErrorKind::DeviceLost);
                assert!(error.message.contains(says), "{error}");
            }
        });
        drop(client);
        assert_eq!(handle.join().unwrap_err().kind, ErrorKind::DeviceLost);
    }
}
