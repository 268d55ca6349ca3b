//! The engine's end of a connection: passes on what the client may ask, answers, and remembers the answers that count.
//!
//! Never leaves anything of the client's jobs on the engine when the connection ends, however it ends.

use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::grants::{Breach, Checked, Grants};
use super::{Call, Return};
use crate::frame::{FrameError, FrameReader, FrameWriter};
use crate::{Command, EngineError};

/// Commands of one connection that are not answered yet; beyond it the stream is not read.
const UNANSWERED_MAX: usize = 1024;

/// Why a connection ended before its time. The client's fault, but for `Frame(Io)`.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// What came is no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// What came is not the client's to ask.
    #[error(transparent)]
    Breach(#[from] Breach),
}

/// Serves one client until it goes away or breaks the rules. A frame from it has at most `bytes_max` bytes.
///
/// # Errors
/// What the client did wrong.
pub async fn serve<R, W>(reader: R, writer: W, grants: Grants, bytes_max: u64) -> Result<(), WireError>
where
    R: AsyncRead + Unpin + Send,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (answers, outbox) = mpsc::channel(UNANSWERED_MAX);
    let mut tasks = JoinSet::new();
    tasks.spawn(answer(outbox, FrameWriter::new(writer)));
    let ended = accept(FrameReader::new(BufReader::new(reader), bytes_max), &grants, &answers, &mut tasks).await;
    tasks.shutdown().await;
    for (job, engine) in grants.jobs() {
        // An engine that is gone holds nothing.
        drop(engine.call(Command::DropJob { job }).await);
    }
    ended
}

async fn accept<R: AsyncRead + Unpin>(
    mut reader: FrameReader<R>,
    grants: &Grants,
    answers: &mpsc::Sender<Return>,
    tasks: &mut JoinSet<()>,
) -> Result<(), WireError> {
    while let Some(Call { id, command }) = reader.next().await? {
        let (engine, expected) = match grants.check(&command)? {
            Checked::Pass(engine, expected) => (engine, expected),
            Checked::PassOver => continue,
        };
        grants.room(expected).await;
        while tasks.len() > UNANSWERED_MAX {
            tasks.join_next().await;
        }
        let pending = engine.send(command).await;
        let (answers, grants) = (answers.clone(), grants.clone());
        tasks.spawn(async move {
            let reply = match pending {
                Ok(pending) => pending.await,
                Err(error) => Err::<_, EngineError>(error),
            };
            if let Some(expected) = expected {
                // First, so that it is known when the client tells it.
                grants.answered(expected, &reply);
            }
            // The client is gone only with its connection.
            drop(answers.send(Return { id, reply }).await);
        });
        while tasks.try_join_next().is_some() {}
    }
    Ok(())
}

async fn answer<W: AsyncWrite + Unpin>(mut outbox: mpsc::Receiver<Return>, mut writer: FrameWriter<W>) {
    while let Some(answer) = outbox.recv().await {
        // A client that does not listen is noticed where it is read.
        if writer.send(&answer).await.is_err() {
            return;
        }
    }
}
