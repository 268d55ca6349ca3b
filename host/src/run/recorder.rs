//! The thread that writes down and shows what a job tells, so that the job waits for a disk or a terminal only where it tells faster
//! than they take.
//!
//! Never loses an event; where the disk refuses, it asks the job to stop.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use anyhow::Context as _;
use nodus_sandbox::StopFlag;
use nodus_sandbox::services::Event;

use super::progress::Progress;
use super::record::{Figures, Record};

/// Events on their way at most; one is a line of the log, 16 KiB, at most. A job that tells more waits.
const EVENTS_MAX: usize = 256;

/// Where events go. The thread ends when it is gone.
pub(crate) struct Listener(SyncSender<Event>);

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
        let (listener, events) = channel();
        let work = move || {
            let listened = catch_unwind(AssertUnwindSafe(|| {
                let result = listen(&events, record, &mut progress);
                progress.finish();
                result
            }));
            let result = listened.unwrap_or_else(|_| Err(anyhow::anyhow!("the recorder's thread panicked")));
            if result.is_err() {
                stop.request();
            }
            result
        };
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(work).context("starting the recorder's thread")?;
        Ok((listener, Self(thread)))
    }

    /// Waits for the listener's last event; what the events amount to.
    ///
    /// # Errors
    /// Ours: a file could not be written.
    pub(crate) fn finish(self) -> anyhow::Result<Figures> {
        self.0.join().map_err(|_| anyhow::anyhow!("the recorder's thread panicked"))?.context("the job's results could not be written")
    }
}

fn channel() -> (Listener, Receiver<Event>) {
    let (sender, events) = sync_channel(EVENTS_MAX);
    (Listener(sender), events)
}

fn listen(events: &Receiver<Event>, mut record: Record, progress: &mut Progress) -> anyhow::Result<Figures> {
    for event in events {
        record.take(&event)?;
        progress.show(&event);
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
    use super::{EVENTS_MAX, Record, Recorder, channel};

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
