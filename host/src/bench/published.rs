//! What was published before (technical report 019, "Many Training Jobs on One GPU"), kept as data.
//!
//! Never mixed with what was measured here: other devices, other engines. Which of these rows the report calls audited is not known here, so
//! that nothing is said of it.

use super::work::{Kind, Work};
use nodus_protocol::LayerSelection;

/// One published ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Published {
    pub(super) kind: Kind,
    pub(super) jobs: u32,
    /// Top layers with adapters; none is all.
    pub(super) top: Option<u32>,
    pub(super) comparator: &'static str,
    pub(super) ratio: f64,
}

const fn sweep(jobs: u32, top: u32, comparator: &'static str, ratio: f64) -> Published {
    Published { kind: Kind::Sweep, jobs, top: Some(top), comparator, ratio }
}

const fn tenants(comparator: &'static str, ratio: f64) -> Published {
    Published { kind: Kind::Tenants, jobs: 16, top: None, comparator, ratio }
}

/// All of them.
pub(super) const ALL: &[Published] = &[
    sweep(16, 1, "dedicated", 4.0305),
    sweep(16, 1, "stock MPS", 3.7011),
    sweep(32, 1, "dedicated", 4.4532),
    sweep(32, 1, "stock MPS", 3.96),
    sweep(16, 2, "dedicated", 3.3794),
    sweep(8, 1, "dedicated", 3.38),
    tenants("solo, steady", 6.93),
    tenants("solo, cold", 5.86),
];

/// Those for the same kind of work: as many jobs, as many layers.
pub(super) fn beside(work: &Work) -> impl Iterator<Item = &'static Published> {
    let top = match &work.layers {
        LayerSelection::Last(last) => Some(*last),
        _ => None,
    };
    let (kind, jobs) = (work.kind, work.jobs);
    ALL.iter().filter(move |published| published.kind == kind && published.jobs == jobs && published.top == top)
}
