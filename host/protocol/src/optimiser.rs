//! AdamW's settings for one step.

use serde::{Deserialize, Serialize};

use crate::EngineError;

/// What the accumulated gradient is divided by at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalisation {
    /// The sum of the weights of all rows since the last step.
    WeightSum,
    /// The number of sequences since the last step.
    Sequences,
    /// One.
    One,
}

/// One AdamW step (Loshchilov and Hutter, 2019), as `torch.optim.AdamW` computes it. Ranges: `adamw` in `wit/training.wit`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Clip the whole adapter's gradient to this norm.
    pub max_grad_norm: Option<f32>,
    /// What the gradient is divided by.
    pub normalisation: Normalisation,
}

impl AdamW {
    /// Checks every field against its range.
    ///
    /// # Errors
    /// `invalid-argument` that names the field, its value and the range.
    pub fn validate(&self) -> Result<(), EngineError> {
        let check = |name: &str, value: f32, good: bool, range: &str| {
            if good && value.is_finite() {
                return Ok(());
            }
            Err(EngineError::invalid(format!("{name} is {value}, expected {range}")))
        };
        check("learning_rate", self.learning_rate, self.learning_rate >= 0.0, "a finite number, 0 or more")?;
        check("beta1", self.beta1, (0.0..1.0).contains(&self.beta1), "0 to below 1")?;
        check("beta2", self.beta2, (0.0..1.0).contains(&self.beta2), "0 to below 1")?;
        check("eps", self.eps, self.eps > 0.0, "a finite number above 0")?;
        check("weight_decay", self.weight_decay, self.weight_decay >= 0.0, "a finite number, 0 or more")?;
        let norm = self.max_grad_norm.unwrap_or(1.0);
        check("max_grad_norm", norm, norm > 0.0, "a finite number above 0, or none")
    }
}
