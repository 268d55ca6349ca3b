//! How busy a card's multiprocessors are while an arm runs: NVML's GPM figure of SM utilisation, which Hopper and later cards have.
//!
//! Never shows another figure in its place: plain utilisation says only that a kernel ran.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use serde::{Deserialize, Serialize};

/// How often the card is asked.
pub(super) const SAMPLE: Duration = Duration::from_millis(100);

/// The mean of a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Stretch {
    pub(super) seconds: f64,
    /// Part of the multiprocessors that had work, from 0 to 1.
    pub(super) busy: f64,
}

/// A card that tells.
pub(super) struct Activity {
    nvml: Nvml,
    name: String,
}

impl Activity {
    /// The card of this [lasting name](crate::cuda::lasting_name), where the driver tells its figures. NVML numbers cards in an order of its own.
    pub(super) fn open(name: &str) -> Option<Self> {
        let open = || -> Result<Self, NvmlError> {
            let nvml = Nvml::init()?;
            if nvml.device_by_uuid(name)?.gpm_support()? { Ok(Self { nvml, name: name.to_owned() }) } else { Err(NvmlError::NotSupported) }
        };
        open().inspect_err(|error| tracing::info!(%error, "the card does not tell how busy it is")).ok()
    }

    /// Does something and looks at the card meanwhile.
    pub(super) fn during<T>(&self, work: impl FnOnce() -> T) -> (T, Vec<Stretch>) {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sampler = scope.spawn(|| self.sample(&is_over));
            let done = work();
            is_over.store(true, Relaxed);
            sampler.thread().unpark();
            // A sampler that panicked measured nothing.
            let stretches = sampler.join().unwrap_or(Ok(Vec::new()));
            (done, stretches.inspect_err(|error| tracing::warn!(%error, "the card stopped telling how busy it is")).unwrap_or_default())
        })
    }

    fn sample(&self, is_over: &AtomicBool) -> Result<Vec<Stretch>, NvmlError> {
        let device = self.nvml.device_by_uuid(self.name.as_str())?;
        let (mut before, mut began, mut stretches) = (device.gpm_sample()?, Instant::now(), Vec::new());
        while !is_over.load(Relaxed) {
            std::thread::park_timeout(SAMPLE);
            let (now, seconds) = (device.gpm_sample()?, began.elapsed().as_secs_f64());
            began = Instant::now();
            if let Some(Ok(metric)) = gpm_metrics_get(&self.nvml, &before, &now, &[GpmMetricId::SmUtil])?.into_iter().next() {
                stretches.push(Stretch { seconds, busy: metric.value / 100.0 });
            }
            before = now;
        }
        Ok(stretches)
    }
}

/// The mean over all stretches; none of none.
pub(super) fn mean(stretches: &[Stretch]) -> Option<f64> {
    let seconds: f64 = stretches.iter().map(|stretch| stretch.seconds).sum();
    (seconds > 0.0).then(|| stretches.iter().map(|stretch| stretch.seconds * stretch.busy).sum::<f64>() / seconds)
}

#[cfg(test)]
mod tests {
    use super::{Stretch, mean};

    #[test]
    fn longer_stretches_count_more() {
        let found = mean(&[Stretch { seconds: 3.0, busy: 0.5 }, Stretch { seconds: 1.0, busy: 0.9 }]).unwrap();
        assert!((found - 0.6).abs() < 1e-12 && mean(&[]).is_none());
    }
}
