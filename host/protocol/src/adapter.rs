//! A LoRA adapter's configuration and weights, as PEFT describes them.

use serde::{Deserialize, Serialize};

use crate::{EngineError, ModelConfig, Module};

/// Which layers carry the adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerSelection {
    /// Every layer.
    All,
    /// The top so many layers.
    Last(u32),
    /// These layers, counted from 0 at the bottom.
    Only(Vec<u32>),
}

/// A rank or alpha that differs for some modules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleOverride {
    /// The end of a module's path, on whole parts, for example `v_proj` or `layers.1.self_attn.v_proj`.
    pub module: String,
    /// Rank for it.
    pub rank: Option<u32>,
    /// Alpha for it.
    pub alpha: Option<f32>,
}

/// LoRA: y = W x + s B A x. Field meanings and ranges: `lora-config` in `wit/training.wit`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank r.
    pub rank: u32,
    /// Alpha; s = alpha / r.
    pub alpha: f32,
    /// s = alpha / sqrt(r) instead.
    pub rslora: bool,
    /// Dropout on the adapter's input while training.
    pub dropout: f32,
    /// Modules that carry it.
    pub targets: Vec<Module>,
    /// Layers that carry it.
    pub layers: LayerSelection,
    /// Ranks and alphas that differ; the first match counts.
    pub overrides: Vec<ModuleOverride>,
}

impl LoraConfig {
    /// Largest rank.
    pub const RANK_MAX: u32 = 512;

    /// Checks every field against its range and against the trunk.
    ///
    /// # Errors
    /// `invalid-argument` that names the field, its value and the range.
    pub fn validate(&self, model: &ModelConfig) -> Result<(), EngineError> {
        let bad = |text: String| Err(EngineError::invalid(text));
        check_rank("rank", self.rank)?;
        check_alpha("alpha", self.alpha)?;
        if !(0.0..1.0).contains(&self.dropout) {
            return bad(format!("dropout is {}, expected 0 to below 1", self.dropout));
        }
        if self.targets.is_empty() {
            return bad("targets is empty, expected at least one module name".into());
        }
        for (i, target) in self.targets.iter().enumerate() {
            if self.targets.iter().take(i).any(|earlier| earlier == target) {
                return bad(format!("targets names {target} twice"));
            }
        }
        let layers = model.num_hidden_layers;
        match &self.layers {
            LayerSelection::All => {}
            LayerSelection::Last(n) if *n == 0 || *n as usize > layers => {
                return bad(format!("layers: last {n}, expected 1 to {layers}, the trunk's number of layers"));
            }
            LayerSelection::Last(_) => {}
            LayerSelection::Only(list) => {
                if list.is_empty() {
                    return bad("layers is an empty list, expected at least one layer".into());
                }
                for (i, layer) in list.iter().enumerate() {
                    if *layer as usize >= layers {
                        return bad(format!("layers names {layer}, expected 0 to {}", layers - 1));
                    }
                    if list.iter().take(i).any(|earlier| earlier == layer) {
                        return bad(format!("layers names {layer} twice"));
                    }
                }
            }
        }
        for over in &self.overrides {
            if let Some(rank) = over.rank {
                check_rank(&format!("overrides: rank of {}", over.module), rank)?;
            }
            if let Some(alpha) = over.alpha {
                check_alpha(&format!("overrides: alpha of {}", over.module), alpha)?;
            }
            if !self.modules(model).any(|(layer, module)| over.matches(layer, module)) {
                return bad(format!("overrides: `{}` matches no module that carries the adapter", over.module));
            }
        }
        Ok(())
    }

    /// The adapted modules as (layer, module), bottom up, within a layer in the order of the forward pass.
    pub fn modules<'a>(&'a self, model: &ModelConfig) -> impl Iterator<Item = (usize, Module)> + 'a {
        let layers = model.num_hidden_layers;
        (0..layers).filter(move |&layer| self.has_layer(layer, layers)).flat_map(move |layer| {
            Module::ALL.into_iter().filter(|module| self.targets.contains(module)).map(move |module| (layer, module))
        })
    }

    /// Rank of one module.
    #[must_use]
    pub fn rank_of(&self, layer: usize, module: Module) -> u32 {
        self.overrides.iter().filter(|o| o.matches(layer, module)).find_map(|o| o.rank).unwrap_or(self.rank)
    }

    /// Scale s of one module: alpha / r, or alpha / sqrt(r) with rslora, r and alpha being the module's own.
    #[must_use]
    pub fn scale_of(&self, layer: usize, module: Module) -> f32 {
        let rank = self.rank_of(layer, module) as f32;
        let alpha = self.overrides.iter().filter(|o| o.matches(layer, module)).find_map(|o| o.alpha).unwrap_or(self.alpha);
        if self.rslora { alpha / rank.sqrt() } else { alpha / rank }
    }

    fn has_layer(&self, layer: usize, layers: usize) -> bool {
        match &self.layers {
            LayerSelection::All => true,
            LayerSelection::Last(n) => layer + *n as usize >= layers,
            LayerSelection::Only(list) => list.contains(&(layer as u32)),
        }
    }
}

impl ModuleOverride {
    /// Whether the pattern is the end of this module's path, on whole parts.
    #[must_use]
    pub fn matches(&self, layer: usize, module: Module) -> bool {
        let path = format!("model.layers.{layer}.{}", module.path());
        path == self.module || path.ends_with(&format!(".{}", self.module))
    }
}

fn check_rank(field: &str, rank: u32) -> Result<(), EngineError> {
    if (1..=LoraConfig::RANK_MAX).contains(&rank) {
        return Ok(());
    }
    Err(EngineError::invalid(format!("{field} is {rank}, expected 1 to {}", LoraConfig::RANK_MAX)))
}

fn check_alpha(field: &str, alpha: f32) -> Result<(), EngineError> {
    if alpha.is_finite() && alpha > 0.0 {
        return Ok(());
    }
    Err(EngineError::invalid(format!("{field} is {alpha}, expected a finite number above 0")))
}

/// The weights of one adapted module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleWeights {
    /// Which layer.
    pub layer: usize,
    /// Which module.
    pub module: Module,
    /// Rank r.
    pub rank: usize,
    /// A, row-major, r x in.
    pub a: Vec<f32>,
    /// B, row-major, out x r.
    pub b: Vec<f32>,
}

/// A whole adapter off the device: its configuration and one entry for each of `LoraConfig::modules`, in that order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterWeights {
    /// How it was made.
    pub config: LoraConfig,
    /// Its weights.
    pub modules: Vec<ModuleWeights>,
}

impl AdapterWeights {
    /// Checks weights made elsewhere against their own configuration and the trunk.
    ///
    /// # Errors
    /// `invalid-argument` that names the module, what it has and what was expected.
    pub fn validate(&self, model: &ModelConfig) -> Result<(), EngineError> {
        self.config.validate(model)?;
        let expected: Vec<_> = self.config.modules(model).collect();
        if self.modules.len() != expected.len() {
            return Err(EngineError::invalid(format!(
                "the adapter has weights for {} modules, its configuration names {}",
                self.modules.len(),
                expected.len()
            )));
        }
        for (found, (layer, module)) in self.modules.iter().zip(expected) {
            let name = format!("layers.{layer}.{}", module.path());
            let refuse = |text: String| Err(EngineError::invalid(format!("{name}: {text}")));
            if (found.layer, found.module) != (layer, module) {
                return refuse(format!("expected here, found layers.{}.{}", found.layer, found.module.path()));
            }
            let rank = self.config.rank_of(layer, module) as usize;
            if found.rank != rank {
                return refuse(format!("rank is {}, its configuration says {rank}", found.rank));
            }
            let (inputs, outputs) = (model.module_in(module), model.module_out(module));
            for (part, values, rows, columns) in [("A", &found.a, rank, inputs), ("B", &found.b, outputs, rank)] {
                if values.len() != rows * columns {
                    return refuse(format!("{part} has {} numbers, expected {rows} x {columns}", values.len()));
                }
                if let Some(value) = values.iter().find(|value| !value.is_finite()) {
                    return refuse(format!("{part} holds {value}, expected finite numbers"));
                }
            }
        }
        Ok(())
    }
}
