//! Device memory: what is dropped comes back, and a lack of it refuses the job that needs too much, and no other.

use nodus_engine::{Engine, Options};
use nodus_kernels::cpu::CpuDevice;
use nodus_protocol::{Architecture, Command, ErrorKind, JobSlot, LayerSelection, LoraConfig, ModelConfig, Module};

use crate::apart::Apart;
use crate::support::{
    all_linear, batch, bits, create, done, engine, engine_with, evaluate, forward_backward, lora, losses, model, optim_step, slot, step,
    train,
};

#[test]
fn dropping_adapters_and_jobs_gives_every_byte_back() {
    let model = model(Architecture::Llama);
    let mut engine = engine(&model);
    let baseline = engine.counts().allocated_bytes;
    for job in 0..3 {
        done(engine.execute(create(slot(job), all_linear(), Some(1))));
    }
    let held = engine.counts().allocated_bytes;
    step(engine.execute(train(slot(0), &batch(&model, 1, &[30, 4]))));
    losses(engine.execute(evaluate(slot(1), &batch(&model, 2, &[12]))));
    assert_eq!(engine.counts().allocated_bytes, held, "a pass keeps memory");
    done(engine.execute(Command::DropAdapter { slot: slot(0) }));
    assert_eq!(engine.counts().allocated_bytes - baseline, (held - baseline) / 3 * 2);
    done(engine.execute(Command::DropJob { job: JobSlot(1) }));
    done(engine.execute(Command::DropJob { job: JobSlot(2) }));
    assert_eq!(engine.counts().allocated_bytes, baseline);
}

fn limited(model: &ModelConfig, config: &LoraConfig, limit_bytes: u64) -> (Engine<CpuDevice>, u64) {
    let mut engine = engine_with(model, CpuDevice::with_memory_limit(1, limit_bytes).unwrap(), Options::default());
    done(engine.execute(create(slot(0), config.clone(), None)));
    let held = engine.counts().allocated_bytes;
    (engine, held)
}

/// At every limit a step either has the bits that it has with plenty, or is refused with the numbers, without effect.
#[test]
fn too_little_memory_refuses_without_effect() {
    for (architecture, targets) in
        [(Architecture::Llama, &Module::ALL[..]), (Architecture::Qwen3, &[Module::VProj]), (Architecture::Mistral, &[Module::DownProj])]
    {
        let model = model(architecture);
        let config = lora(4, targets, LayerSelection::All);
        let (long, short) = (batch(&model, 1, &[60, 40, 50]), batch(&model, 2, &[2]));
        let (mut plenty, held) = limited(&model, &config, u64::MAX);
        let expected = [bits(&plenty.execute(train(slot(0), &long))), bits(&plenty.execute(train(slot(0), &short)))];
        let (mut refused, mut granted) = (0, 0);
        for kilobytes in (30..900).step_by(30) {
            let (mut engine, _) = limited(&model, &config, held + kilobytes * 1024);
            match engine.execute(train(slot(0), &long)) {
                Ok(reply) => {
                    granted += 1;
                    assert_eq!([bits(&Ok(reply)), bits(&engine.execute(train(slot(0), &short)))], expected);
                }
                Err(error) => {
                    refused += 1;
                    assert_eq!(error.kind, ErrorKind::QuotaExceeded, "{error}");
                    assert!(error.message.contains("bytes asked for"), "{error}");
                    assert_eq!(engine.execute(optim_step(slot(0))).unwrap_err().kind, ErrorKind::InvalidArgument, "it had an effect");
                    assert_eq!(engine.counts().allocated_bytes, held);
                    losses(engine.execute(evaluate(slot(0), &short)));
                }
            }
        }
        assert!(refused > 2 && granted > 2, "{refused} refused, {granted} granted");
    }
}

/// The same for a cohort that fans out: each member has its bits or is refused, whether they fit into one pass or not.
#[test]
fn too_little_memory_for_a_cohort_refuses_members_without_effect() {
    let model = model(Architecture::Qwen3);
    let long = batch(&model, 1, &[60, 40, 50]);
    let configs = [
        lora(2, &[Module::QProj, Module::DownProj], LayerSelection::All),
        lora(4, &[Module::UpProj], LayerSelection::Last(2)),
        lora(3, &[Module::VProj], LayerSelection::Last(2)),
        lora(3, &[Module::DownProj], LayerSelection::Last(1)),
    ];
    let run = |limit_bytes: u64| {
        let mut engine = engine_with(&model, CpuDevice::with_memory_limit(1, limit_bytes).unwrap(), Options::default());
        for (job, config) in (0..).zip(&configs) {
            done(engine.execute(create(slot(job), config.clone(), Some(1))));
        }
        let held = engine.counts().allocated_bytes;
        let replies = engine.execute_all((0..4).map(|job| train(slot(job), &long)).collect());
        let counts = engine.counts();
        assert_eq!(counts.allocated_bytes - counts.trunk_cache.device_bytes, held, "a pass keeps memory");
        (held, replies, engine)
    };
    let (held, plenty, _) = run(u64::MAX);
    let (mut refused, mut granted, mut passes) = (0, 0, Vec::new());
    for kilobytes in (100..3600).step_by(125) {
        let (_, replies, mut engine) = run(held + kilobytes * 1024);
        passes.push(engine.counts().passes);
        for (job, (reply, expected)) in (0..).zip(replies.iter().zip(&plenty)) {
            match reply {
                Ok(_) => {
                    granted += 1;
                    assert_eq!(bits(reply), bits(expected));
                }
                Err(error) => {
                    refused += 1;
                    assert_eq!(error.kind, ErrorKind::QuotaExceeded, "{error}");
                    assert_eq!(engine.execute(optim_step(slot(job))).unwrap_err().kind, ErrorKind::InvalidArgument, "it had an effect");
                }
            }
        }
    }
    assert!(refused > 2 && granted > 2, "{refused} refused, {granted} granted");
    assert!(passes.contains(&1) && passes.iter().any(|passes| *passes > 1), "{passes:?}");
}

/// Where memory lacks for all in one pass they run in several; where one is too large by itself, only that one is refused.
#[test]
fn a_neighbour_is_not_seen_through_a_lack_of_memory() {
    let model = model(Architecture::Llama);
    let (small, large) = (batch(&model, 1, &[8]), batch(&model, 2, &[64; 40]));
    let mut engine = engine_with(&model, CpuDevice::with_memory_limit(1, 1 << 20).unwrap(), Options::default());
    let mut solo = crate::support::engine(&model);
    done(solo.execute(create(slot(0), all_linear(), None)));
    for job in 0..4 {
        done(engine.execute(create(slot(job), all_linear(), None)));
    }
    let medium = batch(&model, 3, &[30, 30]);
    let all = engine.execute_all((0..4).map(|job| forward_backward(slot(job), &medium)).collect());
    let alone = bits(&solo.execute(forward_backward(slot(0), &medium)));
    assert!(all.iter().all(|reply| bits(reply) == alone), "{all:?}");
    assert_eq!(engine.counts().passes, 2, "two and two fit, four do not");

    let mut both = engine.execute_all(vec![forward_backward(slot(0), &small), forward_backward(slot(1), &large)]);
    assert_eq!(both.pop().unwrap().unwrap_err().kind, ErrorKind::QuotaExceeded);
    assert_eq!(bits(&both[0]), bits(&solo.execute(forward_backward(slot(0), &small))));
}

#[test]
fn an_adapter_without_room_is_refused_and_leaves_nothing() {
    let model = model(Architecture::Llama);
    let mut engine = engine_with(&model, CpuDevice::with_memory_limit(1, 200_000).unwrap(), Options::default());
    let baseline = engine.counts().allocated_bytes;
    let refused = engine.execute(create(slot(0), lora(100, &Module::ALL, LayerSelection::All), None)).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::QuotaExceeded);
    assert_eq!(engine.counts().allocated_bytes, baseline);
    done(engine.execute(create(slot(0), lora(1, &[Module::QProj], LayerSelection::All), None)));
}

/// What a pass leaves may be there while passes of the same owners follow, and no longer.
#[test]
fn what_passes_leave_is_forgotten_before_anybody_elses_begins() {
    let model = model(Architecture::Llama);
    let mut engine = engine_with(&model, Apart::new(CpuDevice::new(1).unwrap()), Options::default());
    let config = lora(2, &[Module::QProj], LayerSelection::Last(1));
    for (job, cohort) in [(0, None), (1, None), (2, Some(1)), (3, Some(1))] {
        done(engine.execute(create(slot(job), config.clone(), cohort)));
    }
    let batch = batch(&model, 1, &[9]);
    let mut after = |jobs: &[u32]| {
        let replies = engine.execute_all(jobs.iter().map(|job| train(slot(*job), &batch)).collect());
        replies.into_iter().for_each(|reply| assert!(step(reply).loss > 0.0));
        engine.device().forgot
    };
    assert_eq!(after(&[0]), 0);
    assert_eq!(after(&[0]), 0, "the same job");
    assert_eq!(after(&[1]), 1, "another job");
    assert_eq!(after(&[2, 3]), 2, "a cohort");
    assert_eq!(after(&[3]), 2, "a member of it");
    assert_eq!(after(&[0, 1]), 3, "two jobs");
    assert_eq!(after(&[1, 0]), 3, "the same two");
    assert_eq!(after(&[0]), 4, "one of them");
    assert_eq!(after(&[0, 1]), 5, "both again");
    done(engine.execute(Command::DropJob { job: JobSlot(0) }));
    assert_eq!(engine.device().forgot, 6, "a job's end");
}
