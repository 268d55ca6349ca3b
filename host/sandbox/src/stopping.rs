//! What a job was told of a request to stop, and when.
//!
//! The one answer that depends on the outside, so it is counted: a guest does the same again when it is told at the same call.

use crate::run::StopFlag;

/// The answers to a job's `should-stop`, and to the question before each further piece of an evaluation.
#[derive(Debug)]
pub(crate) struct Stopping {
    flag: StopFlag,
    stop_at: Option<u64>,
    calls: u64,
    seen_at: Option<u64>,
}

impl Stopping {
    /// Answers yes once the flag is set, or from the question `stop_at` on; they count from 1.
    pub(crate) fn new(flag: StopFlag, stop_at: Option<u64>) -> Self {
        Self { flag, stop_at, calls: 0, seen_at: None }
    }

    /// One question. A guest asks them in an order that is its own.
    pub(crate) fn ask(&mut self) -> bool {
        self.calls += 1;
        let is_due = self.stop_at.is_some_and(|call| self.calls >= call) || self.flag.is_requested();
        if is_due && self.seen_at.is_none() {
            self.seen_at = Some(self.calls);
        }
        self.seen_at.is_some()
    }

    /// The first that was answered yes.
    pub(crate) fn seen_at(&self) -> Option<u64> {
        self.seen_at
    }
}

#[cfg(test)]
mod tests {
    use super::{StopFlag, Stopping};

    #[test]
    fn a_request_is_answered_from_the_next_call_on_and_again_at_the_same_call() {
        let flag = StopFlag::default();
        let mut first = Stopping::new(flag.clone(), None);
        assert!(!first.ask() && !first.ask() && first.seen_at().is_none());
        flag.request();
        assert!(first.ask() && first.ask());
        let mut again = Stopping::new(StopFlag::default(), first.seen_at());
        assert_eq!([again.ask(), again.ask(), again.ask(), again.ask()], [false, false, true, true]);
        assert_eq!(again.seen_at(), Some(3));
    }
}
