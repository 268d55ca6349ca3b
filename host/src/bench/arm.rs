//! The arms: ways to run the same jobs, each a list of processes and what they share.
//!
//! Knows no clock and no result.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One way to run the jobs of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// One after another, each in a process of its own with the device to itself, nothing kept for later epochs.
    Dedicated,
    /// The same with a trunk cache.
    DedicatedCache,
    /// All at once, each in a process of its own; on a card these are clients of one MPS daemon, the thread percentage unset.
    StockMps,
    /// The same with the thread percentage set to 100 for every client.
    Mps100,
    /// One engine for all, the trunk computed for each job.
    Packed,
    /// One engine for all, the trunk computed once for all members of a sweep.
    Fused,
    /// The same, and kept for later epochs.
    FusedCache,
    /// PyTorch and PEFT, one after another, step by step.
    TorchEager,
    /// The same, a step being one CUDA graph.
    TorchGraph,
    /// The same, forward and backward compiled by `torch.compile`.
    TorchCompile,
    /// PyTorch and PEFT, a process for each job at once, as with `stock-mps`.
    TorchEagerMps,
    /// The same, a step being one CUDA graph.
    TorchGraphMps,
}

/// Under what processes run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Company {
    /// One process at a time.
    Alone,
    /// All at once; on a card under an MPS daemon, with this thread percentage where there is one.
    Together(Option<u8>),
}

impl Arm {
    /// Ours, in the order in which they run and are shown: the one that the others are checked against comes first.
    pub(super) const OURS: [Self; 7] =
        [Self::Dedicated, Self::DedicatedCache, Self::StockMps, Self::Mps100, Self::Packed, Self::Fused, Self::FusedCache];
    /// PyTorch's.
    pub(super) const PEERS: [Self; 5] = [Self::TorchEager, Self::TorchGraph, Self::TorchCompile, Self::TorchEagerMps, Self::TorchGraphMps];

    /// How PyTorch takes a step, where PyTorch does.
    pub(super) fn peer(self) -> Option<&'static str> {
        match self {
            Self::TorchEager | Self::TorchEagerMps => Some("eager"),
            Self::TorchGraph | Self::TorchGraphMps => Some("graph"),
            Self::TorchCompile => Some("compile"),
            _ => None,
        }
    }

    /// Whether it can run where there is no card.
    pub(super) fn needs_card(self) -> bool {
        matches!(self, Self::TorchGraph | Self::TorchGraphMps | Self::TorchEagerMps)
    }

    /// The jobs of each of its processes.
    pub(super) fn processes(self, jobs: u32) -> Vec<Vec<u32>> {
        match self {
            Self::Packed | Self::Fused | Self::FusedCache | Self::TorchEager | Self::TorchGraph | Self::TorchCompile => {
                vec![(0..jobs).collect()]
            }
            _ => (0..jobs).map(|job| vec![job]).collect(),
        }
    }

    /// How its processes meet.
    pub(super) fn company(self) -> Company {
        match self {
            Self::StockMps | Self::TorchEagerMps | Self::TorchGraphMps => Company::Together(None),
            Self::Mps100 => Company::Together(Some(100)),
            _ => Company::Alone,
        }
    }

    /// Whether its processes have the weights once between them, as engines of the service's lane `mps` do.
    pub(super) fn shares_weights(self) -> bool {
        self == Self::Mps100
    }

    /// Whether all jobs are at work at the same time, ours.
    pub(super) fn is_at_once(self) -> bool {
        self.peer().is_none() && !matches!(self, Self::Dedicated | Self::DedicatedCache)
    }

    /// Whether members of a sweep share the trunk's activations.
    pub(super) fn shares(self) -> bool {
        matches!(self, Self::Fused | Self::FusedCache)
    }

    /// Whether activations are kept for later epochs.
    pub(super) fn keeps(self) -> bool {
        matches!(self, Self::DedicatedCache | Self::FusedCache)
    }

    /// As options and files call it.
    pub(super) fn key(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// As tables call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Dedicated => "dedicated",
            Self::DedicatedCache => "dedicated, trunk cache",
            Self::StockMps => "stock MPS",
            Self::Mps100 => "MPS100",
            Self::Packed => "packed, no reuse",
            Self::Fused => "fused",
            Self::FusedCache => "fused, trunk cache",
            Self::TorchEager => "PyTorch + PEFT",
            Self::TorchGraph => "PyTorch, CUDA graph",
            Self::TorchCompile => "PyTorch, compiled",
            Self::TorchEagerMps => "PyTorch, MPS",
            Self::TorchGraphMps => "PyTorch, graph, MPS",
        }
    }

    /// What it is, for a legend; `on_card` says whether MPS can be.
    pub(super) fn meaning(self, on_card: bool) -> &'static str {
        match (self, on_card) {
            (Self::Dedicated, _) => {
                "the same engine with one job, the device to itself, one after another; each job in a process of its own from its start"
            }
            (Self::DedicatedCache, _) => "dedicated, with the trunk's outputs kept for later epochs",
            (Self::StockMps, true) => "a process for each job at the same time under one MPS daemon, the thread percentage variable unset",
            (Self::Mps100, true) => {
                "a process for each job at the same time under one MPS daemon, the thread percentage 100 for every client"
            }
            (Self::StockMps | Self::Mps100, false) => "a process for each job at the same time; a CPU has no MPS",
            (Self::Packed, _) => "one engine, the trunk recomputed for each job",
            (Self::Fused, _) => "one engine, one trunk for all members of a sweep",
            (Self::FusedCache, _) => "fused, with the trunk's outputs kept for later epochs",
            (Self::TorchEager, _) => {
                "PyTorch and PEFT, one job after another in one process, step by step; losses within a tolerance of ours"
            }
            (Self::TorchGraph, _) => "the same, a whole step being one CUDA graph",
            (Self::TorchCompile, _) => "the same, forward and backward by torch.compile",
            (Self::TorchEagerMps, _) => "PyTorch and PEFT, a process for each job at the same time under one MPS daemon",
            (Self::TorchGraphMps, _) => "the same, a whole step being one CUDA graph",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Arm, Company};

    #[test]
    fn every_arm_runs_every_job_once() {
        for arm in Arm::OURS.into_iter().chain(Arm::PEERS) {
            let mut jobs: Vec<u32> = arm.processes(5).concat();
            jobs.sort_unstable();
            assert_eq!(jobs, [0, 1, 2, 3, 4], "{arm:?}");
        }
        assert_eq!(Arm::Mps100.company(), Company::Together(Some(100)));
        assert!(Arm::OURS.into_iter().all(|arm| arm.company() == Company::Alone || arm.processes(3).len() == 3));
    }
}
