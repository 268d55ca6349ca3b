//! The thread that writes down what a job tells, so that the job waits for a disk only where it tells faster than it takes; and the one that
//! shows it, for which nobody waits long: a terminal may be paused, a reader asleep.
//!
//! Never fails to write an event down; where the disk refuses, it asks the job to stop.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nodus_sandbox::StopFlag;
use nodus_sandbox::services::Event;

use super::progress::Progress;
use super::record::{Figures, Record};

/// Events on their way at most; one is a line of the log, 16 KiB, at most. A job that tells more waits.
const EVENTS_MAX: usize = 256;
/// How long the display may take nothing before events pass it by.
const DISPLAY_STUCK: Duration = Duration::from_secs(1);
/// How long the display may take for what is left when all is written down.
const DISPLAY_END: Duration = Duration::from_secs(5);
const DISPLAY: &str = "the display's thread panicked";

/// Where events go. The thread ends when it is gone.
pub(crate) struct Listener(SyncSender<Event>);

impl Listener {
    /// An event of the job. Blocks where the disk is slow; other tasks of the runtime go on meanwhile.
    pub(crate) fn event(&self, event: Event) {
        // The thread is gone only after a failed write, which `Recorder::finish` reports.
        if let Err(TrySendError::Full(event)) = self.0.try_send(event) {
            tokio::task::block_in_place(|| drop(self.0.send(event)));
        }
    }
}

/// The threads.
pub(crate) struct Recorder {
    record: JoinHandle<anyhow::Result<Figures>>,
    /// Tells when all is shown.
    shown: Receiver<()>,
}

impl Recorder {
    /// Starts them.
    pub(crate) fn start(record: Record, progress: Progress, stop: StopFlag) -> anyhow::Result<(Listener, Self)> {
        let (listener, events) = channel();
        let (view, shown) = View::start(progress)?;
        let work = move || {
            let listened = catch_unwind(AssertUnwindSafe(|| listen(&events, record, view)));
            let result = listened.unwrap_or_else(|_| Err(anyhow::anyhow!("the recorder's thread panicked")));
            if result.is_err() {
                stop.request();
            }
            result
        };
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(work).context("starting the recorder's thread")?;
        Ok((listener, Self { record: thread, shown }))
    }

    /// Waits for the listener's last event, and a while for the display; what the events amount to.
    ///
    /// # Errors
    /// Ours: a file could not be written.
    pub(crate) fn finish(self) -> anyhow::Result<Figures> {
        let written = self.record.join().map_err(|_| anyhow::anyhow!("the recorder's thread panicked"))?;
        let shown = self.shown.recv_timeout(DISPLAY_END);
        let figures = written.context("the job's results could not be written")?;
        match shown {
            // Who does not look at the display is no reason to fail a job.
            Ok(()) | Err(RecvTimeoutError::Timeout) => Ok(figures),
            Err(RecvTimeoutError::Disconnected) => bail!(DISPLAY),
        }
    }
}

/// The display's thread, as who writes sees it.
struct View {
    events: SyncSender<Event>,
    is_stuck: bool,
    /// Events that passed it by.
    missed: Arc<AtomicU64>,
}

impl View {
    fn start(mut progress: Progress) -> anyhow::Result<(Self, Receiver<()>)> {
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
        Ok((Self { events, is_stuck: false, missed }, shown))
    }

    /// Has an event shown, where the display takes it.
    fn show(&mut self, mut event: Event) -> anyhow::Result<()> {
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
}

fn channel() -> (Listener, Receiver<Event>) {
    let (sender, events) = sync_channel(EVENTS_MAX);
    (Listener(sender), events)
}

fn listen(events: &Receiver<Event>, mut record: Record, mut view: View) -> anyhow::Result<Figures> {
    for event in events {
        record.take(&event)?;
        view.show(event)?;
    }
    record.finish()
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::time::{Duration, Instant};

    use nodus_sandbox::StopFlag;
    use nodus_sandbox::services::{Event, Level};

    use super::super::display::Display;
    use super::super::output::Folder;
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

    /// Its outcome's text, and whether the job was asked to stop while it still ran.
    fn recorded(record: Record, out: Box<dyn Write + Send>) -> (String, bool) {
        let stop = StopFlag::default();
        let (listener, recorder) = Recorder::start(record, Display::lines(out).job(None), stop.clone()).unwrap();
        listener.event(event());
        let asked = Instant::now();
        while !stop.is_requested() && asked.elapsed() < Duration::from_secs(10) {
            listener.event(event());
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(listener);
        (format!("{:#}", recorder.finish().unwrap_err()), stop.is_requested())
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
        let (listener, recorder) = Recorder::start(Record::create(&folder).unwrap(), progress, StopFlag::default()).unwrap();
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
    fn a_disk_that_refuses_asks_the_job_to_stop_and_is_named() {
        let (_root, folder) = folder();
        let (error, is_stopped) = recorded(Record::create(&folder).unwrap().with_unwritable_log(&folder), Box::new(io::sink()));
        assert!(is_stopped && error.starts_with("the job's results could not be written: writing log.txt: "), "{error}");
    }

    #[test]
    fn a_panic_asks_the_job_to_stop_too() {
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
        let (error, is_stopped) = recorded(Record::create(&folder).unwrap(), Box::new(Broken));
        assert!(is_stopped && error.contains("panicked"), "{error}");
    }
}
