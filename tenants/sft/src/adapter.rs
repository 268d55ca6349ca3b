//! The adapter to train: a fresh one, or the one that `init_adapter` names.
//!
//! Never trains a loaded adapter under other settings than its own: what disagrees is refused.

use std::collections::BTreeSet;
use std::fmt::Debug;

use nodus_guest::{Adapter, Error, LayerSelection, LoraConfig, Result, Trunk, TrunkInfo};

use crate::forms::{Layers, Targets};
use crate::params::Params;

/// Creates or loads it.
pub(crate) fn open(trunk: &Trunk, params: &Params) -> Result<Adapter> {
    let Some(digest) = &params.init_adapter else {
        return Adapter::create(trunk, &fresh(params, trunk.info()));
    };
    let adapter = Adapter::load(trunk, digest)?;
    agree(params, &adapter.config(), trunk.info())?;
    Ok(adapter)
}

/// The configuration of a fresh adapter.
pub(crate) fn fresh(params: &Params, trunk: &TrunkInfo) -> LoraConfig {
    let mut config = LoraConfig::new(params.rank.unwrap_or(8))
        .alpha(params.alpha.unwrap_or(16.0))
        .rslora(params.rslora.unwrap_or(false))
        .dropout(params.dropout.unwrap_or(0.0));
    if let Some(targets) = &params.targets {
        config = config.targets(names(targets, trunk));
    }
    if let Some(Layers(layers)) = &params.layers {
        config.layers = layers.clone();
    }
    config
}

/// Checks that what is given is what the loaded adapter has.
pub(crate) fn agree(params: &Params, loaded: &LoraConfig, trunk: &TrunkInfo) -> Result<()> {
    let set = |names: &[String]| names.iter().cloned().collect::<BTreeSet<_>>();
    let layers = |selection: &LayerSelection| selection.resolve(trunk.layers);
    same("rank", params.rank, loaded.rank)?;
    same("alpha", params.alpha, loaded.alpha)?;
    same("rslora", params.rslora, loaded.rslora)?;
    same("dropout", params.dropout, loaded.dropout)?;
    same("targets", params.targets.as_ref().map(|t| set(&names(t, trunk))), set(&loaded.targets))?;
    same("layers", params.layers.as_ref().map(|Layers(given)| layers(given)), layers(&loaded.layers))
}

fn names(targets: &Targets, trunk: &TrunkInfo) -> Vec<String> {
    match targets {
        Targets::AllLinear => trunk.target_modules.clone(),
        Targets::Names(names) => names.clone(),
    }
}

fn same<T: PartialEq + Debug>(name: &str, given: Option<T>, loaded: T) -> Result<()> {
    match given {
        Some(given) if given != loaded => Err(Error::user(format!(
            "{name} is {given:?}, but the adapter in init_adapter has {loaded:?}: leave {name} out, or make them equal"
        ))),
        _ => Ok(()),
    }
}
