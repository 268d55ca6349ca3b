//! What each job holds of the device's memory, and what is reserved for it.
//!
//! Knows no device: it is told what is allocated and freed, and answers whether more may be. A job with a reservation is refused by its
//! own numbers alone, so that it never sees a neighbour.

use std::collections::BTreeMap;

use nodus_protocol::{AdapterSlot, EngineError, ErrorKind, JobSlot};
use serde::{Deserialize, Serialize};

/// What became of one adapter's bytes, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterBytes {
    /// Weights, gradient and moments that it was given.
    pub granted: u64,
    /// Weights written at creation or loading.
    pub written: u64,
    /// Weights exported.
    pub exported: u64,
    /// What it gave back, zeroed.
    pub zeroed: u64,
}

/// Device memory of one job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobBytes {
    /// Reserved for its adapters' weights, gradients and moments; none where nothing is reserved.
    pub reserved_adapter_bytes: Option<u64>,
    /// Reserved for the activations of its largest batch.
    pub reserved_activation_bytes: u64,
    /// What its adapters hold now.
    pub allocated_bytes: u64,
    /// The most that it needed at once: its adapters and, in a pass, the activations of its own rows.
    pub peak_bytes: u64,
    /// Each adapter that it ever had, by its index.
    pub adapters: BTreeMap<u32, AdapterBytes>,
}

impl JobBytes {
    fn outstanding(&self) -> u64 {
        self.reserved_adapter_bytes.unwrap_or(0).saturating_sub(self.allocated_bytes)
    }
}

/// All jobs.
#[derive(Debug, Default)]
pub(crate) struct Jobs(pub(crate) BTreeMap<JobSlot, JobBytes>);

impl Jobs {
    pub(crate) fn of(&mut self, job: JobSlot) -> &mut JobBytes {
        self.0.entry(job).or_default()
    }

    /// Reserves for a job, in place of what was reserved for it. `free_bytes` is what the device has left.
    ///
    /// # Errors
    /// `QuotaExceeded` with the numbers.
    pub(crate) fn reserve(&mut self, job: JobSlot, adapter: u64, activation: u64, free_bytes: u64) -> Result<(), EngineError> {
        let held = self.0.get(&job).map_or(0, |job| job.allocated_bytes);
        let (others, largest) = self.promised(Some(job));
        let needed = adapter.saturating_sub(held).saturating_add(activation.max(largest)).saturating_add(others);
        if needed > free_bytes {
            let beside = free_bytes.saturating_sub(others);
            return Err(refusal(format!(
                "the job needs {adapter} bytes for adapters and {activation} for activations, {beside} are free on the device"
            )));
        }
        let job = self.of(job);
        (job.reserved_adapter_bytes, job.reserved_activation_bytes) = (Some(adapter), activation);
        Ok(())
    }

    /// Whether a job may have so many bytes for one more adapter.
    ///
    /// # Errors
    /// `QuotaExceeded` with the numbers.
    pub(crate) fn check_adapter(&self, job: JobSlot, bytes: u64, free_bytes: u64) -> Result<(), EngineError> {
        let own = self.0.get(&job);
        if let Some(reserved) = own.and_then(|own| own.reserved_adapter_bytes) {
            let left = reserved.saturating_sub(own.map_or(0, |own| own.allocated_bytes));
            return match bytes <= left {
                true => Ok(()),
                false => Err(refusal(format!("the adapter needs {bytes} bytes, {left} of the job's {reserved} are left"))),
            };
        }
        let (others, largest) = self.promised(Some(job));
        let left = free_bytes.saturating_sub(others).saturating_sub(largest);
        if bytes > left {
            return Err(refusal(format!("the adapter needs {bytes} bytes, {left} are free on the device")));
        }
        Ok(())
    }

    /// Whether a job's batch lies within its reservation, if it has one.
    ///
    /// # Errors
    /// `ActivationBytes` with the numbers.
    pub(crate) fn check_activations(&self, job: JobSlot, bytes: u64) -> Result<(), EngineError> {
        let Some(own) = self.0.get(&job).filter(|own| own.reserved_adapter_bytes.is_some()) else { return Ok(()) };
        let reserved = own.reserved_activation_bytes;
        if bytes > reserved {
            return Err(refusal(format!(
                "the batch needs {bytes} bytes of activations, expected at most the job's {reserved} (activation-bytes)"
            )));
        }
        Ok(())
    }

    /// What other jobs were promised and do not hold yet: for their adapters together, and for the activations of the largest, since what
    /// does not fit into one pass runs one after the other.
    fn promised(&self, but: Option<JobSlot>) -> (u64, u64) {
        let others = || self.0.iter().filter(|(job, _)| Some(**job) != but).map(|(_, bytes)| bytes);
        let adapters = others().map(JobBytes::outstanding).fold(0, u64::saturating_add);
        (adapters, others().map(|job| job.reserved_activation_bytes).max().unwrap_or(0))
    }

    /// An adapter was made or filled.
    pub(crate) fn granted(&mut self, slot: AdapterSlot, state_bytes: u64, written_bytes: u64) {
        let job = self.of(slot.job);
        job.allocated_bytes += state_bytes;
        job.peak_bytes = job.peak_bytes.max(job.allocated_bytes);
        let adapter = job.adapters.entry(slot.index).or_default();
        adapter.granted += state_bytes;
        adapter.written += written_bytes;
    }

    /// An adapter's weights were handed out.
    pub(crate) fn exported(&mut self, slot: AdapterSlot, bytes: u64) {
        self.of(slot.job).adapters.entry(slot.index).or_default().exported += bytes;
    }

    /// A pass is going to hold so many bytes of the job's activations.
    pub(crate) fn passing(&mut self, job: JobSlot, bytes: u64) {
        let job = self.of(job);
        job.peak_bytes = job.peak_bytes.max(job.allocated_bytes + bytes);
    }

    /// An adapter is gone.
    pub(crate) fn zeroed(&mut self, slot: AdapterSlot, state_bytes: u64) {
        let job = self.of(slot.job);
        job.allocated_bytes = job.allocated_bytes.saturating_sub(state_bytes);
        job.adapters.entry(slot.index).or_default().zeroed += state_bytes;
    }

    /// A job ended: nothing is reserved for it any more. Its figures stay.
    pub(crate) fn ended(&mut self, job: JobSlot) {
        if let Some(job) = self.0.get_mut(&job) {
            (job.reserved_adapter_bytes, job.reserved_activation_bytes) = (None, 0);
        }
    }
}

fn refusal(text: String) -> EngineError {
    EngineError::new(ErrorKind::QuotaExceeded, format!("device memory: {text}"))
}
