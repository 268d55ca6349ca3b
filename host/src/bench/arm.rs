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
    /// In the order in which they run and are shown: the one that the others are checked against comes first.
    pub(super) const ALL: [Self; 7] =
        [Self::Dedicated, Self::DedicatedCache, Self::StockMps, Self::Mps100, Self::Packed, Self::Fused, Self::FusedCache];

    /// The jobs of each of its processes.
    pub(super) fn processes(self, jobs: u32) -> Vec<Vec<u32>> {
        match self {
            Self::Dedicated | Self::DedicatedCache | Self::StockMps | Self::Mps100 => (0..jobs).map(|job| vec![job]).collect(),
            Self::Packed | Self::Fused | Self::FusedCache => vec![(0..jobs).collect()],
        }
    }

    /// How its processes meet.
    pub(super) fn company(self) -> Company {
        match self {
            Self::StockMps => Company::Together(None),
            Self::Mps100 => Company::Together(Some(100)),
            _ => Company::Alone,
        }
    }

    /// Whether members of a sweep share the trunk's activations.
    pub(super) fn shares(self) -> bool {
        matches!(self, Self::Fused | Self::FusedCache)
    }

    /// Whether activations are kept for later epochs.
    pub(super) fn keeps(self) -> bool {
        matches!(self, Self::DedicatedCache | Self::FusedCache)
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Arm, Company};

    #[test]
    fn every_arm_runs_every_job_once() {
        for arm in Arm::ALL {
            let mut jobs: Vec<u32> = arm.processes(5).concat();
            jobs.sort_unstable();
            assert_eq!(jobs, [0, 1, 2, 3, 4], "{arm:?}");
        }
        assert_eq!(Arm::Mps100.company(), Company::Together(Some(100)));
        assert!(Arm::ALL.into_iter().all(|arm| arm.company() == Company::Alone || arm.processes(3).len() == 3));
    }
}
