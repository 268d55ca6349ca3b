//! What an engine answered to one job and the job's process has not yet told: the figures that count, whatever the process says.
//!
//! Never takes the process's word: what it tells must be the engine's, bit for bit, step for step.

use std::collections::{BTreeMap, VecDeque};

use super::grants::Breach;
use crate::frame::encode;
use crate::{AdapterWeights, Command, Digest, EngineError, LossSums, Reply, SequenceLoss, StepReport};

/// Where a command's answer belongs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    adapter: u32,
    call: u64,
    /// Of a piece of an evaluation, the number of its first sequence.
    first: u64,
}

/// Of one job.
#[derive(Debug, Default)]
pub(super) struct Seen {
    next: u64,
    adapters: BTreeMap<u32, Account>,
}

/// Of one adapter.
#[derive(Debug, Default)]
struct Account {
    /// Its step count, by the engine's answers.
    steps: u64,
    /// Its step count, as far as told.
    told: u64,
    /// In the order in which they were sent, which is that of their numbers.
    calls: VecDeque<Call>,
    export: Option<Export>,
    /// Whether the engine was asked to drop it.
    is_dropped: bool,
}

#[derive(Debug)]
struct Export {
    fingerprint: Digest,
    step: u64,
}

#[derive(Debug)]
struct Call {
    id: u64,
    kind: Kind,
    /// Commands without an answer.
    unanswered: u64,
    /// Whether one was answered by an error: there is nothing to tell.
    is_failed: bool,
}

#[derive(Debug)]
enum Kind {
    Step { learning_rate: f32, report: Option<StepReport> },
    Evaluation { asked: u64, sums: LossSums, early: BTreeMap<u64, Vec<SequenceLoss>> },
}

impl Seen {
    /// The job sent this. None where the answer has nothing that is told.
    ///
    /// # Errors
    /// A piece that continues no evaluation.
    pub(super) fn asked(&mut self, command: &Command) -> Result<Option<Ticket>, Breach> {
        let (slot, kind, first) = match command {
            Command::OptimStep { slot, optimiser } | Command::TrainStep { slot, optimiser, .. } => {
                (slot, Kind::Step { learning_rate: optimiser.learning_rate, report: None }, 0)
            }
            Command::Evaluate { slot, batch, first } => {
                let (first, sequences) = (*first as u64, batch.sequences.len() as u64);
                if first > 0 {
                    return self
                        .piece(slot.index, first, sequences)
                        .map(Some)
                        .ok_or(Breach("a piece of an evaluation that it did not begin"));
                }
                (slot, Kind::Evaluation { asked: sequences, sums: LossSums::default(), early: BTreeMap::new() }, 0)
            }
            Command::Export { slot } => return Ok(Some(Ticket { adapter: slot.index, call: u64::MAX, first: 0 })),
            Command::DropAdapter { slot } => {
                if let Some(account) = self.adapters.get_mut(&slot.index) {
                    account.is_dropped = true;
                }
                self.tidy(slot.index);
                return Ok(None);
            }
            _ => return Ok(None),
        };
        let call = self.next;
        self.next += 1;
        let account = self.adapters.entry(slot.index).or_default();
        account.calls.push_back(Call { id: call, kind, unanswered: 1, is_failed: false });
        Ok(Some(Ticket { adapter: slot.index, call, first }))
    }

    /// The next piece of the adapter's latest evaluation.
    fn piece(&mut self, adapter: u32, first: u64, sequences: u64) -> Option<Ticket> {
        let call = self.adapters.get_mut(&adapter)?.calls.back_mut()?;
        let Kind::Evaluation { asked, .. } = &mut call.kind else { return None };
        if *asked != first {
            return None;
        }
        *asked += sequences;
        call.unanswered += 1;
        Some(Ticket { adapter, call: call.id, first })
    }

    /// The engine answered. `fingerprint` is that of the weights, where it answered some.
    pub(super) fn answered(&mut self, ticket: Ticket, reply: &Result<Reply, EngineError>, fingerprint: Option<Digest>) {
        let Some(account) = self.adapters.get_mut(&ticket.adapter) else {
            // An adapter that has taken no step yet.
            if let Some(fingerprint) = fingerprint {
                let export = Some(Export { fingerprint, step: 0 });
                self.adapters.insert(ticket.adapter, Account { export, ..Account::default() });
            }
            return;
        };
        if let Some(fingerprint) = fingerprint {
            account.export = Some(Export { fingerprint, step: account.steps });
            return;
        }
        let at = account.calls.binary_search_by_key(&ticket.call, |call| call.id);
        let Some(call) = at.ok().and_then(|at| account.calls.get_mut(at)) else { return };
        call.unanswered -= 1;
        match (&mut call.kind, reply) {
            (Kind::Step { report, .. }, Ok(Reply::Step(answer))) => {
                *report = Some(*answer);
                account.steps = answer.step;
            }
            (Kind::Evaluation { sums, early, .. }, Ok(Reply::Loss(losses))) => {
                early.insert(ticket.first, losses.clone());
                // One by one in their order: equal bits for any split.
                while let Some(losses) = early.remove(&sums.sequences) {
                    losses.iter().for_each(|loss| sums.add(loss));
                }
            }
            _ => call.is_failed = true,
        }
        self.tidy(ticket.adapter);
    }

    /// The process tells a step: whether it is the oldest that was not told, as the engine answered it.
    pub(super) fn told_step(&mut self, adapter: u32, report: &StepReport, learning_rate: f32) -> bool {
        let Some(account) = self.adapters.get_mut(&adapter) else { return false };
        while let Some(call) = account.calls.pop_front() {
            let Kind::Step { learning_rate: asked, report: Some(answer) } = call.kind else {
                // A step without an answer is none; an evaluation that the job left off is not told.
                if call.unanswered > 0 {
                    return false;
                }
                continue;
            };
            account.told = answer.step;
            let is_same = is_same_report(&answer, report) && asked.to_bits() == learning_rate.to_bits();
            self.tidy(adapter);
            return is_same;
        }
        false
    }

    /// The process tells an evaluation: whether the engine answered it so, no step before it is left out, and so many were told.
    pub(super) fn told_evaluation(&mut self, adapter: u32, step: u64, told: &LossSums) -> bool {
        let Some(account) = self.adapters.get_mut(&adapter) else { return false };
        while let Some(call) = account.calls.pop_front() {
            match call.kind {
                Kind::Step { report: Some(_), .. } => return false,
                _ if call.unanswered > 0 => return false,
                Kind::Evaluation { sums, .. } if !call.is_failed && is_same_sums(&sums, told) => {
                    let is_same = account.told == step;
                    self.tidy(adapter);
                    return is_same;
                }
                _ => {}
            }
        }
        false
    }

    /// Adapters whose latest export is this, each with its step count at that time.
    pub(super) fn exported(&self, fingerprint: Digest) -> Vec<(u32, u64)> {
        let export = |(adapter, account): (&u32, &Account)| {
            let export = account.export.as_ref().filter(|export| export.fingerprint == fingerprint)?;
            Some((*adapter, export.step))
        };
        self.adapters.iter().filter_map(export).collect()
    }

    /// Whether every step that the engine answered was told.
    pub(super) fn is_all_told(&self) -> bool {
        let is_step = |call: &Call| matches!(call.kind, Kind::Step { report: Some(_), .. });
        !self.adapters.values().flat_map(|account| &account.calls).any(is_step)
    }

    /// Calls that were not told.
    pub(super) fn untold(&self) -> usize {
        self.adapters.values().map(|account| account.calls.len().max(1)).sum()
    }

    /// Forgets what has nothing more to tell.
    fn tidy(&mut self, adapter: u32) {
        let Some(account) = self.adapters.get_mut(&adapter) else { return };
        while account.calls.front().is_some_and(|call| call.is_failed && call.unanswered == 0) {
            account.calls.pop_front();
        }
        let is_unknown = account.steps == 0 && account.export.is_none();
        if account.calls.is_empty() && (account.is_dropped || is_unknown) {
            self.adapters.remove(&adapter);
        }
    }
}

/// What tells weights from all others.
pub(super) fn fingerprint(weights: &AdapterWeights) -> Option<Digest> {
    encode(weights).ok().map(|bytes| Digest::of(&bytes))
}

fn is_same_report(a: &StepReport, b: &StepReport) -> bool {
    let bits = |report: &StepReport| (report.step, report.loss.to_bits(), report.grad_norm.to_bits());
    bits(a) == bits(b) && is_same_sums(&a.sums, &b.sums)
}

fn is_same_sums(a: &LossSums, b: &LossSums) -> bool {
    let bits = |sums: &LossSums| (sums.loss_sum.to_bits(), sums.weight_sum.to_bits(), sums.labelled, sums.sequences);
    bits(a) == bits(b)
}
