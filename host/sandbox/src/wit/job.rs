//! `nodus:gpu/job`: what the job was submitted with, and what it tells its owner. Waits for nothing but that the answer to `should-stop` is
//! noted before the guest has it.

use crate::bindings::nodus::gpu::job::{Host, Level as GuestLevel, Limit};
use crate::limits::METRIC_NAME_BYTES_MAX;
use crate::services::{Event, Level};
use crate::state::State;
use crate::wit::Fault;

impl Host for State {
    fn params(&mut self) -> wasmtime::Result<String> {
        Ok(self.params.clone())
    }

    fn seed(&mut self) -> wasmtime::Result<u64> {
        Ok(self.seed)
    }

    fn metric(&mut self, mut name: String, step: u64, value: f64) -> wasmtime::Result<()> {
        if self.counts.metrics >= self.limits.metrics {
            self.counts.reports_dropped += 1;
            return Ok(());
        }
        self.counts.metrics += 1;
        name.truncate(name.floor_char_boundary(METRIC_NAME_BYTES_MAX));
        self.tell(Event::Metric { name, step, value });
        Ok(())
    }

    fn progress(&mut self, done: u64, total: u64) -> wasmtime::Result<()> {
        if self.counts.progress_reports >= self.limits.progress_reports {
            self.counts.reports_dropped += 1;
            return Ok(());
        }
        self.counts.progress_reports += 1;
        self.tell(Event::Progress { done, total });
        Ok(())
    }

    fn log(&mut self, level: GuestLevel, message: String) -> wasmtime::Result<()> {
        let level = match level {
            GuestLevel::Debug => Level::Debug,
            GuestLevel::Info => Level::Info,
            GuestLevel::Warn => Level::Warn,
            GuestLevel::Error => Level::Error,
        };
        self.log.line(level, message);
        self.tell_log();
        Ok(())
    }

    async fn should_stop(&mut self) -> wasmtime::Result<bool> {
        self.asks_to_stop().await.map_err(|refusal| Fault::from(refusal).into_stop())
    }

    fn limits(&mut self) -> wasmtime::Result<Vec<Limit>> {
        Ok(self.limits.entries().into_iter().map(|(name, value)| Limit { name: name.to_owned(), value }).collect())
    }
}
