//! Server-sent events: bytes to frames, and a stream that goes on where it was cut off.
//!
//! Never gives a frame twice: what was given is named to the service when the stream is opened again.

use std::time::Duration;

use anyhow::Context as _;
use reqwest::{Method, Response};

use super::http::Remote;
use crate::error::exit_code;

/// How long after a cut the stream is opened again.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest frame: a line of a log, escaped as JSON, is far below.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) event: String,
    pub(super) id: String,
    pub(super) data: String,
}

/// Bytes to frames, as the HTML standard has it (fields `event`, `id`, `data`; `\n` and `\r\n` end lines).
#[derive(Default)]
struct Parser {
    line: Vec<u8>,
    frame: Frame,
}

impl Parser {
    /// The frames that these bytes complete.
    fn push(&mut self, bytes: &[u8]) -> anyhow::Result<Vec<Frame>> {
        let mut frames = Vec::new();
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                anyhow::ensure!(self.line.len() + self.frame.data.len() <= FRAME_BYTES_MAX, "the service sent an event that does not end");
                continue;
            }
            let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
            let line = line.strip_suffix('\r').unwrap_or(&line);
            if line.is_empty() {
                let frame = std::mem::take(&mut self.frame);
                frames.extend(Some(frame).filter(|frame| *frame != Frame::default()));
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => value.clone_into(&mut self.frame.event),
                "id" => value.clone_into(&mut self.frame.id),
                "data" => {
                    if !self.frame.data.is_empty() {
                        self.frame.data.push('\n');
                    }
                    self.frame.data.push_str(value);
                }
                // Comments keep the connection alive; what else there may be is not for us.
                _ => {}
            }
        }
        Ok(frames)
    }
}

/// Follows a stream to its end, over cuts.
///
/// # Errors
/// The user's: what the service refuses. What `take` says.
pub(super) async fn follow(remote: &Remote, path: &str, mut take: impl FnMut(&Frame) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut last: Option<String> = None;
    loop {
        let mut request = remote.request(Method::GET, path);
        if let Some(last) = &last {
            request = request.header("last-event-id", last);
        }
        let cut = match remote.send(request).await {
            Ok(response) => match read(response, &mut last, &mut take).await {
                Ok(true) => return Ok(()),
                Ok(false) => None,
                Err(Broken::Taker(error)) => return Err(error),
                Err(Broken::Stream(error)) => Some(error),
            },
            Err(error) if exit_code(&error) == 2 || last.is_none() => return Err(error),
            Err(error) => Some(error),
        };
        if let Some(error) = cut {
            tracing::warn!("the stream was cut off and is opened again: {error:#}");
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Why a stream is not read on.
enum Broken {
    /// It was cut off.
    Stream(anyhow::Error),
    /// Whoever takes the frames has enough.
    Taker(anyhow::Error),
}

/// Whether it came to its end.
async fn read(
    mut response: Response,
    last: &mut Option<String>,
    take: &mut impl FnMut(&Frame) -> anyhow::Result<()>,
) -> Result<bool, Broken> {
    let mut parser = Parser::default();
    while let Some(bytes) = response.chunk().await.context("reading events").map_err(Broken::Stream)? {
        for frame in parser.push(&bytes).map_err(Broken::Taker)? {
            if frame.event == "end" {
                return Ok(true);
            }
            take(&frame).map_err(Broken::Taker)?;
            *last = Some(frame.id);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Frame, Parser};

    const TEXT: &str = ": alive\n\nevent: step\nid: 7\ndata: {\"a\":1}\n\nevent:end\r\ndata: x\r\ndata: y\r\n\r\nid: 9\n";

    fn frame(event: &str, id: &str, data: &str) -> Frame {
        Frame { event: event.into(), id: id.into(), data: data.into() }
    }

    proptest! {
        #[test]
        fn frames_are_the_same_however_the_bytes_come(cuts in proptest::collection::vec(0..TEXT.len(), 0..8)) {
            let mut cuts = cuts;
            cuts.extend([0, TEXT.len()]);
            cuts.sort_unstable();
            let mut parser = Parser::default();
            let frames: Vec<Frame> = cuts.windows(2).flat_map(|cut| parser.push(&TEXT.as_bytes()[cut[0]..cut[1]]).unwrap()).collect();
            prop_assert_eq!(frames, [frame("step", "7", "{\"a\":1}"), frame("end", "", "x\ny")]);
        }
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut parser = Parser::default();
        assert!(parser.push(&vec![b'x'; 1 << 20]).is_ok());
        assert!(parser.push(b"x").is_err());
    }
}
