//! A call of a job, told from all others by what it asks.
//!
//! Knows none of the numbers by which an engine happens to know job, trunk and cohort: they are others in every attempt.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use nodus_protocol::frame::{FrameError, encode};
use nodus_protocol::{Command, Digest};
use serde::Serialize;

/// What tells a call from all others; none where the command is the host's own and no call of the job.
///
/// # Errors
/// None that any command has.
pub(super) fn fingerprint(command: &Command) -> Result<Option<Digest>, FrameError> {
    let of = match command {
        Command::CreateAdapter { slot, config, seed, .. } => digest(&("create", slot.index, config, seed)),
        Command::LoadAdapter { slot, weights, seed, .. } => digest(&("load", slot.index, weights, seed)),
        Command::ForwardBackward { slot, batch } => digest(&("forward-backward", slot.index, batch)),
        Command::OptimStep { slot, optimiser } => digest(&("optim-step", slot.index, optimiser)),
        Command::TrainStep { slot, batch, optimiser } => digest(&("train-step", slot.index, batch, optimiser)),
        Command::Evaluate { slot, batch, first } => digest(&("evaluate", slot.index, batch, first)),
        Command::Export { slot } => digest(&("export", slot.index)),
        Command::DropAdapter { slot } => digest(&("drop", slot.index)),
        Command::Reserve { .. }
        | Command::Prioritise { .. }
        | Command::Snapshot { .. }
        | Command::Restore { .. }
        | Command::Bound { .. }
        | Command::DropJob { .. } => return Ok(None),
    };
    of.map(Some)
}

/// Adapters of a job, by the default of its limit `adapters-made`; more are as any other call.
const DROPS: u32 = 4096;

/// Whether what was asked is that an adapter be dropped.
pub(super) fn is_drop(asked: Digest) -> bool {
    static ALL: LazyLock<BTreeSet<Digest>> = LazyLock::new(|| (0..DROPS).filter_map(|index| digest(&("drop", index)).ok()).collect());
    ALL.contains(&asked)
}

fn digest(call: &impl Serialize) -> Result<Digest, FrameError> {
    encode(call).map(|bytes| Digest::of(&bytes))
}

/// What a call asks, in a word or two, for a fault.
pub(super) fn name(command: &Command) -> &'static str {
    match command {
        Command::CreateAdapter { .. } => "create an adapter",
        Command::LoadAdapter { .. } => "load an adapter",
        Command::ForwardBackward { .. } => "forward-backward",
        Command::OptimStep { .. } => "optim-step",
        Command::TrainStep { .. } => "train-step",
        Command::Evaluate { .. } => "evaluate",
        Command::Export { .. } => "export an adapter",
        Command::DropAdapter { .. } => "drop an adapter",
        _ => "a command of the host",
    }
}
