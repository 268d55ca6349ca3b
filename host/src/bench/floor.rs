//! The least time that an arm's steps can take: its matrix products at the rate that the device reaches.
//!
//! Counts only what cannot be left out (no norms, no adapters, no memory), so that a real time is always above it.

use nodus_protocol::{LayerSelection, ModelConfig, Module};
use serde::{Deserialize, Serialize};

use super::arm::Arm;
use super::work::{Kind, Work};

/// Rates that large bf16 products reach, in operations a second: measured, not of a data sheet.
const KNOWN: [(&str, f64); 1] = [("H200", 790e12)];

/// The least of an arm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Floor {
    /// Multiplications and additions of all measured steps.
    pub(super) operations: f64,
    /// Operations a second that were counted on.
    pub(super) rate: f64,
    pub(super) seconds: f64,
}

/// The rate of a device that is known by name.
pub(super) fn known_rate(device: &str) -> Option<f64> {
    KNOWN.iter().find(|(name, _)| device.contains(name)).map(|(_, rate)| *rate)
}

impl Floor {
    pub(super) fn of(model: &ModelConfig, work: &Work, arm: Arm, rate: f64) -> Self {
        let operations = operations(model, work, arm);
        Self { operations, rate, seconds: operations / rate }
    }
}

/// Of all measured steps of all jobs.
fn operations(model: &ModelConfig, work: &Work, arm: Arm) -> f64 {
    let steps = f64::from(work.jobs) * f64::from(work.steps());
    let uses = match (arm.shares(), arm.keeps()) {
        (_, true) if work.kind == Kind::Sweep && arm.shares() => f64::from(work.jobs) * f64::from(work.epochs),
        (_, true) => f64::from(work.epochs),
        (true, false) if work.kind == Kind::Sweep => f64::from(work.jobs),
        _ => 1.0,
    };
    let one = OneStep::of(model, work);
    steps * (one.below / uses + one.above)
}

/// Operations of one job's step, below its cut and above it.
struct OneStep {
    below: f64,
    above: f64,
}

impl OneStep {
    /// Forward: every product once for each row, and scores and mixing of attention for the mean number of rows seen. Backward: the
    /// gradient of each product's input above the cut, but of q, k and v at the cut itself, which nobody below wants; attention's four
    /// products. What only rows without a label need above the last attention is left out, as is the head for them.
    fn of(model: &ModelConfig, work: &Work) -> Self {
        let (rows, labelled) = ((work.sequences * work.length) as f64, (work.sequences * work.labelled) as f64);
        let product =
            |modules: &[Module]| modules.iter().map(|module| 2.0 * (model.module_in(*module) * model.module_out(*module)) as f64).sum();
        let (into, rest): (f64, f64) = (product(&Module::ALL[..3]), product(&Module::ALL[3..]));
        let seen = (work.length.min(model.sliding_window.unwrap_or(usize::MAX)) as f64 + 1.0) / 2.0;
        let attention = 4.0 * (model.num_attention_heads * model.head_dim) as f64 * seen;
        let head = 2.0 * (model.hidden_size * model.vocab_size) as f64 * labelled;
        let layers = model.num_hidden_layers;
        let own = match &work.layers {
            LayerSelection::Last(last) => (*last as usize).min(layers),
            _ => layers,
        };
        let layer = |labelled_only: bool| (into + attention) * rows + rest * if labelled_only { labelled } else { rows };
        let forward = layer(true) + (own.max(1) - 1) as f64 * layer(false);
        let backward = forward + own as f64 * attention * rows - into * rows;
        Self { below: (layers - own) as f64 * layer(false), above: forward + backward + 2.0 * head }
    }
}

/// TinyLlama's shape.
#[cfg(test)]
pub(super) fn shape() -> ModelConfig {
    crate::random::Shape::Llama1_1b.config()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(jobs: u32, epochs: u32) -> Work {
        let (layers, model) = (LayerSelection::Last(1), "m".to_owned());
        let (sequences, length, labelled) = (4, 512, 512);
        Work { kind: Kind::Sweep, model, layers, jobs, sequences, length, labelled, batches: 1, epochs, warmup: 0, rank: 8, seed: 0 }
    }

    /// By hand: a layer has 44.04 million weights, the head 65.54 million; a batch 2,048 rows.
    #[test]
    fn a_step_of_a_known_shape_counts_what_a_hand_counts() {
        let one = OneStep::of(&shape(), &work(1, 1));
        let attention = 4.0 * 2048.0 * 256.5 * 2048.0;
        let layer = 2.0 * 44_040_192.0 * 2048.0 + attention;
        assert!((one.below / (21.0 * layer) - 1.0).abs() < 1e-9, "{}", one.below);
        let into = 2.0 * (2048.0 * 2048.0 + 2.0 * 2048.0 * 256.0) * 2048.0;
        let above = 2.0 * layer + attention - into + 4.0 * 2048.0 * 32000.0 * 2048.0;
        assert!((one.above / above - 1.0).abs() < 1e-9, "{}", one.above);
    }

    #[test]
    fn a_shared_trunk_counts_once() {
        let seconds = |arm, epochs| Floor::of(&shape(), &work(16, epochs), arm, 790e12).seconds;
        let one = OneStep::of(&shape(), &work(1, 1));
        assert!((seconds(Arm::Packed, 1) - 16.0 * (one.below + one.above) / 790e12).abs() < 1e-9);
        assert!((seconds(Arm::Fused, 1) - (one.below + 16.0 * one.above) / 790e12).abs() < 1e-9);
        assert!((seconds(Arm::FusedCache, 3) - (one.below + 48.0 * one.above) / 790e12).abs() < 1e-9);
        assert!((seconds(Arm::DedicatedCache, 3) - (16.0 * one.below + 48.0 * one.above) / 790e12).abs() < 1e-9);
    }
}
