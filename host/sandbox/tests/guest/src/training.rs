//! The behaviours that need an engine.

use crate::nodus::gpu::data::{Batch, Dataset, Example};
use crate::nodus::gpu::training::{Adamw, Adapter, LayerSelection, LoraConfig, Normalisation};
use crate::nodus::gpu::trunk::Trunk;
use crate::nodus::gpu::types::Error;
use crate::nodus::gpu::{job, training};

/// Whatever the host answers as an error is told as it is.
fn told<T>(answer: Result<T, Error>) -> Result<T, String> {
    answer.map_err(|error| format!("{error:?}"))
}

pub fn config() -> LoraConfig {
    LoraConfig {
        rank: 2,
        alpha: 4.0,
        rslora: false,
        dropout: 0.0,
        targets: vec!["q_proj".into(), "v_proj".into()],
        layers: LayerSelection::All,
        overrides: Vec::new(),
    }
}

pub fn adamw(learning_rate: f32) -> Adamw {
    Adamw {
        learning_rate,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: None,
        normalisation: Normalisation::WeightSum,
    }
}

pub struct Setup {
    pub trunk: Trunk,
    pub train: Dataset,
    pub adapter: Adapter,
}

pub fn setup() -> Result<Setup, String> {
    let trunk = told(Trunk::open("model"))?;
    let train = told(Dataset::open("train", &trunk, None))?;
    let adapter = told(Adapter::create(&trunk, &config()))?;
    Ok(Setup { trunk, train, adapter })
}

pub fn run(name: &str, argument: &str) -> Result<(), String> {
    match name {
        "train" => train(argument.parse().unwrap()),
        "fire-and-forget" => fire_and_forget(argument.parse().unwrap()),
        "step-and-spin" => step_and_spin(),
        "work-between-steps" => work_between_steps(),
        "train-then-panic" => {
            let Setup { train, adapter, .. } = setup()?;
            let batch = told(train.batch(&[0]))?;
            drop(told(adapter.train_step(&batch, adamw(0.1)))?);
            panic!("after a step");
        }
        "wait-twice" => {
            let Setup { train, adapter, .. } = setup()?;
            let pending = told(adapter.evaluate(&told(train.batch(&[0]))?))?;
            told(pending.wait())?;
            told(pending.wait()).map(drop)
        }
        "two-adapters" => two_adapters(),
        "outlive" => outlive(),
        "poisoned" => poisoned(),
        "save" => told(setup()?.adapter.save(argument)).map(drop),
        "save-twice" => {
            let adapter = setup()?.adapter;
            told(adapter.save("a"))?;
            told(adapter.save("a"))?;
            told(adapter.save("b")).map(drop)
        }
        "load" => {
            let Setup { trunk, adapter, .. } = setup()?;
            let digest = told(adapter.save("adapter"))?;
            let again = told(Adapter::load(&trunk, &digest))?;
            job::metric("rank", 0, f64::from(again.config().rank));
            told(Adapter::load(&trunk, argument)).map(drop)
        }
        "adapters" => {
            let Setup { trunk, adapter, .. } = setup()?;
            drop(adapter);
            let mut held = Vec::new();
            loop {
                held.push(Adapter::create(&trunk, &config()).map_err(|error| format!("after {}: {error:?}", held.len()))?);
            }
        }
        "evaluate-all" => evaluate_all(argument.parse().unwrap()),
        "large-batch" => {
            let Setup { train, adapter, .. } = setup()?;
            let batch = told(train.batch(&vec![0; argument.parse().unwrap()]))?;
            told(adapter.forward_backward(&batch)).map(drop)
        }
        "own-batches" => own_batches(),
        "open" => told(Trunk::open(argument)).map(drop),
        "step-and-open" => {
            let Setup { train, adapter, .. } = setup()?;
            drop(told(adapter.train_step(&told(train.batch(&[0]))?, adamw(0.1)))?);
            told(Trunk::open(argument)).map(drop)
        }
        "mistakes" => mistakes(),
        "round-trips" => {
            let Setup { train, adapter, .. } = setup()?;
            let batch = told(train.batch(&[0]))?;
            for _ in 0..argument.parse::<u64>().unwrap() {
                told(told(adapter.evaluate(&batch))?.wait())?;
            }
            Ok(())
        }
        _ => Err(format!("no behaviour `{name}`")),
    }
}

fn train(steps: u64) -> Result<(), String> {
    let Setup { train, adapter, .. } = setup()?;
    for step in 0..steps {
        let batch = told(train.batch(&[step % train.info().examples]))?;
        let report = told(told(adapter.train_step(&batch, adamw(0.5)))?.wait())?;
        job::metric("loss", report.step, f64::from(report.loss));
    }
    told(told(adapter.evaluate(&told(train.batch(&[0, 1]))?))?.wait())?;
    told(adapter.save("adapter")).map(drop)
}

fn fire_and_forget(steps: u64) -> Result<(), String> {
    let Setup { train, adapter, .. } = setup()?;
    let batch = told(train.batch(&[0]))?;
    for step in 0..steps {
        drop(told(adapter.train_step(&batch, adamw(step as f32)))?);
        drop(told(adapter.evaluate(&batch))?);
    }
    // Neither waited for nor dropped: the job ends with the handles alive.
    std::mem::forget(told(adapter.evaluate(&batch))?);
    std::mem::forget(adapter);
    Ok(())
}

fn step_and_spin() -> Result<(), String> {
    let Setup { train, adapter, .. } = setup()?;
    let batch = told(train.batch(&[0]))?;
    told(told(adapter.train_step(&batch, adamw(0.5)))?.wait())?;
    loop {
        std::hint::black_box(());
    }
}

fn work_between_steps() -> Result<(), String> {
    let Setup { train, adapter, .. } = setup()?;
    let batch = told(train.batch(&[0]))?;
    loop {
        for i in 0..2_000_000u64 {
            std::hint::black_box(i);
        }
        told(told(adapter.evaluate(&batch))?.wait())?;
    }
}

fn two_adapters() -> Result<(), String> {
    let Setup { trunk, train, adapter: first } = setup()?;
    let second = told(Adapter::create(&trunk, &config()))?;
    let batch = told(train.batch(&[0]))?;
    let a = told(first.train_step(&batch, adamw(0.25)))?;
    let b = told(second.train_step(&batch, adamw(0.5)))?;
    let c = told(first.train_step(&batch, adamw(0.75)))?;
    told(b.wait())?;
    // The later call first: its adapter's earlier one is told before it.
    job::metric("step", 0, told(c.wait())?.step as f64);
    job::metric("step", 1, told(a.wait())?.step as f64);
    Ok(())
}

fn outlive() -> Result<(), String> {
    let Setup { train, adapter, .. } = setup()?;
    let pending = told(adapter.train_step(&told(train.batch(&[0]))?, adamw(0.5)))?;
    drop(adapter);
    job::metric("step", 0, told(pending.wait())?.step as f64);
    Ok(())
}

fn poisoned() -> Result<(), String> {
    let Setup { train, adapter, .. } = setup()?;
    let batch = told(train.batch(&[0]))?;
    let first = told(adapter.train_step(&batch, adamw(0.5)))?.wait();
    job::log(job::Level::Info, &format!("{first:?}"));
    job::log(job::Level::Info, &format!("{:?}", adapter.evaluate(&batch).err()));
    told(adapter.save("adapter")).map(drop)
}

fn evaluate_all(copies: usize) -> Result<(), String> {
    let Setup { train, adapter, .. } = setup()?;
    let indices: Vec<u64> = (0..train.info().examples).cycle().take(copies).collect();
    let sums = told(told(adapter.evaluate(&told(train.batch(&indices))?))?.wait())?;
    job::log(job::Level::Info, &format!("{:016x} {}", sums.loss_sum.to_bits(), sums.sequences));
    Ok(())
}

fn own_batches() -> Result<(), String> {
    let Setup { trunk, .. } = setup()?;
    let example = Example { tokens: vec![1; 100], targets: vec![2; 100], weights: vec![1.0; 100] };
    let mut held = Vec::new();
    loop {
        match Batch::from_examples(&trunk, &[example.clone(), example.clone()]) {
            Ok(batch) => held.push(batch),
            Err(error) => return Err(format!("after {}: {error:?}", held.len())),
        }
    }
}

/// Tells the error of every call that is wrong.
fn mistakes() -> Result<(), String> {
    let Setup { trunk, train, adapter } = setup()?;
    let tell = |what: &str, error: Option<Error>| job::log(job::Level::Info, &format!("{what}: {error:?}"));
    let batch = told(train.batch(&[0]))?;
    let unlabelled = Example { tokens: vec![1], targets: vec![2], weights: vec![0.0] };
    let unlabelled = told(Batch::from_examples(&trunk, &[unlabelled]))?;
    let example = |token, weight| Example { tokens: vec![token], targets: vec![1], weights: vec![weight] };
    tell("trunk", Trunk::open("other").err());
    tell("dataset", Dataset::open("other", &trunk, None).err());
    tell("short", Dataset::open("train", &trunk, Some(1)).err());
    tell("long", Dataset::open("train", &trunk, Some(1000)).err());
    tell("no indices", train.batch(&[]).err());
    tell("index", train.batch(&[0, 99]).err());
    tell("example", train.example(99).err());
    tell("token", Batch::from_examples(&trunk, &[example(1, 1.0), example(1000, 1.0)]).err());
    tell("weight", Batch::from_examples(&trunk, &[example(1, f32::NAN)]).err());
    tell("rank", Adapter::create(&trunk, &LoraConfig { rank: 0, ..config() }).err());
    tell("target", Adapter::create(&trunk, &LoraConfig { targets: vec!["head".into()], ..config() }).err());
    let overrides = vec![training::ModuleOverride { module: "q_proj".into(), rank: None, alpha: None }; 100];
    tell("overrides", Adapter::create(&trunk, &LoraConfig { overrides, ..config() }).err());
    tell("digest", Adapter::load(&trunk, "sha256:xyz").err());
    tell("nothing", adapter.optim_step(adamw(0.1)).err());
    tell("beta", adapter.train_step(&batch, Adamw { beta1: 1.0, ..adamw(0.1) }).err());
    tell("zero weights", adapter.train_step(&unlabelled, adamw(0.1)).err());
    told(told(adapter.forward_backward(&unlabelled))?.wait())?;
    tell("zero weights accumulated", adapter.optim_step(adamw(0.1)).err());
    told(told(adapter.forward_backward(&batch))?.wait())?;
    tell("now fine", adapter.optim_step(adamw(0.1)).map(drop).err());
    tell("name", adapter.save("../adapter").err());
    Ok(())
}
