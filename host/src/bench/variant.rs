//! The ablations: the same arms with one of the engine's means taken away.
//!
//! Never changes a bit: only how launches reach the card.

use clap::ValueEnum;
use nodus_kernels::cuda::Launching;
use serde::{Deserialize, Serialize};

/// What every arm has of the engine's means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// All: CUDA graphs, independent launches side by side, copies and recording beside the card's work
    #[default]
    Base,
    /// One launch after another, without graphs
    NoGraphs,
    /// Graphs whose launches stand in one line
    OneStream,
    /// The host waits for the card after each piece of a pass
    NoOverlap,
}

impl Variant {
    /// As options and tables call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::NoGraphs => "no-graphs",
            Self::OneStream => "one-stream",
            Self::NoOverlap => "no-overlap",
        }
    }

    pub(super) fn launching(self) -> Launching {
        match self {
            Self::Base => Launching::Best,
            Self::NoGraphs => Launching::NoGraphs,
            Self::OneStream => Launching::OneStream,
            Self::NoOverlap => Launching::NoOverlap,
        }
    }
}
