//! All that the engine holds of a job, off the device and back.
//!
//! Never rounds and never leaves anything out: who goes on from a snapshot goes on with the same bits.

use nodus_kernels::{Device, DeviceError};
use nodus_protocol::{AdapterSlot, AdapterState, AdapterWeights, EngineError, ErrorKind, JobSlot, JobState, ModelConfig, TrunkSlot};

use crate::adapter::Adapter;
use crate::engine::{Engine, no_adapter};
use crate::error::to_job;

/// The most that a job's state may have: it travels in one frame of a process's socket, which has less than 4 GiB.
const STATE_BYTES_MAX: u64 = 3 << 30;
/// Of each weight: itself, two moments and what is accumulated.
const WEIGHT_BYTES: u64 = 16;

impl<D: Device> Engine<D> {
    /// The gradient accumulated since an adapter's last step, not normalised, in the places of its weights. For tests and for looking inside.
    ///
    /// # Errors
    /// `NotFound`; what the device says.
    pub fn gradients(&mut self, slot: AdapterSlot) -> Result<AdapterWeights, EngineError> {
        let adapter = self.adapters.get(&slot).ok_or_else(|| no_adapter(slot))?;
        adapter.gradients(&mut self.device).map_err(|error| to_job(&error))
    }

    /// All that is held of a job. `QuotaExceeded` where that is more than a frame holds; nothing is read then.
    pub(crate) fn snapshot(&mut self, job: JobSlot) -> Result<JobState, EngineError> {
        let own = self.adapters.iter().filter(|(slot, _)| slot.job == job);
        let bytes = own.clone().map(|(_, adapter)| adapter.sites.len() as u64 * WEIGHT_BYTES).sum::<u64>();
        if bytes > STATE_BYTES_MAX {
            let text = format!("the job's adapters and moments have {bytes} bytes, expected at most {STATE_BYTES_MAX} to be kept");
            return Err(EngineError::new(ErrorKind::QuotaExceeded, text));
        }
        let adapters = own.map(|(_, adapter)| adapter.state(&mut self.device)).collect::<Result<_, _>>();
        Ok(JobState { adapters: adapters.map_err(|error| to_job(&error))? })
    }

    /// Puts it back.
    pub(crate) fn restore(&mut self, job: JobSlot, at: (TrunkSlot, Option<u64>), state: &JobState) -> Result<(), EngineError> {
        for state in &state.adapters {
            let slot = AdapterSlot { job, index: state.index };
            let model = self.make_room(slot, at.0, &state.config)?;
            let adapter = Adapter::restored(&mut self.device, slot, (at, &model), state)?;
            self.install(slot, adapter);
        }
        Ok(())
    }
}

impl<D: Device> Adapter<D> {
    fn state(&self, device: &mut D) -> Result<AdapterState, DeviceError> {
        let mut read = |buffer: &D::Buffer| {
            let mut values = vec![0.0; self.sites.len()];
            device.download(buffer, 0, &mut values).map(|()| values)
        };
        let has_stepped = self.steps > 0;
        Ok(AdapterState {
            index: self.index,
            config: self.config.clone(),
            seed: self.seed,
            steps: self.steps,
            count: self.count,
            sums: self.sums,
            poison: self.poison.clone(),
            params: read(&self.params)?,
            // A step makes the moments, and leaves nothing accumulated.
            moments: if has_stepped { Some([read(&self.moment1)?, read(&self.moment2)?]) } else { None },
            grads: if self.sums.sequences > 0 { Some(read(&self.grads)?) } else { None },
        })
    }

    fn restored(
        device: &mut D,
        slot: AdapterSlot,
        ((trunk, cohort), model): ((TrunkSlot, Option<u64>), &ModelConfig),
        state: &AdapterState,
    ) -> Result<Self, EngineError> {
        let blank = Self::blank(device, slot, (trunk, model), &state.config, state.seed, cohort);
        let mut adapter = blank.map_err(|error| to_job(&error))?;
        let len = adapter.sites.len();
        let mut write = |values: &[f32], buffer: &mut D::Buffer| {
            if values.len() != len {
                return Err(EngineError::invalid(format!("adapter {} has {} numbers, expected {len}", state.index, values.len())));
            }
            device.upload(values, buffer, 0).map_err(|error| to_job(&error))
        };
        write(&state.params, &mut adapter.params)?;
        if let Some([first, second]) = &state.moments {
            write(first, &mut adapter.moment1)?;
            write(second, &mut adapter.moment2)?;
        }
        if let Some(grads) = &state.grads {
            write(grads, &mut adapter.grads)?;
        }
        (adapter.steps, adapter.count, adapter.sums) = (state.steps, state.count, state.sums);
        adapter.poison.clone_from(&state.poison);
        Ok(adapter)
    }
}
