//! Calls every function of the contract with words that others may own, and logs each answer as `interface.function(word) = answer`.
//!
//! A function without a place for a word is called as it is.

use std::fmt::Debug;

use crate::nodus::gpu::data::{Batch, Dataset, Example};
use crate::nodus::gpu::job;
use crate::nodus::gpu::training::{Adapter, LoraConfig, ModuleOverride};
use crate::nodus::gpu::trunk::{Message, Trunk};
use crate::nodus::gpu::types::Error;
use crate::training::{Setup, adamw, config, setup};

/// Of what was made, nothing is told but that it was.
fn made<T>(answer: Result<T, Error>) -> Result<(), Error> {
    answer.map(drop)
}

/// `words` are set apart by spaces.
pub fn run(words: &str) -> Result<(), String> {
    for word in words.split(' ') {
        let tell = |function: &str, answer: &dyn Debug| job::log(job::Level::Info, &format!("{function}({word}) = {answer:?}"));
        of_trunk_and_data(word, &tell)?;
        of_training(word, &tell)?;
        of_job(word, &tell);
    }
    // What is shown of an end is the guest's own text, too.
    Err("\u{1b}[31mred\r\n\u{7}\u{9b}31mred".to_owned())
}

fn of_trunk_and_data(word: &str, tell: &dyn Fn(&str, &dyn Debug)) -> Result<(), String> {
    let Setup { trunk, train, .. } = setup()?;
    tell("trunk.trunk.open", &made(Trunk::open(word)));
    tell("trunk.trunk.info", &trunk.info());
    tell("trunk.trunk.encode", &trunk.encode(word));
    tell("trunk.trunk.decode", &trunk.decode(&[1, 2]));
    let message = Message { role: word.to_owned(), content: word.to_owned() };
    tell("trunk.trunk.apply-chat-template", &trunk.apply_chat_template(&[message], true));
    tell("data.dataset.open", &made(Dataset::open(word, &trunk, None)));
    tell("data.dataset.info", &train.info());
    tell("data.dataset.batch", &made(train.batch(&[0, u64::MAX])));
    tell("data.dataset.example", &train.example(u64::MAX).map(|example| example.tokens));
    let example = Example { tokens: vec![1], targets: vec![2], weights: vec![1.0] };
    let own = Batch::from_examples(&trunk, &[example]);
    tell("data.batch.from-examples", &own.as_ref().map(drop));
    let own = own.map_err(|error| format!("{error:?}"))?;
    tell("data.batch.sequences", &own.sequences());
    tell("data.batch.tokens", &own.tokens());
    tell("data.batch.labelled-tokens", &own.labelled_tokens());
    Ok(())
}

fn of_training(word: &str, tell: &dyn Fn(&str, &dyn Debug)) -> Result<(), String> {
    let Setup { trunk, train, adapter } = setup()?;
    let batch = train.batch(&[0]).map_err(|error| format!("{error:?}"))?;
    let overrides = vec![ModuleOverride { module: word.to_owned(), rank: None, alpha: None }];
    let foreign = LoraConfig { targets: vec![word.to_owned()], overrides, ..config() };
    tell("training.adapter.create", &made(Adapter::create(&trunk, &foreign)));
    tell("training.adapter.load", &made(Adapter::load(&trunk, word)));
    tell("training.adapter.config", &adapter.config().targets);
    let loss = adapter.forward_backward(&batch);
    tell("training.adapter.forward-backward", &loss.as_ref().map(drop));
    tell("training.pending-loss.wait", &loss.map(|pending| made(pending.wait())));
    let step = adapter.optim_step(adamw(0.1));
    tell("training.adapter.optim-step", &step.as_ref().map(drop));
    tell("training.pending-step.wait", &step.map(|pending| made(pending.wait())));
    tell("training.adapter.train-step", &made(adapter.train_step(&batch, adamw(0.1))));
    tell("training.adapter.evaluate", &made(adapter.evaluate(&batch)));
    tell("training.adapter.save", &made(adapter.save(word)));
    Ok(())
}

fn of_job(word: &str, tell: &dyn Fn(&str, &dyn Debug)) {
    tell("job.params", &job::params().len());
    tell("job.seed", &job::seed());
    tell("job.metric", &job::metric(&format!("{word}\u{1b}[31m"), 0, 0.0));
    tell("job.progress", &job::progress(0, 1));
    tell("job.log", &job::log(job::Level::Warn, &format!("{word}\u{1b}[31m\r\u{9b}31m")));
    tell("job.should-stop", &job::should_stop());
    tell("job.limits", &job::limits().len());
    println!("{word}\u{1b}[31m\r\u{9b}31m");
    eprintln!("{word}\u{1b}[31m\r\u{9b}31m");
}
