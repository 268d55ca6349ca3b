//! What a tenant of Nodus imports: train LoRA adapters on a frozen base model, from a WebAssembly component.
//!
//! Never knows the host behind the contract in `wit/`. A whole job:
//!
//! ```no_run
//! use nodus_guest::{AdamW, Adapter, Error, Job, LoraConfig, Schedule};
//!
//! #[derive(serde::Deserialize)]
//! struct Params {
//!     learning_rate: f64,
//!     epochs: Option<u64>,
//! }
//!
//! fn train(job: Job, params: Params) -> Result<(), Error> {
//!     let trunk = job.trunk()?;
//!     let adapter = Adapter::create(&trunk, &LoraConfig::new(8).alpha(16.0).targets(["q_proj", "v_proj"]))?;
//!     let data = job.train_data(&trunk, None)?;
//!     let batches = data.batches(4).epochs(params.epochs.unwrap_or(1)).shuffle(job.seed());
//!     let total = batches.total();
//!     let schedule = Schedule::cosine(params.learning_rate, total).warmup(10);
//!     for (step, indices) in (0..).zip(batches) {
//!         let report = adapter.train_step(&data.batch(&indices)?, &AdamW::new(schedule.at(step)))?;
//!         job.metric("loss", report.step, report.loss);
//!         job.progress(report.step, total);
//!     }
//!     adapter.save("adapter")?;
//!     Ok(())
//! }
//!
//! nodus_guest::job!(train);
//! # fn main() {}
//! ```
//!
//! In a crate with `crate-type = ["cdylib"]`, `cargo build --release --target wasm32-wasip2` makes the component. What does not
//! touch the host (schedules, batches, parameters, early stopping, random numbers) is pure and can be tested on any target; the rest
//! compiles everywhere, and panics where there is no host.

#[doc(hidden)]
pub mod bindings;

mod adapter;
mod batches;
mod data;
mod early_stopping;
mod error;
mod job;
mod lora;
mod optimiser;
mod params;
mod random;
pub mod schedule;
mod trunk;

pub use adapter::{Adapter, PendingLoss, PendingStep};
pub use batches::{Batches, Steps};
pub use bindings::data::{DatasetInfo, Example};
pub use bindings::job::{Level, Limit};
pub use bindings::training::{Adamw as AdamW, LayerSelection, LoraConfig, LossSums, ModuleOverride, Normalisation, StepReport};
pub use bindings::trunk::{Message, TrunkInfo};
pub use data::{Batch, Dataset};
pub use early_stopping::EarlyStopping;
pub use error::{Error, Result};
#[doc(hidden)]
pub use job::run;
pub use job::{Job, Train};
pub use params::parse_params;
pub use random::Rng;
pub use schedule::Schedule;
pub use trunk::Trunk;

/// Makes a function the component's job: `job!(train)`, where `train` takes a [`Job`], or a [`Job`] and a struct of parameters
/// that serde can read, and returns a result whose error has a text. Once a component.
#[macro_export]
macro_rules! job {
    ($train:path) => {
        #[doc(hidden)]
        struct NodusJob;

        impl $crate::bindings::Guest for NodusJob {
            fn run() -> ::core::result::Result<(), ::std::string::String> {
                $crate::run($train)
            }
        }

        $crate::bindings::export!(NodusJob with_types_in $crate::bindings);
    };
}
