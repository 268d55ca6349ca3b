//! The channel between a job and an engine: a client that sends commands, an inbox that the engine drains.
//!
//! Never knows what a command does.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::{mpsc, oneshot};

use crate::{Command, EngineError, Reply};

/// A command on its way, with the address its answer goes to.
#[derive(Debug)]
pub struct Request {
    /// What is asked.
    pub command: Command,
    /// When it was sent: the engine's linger counts from here.
    pub sent: Instant,
    reply: Answer,
}

/// The address of one answer.
#[derive(Debug)]
pub struct Answer(oneshot::Sender<Result<Reply, EngineError>>);

impl Answer {
    /// Answers. The asker may be gone; then the answer is dropped.
    pub fn give(self, reply: Result<Reply, EngineError>) {
        drop(self.0.send(reply));
    }
}

impl Request {
    /// The command, and where its answer goes: for who passes it on.
    #[must_use]
    pub fn into_parts(self) -> (Command, Answer) {
        (self.command, self.reply)
    }

    /// Answers. The asker may be gone; then the answer is dropped.
    pub fn answer(self, reply: Result<Reply, EngineError>) {
        self.reply.give(reply);
    }

    /// Whether the asker still waits.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.reply.0.is_closed()
    }
}

/// Sends commands to one engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    requests: mpsc::Sender<Request>,
}

/// What the engine drains.
pub type Inbox = mpsc::Receiver<Request>;

/// A client and the inbox it fills, bounded to so many commands not yet drained.
#[must_use]
pub fn channel(capacity: usize) -> (Client, Inbox) {
    let (requests, inbox) = mpsc::channel(capacity);
    (Client { requests }, inbox)
}

impl Client {
    /// Sends a command; waits for room in the channel, not for the answer.
    ///
    /// # Errors
    /// `DeviceLost` when the engine is gone.
    pub async fn send(&self, command: Command) -> Result<Pending, EngineError> {
        let (reply, answer) = oneshot::channel();
        let request = Request { command, sent: Instant::now(), reply: Answer(reply) };
        self.requests.send(request).await.map_err(|_| EngineError::gone())?;
        Ok(Pending(answer))
    }

    /// Sends a command and waits for its answer.
    ///
    /// # Errors
    /// What the engine answers; `DeviceLost` when it is gone.
    pub async fn call(&self, command: Command) -> Result<Reply, EngineError> {
        self.send(command).await?.await
    }

    /// Whether both send to the same engine.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.requests.same_channel(&other.requests)
    }

    /// Sends a command whose answer nobody waits for, from where waiting is impossible (a `Drop`). Full channels are
    /// waited for on a thread of the runtime.
    pub fn send_detached(&self, command: Command) {
        let (reply, _) = oneshot::channel();
        let request = Request { command, sent: Instant::now(), reply: Answer(reply) };
        if let Err(mpsc::error::TrySendError::Full(request)) = self.requests.try_send(request) {
            let requests = self.requests.clone();
            std::thread::spawn(move || drop(requests.blocking_send(request)));
        }
    }
}

/// An answer on its way. Dropping it does not take the command back.
#[derive(Debug)]
pub struct Pending(oneshot::Receiver<Result<Reply, EngineError>>);

impl Future for Pending {
    type Output = Result<Reply, EngineError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|answer| answer.unwrap_or_else(|_| Err(EngineError::gone())))
    }
}
