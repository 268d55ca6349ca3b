//! What jobs will need of the machine's memory, before any of them starts.
//!
//! Reads a job's parameters as `sft` names them; of a component that names them otherwise it knows the model's need alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context as _;
use nodus_engine::plan::{BatchSize, needs};
use nodus_protocol::{Digest, LayerSelection, LoraConfig, ModelConfig, Module};
use nodus_sandbox::services::Dataset;
use serde_json::{Map, Value};

use super::choice::Chosen;
use super::inputs::Job;
use crate::cli::{DeviceArgs, Lane};
use crate::error::user;
use crate::machine::{self, MEMORY_FILE};
use crate::paths::Paths;
use crate::text::bytes;

/// What `sft` takes where the parameters do not say, as its README has it: sequences of a batch, and the adapter's rank.
const BATCH_SIZE: usize = 8;
const RANK: u32 = 8;
/// Any will do: no byte depends on it.
const ALPHA: f32 = 16.0;

/// What one job needs beside its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Need {
    adapter_bytes: u64,
    activation_bytes: u64,
}

/// What a run needs at the moment when it needs most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Total {
    weight_bytes: u64,
    adapter_bytes: u64,
    activation_bytes: u64,
    cache_bytes: u64,
}

/// Jobs that fit. Keeps the tokens that were read for the plan until the jobs have them.
pub(super) struct Admission {
    /// What is left for everything but the weights.
    pub(super) buffer_bytes_max: u64,
    _data: Vec<Dataset>,
}

/// Refuses jobs that do not fit into the memory that there is.
///
/// # Errors
/// The user's, with the numbers.
pub(super) fn admit(
    jobs: &[Arc<Job>],
    lane: Lane,
    at_once: usize,
    device: (&Chosen, DeviceArgs),
    paths: Paths,
) -> anyhow::Result<Admission> {
    let row_align = device.0.row_align();
    let (needs, data): (Vec<Need>, Vec<Option<Dataset>>) = jobs.iter().map(|job| of_job(job, row_align)).unzip();
    let buffer_bytes_max = check(jobs, &needs, lane, at_once, device, paths)?;
    Ok(Admission { buffer_bytes_max, _data: data.into_iter().flatten().collect() })
}

/// The memory that is left beside the weights.
fn check(
    jobs: &[Arc<Job>],
    needs: &[Need],
    lane: Lane,
    at_once: usize,
    device: (&Chosen, DeviceArgs),
    paths: Paths,
) -> anyhow::Result<u64> {
    let (chosen, args) = device;
    let (available, source) = match (args.memory, chosen, machine::memory(paths)) {
        (Some(bytes), ..) => (bytes, "--memory allows".to_owned()),
        (None, Chosen::Cuda(card), _) => (card.free_bytes().context("asking the card")?, format!("{} has free", chosen.name())),
        (None, Chosen::Cpu, Some(memory)) => (memory.available, format!("the machine has available ({MEMORY_FILE})")),
        (None, Chosen::Cpu, None) => {
            tracing::warn!("{MEMORY_FILE} does not tell the machine's memory; give --memory to have the jobs' needs checked");
            return Ok(u64::MAX);
        }
    };
    let weight = |job: &Arc<Job>| (job.model.digest, weight_bytes(&job.model.config, chosen.weight_bytes()));
    let models = jobs.iter().map(weight).collect::<BTreeMap<Digest, u64>>();
    let total = total(needs, &models.into_values().collect::<Vec<_>>(), lane, at_once, args.trunk_cache);
    let needed = total.sum();
    if needed > available {
        let Total { weight_bytes, adapter_bytes, activation_bytes, cache_bytes } = total;
        let parts =
            [("weights", weight_bytes), ("adapters", adapter_bytes), ("activations", activation_bytes), ("trunk cache", cache_bytes)];
        let parts = parts.map(|(name, part)| format!("{name} {part}")).join(", ");
        return Err(user(format!(
            "not enough memory: {needed} bytes needed ({}: {parts}), {available} bytes ({}) are what {source}\n\
             fewer jobs at once (--jobs), smaller batches or a smaller --trunk-cache need less",
            bytes(needed),
            bytes(available)
        )));
    }
    tracing::info!(needed, available, ?total, "memory is planned");
    Ok(available - total.weight_bytes)
}

impl Total {
    fn sum(&self) -> u64 {
        [self.adapter_bytes, self.activation_bytes, self.cache_bytes].into_iter().fold(self.weight_bytes, u64::saturating_add)
    }
}

/// Adapters of those that need most, as many as run at once; the largest job's activations, since a pass takes no more jobs than the
/// memory allows; a cache no larger than was asked for (without a word it gives way to jobs and needs nothing of its own).
fn total(needs: &[Need], models: &[u64], lane: Lane, at_once: usize, trunk_cache: Option<u64>) -> Total {
    let mut adapters: Vec<u64> = needs.iter().map(|need| need.adapter_bytes).collect();
    adapters.sort_unstable_by(|a, b| b.cmp(a));
    Total {
        weight_bytes: match lane {
            Lane::Fused => models.iter().copied().fold(0, u64::saturating_add),
            Lane::Solo => models.iter().copied().max().unwrap_or(0),
        },
        adapter_bytes: adapters.into_iter().take(at_once).fold(0, u64::saturating_add),
        activation_bytes: needs.iter().map(|need| need.activation_bytes).max().unwrap_or(0),
        cache_bytes: trunk_cache.unwrap_or(0),
    }
}

/// A model's weights, of which one takes so many bytes.
fn weight_bytes(model: &ModelConfig, one: u64) -> u64 {
    let modules = Module::ALL.iter().map(|module| model.module_in(*module) as u64 * model.module_out(*module) as u64);
    let layers = (modules.sum::<u64>() + 2 * model.hidden_size as u64) * model.num_hidden_layers as u64;
    let tables = if model.tie_word_embeddings { 1 } else { 2 };
    (layers + tables * model.vocab_size as u64 * model.hidden_size as u64) * one
}

/// A job's need as its parameters tell it, and the tokens it follows from; nothing where they do not fit, since the component will
/// refuse them.
fn of_job(job: &Job, row_align: usize) -> (Need, Option<Dataset>) {
    let model = &job.model.config;
    let Some(config) = config(&job.parameters, model) else { return (Need::default(), None) };
    let number = |key: &str| job.parameters.get(key).and_then(Value::as_u64).and_then(|number| usize::try_from(number).ok());
    let max_length = number("max_length").unwrap_or(model.max_position_embeddings);
    let Ok(data) = job.train.tokenise(&job.model, max_length) else { return (Need::default(), None) };
    let needs = needs(model, &config, largest(&data, number("batch_size").unwrap_or(BATCH_SIZE)), row_align);
    (Need { adapter_bytes: needs.adapter_bytes, activation_bytes: needs.activation_bytes }, Some(data))
}

/// The largest batch of so many sequences that the data can give.
fn largest(data: &Dataset, sequences: usize) -> BatchSize {
    let most = |size: &dyn Fn(&nodus_protocol::Sequence) -> usize| {
        let mut sizes: Vec<usize> = data.examples.iter().map(|example| size(example)).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.into_iter().take(sequences).sum()
    };
    let labelled = |example: &nodus_protocol::Sequence| example.weights().iter().filter(|weight| **weight > 0.0).count();
    BatchSize { sequences: sequences.min(data.examples.len()), rows: most(&|example| example.rows()), labelled: most(&labelled) }
}

/// The adapter that the parameters describe; none where they describe none that the model could have.
fn config(parameters: &Map<String, Value>, model: &ModelConfig) -> Option<LoraConfig> {
    let rank = match parameters.get("rank") {
        None | Some(Value::Null) => RANK,
        Some(rank) => u32::try_from(rank.as_u64()?).ok()?,
    };
    let config = LoraConfig {
        rank,
        alpha: ALPHA,
        rslora: false,
        dropout: 0.0,
        targets: targets(parameters.get("targets"))?,
        layers: layers(parameters.get("layers"))?,
        overrides: Vec::new(),
    };
    config.validate(model).ok().map(|()| config)
}

fn targets(value: Option<&Value>) -> Option<Vec<Module>> {
    let named = |name: &str| Module::ALL.into_iter().find(|module| module.to_string() == name);
    match value {
        None | Some(Value::Null) => ["q_proj", "v_proj"].into_iter().map(named).collect(),
        Some(Value::String(all)) if all == "all-linear" => Some(Module::ALL.to_vec()),
        Some(Value::Array(names)) => names.iter().map(|name| name.as_str().and_then(named)).collect(),
        Some(_) => None,
    }
}

fn layers(value: Option<&Value>) -> Option<LayerSelection> {
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    match value {
        None | Some(Value::Null) => Some(LayerSelection::All),
        Some(Value::String(all)) if all == "all" => Some(LayerSelection::All),
        Some(Value::Object(object)) => object.get("last").and_then(number).map(LayerSelection::Last),
        Some(Value::Array(list)) => list.iter().map(number).collect::<Option<_>>().map(LayerSelection::Only),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{Lane, Need, Total, total};

    #[test]
    fn a_run_needs_what_those_at_once_need() {
        let needs = [10, 30, 20].map(|bytes| Need { adapter_bytes: bytes, activation_bytes: bytes * 10 });
        let fused = total(&needs, &[1000, 500], Lane::Fused, 2, Some(7));
        assert_eq!(fused, Total { weight_bytes: 1500, adapter_bytes: 50, activation_bytes: 300, cache_bytes: 7 });
        assert_eq!(fused.sum(), 1857);
        let solo = total(&needs, &[1000, 500], Lane::Solo, 1, None);
        assert_eq!(solo, Total { weight_bytes: 1000, adapter_bytes: 30, activation_bytes: 300, cache_bytes: 0 });
    }
}
