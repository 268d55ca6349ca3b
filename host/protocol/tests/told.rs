//! What a client tells is held against what the engine answered it.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

use std::sync::Arc;

use nodus_protocol::wire::{Grants, connect, serve};
use nodus_protocol::{
    AdamW, AdapterSlot, AdapterWeights, Architecture, Batch, Client, Command, EngineError, ErrorKind, JobSlot, LayerSelection, LoraConfig,
    LossSums, ModelConfig, Module, Normalisation, Reply, Sequence, SequenceLoss, StepReport, TrunkSlot, channel,
};
use tokio::net::UnixStream;

const JOB: JobSlot = JobSlot(3);
const LOSS: SequenceLoss = SequenceLoss { loss_sum: 0.1, weight_sum: 1.0, labelled: 1 };

fn slot(index: u32) -> AdapterSlot {
    AdapterSlot { job: JOB, index }
}

fn report(step: u64) -> StepReport {
    let sums = LossSums { loss_sum: 1.0 / step as f64, weight_sum: 1.0, labelled: 1, sequences: 1 };
    StepReport { step, sums, loss: sums.mean(), grad_norm: 2.0 }
}

fn weights(alpha: f32) -> AdapterWeights {
    let config = LoraConfig {
        rank: 1,
        alpha,
        rslora: false,
        dropout: 0.0,
        targets: vec![Module::QProj],
        layers: LayerSelection::All,
        overrides: Vec::new(),
    };
    AdapterWeights { config, modules: Vec::new() }
}

/// An engine that counts steps (of adapter 9 it refuses them), answers every sequence by one loss, and exports what has the step count as
/// its alpha.
fn engine() -> Client {
    let (client, mut inbox) = channel(16);
    std::thread::spawn(move || {
        let mut steps = std::collections::BTreeMap::<u32, u64>::new();
        while let Some(request) = inbox.blocking_recv() {
            let reply = match &request.command {
                Command::OptimStep { slot: AdapterSlot { index: 9, .. }, .. } => Err(EngineError::new(ErrorKind::NonFinite, "NaN")),
                Command::OptimStep { slot, .. } => {
                    let step = steps.entry(slot.index).or_default();
                    *step += 1;
                    Ok(Reply::Step(report(*step)))
                }
                Command::Evaluate { batch, .. } => Ok(Reply::Loss(vec![LOSS; batch.sequences.len()])),
                Command::Export { slot } => Ok(Reply::Weights(Box::new(weights(steps[&slot.index] as f32)))),
                _ => Ok(Reply::Done),
            };
            request.answer(reply);
        }
    });
    client
}

fn served() -> (Client, Grants) {
    let (near, far) = UnixStream::pair().unwrap();
    let grants = Grants::default();
    grants.grant(JOB, engine(), vec![TrunkSlot(1)], None);
    let (reader, writer) = far.into_split();
    tokio::spawn(serve(reader, writer, grants.clone(), 1 << 16));
    let (reader, writer) = near.into_split();
    let (client, work) = connect(reader, writer);
    tokio::spawn(work);
    (client, grants)
}

async fn step(client: &Client, index: u32) -> Result<Reply, EngineError> {
    let optimiser = AdamW {
        learning_rate: 0.5,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: None,
        normalisation: Normalisation::WeightSum,
    };
    client.call(Command::OptimStep { slot: slot(index), optimiser }).await
}

async fn evaluate(client: &Client, first: usize, sequences: usize) -> Result<Reply, EngineError> {
    let sequence = Arc::new(Sequence::new(&model(), vec![1], vec![2], vec![1.0]).unwrap());
    let batch = Batch { sequences: vec![sequence; sequences] };
    client.call(Command::Evaluate { slot: slot(0), batch, first }).await
}

fn model() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 8,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 4,
        vocab_size: 300,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        sliding_window: None,
        qkv_bias: false,
        tie_word_embeddings: true,
        eos_token_id: None,
        bos_token_id: None,
    }
}

fn sums(sequences: usize) -> LossSums {
    let mut sums = LossSums::default();
    (0..sequences).for_each(|_| sums.add(&LOSS));
    sums
}

#[tokio::test]
async fn steps_are_told_in_order_and_bit_for_bit_or_not_at_all() {
    let (client, grants) = served();
    assert!(!grants.told_step(JOB, 0, &report(1), 0.5), "before it was asked for");
    for _ in 0..3 {
        step(&client, 0).await.unwrap();
    }
    assert!(!grants.is_all_told(JOB));
    assert!(grants.told_step(JOB, 0, &report(1), 0.5));
    assert!(grants.told_step(JOB, 0, &report(2), 0.5));
    assert!(!grants.told_step(JOB, 1, &report(3), 0.5), "of another adapter");
    assert!(grants.told_step(JOB, 0, &report(3), 0.5));
    assert!(grants.is_all_told(JOB));
    assert!(!grants.told_step(JOB, 0, &report(3), 0.5), "twice");
    for lie in [
        |report: &mut StepReport, _: &mut f32| report.step += 1,
        |report, _| report.loss = f32::from_bits(report.loss.to_bits() + 1),
        |report, _| report.grad_norm = -report.grad_norm,
        |report, _| report.sums.loss_sum += f64::EPSILON,
        |report, _| report.sums.labelled += 1,
        |_, learning_rate| *learning_rate = 0.25,
    ] as [fn(&mut StepReport, &mut f32); 6]
    {
        let Reply::Step(mut told) = step(&client, 0).await.unwrap() else { panic!("no step") };
        let mut learning_rate = 0.5;
        lie(&mut told, &mut learning_rate);
        assert!(!grants.told_step(JOB, 0, &told, learning_rate), "{told:?} {learning_rate}");
    }
    step(&client, 9).await.unwrap_err();
    assert!(grants.is_all_told(JOB) && !grants.told_step(JOB, 9, &report(1), 0.5), "a step that was refused is none");
}

#[tokio::test]
async fn evaluations_are_told_whole_and_after_the_steps_before_them() {
    let (client, grants) = served();
    evaluate(&client, 0, 2).await.unwrap();
    evaluate(&client, 2, 3).await.unwrap();
    assert!(!grants.told_evaluation(JOB, 0, 1, &sums(5)), "no step was taken");
    evaluate(&client, 0, 2).await.unwrap();
    evaluate(&client, 2, 3).await.unwrap();
    assert!(grants.told_evaluation(JOB, 0, 0, &sums(5)));
    evaluate(&client, 0, 4).await.unwrap();
    // One that a job left off is not told; the next is.
    evaluate(&client, 0, 1).await.unwrap();
    assert!(grants.told_evaluation(JOB, 0, 0, &sums(1)));
    assert!(!grants.told_evaluation(JOB, 0, 0, &sums(1)));
    step(&client, 0).await.unwrap();
    evaluate(&client, 0, 1).await.unwrap();
    assert!(!grants.told_evaluation(JOB, 0, 1, &sums(1)), "a step before it is kept back");
    step(&client, 0).await.unwrap();
    assert_eq!(evaluate(&client, 7, 1).await.unwrap_err(), EngineError::gone(), "a piece of nothing ends the connection");
}

#[tokio::test]
async fn weights_are_those_that_were_exported() {
    let (client, grants) = served();
    for adapter in [0, 0, 1, 2] {
        step(&client, adapter).await.unwrap();
    }
    for adapter in [0, 1, 2] {
        client.call(Command::Export { slot: slot(adapter) }).await.unwrap();
    }
    assert_eq!(grants.exported(JOB, &weights(2.0)), [(0, 2)]);
    assert_eq!(grants.exported(JOB, &weights(1.0)), [(1, 1), (2, 1)], "equal weights are told apart by nobody");
    assert_eq!(grants.exported(JOB, &weights(3.0)), []);
    assert_eq!(grants.exported(JobSlot(4), &weights(2.0)), []);
    grants.revoke(JOB);
    assert_eq!(grants.exported(JOB, &weights(2.0)), []);
}
