//! Learning-rate schedules: pure functions of the step.
//!
//! Never holds the step itself: the caller counts, from 0.
//!
//! Steps count from 0, so `total` steps are 0 to `total` - 1, and the learning rate of a step is the one that very step uses.
//!
//! * Warm-up of `warmup` steps: step `t` below `warmup` has `peak * (t + 1) / warmup`. The first step already moves, and the
//!   last warm-up step has the peak. `transformers` (`get_linear_schedule_with_warmup` and its kin) uses
//!   `peak * t / warmup` instead, so its first step has learning rate 0 and trains nothing: during warm-up ours is one step ahead.
//! * After warm-up all three equal `transformers`: with `p = (t - warmup) / (total - warmup)`, linear is
//!   `peak * (1 - p)` and cosine is `min + (peak - min) * (1 + cos(pi p)) / 2`. The last step is not yet at 0 or `min`.
//! * From `total` on, linear stays at 0 and cosine at `min`.

use std::f64::consts::PI;

/// A constant learning rate after warm-up.
#[must_use]
pub fn constant(step: u64, warmup: u64, peak: f64) -> f64 {
    warm_up(step, warmup, peak).unwrap_or(peak)
}

/// Falls linearly from `peak` to 0 after warm-up.
#[must_use]
pub fn linear(step: u64, total: u64, warmup: u64, peak: f64) -> f64 {
    warm_up(step, warmup, peak).unwrap_or_else(|| peak * (1.0 - part_done(step, total, warmup)))
}

/// Falls from `peak` to `min` along half a cosine after warm-up.
#[must_use]
pub fn cosine(step: u64, total: u64, warmup: u64, peak: f64, min: f64) -> f64 {
    let fall = || min + (peak - min) * 0.5 * (1.0 + (PI * part_done(step, total, warmup)).cos());
    warm_up(step, warmup, peak).unwrap_or_else(fall)
}

fn warm_up(step: u64, warmup: u64, peak: f64) -> Option<f64> {
    (step < warmup).then(|| peak * ((step + 1) as f64 / warmup as f64))
}

/// How much of the time after warm-up lies behind this step, 0 to 1.
fn part_done(step: u64, total: u64, warmup: u64) -> f64 {
    let falling = total.saturating_sub(warmup).max(1);
    (step.saturating_sub(warmup) as f64 / falling as f64).min(1.0)
}

/// A schedule with its numbers filled in.
///
/// ```
/// use nodus_guest::Schedule;
///
/// let schedule = Schedule::cosine(2e-4, 100).warmup(10).min(1e-5);
/// assert_eq!(schedule.at(0), 2e-5); // a tenth of the way up, not 0
/// assert_eq!(schedule.at(9), 2e-4);
/// assert_eq!(schedule.at(100), 1e-5);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    shape: Shape,
    peak: f64,
    warmup: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Constant,
    Linear { total: u64 },
    Cosine { total: u64, min: f64 },
}

impl Schedule {
    /// See [`constant`].
    #[must_use]
    pub fn constant(peak: f64) -> Self {
        Self { shape: Shape::Constant, peak, warmup: 0 }
    }

    /// See [`linear`]; `total` counts warm-up too.
    #[must_use]
    pub fn linear(peak: f64, total: u64) -> Self {
        Self { shape: Shape::Linear { total }, peak, warmup: 0 }
    }

    /// See [`cosine`]; `total` counts warm-up too, and the lowest learning rate is 0 unless [`Schedule::min`] says otherwise.
    #[must_use]
    pub fn cosine(peak: f64, total: u64) -> Self {
        Self { shape: Shape::Cosine { total, min: 0.0 }, peak, warmup: 0 }
    }

    /// Number of warm-up steps; 0 is none.
    #[must_use]
    pub fn warmup(self, steps: u64) -> Self {
        Self { warmup: steps, ..self }
    }

    /// The learning rate that a cosine ends at. The other schedules have none, and ignore it.
    #[must_use]
    pub fn min(self, min: f64) -> Self {
        match self.shape {
            Shape::Cosine { total, .. } => Self { shape: Shape::Cosine { total, min }, ..self },
            _ => self,
        }
    }

    /// The learning rate of a step, counted from 0: computed in float64 and rounded to float32 once.
    #[must_use]
    pub fn at(&self, step: u64) -> f32 {
        let rate = match self.shape {
            Shape::Constant => constant(step, self.warmup, self.peak),
            Shape::Linear { total } => linear(step, total, self.warmup, self.peak),
            Shape::Cosine { total, min } => cosine(step, total, self.warmup, self.peak, min),
        };
        rate as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `_get_linear_schedule_with_warmup_lr_lambda` of transformers.
    fn their_linear(step: u64, total: u64, warmup: u64) -> f64 {
        if step < warmup {
            return step as f64 / warmup.max(1) as f64;
        }
        (total.saturating_sub(step) as f64 / (total - warmup).max(1) as f64).max(0.0)
    }

    /// `_get_cosine_schedule_with_warmup_lr_lambda` of transformers, with half a wave.
    fn their_cosine(step: u64, total: u64, warmup: u64) -> f64 {
        if step < warmup {
            return step as f64 / warmup.max(1) as f64;
        }
        let progress = (step - warmup) as f64 / (total - warmup).max(1) as f64;
        (0.5 * (1.0 + (PI * 0.5 * 2.0 * progress).cos())).max(0.0)
    }

    #[test]
    fn equals_transformers_after_warm_up_and_leads_by_one_step_in_it() {
        for (total, warmup) in [(20, 0), (20, 5), (20, 1), (1, 0), (100, 99)] {
            for step in 0..total {
                let theirs = if step < warmup { step + 1 } else { step };
                let line = linear(step, total, warmup, 1.0);
                let wave = cosine(step, total, warmup, 1.0, 0.0);
                assert!((line - their_linear(theirs, total, warmup)).abs() < 1e-12, "linear at {step} of {total}, warm-up {warmup}");
                assert!((wave - their_cosine(theirs, total, warmup)).abs() < 1e-12, "cosine at {step} of {total}, warm-up {warmup}");
            }
        }
    }

    #[test]
    fn no_step_of_a_run_is_wasted_on_zero() {
        for (total, warmup) in [(1, 0), (1, 1), (7, 0), (7, 3), (7, 7), (7, 9)] {
            for step in 0..total {
                for rate in [constant(step, warmup, 0.1), linear(step, total, warmup, 0.1), cosine(step, total, warmup, 0.1, 0.0)] {
                    assert!(rate > 0.0 && rate <= 0.1, "{rate} at {step} of {total}, warm-up {warmup}");
                }
            }
        }
    }

    #[test]
    fn without_warm_up_the_first_step_has_the_rate_as_given() {
        let schedules = [Schedule::constant(3e-4), Schedule::linear(3e-4, 9), Schedule::cosine(3e-4, 9)];
        assert!(schedules.iter().all(|s| s.at(0) == 3e-4));
        assert!(schedules.iter().all(|s| s.warmup(1).at(0) == 3e-4), "a warm-up of one step ends with that step");
    }

    #[test]
    fn ends_where_it_should_and_stays_there() {
        let (line, wave) = (Schedule::linear(1.0, 10), Schedule::cosine(1.0, 10).min(0.25));
        assert_eq!((line.at(9), line.at(10), line.at(1000)), (0.1, 0.0, 0.0));
        assert_eq!((wave.at(10), wave.at(1000)), (0.25, 0.25));
        assert_eq!(Schedule::cosine(1.0, 10).at(5), 0.5);
        assert_eq!(Schedule::constant(1.0).warmup(4).at(1000), 1.0);
        assert_eq!([0, 1, 2, 3, 4].map(|t| Schedule::constant(1.0).warmup(4).at(t)), [0.25, 0.5, 0.75, 1.0, 1.0]);
    }
}
