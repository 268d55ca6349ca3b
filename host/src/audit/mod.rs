//! What an auditor does: check receipts, run jobs again, read the ledger.
//!
//! Changes nothing that a host keeps.

mod brought;
mod compare;
mod ledger;
mod recorded;
mod replay;
mod trust;
mod verify;

pub(crate) use brought::INPUTS;
pub(crate) use ledger::ledger;
pub(crate) use replay::{replay, replay_fetched};
pub(crate) use trust::known;
pub(crate) use verify::{check, verify};
