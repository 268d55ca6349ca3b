//! What is wanted of guest processes, and what one needs for its jobs.
//!
//! Knows sizes only.

use std::time::Duration;

use nodus_sandbox::Limits;

use crate::cli::SandboxArgs;

/// What the user wants of processes for guests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// None at all: guests run in this process.
    pub(crate) in_process: bool,
    /// None that the kernel locks down less than wholly.
    pub(crate) require_os_sandbox: bool,
    /// How long one may give no sign of life.
    pub(crate) silence: Duration,
}

impl From<SandboxArgs> for Terms {
    fn from(args: SandboxArgs) -> Self {
        let silence = Duration::from_millis(args.guest_silence_ms);
        Self { in_process: args.in_process, require_os_sandbox: args.require_os_sandbox, silence }
    }
}

/// How the ledger calls a job that was refused for want of the kernel's locks.
pub(crate) const OS_SANDBOX: &str = "os-sandbox";

/// What a process will need for all of its jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) threads: usize,
    pub(crate) data_bytes: u64,
    pub(crate) cpu_seconds: u64,
    pub(crate) message_bytes_max: u64,
    /// How long it may say nothing; it is asked for a word four times as often.
    pub(crate) silence: Duration,
}

/// Text as tokens, targets and weights, and the text itself.
const TOKENS_PER_TEXT: u64 = 16;

/// What jobs need of a guest process, beside what every process takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    data_bytes: u64,
    cpu_seconds: u64,
    message_bytes_max: u64,
}

impl Need {
    /// One job's, whose data sets have so many bytes.
    pub(crate) fn of(limits: &Limits, dataset_bytes: u64) -> Self {
        let message_bytes_max = message_bytes_max(limits);
        let own = [limits.guest_memory_bytes, limits.batch_bytes, limits.log_bytes, 3 * message_bytes_max];
        let data_bytes = own.into_iter().fold(dataset_bytes.saturating_mul(TOKENS_PER_TEXT), u64::saturating_add);
        Self { data_bytes, cpu_seconds: limits.cpu_ms / 1000 + 1, message_bytes_max }
    }

    /// Of so many such jobs.
    pub(crate) fn times(self, jobs: u64) -> Self {
        let (data_bytes, cpu_seconds) = (self.data_bytes.saturating_mul(jobs), self.cpu_seconds.saturating_mul(jobs));
        Self { data_bytes, cpu_seconds, ..self }
    }

    fn and(self, other: Self) -> Self {
        Self {
            data_bytes: self.data_bytes.saturating_add(other.data_bytes),
            cpu_seconds: self.cpu_seconds.saturating_add(other.cpu_seconds),
            message_bytes_max: self.message_bytes_max.max(other.message_bytes_max),
        }
    }

    /// What is left where one job more is let in; none where it does not fit.
    pub(crate) fn less(self, job: Self) -> Option<Self> {
        let data_bytes = self.data_bytes.checked_sub(job.data_bytes)?;
        let cpu_seconds = self.cpu_seconds.checked_sub(job.cpu_seconds)?;
        (job.message_bytes_max <= self.message_bytes_max).then_some(Self { data_bytes, cpu_seconds, ..self })
    }

    /// With the memory of a job that left. Its time does not come back.
    pub(crate) fn with_memory_of(self, job: Self) -> Self {
        Self { data_bytes: self.data_bytes.saturating_add(job.data_bytes), ..self }
    }
}

impl Size {
    /// For these jobs and this much of data sets.
    pub(crate) fn new(threads: usize, jobs: impl Iterator<Item = Limits>, dataset_bytes: u64, silence: Duration) -> Self {
        let data = Need { data_bytes: dataset_bytes.saturating_mul(TOKENS_PER_TEXT), ..Need::default() };
        Self::of(threads, silence, jobs.map(|limits| Need::of(&limits, 0)).fold(data, Need::and))
    }

    /// For jobs that need this together.
    pub(crate) fn of(threads: usize, silence: Duration, need: Need) -> Self {
        /// The program, tokenizers, and stacks for chat templates.
        const BASE_BYTES: u64 = 4 << 30;
        /// Tokenising, and the program's start.
        const BASE_SECONDS: u64 = 600;
        let Need { data_bytes, cpu_seconds, message_bytes_max } = need;
        // What the kernel takes: bytes as signed, seconds as nanoseconds.
        let data_bytes = data_bytes.saturating_add(BASE_BYTES).min(1 << 62);
        Self { threads, data_bytes, cpu_seconds: cpu_seconds.saturating_add(BASE_SECONDS).min(1 << 32), message_bytes_max, silence }
    }
}

/// Bytes of the longest message of a process that runs jobs of these limits: an adapter's weights, which are a quarter of what it may hold on
/// the device, or a batch.
fn message_bytes_max(limits: &Limits) -> u64 {
    const BESIDE: u64 = 16 << 20;
    (limits.device_bytes / 4).max(limits.batch_bytes).saturating_add(BESIDE).min(u64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use nodus_sandbox::Limits;

    use super::Need;

    #[test]
    fn a_process_has_room_for_as_many_jobs_as_it_was_made_for_and_time_does_not_come_back() {
        let job = Need::of(&Limits::DEFAULT, 1000);
        let mut left = job.times(2);
        left = left.less(job).unwrap().less(job).unwrap();
        assert_eq!(left.less(job), None);
        assert_eq!(left.with_memory_of(job).less(job), None, "no time is left");
        let larger = Need::of(&Limits { device_bytes: Limits::DEFAULT.device_bytes * 8, ..Limits::DEFAULT }, 0);
        assert_eq!(job.times(9).less(larger), None, "its messages are longer than the process takes");
    }
}
