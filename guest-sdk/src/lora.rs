//! How an adapter is shaped, as PEFT describes it.
//!
//! Never checks against a trunk: the host does, when the adapter is created.

use crate::TrunkInfo;
use crate::bindings::training::{LayerSelection, LoraConfig, ModuleOverride};

/// PEFT's names: `rank` is `r`, `alpha` is `lora_alpha`, `targets` is `target_modules`, `dropout` is `lora_dropout`, `rslora` is
/// `use_rslora`, `layers` is `layers_to_transform`, and `overrides` are `rank_pattern` and `alpha_pattern`.
///
/// ```
/// use nodus_guest::LoraConfig;
///
/// let config = LoraConfig::new(16).alpha(32.0).targets(["q_proj", "k_proj", "v_proj"]).last_layers(4).dropout(0.05);
/// assert_eq!(config.targets.len(), 3);
/// ```
impl LoraConfig {
    /// Rank `rank`, alpha twice the rank (so that the scale is 2), on `q_proj` and `v_proj` of every layer, without dropout.
    #[must_use]
    pub fn new(rank: u32) -> Self {
        Self {
            rank,
            alpha: 2.0 * rank as f32,
            rslora: false,
            dropout: 0.0,
            targets: vec!["q_proj".into(), "v_proj".into()],
            layers: LayerSelection::All,
            overrides: Vec::new(),
        }
    }

    /// Alpha; the adapter's product is scaled by alpha / rank.
    #[must_use]
    pub fn alpha(self, alpha: f32) -> Self {
        Self { alpha, ..self }
    }

    /// Scales by alpha / sqrt(rank) instead (Kalajdzievski, 2023).
    #[must_use]
    pub fn rslora(self, rslora: bool) -> Self {
        Self { rslora, ..self }
    }

    /// Dropout on the adapter's input while training, 0 (none) to below 1.
    #[must_use]
    pub fn dropout(self, dropout: f32) -> Self {
        Self { dropout, ..self }
    }

    /// Names of the modules that carry the adapter, for example `q_proj`.
    #[must_use]
    pub fn targets<S: Into<String>>(self, names: impl IntoIterator<Item = S>) -> Self {
        Self { targets: names.into_iter().map(Into::into).collect(), ..self }
    }

    /// Every linear module of the decoder layers, as PEFT's `all-linear`; never the head.
    #[must_use]
    pub fn all_linear(self, trunk: &TrunkInfo) -> Self {
        Self { targets: trunk.target_modules.clone(), ..self }
    }

    /// Only the top so many layers.
    #[must_use]
    pub fn last_layers(self, count: u32) -> Self {
        Self { layers: LayerSelection::Last(count), ..self }
    }

    /// Only these layers, counted from 0 at the bottom.
    #[must_use]
    pub fn only_layers(self, layers: impl IntoIterator<Item = u32>) -> Self {
        Self { layers: LayerSelection::Only(layers.into_iter().collect()), ..self }
    }

    /// Another rank for the modules whose name ends so, on whole parts; the first override that matches a module counts.
    #[must_use]
    pub fn override_rank(self, module: impl Into<String>, rank: u32) -> Self {
        self.with_override(ModuleOverride { module: module.into(), rank: Some(rank), alpha: None })
    }

    /// Another rank and alpha for the modules whose name ends so, on whole parts; the first override that matches a module counts.
    #[must_use]
    pub fn override_rank_alpha(self, module: impl Into<String>, rank: u32, alpha: f32) -> Self {
        self.with_override(ModuleOverride { module: module.into(), rank: Some(rank), alpha: Some(alpha) })
    }

    fn with_override(mut self, over: ModuleOverride) -> Self {
        self.overrides.push(over);
        self
    }
}

impl LayerSelection {
    /// The selected layers of a trunk with so many, bottom up, each once.
    #[must_use]
    pub fn resolve(&self, layers: u32) -> Vec<u32> {
        match self {
            Self::All => (0..layers).collect(),
            Self::Last(count) => (layers.saturating_sub(*count)..layers).collect(),
            Self::Only(list) => (0..layers).filter(|layer| list.contains(layer)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builder_changes_what_it_names_and_nothing_else() {
        let plain = LoraConfig::new(8);
        assert_eq!((plain.rank, plain.alpha, plain.rslora, plain.dropout), (8, 16.0, false, 0.0));
        assert_eq!(plain.clone().alpha(4.0), LoraConfig { alpha: 4.0, ..plain.clone() });
        assert_eq!(plain.clone().last_layers(2).layers, LayerSelection::Last(2));
        let over = plain.override_rank("v_proj", 4).override_rank_alpha("layers.1.self_attn.q_proj", 2, 3.0);
        assert_eq!(over.overrides.iter().map(|o| (o.rank, o.alpha)).collect::<Vec<_>>(), [(Some(4), None), (Some(2), Some(3.0))]);
    }

    #[test]
    fn selections_resolve_to_layers() {
        assert_eq!(LayerSelection::All.resolve(3), [0, 1, 2]);
        assert_eq!(LayerSelection::Last(2).resolve(3), [1, 2]);
        assert_eq!(LayerSelection::Only(vec![2, 0, 2]).resolve(3), [0, 2]);
    }
}
