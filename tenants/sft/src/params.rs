//! The parameters, their defaults and their ranges.
//!
//! Never touches the host: what is refused here is refused before any work.

use std::fmt;

use nodus_guest::{AdamW, Error, LayerSelection, Result, Schedule, TrunkInfo};
use serde::Deserialize;

use crate::forms::{Decay, Layers, Targets};

/// Everything that can be set. `null` counts as absent.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Params {
    /// LoRA rank, 1 to 512; default 8. This and the next five are read from the adapter where `init_adapter` names one.
    pub(crate) rank: Option<u32>,
    /// LoRA alpha, above 0; default 16. The scale is alpha / rank.
    pub(crate) alpha: Option<f32>,
    /// Names of the modules that carry the adapter, or `"all-linear"`; default `["q_proj", "v_proj"]`.
    pub(crate) targets: Option<Targets>,
    /// `"all"`, `{"last": k}` or a list of layers counted from 0; default `"all"`.
    pub(crate) layers: Option<Layers>,
    /// Scale alpha / sqrt(rank) instead; default false.
    pub(crate) rslora: Option<bool>,
    /// Dropout on the adapter's input while training, 0 to below 1; default 0.
    pub(crate) dropout: Option<f32>,
    /// Digest of the adapter to start from; default: a fresh one.
    pub(crate) init_adapter: Option<String>,
    /// Peak learning rate, 0 or more; default 2e-4.
    pub(crate) learning_rate: f64,
    /// `"constant"`, `"linear"` or `"cosine"` after warm-up; default `"constant"`.
    pub(crate) schedule: Decay,
    /// Warm-up in optimiser steps; default 0. Excludes `warmup_ratio`.
    pub(crate) warmup_steps: Option<u64>,
    /// Warm-up as a part of all steps, 0 to 1, rounded up to whole steps; default 0. Excludes `warmup_steps`.
    pub(crate) warmup_ratio: Option<f64>,
    /// Decoupled weight decay, 0 or more; default 0.
    pub(crate) weight_decay: f32,
    /// Decay of AdamW's first moment, 0 to below 1; default 0.9.
    pub(crate) beta1: f32,
    /// Decay of AdamW's second moment, 0 to below 1; default 0.999.
    pub(crate) beta2: f32,
    /// Added to the root of the second moment, above 0; default 1e-8.
    pub(crate) eps: f32,
    /// Clips the adapter's gradient to this norm, above 0; default: no clipping.
    pub(crate) max_grad_norm: Option<f32>,
    /// Sequences in one forward and backward pass, 1 or more; default 8.
    pub(crate) batch_size: u64,
    /// Passes for one optimiser step, 1 or more; default 1.
    pub(crate) gradient_accumulation: u64,
    /// Times through the data, 1 or more; default 1. Excludes `steps`.
    pub(crate) epochs: Option<u64>,
    /// Optimiser steps, 1 or more, over as many epochs as that takes. Excludes `epochs`.
    pub(crate) steps: Option<u64>,
    /// Cuts each example to so many tokens, 2 to the model's context; default: the context.
    pub(crate) max_length: Option<u32>,
    /// A new order in each epoch, by the job's seed; default true.
    pub(crate) shuffle: bool,
    /// Held-out loss every so many steps; default 0: only before and after.
    pub(crate) evaluate_every: u64,
    /// Stops after so many evaluations in a row without a new best, 1 or more; default: never. Needs `evaluate_every`.
    pub(crate) patience: Option<u32>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            rank: None,
            alpha: None,
            targets: None,
            layers: None,
            rslora: None,
            dropout: None,
            init_adapter: None,
            learning_rate: 2e-4,
            schedule: Decay::Constant,
            warmup_steps: None,
            warmup_ratio: None,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            max_grad_norm: None,
            batch_size: 8,
            gradient_accumulation: 1,
            epochs: None,
            steps: None,
            max_length: None,
            shuffle: true,
            evaluate_every: 0,
            patience: None,
        }
    }
}

impl Params {
    /// Checks every parameter against its range and against the others.
    pub(crate) fn validate(&self, trunk: &TrunkInfo) -> Result<()> {
        self.validate_adapter(trunk)?;
        self.validate_optimiser()?;
        exclusive("epochs", self.epochs.is_some(), "steps", self.steps.is_some())?;
        within("batch_size", self.batch_size, self.batch_size >= 1, "1 or more")?;
        within("gradient_accumulation", self.gradient_accumulation, self.gradient_accumulation >= 1, "1 or more")?;
        optional("epochs", self.epochs, |n| n >= 1, "1 or more")?;
        optional("steps", self.steps, |n| n >= 1, "1 or more")?;
        let context = trunk.context_length;
        optional("max_length", self.max_length, |n| (2..=context).contains(&n), &format!("2 to the model's context of {context}"))?;
        optional("patience", self.patience, |n| n >= 1, "1 or more")?;
        if self.patience.is_some() && self.evaluate_every == 0 {
            return Err(Error::user("patience needs evaluate_every, which is 0: set it to a number of steps"));
        }
        Ok(())
    }

    fn validate_adapter(&self, trunk: &TrunkInfo) -> Result<()> {
        optional("rank", self.rank, |r| (1..=512).contains(&r), "1 to 512")?;
        optional("alpha", self.alpha, |a| a.is_finite() && a > 0.0, "a finite number above 0")?;
        optional("dropout", self.dropout, |d| (0.0..1.0).contains(&d), "0 to below 1")?;
        if let Some(Targets::Names(names)) = &self.targets {
            let known = trunk.target_modules.join(", ");
            within("targets", "an empty list", !names.is_empty(), &format!("\"all-linear\", or some of {known}"))?;
            for (i, name) in names.iter().enumerate() {
                within("targets", format!("a list with `{name}`"), trunk.target_modules.contains(name), &format!("some of {known}"))?;
                within("targets", format!("a list with `{name}` twice"), !names.iter().take(i).any(|n| n == name), "each once")?;
            }
        }
        let layers = trunk.layers;
        match &self.layers {
            None | Some(Layers(LayerSelection::All)) => Ok(()),
            Some(Layers(LayerSelection::Last(k))) => {
                within("layers", format!("the last {k}"), (1..=layers).contains(k), &format!("the last 1 to {layers}"))
            }
            Some(Layers(LayerSelection::Only(list))) => {
                let good = !list.is_empty() && list.iter().enumerate().all(|(i, l)| *l < layers && !list.iter().take(i).any(|m| m == l));
                within(
                    "layers",
                    format!("{list:?}"),
                    good,
                    &format!("layers from 0 to {}, at least one, each once", layers.saturating_sub(1)),
                )
            }
        }
    }

    fn validate_optimiser(&self) -> Result<()> {
        let rate = self.learning_rate;
        // Large float64 numbers are infinite as the float32 that AdamW takes.
        within("learning_rate", rate, rate >= 0.0 && (rate as f32).is_finite(), "a finite number, 0 or more")?;
        exclusive("warmup_steps", self.warmup_steps.is_some(), "warmup_ratio", self.warmup_ratio.is_some())?;
        optional("warmup_ratio", self.warmup_ratio, |r| (0.0..=1.0).contains(&r), "0 to 1")?;
        within("weight_decay", self.weight_decay, self.weight_decay >= 0.0 && self.weight_decay.is_finite(), "a finite number, 0 or more")?;
        within("beta1", self.beta1, (0.0..1.0).contains(&self.beta1), "0 to below 1")?;
        within("beta2", self.beta2, (0.0..1.0).contains(&self.beta2), "0 to below 1")?;
        within("eps", self.eps, self.eps > 0.0 && self.eps.is_finite(), "a finite number above 0")?;
        optional("max_grad_norm", self.max_grad_norm, |n| n > 0.0 && n.is_finite(), "a finite number above 0, or null for no clipping")
    }

    /// Number of optimiser steps of the whole run, from their number in one epoch.
    pub(crate) fn total_steps(&self, per_epoch: u64) -> u64 {
        self.steps.unwrap_or_else(|| per_epoch.saturating_mul(self.epochs.unwrap_or(1)))
    }

    /// Number of warm-up steps of a run of so many.
    pub(crate) fn warmup(&self, total: u64) -> u64 {
        let by_ratio = self.warmup_ratio.map(|ratio| (ratio * total as f64).ceil() as u64);
        self.warmup_steps.or(by_ratio).unwrap_or(0)
    }

    /// The learning-rate schedule of a run of so many steps.
    pub(crate) fn schedule(&self, total: u64) -> Schedule {
        let peak = self.learning_rate;
        let schedule = match self.schedule {
            Decay::Constant => Schedule::constant(peak),
            Decay::Linear => Schedule::linear(peak, total),
            Decay::Cosine => Schedule::cosine(peak, total),
        };
        schedule.warmup(self.warmup(total))
    }

    /// AdamW at this learning rate.
    pub(crate) fn optimiser(&self, learning_rate: f32) -> AdamW {
        AdamW::new(learning_rate)
            .betas(self.beta1, self.beta2)
            .eps(self.eps)
            .weight_decay(self.weight_decay)
            .max_grad_norm(self.max_grad_norm)
    }
}

fn within(name: &str, value: impl fmt::Display, good: bool, range: &str) -> Result<()> {
    if good { Ok(()) } else { Err(Error::user(format!("{name} is {value}, expected {range}"))) }
}

fn optional<T: Copy + fmt::Display>(name: &str, value: Option<T>, good: impl Fn(T) -> bool, range: &str) -> Result<()> {
    value.map_or(Ok(()), |value| within(name, value, good(value), range))
}

fn exclusive(a: &str, has_a: bool, b: &str, has_b: bool) -> Result<()> {
    if has_a && has_b { Err(Error::user(format!("{a} and {b} are both given, expected at most one of them"))) } else { Ok(()) }
}
