//! The thread that shows what a job tells, for which nobody waits long: a terminal may be paused, a reader asleep.
//!
//! Never fails a job for what was not shown.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nodus_sandbox::services::Event;

use super::progress::Progress;
use super::recorder::{Audience, EVENTS_MAX};

/// How long the display may take nothing before events pass it by.
const DISPLAY_STUCK: Duration = Duration::from_secs(1);
/// How long the display may take for what is left when all is written down.
const DISPLAY_END: Duration = Duration::from_secs(5);
const DISPLAY: &str = "the display's thread panicked";

/// The display's thread, as who writes sees it.
pub(super) struct View {
    events: SyncSender<Event>,
    /// Tells when all is shown.
    shown: Receiver<()>,
    is_stuck: bool,
    /// Events that passed it by.
    missed: Arc<AtomicU64>,
}

impl View {
    pub(super) fn start(mut progress: Progress) -> anyhow::Result<Self> {
        let (events, inbox) = sync_channel(EVENTS_MAX);
        let (ended, shown) = sync_channel(1);
        let missed = Arc::new(AtomicU64::new(0));
        let counted = missed.clone();
        let work = move || {
            inbox.iter().for_each(|event| progress.show(&event));
            match counted.load(Relaxed) {
                0 => {}
                missed => progress.note(&format!("{missed} events were not shown, since nothing took them; the results have them all")),
            }
            progress.finish();
            // Nobody may be waiting any more.
            ended.send(()).ok();
        };
        std::thread::Builder::new().name("display".into()).spawn(work).context("starting the display's thread")?;
        Ok(Self { events, shown, is_stuck: false, missed })
    }
}

impl Audience for View {
    fn hear(&mut self, mut event: Event) -> anyhow::Result<()> {
        let asked = Instant::now();
        loop {
            event = match self.events.try_send(event) {
                Ok(()) => {
                    self.is_stuck = false;
                    return Ok(());
                }
                Err(TrySendError::Disconnected(_)) => bail!(DISPLAY),
                Err(TrySendError::Full(event)) => event,
            };
            self.is_stuck |= asked.elapsed() >= DISPLAY_STUCK;
            if self.is_stuck {
                self.missed.fetch_add(1, Relaxed);
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn pause(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        let Self { events, shown, .. } = *self;
        drop(events);
        match shown.recv_timeout(DISPLAY_END) {
            // Who does not look at the display is no reason to fail a job.
            Ok(()) | Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => bail!(DISPLAY),
        }
    }
}
