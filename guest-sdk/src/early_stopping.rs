//! Keeps count of the best held-out loss, and says when it has stopped improving.
//!
//! Never sees an adapter: losses in, answers out.

/// The best evaluation so far, and how many evaluations ago it was.
///
/// ```
/// use nodus_guest::EarlyStopping;
///
/// let mut stopping = EarlyStopping::new(Some(2));
/// assert!(stopping.observe(0, 3.0)); // the best so far
/// assert!(stopping.observe(10, 2.5));
/// assert!(!stopping.observe(20, 2.5)); // equal is no improvement
/// assert!(!stopping.should_stop());
/// assert!(!stopping.observe(30, 2.6));
/// assert!(stopping.should_stop());
/// assert_eq!(stopping.best(), Some((10, 2.5)));
/// ```
#[derive(Clone, Debug)]
pub struct EarlyStopping {
    patience: Option<u32>,
    best: Option<(u64, f32)>,
    since: u32,
}

impl EarlyStopping {
    /// Stops after so many evaluations in a row without a new best; `None` never stops.
    #[must_use]
    pub fn new(patience: Option<u32>) -> Self {
        Self { patience, best: None, since: 0 }
    }

    /// Takes in the loss after a step; true where it is below every one before. NaN never is.
    pub fn observe(&mut self, step: u64, loss: f32) -> bool {
        let better = !loss.is_nan() && self.best.is_none_or(|(_, best)| loss < best);
        if better {
            self.best = Some((step, loss));
            self.since = 0;
        } else {
            self.since = self.since.saturating_add(1);
        }
        better
    }

    /// Whether patience has run out.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        self.patience.is_some_and(|patience| self.since >= patience.max(1))
    }

    /// The best evaluation so far: its step and its loss.
    #[must_use]
    pub fn best(&self) -> Option<(u64, f32)> {
        self.best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_improvement_starts_the_count_again() {
        let mut stopping = EarlyStopping::new(Some(2));
        for (step, loss) in [3.0, 3.1, 2.9, 3.0].into_iter().enumerate() {
            stopping.observe(step as u64, loss);
            assert!(!stopping.should_stop(), "at {step}");
        }
        stopping.observe(4, 2.95);
        assert!(stopping.should_stop());
        assert_eq!(stopping.best(), Some((2, 2.9)));
    }

    #[test]
    fn nan_is_never_best_and_no_patience_never_stops() {
        let mut stopping = EarlyStopping::new(None);
        assert!(!stopping.observe(0, f32::NAN));
        assert_eq!(stopping.best(), None);
        for step in 1..1000 {
            stopping.observe(step, 1.0);
        }
        assert!(!stopping.should_stop());
        assert_eq!(stopping.best(), Some((1, 1.0)));
    }
}
