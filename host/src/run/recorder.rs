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

/// What the thread is told.
enum Message {
    Event(Event),
    Note(String),
}

/// Where events go. Cheap to clone; the thread ends when every clone is gone.
#[derive(Clone)]
pub(crate) struct Listener(Sender<Message>);

impl Listener {
    /// An event of the job.
    pub(crate) fn event(&self, event: Event) {
        // The thread is gone only after a failed write, which `Recorder::finish` reports.
        drop(self.0.send(Message::Event(event)));
    }

    /// A line to show.
    pub(crate) fn note(&self, text: impl Into<String>) {
        drop(self.0.send(Message::Note(text.into())));
    }
}

/// The thread.
pub(crate) struct Recorder(JoinHandle<anyhow::Result<Figures>>);

impl Recorder {
    /// Starts it.
    pub(crate) fn start(record: Record, progress: Progress, stop: StopFlag) -> anyhow::Result<(Listener, Self)> {
        let (sender, messages) = channel();
        let work = move || {
            let result = listen(&messages, record, progress);
            if result.is_err() {
                stop.request();
            }
            result
        };
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(work).context("starting the recorder's thread")?;
        Ok((Listener(sender), Self(thread)))
    }

    /// Waits for the last event of all listeners; what the events amount to.
    ///
    /// # Errors
    /// Ours: a file could not be written.
    pub(crate) fn finish(self) -> anyhow::Result<Figures> {
        self.0.join().map_err(|_| anyhow::anyhow!("the recorder's thread panicked"))?
    }
}

fn listen(messages: &Receiver<Message>, mut record: Record, mut progress: Progress) -> anyhow::Result<Figures> {
    for message in messages {
        match message {
            Message::Event(event) => {
                record.take(&event)?;
                progress.show(&event);
            }
            Message::Note(text) => progress.note(&text),
        }
    }
    progress.finish();
    record.finish()
}
