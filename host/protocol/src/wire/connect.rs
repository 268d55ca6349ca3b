//! The client's end of a connection: passes commands on and gives each answer to its asker.
//!
//! Trusts its engine; what it says is taken as it is.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncRead, AsyncWrite, BufReader};

use super::{Call, Return};
use crate::client::{Answer, Client, Inbox, channel};
use crate::frame::{FrameError, FrameReader, FrameWriter};

/// Commands that may wait for the stream before their jobs must.
const QUEUE: usize = 64;

/// Those who wait for an answer.
#[derive(Clone, Default)]
struct Askers(Arc<Mutex<HashMap<u64, Answer>>>);

impl Askers {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Answer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client of the engine at the other end, and the work that carries its commands, to be spawned. It ends with the connection; whoever
/// waits then is told that the engine is gone.
pub fn connect<R, W>(reader: R, writer: W) -> (Client, impl Future<Output = Result<(), FrameError>> + Send)
where
    R: AsyncRead + Unpin + Send,
    W: AsyncWrite + Unpin + Send,
{
    let (client, inbox) = channel(QUEUE);
    let askers = Askers::default();
    let work = async move {
        let (out, back) = (send(inbox, FrameWriter::new(writer), askers.clone()), receive(reader, askers.clone()));
        let ended = tokio::select! {
            ended = out => ended,
            ended = back => ended,
        };
        askers.lock().clear();
        ended
    };
    (client, work)
}

/// Ends when all clients are gone.
async fn send<W: AsyncWrite + Unpin>(mut inbox: Inbox, mut writer: FrameWriter<W>, askers: Askers) -> Result<(), FrameError> {
    let mut id = 0;
    while let Some(request) = inbox.recv().await {
        let (command, answer) = request.into_parts();
        askers.lock().insert(id, answer);
        writer.send(&Call { id, command }).await?;
        id += 1;
    }
    Ok(())
}

/// Ends when the engine is gone.
async fn receive<R: AsyncRead + Unpin>(reader: R, askers: Askers) -> Result<(), FrameError> {
    let mut reader = FrameReader::new(BufReader::new(reader), u64::from(u32::MAX));
    while let Some(Return { id, reply }) = reader.next().await? {
        let asker = askers.lock().remove(&id);
        asker.ok_or(FrameError::Malformed)?.give(reply);
    }
    Ok(())
}
