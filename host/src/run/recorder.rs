//! The thread that writes down what a job tells, so that the job waits for a disk only where it tells faster than it takes, and passes it on to
//! who else is to hear it.
//!
//! Never loses an event of a job that goes on: where the disk refuses, it raises the alarm, and the job is cut off.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use anyhow::Context as _;
use nodus_sandbox::services::Event;

use super::alarm::Alarm;
use super::record::{Figures, Record};

/// Events on their way at most; one is a line of the log, 16 KiB, at most. A job that tells more waits.
pub(super) const EVENTS_MAX: usize = 256;
const WRITING: &str = "the job's results could not be written";
/// Where events go. The thread ends when it is gone.
pub(crate) struct Listener(SyncSender<Event>);

impl Listener {
    /// An event of the job. Blocks where the disk is slow; other tasks of the runtime go on meanwhile.
    pub(crate) fn event(&self, event: Event) {
        // The thread is gone only after a failed write, of which the alarm told.
        if let Err(TrySendError::Full(event)) = self.0.try_send(event) {
            tokio::task::block_in_place(|| drop(self.0.send(event)));
        }
    }
}

/// Who hears what a job tells, once it is written down.
pub(crate) trait Audience: Send {
    /// Hears an event.
    ///
    /// # Errors
    /// Ours: it cannot be told any more, and the job is cut off.
    fn hear(&mut self, event: Event) -> anyhow::Result<()>;
    /// The job tells nothing for the moment.
    ///
    /// # Errors
    /// As [`Audience::hear`].
    fn pause(&mut self) -> anyhow::Result<()>;
    /// All was told.
    ///
    /// # Errors
    /// As [`Audience::hear`].
    fn end(self: Box<Self>) -> anyhow::Result<()>;
}

/// The thread.
pub(crate) struct Recorder(JoinHandle<Option<Figures>>);

impl Recorder {
    /// Starts it. Where the disk or the audience fails, the alarm is raised.
    pub(crate) fn start(record: Record, audience: Box<dyn Audience>, alarm: Alarm) -> anyhow::Result<(Listener, Self)> {
        let (listener, events) = channel();
        let work = move || {
            let listened = catch_unwind(AssertUnwindSafe(|| listen(&events, record, audience)));
            let result = listened.unwrap_or_else(|_| Err(anyhow::anyhow!("the recorder's thread panicked")));
            result.map_err(|error| alarm.raise(error)).ok()
        };
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(work).context("starting the recorder's thread")?;
        Ok((listener, Self(thread)))
    }

    /// Waits for the listener's last event; what the events amount to, unless the alarm was raised.
    pub(crate) fn finish(self) -> Option<Figures> {
        self.0.join().ok().flatten()
    }
}

fn channel() -> (Listener, Receiver<Event>) {
    let (sender, events) = sync_channel(EVENTS_MAX);
    (Listener(sender), events)
}

fn listen(events: &Receiver<Event>, mut record: Record, mut audience: Box<dyn Audience>) -> anyhow::Result<Figures> {
    let take = |record: &mut Record, audience: &mut dyn Audience, event: Event| {
        record.take(&event).context(WRITING)?;
        audience.hear(event)
    };
    while let Ok(event) = events.recv() {
        take(&mut record, &mut *audience, event)?;
        events.try_iter().try_for_each(|event| take(&mut record, &mut *audience, event))?;
        audience.pause()?;
    }
    let figures = record.finish().context(WRITING)?;
    audience.end()?;
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::time::{Duration, Instant};

    use nodus_sandbox::services::{Event, Level};

    use super::super::alarm::Alarm;
    use super::super::display::Display;
    use super::super::output::Folder;
    use super::super::view::View;
    use super::{EVENTS_MAX, Listener, Record, Recorder, channel};

    impl Listener {
        /// Whom nobody hears.
        pub(in super::super) fn to_nobody() -> Self {
            channel().0
        }
    }

    fn event() -> Event {
        Event::Log { level: Level::Info, message: "told".into() }
    }

    /// What the alarm tells while the job still runs.
    fn alarm(record: Record, out: Box<dyn Write + Send>) -> Option<String> {
        let (alarm, mut alarms) = Alarm::new();
        let (listener, recorder) = Recorder::start(record, Box::new(View::start(Display::lines(out).job(None)).unwrap()), alarm).unwrap();
        let (began, mut told) = (Instant::now(), None);
        while told.is_none() && began.elapsed() < Duration::from_secs(10) {
            listener.event(event());
            std::thread::sleep(Duration::from_millis(5));
            told = alarms.last();
        }
        drop(listener);
        assert!(recorder.finish().is_none());
        told.map(|error| format!("{error:#}"))
    }

    fn folder() -> (cap_tempfile::TempDir, Folder) {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let folder = Folder::new(root.try_clone().unwrap(), "out".into());
        (root, folder)
    }

    #[test]
    fn who_tells_faster_than_the_disk_takes_waits() {
        let (listener, events) = channel();
        let teller = std::thread::spawn(move || (0..=EVENTS_MAX).for_each(|_| listener.event(event())));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!teller.is_finished(), "the channel has no bound");
        assert_eq!(events.iter().count(), EVENTS_MAX + 1, "nothing is lost");
        teller.join().unwrap();
    }

    /// A terminal that is paused, or `less` that nobody pages: the job goes on, all is written, and it ends.
    #[test]
    fn a_reader_that_does_not_read_holds_nobody_up() {
        struct Asleep(std::sync::mpsc::Receiver<()>);
        impl Write for Asleep {
            fn write(&mut self, text: &[u8]) -> io::Result<usize> {
                self.0.recv().ok();
                Ok(text.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (_root, folder) = folder();
        let (awake, asleep) = std::sync::mpsc::channel();
        let progress = Display::lines(Box::new(Asleep(asleep))).job(None);
        let (listener, recorder) =
            Recorder::start(Record::create(&folder).unwrap(), Box::new(View::start(progress).unwrap()), Alarm::new().0).unwrap();
        (0..4 * EVENTS_MAX).for_each(|_| listener.event(event()));
        drop(listener);
        recorder.finish().unwrap();
        assert_eq!(folder.dir().read_to_string("log.txt").unwrap().lines().count(), 4 * EVENTS_MAX);
        drop(awake);
    }

    /// A job's one worker is also who hears Ctrl-C.
    #[test]
    fn a_job_that_waits_for_the_disk_leaves_the_runtime_to_others() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let (listener, events) = channel();
        let teller = runtime.spawn(async move { (0..=EVENTS_MAX).for_each(|_| listener.event(event())) });
        std::thread::sleep(Duration::from_millis(200));
        let (heard, hears) = std::sync::mpsc::channel();
        runtime.spawn(async move { heard.send(()) });
        hears.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(!teller.is_finished());
        assert_eq!(events.iter().count(), EVENTS_MAX + 1);
        runtime.block_on(teller).unwrap();
    }

    #[test]
    fn a_disk_that_refuses_raises_the_alarm_and_is_named() {
        let (_root, folder) = folder();
        let error = alarm(Record::create(&folder).unwrap().with_unwritable_log(&folder), Box::new(io::sink())).unwrap();
        assert!(error.starts_with("the job's results could not be written: writing log.txt: "), "{error}");
    }

    #[test]
    fn a_panic_raises_the_alarm_too() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                panic!("a fault of ours");
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (_root, folder) = folder();
        let error = alarm(Record::create(&folder).unwrap(), Box::new(Broken)).unwrap();
        assert!(error.contains("panicked"), "{error}");
    }
}
