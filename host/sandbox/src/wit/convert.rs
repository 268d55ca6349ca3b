//! Values of `nodus:gpu/training` to the host's words and back. Checks ranges; decides nothing else.

use nodus_protocol::{AdamW, LayerSelection, LoraConfig, LossSums, ModelConfig, Module, ModuleOverride, Normalisation, StepReport};

use super::Fault;
use crate::bindings::nodus::gpu::training as guest;

/// The guest's configuration, checked against the trunk.
pub(super) fn lora_config(config: guest::LoraConfig, model: &ModelConfig) -> Result<LoraConfig, Fault> {
    check_counts(&config, model)?;
    let target = |name: &String| name.parse::<Module>().map_err(|error| Fault::invalid(format!("targets: {error}")));
    let config = LoraConfig {
        rank: config.rank,
        alpha: config.alpha,
        rslora: config.rslora,
        dropout: config.dropout,
        targets: config.targets.iter().map(target).collect::<Result<_, _>>()?,
        layers: match config.layers {
            guest::LayerSelection::All => LayerSelection::All,
            guest::LayerSelection::Last(count) => LayerSelection::Last(count),
            guest::LayerSelection::Only(layers) => LayerSelection::Only(layers),
        },
        overrides: config
            .overrides
            .into_iter()
            .map(|guest::ModuleOverride { module, rank, alpha }| ModuleOverride { module, rank, alpha })
            .collect(),
    };
    config.validate(model)?;
    Ok(config)
}

/// Longest module path that can match anything.
const MODULE_BYTES_MAX: usize = 128;

/// Bounds the lists first: checking them costs the product of their lengths, and the guest chooses both.
fn check_counts(config: &guest::LoraConfig, model: &ModelConfig) -> Result<(), Fault> {
    let check = |field: &str, count: usize, most: usize, of: &str| {
        if count <= most {
            return Ok(());
        }
        Err(Fault::invalid(format!("{field} has {count} entries, expected at most {most}, the number of {of}")))
    };
    check("targets", config.targets.len(), Module::ALL.len(), "linear modules of a layer")?;
    check("overrides", config.overrides.len(), Module::ALL.len() * model.num_hidden_layers, "linear modules")?;
    if let guest::LayerSelection::Only(layers) = &config.layers {
        check("layers", layers.len(), model.num_hidden_layers, "layers")?;
    }
    match config.overrides.iter().find(|over| over.module.len() > MODULE_BYTES_MAX) {
        Some(over) => {
            Err(Fault::invalid(format!("overrides: a module name of {} bytes, expected at most {MODULE_BYTES_MAX}", over.module.len())))
        }
        None => Ok(()),
    }
}

pub(super) fn guest_lora_config(config: &LoraConfig) -> guest::LoraConfig {
    guest::LoraConfig {
        rank: config.rank,
        alpha: config.alpha,
        rslora: config.rslora,
        dropout: config.dropout,
        targets: config.targets.iter().map(ToString::to_string).collect(),
        layers: match &config.layers {
            LayerSelection::All => guest::LayerSelection::All,
            LayerSelection::Last(count) => guest::LayerSelection::Last(*count),
            LayerSelection::Only(layers) => guest::LayerSelection::Only(layers.clone()),
        },
        overrides: config
            .overrides
            .iter()
            .map(|over| guest::ModuleOverride { module: over.module.clone(), rank: over.rank, alpha: over.alpha })
            .collect(),
    }
}

/// The guest's optimiser settings, checked.
pub(super) fn adamw(optimiser: guest::Adamw) -> Result<AdamW, Fault> {
    let optimiser = AdamW {
        learning_rate: optimiser.learning_rate,
        beta1: optimiser.beta1,
        beta2: optimiser.beta2,
        eps: optimiser.eps,
        weight_decay: optimiser.weight_decay,
        max_grad_norm: optimiser.max_grad_norm,
        normalisation: match optimiser.normalisation {
            guest::Normalisation::WeightSum => Normalisation::WeightSum,
            guest::Normalisation::Sequences => Normalisation::Sequences,
            guest::Normalisation::One => Normalisation::One,
        },
    };
    optimiser.validate()?;
    Ok(optimiser)
}

pub(super) fn loss_sums(sums: &LossSums) -> guest::LossSums {
    guest::LossSums {
        loss_sum: sums.loss_sum,
        weight_sum: sums.weight_sum,
        labelled_tokens: sums.labelled,
        sequences: u32::try_from(sums.sequences).unwrap_or(u32::MAX),
    }
}

pub(super) fn step_report(report: &StepReport) -> guest::StepReport {
    guest::StepReport { step: report.step, sums: loss_sums(&report.sums), loss: report.loss, grad_norm: report.grad_norm }
}
