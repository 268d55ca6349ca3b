//! Processes of this program that it starts itself.
//!
//! What they do is said where it is done: `guest`, `engine`.

pub(crate) mod fate;
pub(crate) mod handover;
pub(crate) mod mps;
pub(crate) mod rank;
pub(crate) mod socket;
pub(crate) mod spawn;
pub(crate) mod weights;
