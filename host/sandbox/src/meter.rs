//! How much CPU time a guest used: the time of the thread that runs it, while it runs.
//!
//! Waiting never counts, neither for the engine nor for a place on the CPU, whatever the machine's load.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::failure::Stop;
use crate::limits::Limits;

/// A job's CPU time, in nanoseconds. All but `used` is touched by the polling thread alone.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// Used in polls that ended.
    used: AtomicU64,
    /// The thread's CPU time at the start of this poll.
    poll_start: AtomicU64,
    /// Used in all when the engine last answered.
    stretch_start: AtomicU64,
}

impl Meter {
    /// CPU time used by the polls that ended.
    pub(crate) fn used(&self) -> Duration {
        Duration::from_nanos(self.used.load(Relaxed))
    }

    /// The engine answered: a new stretch begins.
    pub(crate) fn answered(&self) {
        self.stretch_start.store(self.used_now(), Relaxed);
    }

    /// Whether the guest may go on. Only within a poll.
    pub(crate) fn check(&self, limits: &Limits) -> Result<(), Stop> {
        let used = self.used_now();
        let stretch = used.saturating_sub(self.stretch_start.load(Relaxed));
        for (limit, used, allowed) in [("cpu-stretch-ms", stretch, limits.cpu_stretch_ms), ("cpu-ms", used, limits.cpu_ms)] {
            if used / NS_PER_MS >= allowed {
                return Err(Stop::CpuTime { limit, allowed });
            }
        }
        Ok(())
    }

    fn used_now(&self) -> u64 {
        self.used.load(Relaxed) + thread_cpu_ns().saturating_sub(self.poll_start.load(Relaxed))
    }
}

const NS_PER_MS: u64 = 1_000_000;

/// A future whose polls a meter counts. Guest code, and what the host does within its calls, runs inside one poll on one thread.
pub(crate) struct Metered<F> {
    inner: Pin<Box<F>>,
    meter: Arc<Meter>,
}

impl<F> Metered<F> {
    pub(crate) fn new(inner: F, meter: Arc<Meter>) -> Self {
        Self { inner: Box::pin(inner), meter }
    }
}

impl<F: Future> Future for Metered<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.meter.poll_start.store(thread_cpu_ns(), Relaxed);
        let poll = self.inner.as_mut().poll(cx);
        self.meter.used.store(self.meter.used_now(), Relaxed);
        poll
    }
}

fn thread_cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_counts_and_waiting_does_not() {
        let meter = Arc::new(Meter::default());
        let work = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let start = thread_cpu_ns();
            while thread_cpu_ns() - start < 20 * NS_PER_MS {}
            meter.check(&Limits { cpu_ms: 10, ..Limits::DEFAULT })
        };
        let verdict = Metered::new(work, meter.clone()).await;
        assert!(matches!(verdict, Err(Stop::CpuTime { limit: "cpu-ms", allowed: 10 })), "{verdict:?}");
        let used = meter.used();
        assert!(used >= Duration::from_millis(20) && used < Duration::from_millis(150), "{used:?}");
    }
}
