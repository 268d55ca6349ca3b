//! The thread that writes down and shows what a job tells, so that the job never waits for a disk or a terminal.
//!
//! Never loses an event; where the disk refuses, it asks the job to stop.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::Context as _;
use nodus_sandbox::StopFlag;
use nodus_sandbox::services::Event;

use super::progress::Progress;
use super::record::{Figures, Record};

/// Where events go. The thread ends when it is gone.
pub(crate) struct Listener(Sender<Event>);

impl Listener {
    /// An event of the job.
    pub(crate) fn event(&self, event: Event) {
        // The thread is gone only after a failed write, which `Recorder::finish` reports.
        drop(self.0.send(event));
    }
}

/// The thread.
pub(crate) struct Recorder(JoinHandle<anyhow::Result<Figures>>);

impl Recorder {
    /// Starts it.
    pub(crate) fn start(record: Record, mut progress: Progress, stop: StopFlag) -> anyhow::Result<(Listener, Self)> {
        let (sender, events) = channel();
        let work = move || {
            let result = listen(&events, record, &mut progress);
            progress.finish();
            if result.is_err() {
                stop.request();
            }
            result
        };
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(work).context("starting the recorder's thread")?;
        Ok((Listener(sender), Self(thread)))
    }

    /// Waits for the listener's last event; what the events amount to.
    ///
    /// # Errors
    /// Ours: a file could not be written.
    pub(crate) fn finish(self) -> anyhow::Result<Figures> {
        self.0.join().map_err(|_| anyhow::anyhow!("the recorder's thread panicked"))?
    }
}

fn listen(events: &Receiver<Event>, mut record: Record, progress: &mut Progress) -> anyhow::Result<Figures> {
    for event in events {
        record.take(&event)?;
        progress.show(&event);
    }
    record.finish()
}
