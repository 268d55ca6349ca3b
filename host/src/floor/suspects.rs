//! Jobs that were at work in an engine that died: suspected, then tried alone, at last not run again.
//!
//! Knows no engine and no clock: deaths in, a verdict out. Counts are lost with the service: a restart begins with no suspicion.

use std::collections::BTreeMap;

use nodus_state::JobId;

/// After so many deaths a job runs alone on its device, so that the next one shows whose doing it is.
const DEATHS_TOGETHER_MAX: u32 = 2;

/// How often an engine died while each of them was at work in it.
#[derive(Debug, Default)]
pub(super) struct Suspects(BTreeMap<JobId, u32>);

impl Suspects {
    /// An engine died while a job was at work in it, perhaps alone on its device; whether it is the job's doing.
    pub(super) fn died(&mut self, job: JobId, was_alone: bool) -> bool {
        let deaths = self.0.entry(job).or_default();
        *deaths += 1;
        was_alone && *deaths > DEATHS_TOGETHER_MAX
    }

    /// Whether a job is to run alone.
    pub(super) fn is_tried(&self, job: JobId) -> bool {
        self.0.get(&job).is_some_and(|deaths| *deaths >= DEATHS_TOGETHER_MAX)
    }

    /// It did no harm, or is gone.
    pub(super) fn clear(&mut self, job: JobId) {
        self.0.remove(&job);
    }

    /// Forgets all others.
    pub(super) fn retain(&mut self, is_known: impl Fn(&JobId) -> bool) {
        self.0.retain(|job, _| is_known(job));
    }
}

#[cfg(test)]
mod tests {
    use nodus_state::JobId;

    use super::Suspects;

    #[test]
    fn who_dies_twice_in_company_is_tried_alone_and_then_known() {
        let [guilty, innocent]: [JobId; 2] =
            ["0198c0de-0000-7000-8000-000000000001", "0198c0de-0000-7000-8000-000000000002"].map(|id| id.parse().unwrap());
        let mut suspects = Suspects::default();
        for deaths in 0..2 {
            assert!(!suspects.is_tried(guilty), "{deaths}");
            assert!(!suspects.died(guilty, false) && !suspects.died(innocent, false));
        }
        assert!(suspects.is_tried(guilty) && suspects.is_tried(innocent));
        assert!(!suspects.died(innocent, false), "in company nobody is found guilty");
        suspects.clear(innocent);
        assert!(!suspects.is_tried(innocent));
        assert!(suspects.died(guilty, true));
        suspects.retain(|_| false);
        assert!(!suspects.is_tried(guilty) && !suspects.died(guilty, true), "the first death alone proves nothing");
    }
}
