//! What jobs will need of the machine's memory, before any of them starts.
//!
//! Knows no job's need but its limits: a job is held to what was planned for it, so that no neighbour can be seen through a refusal.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context as _;
use nodus_engine::plan::table_bytes;
use nodus_protocol::{Digest, ModelConfig, Module};
use nodus_sandbox::Limits;

use super::choice::Chosen;
use super::inputs::Job;
use crate::cli::{DeviceArgs, Lane};
use crate::error::user;
use crate::machine::{self, MEMORY_FILE};
use crate::paths::Paths;
use crate::text::bytes;

/// What a run needs at the moment when it needs most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Total {
    weight_bytes: u64,
    table_bytes: u64,
    adapter_bytes: u64,
    activation_bytes: u64,
    cache_bytes: u64,
}

/// Refuses jobs that do not fit into the memory that there is; the bytes that are left for everything but the weights.
///
/// # Errors
/// The user's, with the numbers.
pub(super) fn admit(jobs: &[Arc<Job>], lane: Lane, at_once: usize, device: (&Chosen, DeviceArgs), paths: Paths) -> anyhow::Result<u64> {
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
    let model = |job: &Arc<Job>| {
        let config = &job.model.config;
        (job.model.digest, (weight_bytes(config, chosen.weight_bytes()), table_bytes(config)))
    };
    let models = jobs.iter().map(model).collect::<BTreeMap<Digest, (u64, u64)>>();
    let limits: Vec<Limits> = jobs.iter().map(|job| job.limits).collect();
    let total = total(&limits, &models.into_values().collect::<Vec<_>>(), lane, at_once, args.trunk_cache);
    let needed = total.sum();
    if needed > available {
        let Total { weight_bytes, table_bytes, adapter_bytes, activation_bytes, cache_bytes } = total;
        let parts = [
            ("weights", weight_bytes),
            ("tables", table_bytes),
            ("adapters", adapter_bytes),
            ("activations", activation_bytes),
            ("trunk cache", cache_bytes),
        ];
        let parts = parts.map(|(name, part)| format!("{name} {part}")).join(", ");
        return Err(user(format!(
            "not enough memory: {needed} bytes needed ({}: {parts}), {available} bytes ({}) are what {source}\n\
             {}",
            bytes(needed),
            bytes(available),
            total.hint(at_once, args.trunk_cache.is_some())
        )));
    }
    tracing::info!(needed, available, ?total, "memory is planned");
    Ok(available - total.weight_bytes)
}

impl Total {
    /// What would need less.
    fn hint(&self, at_once: usize, has_cache: bool) -> String {
        let ways = [
            (at_once > 1, "fewer jobs at once (--jobs)"),
            (self.activation_bytes > self.adapter_bytes, "smaller batches, shorter sequences (max_length)"),
            (self.adapter_bytes >= self.activation_bytes, "a smaller rank or fewer target modules"),
            (has_cache, "a smaller --trunk-cache"),
            (self.weight_bytes > self.sum() / 2, "a smaller model"),
        ];
        let ways: Vec<&str> = ways.into_iter().filter_map(|(is_way, text)| is_way.then_some(text)).collect();
        format!(
            "less is needed by: {}; planned bytes that are too many can be lowered with --limit device-bytes and activation-bytes",
            ways.join("; ")
        )
    }

    fn sum(&self) -> u64 {
        let parts = [self.weight_bytes, self.table_bytes, self.adapter_bytes, self.activation_bytes, self.cache_bytes];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// Adapters of those that need most, as many as run at once; the largest job's activations, since a pass takes no more jobs than the
/// memory allows; a cache no larger than was asked for (without a word it gives way to jobs and needs nothing of its own).
fn total(limits: &[Limits], models: &[(u64, u64)], lane: Lane, at_once: usize, trunk_cache: Option<u64>) -> Total {
    let mut adapters: Vec<u64> = limits.iter().map(|limits| limits.device_bytes).collect();
    adapters.sort_unstable_by(|a, b| b.cmp(a));
    let (weight_bytes, table_bytes) = match lane {
        Lane::Fused => models.iter().fold((0, 0), |(weights, tables), (more, and)| (weights + more, tables + and)),
        Lane::Solo => models.iter().copied().max().unwrap_or_default(),
    };
    Total {
        weight_bytes,
        table_bytes,
        adapter_bytes: adapters.into_iter().take(at_once).fold(0, u64::saturating_add),
        activation_bytes: limits.iter().map(|limits| limits.activation_bytes).max().unwrap_or(0),
        cache_bytes: trunk_cache.unwrap_or(0),
    }
}

/// A model's weights, of which one takes so many bytes.
pub(crate) fn weight_bytes(model: &ModelConfig, one: u64) -> u64 {
    let modules = Module::ALL.iter().map(|module| model.module_in(*module) as u64 * model.module_out(*module) as u64);
    let layers = (modules.sum::<u64>() + 2 * model.hidden_size as u64) * model.num_hidden_layers as u64;
    let tables = if model.tie_word_embeddings { 1 } else { 2 };
    (layers + tables * model.vocab_size as u64 * model.hidden_size as u64) * one
}

#[cfg(test)]
mod tests {
    use nodus_sandbox::Limits;

    use super::{Lane, Total, total};

    #[test]
    fn a_run_needs_what_those_at_once_need() {
        let limits = [10, 30, 20].map(|bytes| Limits { device_bytes: bytes, activation_bytes: bytes * 10, ..Limits::DEFAULT });
        let fused = total(&limits, &[(1000, 3), (500, 4)], Lane::Fused, 2, Some(7));
        assert_eq!(fused, Total { weight_bytes: 1500, table_bytes: 7, adapter_bytes: 50, activation_bytes: 300, cache_bytes: 7 });
        assert_eq!(fused.sum(), 1864);
        let solo = total(&limits, &[(1000, 3), (500, 4)], Lane::Solo, 1, None);
        assert_eq!(solo, Total { weight_bytes: 1000, table_bytes: 3, adapter_bytes: 30, activation_bytes: 300, cache_bytes: 0 });
    }
}
