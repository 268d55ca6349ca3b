//! AdamW's settings.
//!
//! Never computes a step: the host does, next to the weights.

use crate::bindings::training::{Adamw, Normalisation};

/// ```
/// use nodus_guest::AdamW;
///
/// let optimiser = AdamW::new(2e-4).weight_decay(0.01).max_grad_norm(1.0);
/// assert_eq!((optimiser.beta1, optimiser.beta2, optimiser.eps), (0.9, 0.999, 1e-8));
/// ```
impl Adamw {
    /// AdamW with torch's betas (0.9, 0.999) and eps (1e-8), weight decay 0 (as transformers; torch has 0.01), no clipping, the
    /// gradient divided by the accumulated weight, so that the loss is the mean over labelled tokens.
    #[must_use]
    pub fn new(learning_rate: f32) -> Self {
        Self {
            learning_rate,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: None,
            normalisation: Normalisation::WeightSum,
        }
    }

    /// The learning rate of the next step, 0 or more.
    #[must_use]
    pub fn learning_rate(self, learning_rate: f32) -> Self {
        Self { learning_rate, ..self }
    }

    /// Decay of the first and second moment, each 0 to below 1.
    #[must_use]
    pub fn betas(self, beta1: f32, beta2: f32) -> Self {
        Self { beta1, beta2, ..self }
    }

    /// Added to the root of the second moment, above 0.
    #[must_use]
    pub fn eps(self, eps: f32) -> Self {
        Self { eps, ..self }
    }

    /// Decoupled weight decay, 0 or more.
    #[must_use]
    pub fn weight_decay(self, weight_decay: f32) -> Self {
        Self { weight_decay, ..self }
    }

    /// Clips the gradient of the whole adapter to this norm; `None` does not.
    #[must_use]
    pub fn max_grad_norm(self, norm: impl Into<Option<f32>>) -> Self {
        Self { max_grad_norm: norm.into(), ..self }
    }

    /// What the accumulated gradient is divided by.
    #[must_use]
    pub fn normalisation(self, normalisation: Normalisation) -> Self {
        Self { normalisation, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builder_changes_what_it_names_and_nothing_else() {
        let plain = Adamw::new(1e-3);
        assert_eq!((plain.weight_decay, plain.max_grad_norm, plain.normalisation), (0.0, None, Normalisation::WeightSum));
        assert_eq!(plain.betas(0.8, 0.9), Adamw { beta1: 0.8, beta2: 0.9, ..plain });
        assert_eq!(plain.max_grad_norm(1.0).max_grad_norm, Some(1.0));
        assert_eq!(plain.max_grad_norm(1.0).max_grad_norm(None), plain);
        assert_eq!(plain.learning_rate(1e-4), Adamw { learning_rate: 1e-4, ..plain });
    }
}
