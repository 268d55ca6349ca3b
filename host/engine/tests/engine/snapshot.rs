//! A job taken out of one engine and put into another goes on with the same bits, wherever it stood.

use std::sync::Arc;

use nodus_engine::{Engine, Options};
use nodus_kernels::Device;
use nodus_protocol::{AdapterSlot, Batch, Command, JobSlot, JobState, LoraConfig, Reply, frame};

use crate::devices::{Cpu, Devices};
use crate::support::{
    TRUNK, all_linear, batch, bits, create, done, engine, engine_with, error, evaluate, forward_backward, llama, optim_step, slot, train,
};

const COHORT: Option<u64> = Some(5);

fn snapshot<D: Device>(engine: &mut Engine<D>, job: u32) -> JobState {
    match engine.execute(Command::Snapshot { job: JobSlot(job) }) {
        Ok(Reply::State(state)) => *state,
        other => panic!("{other:?}"),
    }
}

fn restore(state: JobState, job: u32) -> Command {
    Command::Restore { job: JobSlot(job), trunk: TRUNK, cohort: COHORT, state: Arc::new(state) }
}

/// The same command of another job.
fn of_job(command: &Command, job: u32) -> Command {
    let mut command = command.clone();
    match &mut command {
        Command::CreateAdapter { slot, .. }
        | Command::ForwardBackward { slot, .. }
        | Command::OptimStep { slot, .. }
        | Command::TrainStep { slot, .. }
        | Command::Evaluate { slot, .. }
        | Command::Export { slot }
        | Command::DropAdapter { slot } => slot.job = JobSlot(job),
        other => panic!("{other:?}"),
    }
    command
}

/// Two adapters, one of them made late and the other dropped; steps, accumulation over several batches, evaluations, dropout.
fn script() -> Vec<Command> {
    let model = llama();
    let batches: [Batch; 3] = [batch(&model, 1, &[9, 5]), batch(&model, 2, &[4]), batch(&model, 3, &[7, 7, 2])];
    let config = LoraConfig { dropout: 0.2, ..all_linear() };
    let second = AdapterSlot { index: 1, ..slot(0) };
    vec![
        create(slot(0), config.clone(), COHORT),
        train(slot(0), &batches[0]),
        forward_backward(slot(0), &batches[1]),
        forward_backward(slot(0), &batches[2]),
        optim_step(slot(0)),
        create(second, config, COHORT),
        evaluate(slot(0), &batches[0]),
        train(second, &batches[1]),
        train(slot(0), &batches[2]),
        Command::Export { slot: slot(0) },
        Command::DropAdapter { slot: slot(0) },
        train(second, &batches[0]),
        Command::Export { slot: second },
    ]
}

/// Stops a job before each of its commands, and lets it go on in another engine.
pub(crate) fn goes_on(devices: &impl Devices) {
    let model = llama();
    let open = || engine_with(&model, devices.open(2), Options::default());
    let mut whole = open();
    let expected: Vec<String> = script().into_iter().map(|command| bits(&whole.execute(command))).collect();
    devices.give_back(whole.into_device());
    for stop in 0..=script().len() {
        let mut first = open();
        for (command, expected) in script().iter().take(stop).zip(&expected) {
            assert_eq!(bits(&first.execute(command.clone())), *expected);
        }
        // Through the bytes that are kept.
        let kept = frame::encode(&snapshot(&mut first, 0)).unwrap();
        let mut second = open();
        done(second.execute(restore(frame::decode(&kept).unwrap(), 9)));
        assert_eq!(frame::encode(&snapshot(&mut second, 9)).unwrap(), kept, "{stop}");
        for (command, expected) in script().iter().zip(&expected).skip(stop) {
            assert_eq!(bits(&second.execute(of_job(command, 9))), *expected, "stopped before command {stop}");
        }
        // A snapshot takes nothing away.
        if let Some((command, expected)) = script().get(stop).zip(expected.get(stop)) {
            assert_eq!(bits(&first.execute(command.clone())), *expected);
        }
        devices.give_back(first.into_device());
        devices.give_back(second.into_device());
    }
}

#[test]
fn a_job_goes_on_elsewhere_with_the_same_bits_wherever_it_stood() {
    goes_on(&Cpu);
}

#[test]
fn a_state_that_fits_no_adapter_is_refused() {
    let model = llama();
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), COHORT)));
    let state = snapshot(&mut engine, 0);
    assert!(error(engine.execute(restore(state.clone(), 0))).message.contains("exists already"));
    let mut short = state;
    short.adapters[0].params.pop();
    let refused = error(engine.execute(restore(short, 1)));
    assert!(refused.message.contains("numbers, expected"), "{refused}");
}
