//! Raised where the host cannot write down what a job does: the job is cut off, as by the end of a process.
//!
//! Never tells the job: that a disk refused is no request to stop, and a job that goes on must not know of it.

use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Whoever writes for a job has one.
#[derive(Clone)]
pub(crate) struct Alarm(Sender<anyhow::Error>);

/// Where it is heard.
pub(crate) struct Alarms(Receiver<anyhow::Error>);

impl Alarm {
    pub(crate) fn new() -> (Self, Alarms) {
        let (sender, receiver) = channel(1);
        (Self(sender), Alarms(receiver))
    }

    /// Something could not be written. The first that is told is why the job is cut off.
    pub(crate) fn raise(&self, error: anyhow::Error) {
        // Where one waits already, or the job has ended, nobody needs this one.
        drop(self.0.try_send(error));
    }
}

impl Alarms {
    /// Resolves when it is raised.
    pub(crate) async fn raised(&mut self) -> anyhow::Error {
        match self.0.recv().await {
            Some(error) => error,
            None => std::future::pending().await,
        }
    }

    /// Whether it was raised, and not heard yet.
    pub(crate) fn last(&mut self) -> Option<anyhow::Error> {
        self.0.try_recv().ok()
    }
}
