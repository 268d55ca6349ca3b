//! Server-sent events: bytes to frames, and a stream that goes on where it was cut off.
//!
//! Never gives a frame twice: what was given is named to the service when the stream is opened again.

use std::time::Duration;

use anyhow::Context as _;
use reqwest::{Method, Response};

use super::http::Remote;
use crate::error::exit_code;
use crate::text::{escape, one_line};

/// How long after a cut the stream is opened again; twice as long after each further one before anything came.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest such wait.
const AGAIN_MAX: Duration = Duration::from_secs(30);
/// Characters of why it was cut off that are shown.
const CUT_CHARS_MAX: usize = 300;
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

/// Follows a stream to its end, over cuts: it is opened again where it was cut off, after a while that grows while nothing comes. What happens is
/// said by `say`, a line each.
///
/// # Errors
/// The user's: what the service refuses. Ours: it cannot be reached at first. What `take` says.
pub(super) async fn follow(
    remote: &Remote,
    path: &str,
    say: impl Fn(&str),
    mut take: impl FnMut(&Frame) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (mut last, mut has_met, mut cuts) = (None::<String>, false, 0_u32);
    loop {
        let mut request = remote.request(Method::GET, path);
        if let Some(last) = &last {
            request = request.header("last-event-id", last);
        }
        let cut = match remote.send(request).await {
            Ok(response) => {
                if std::mem::replace(&mut has_met, true) {
                    let place = last.as_deref().map_or_else(|| "from its start".to_owned(), |last| format!("after event {}", escape(last)));
                    say(&format!("the service answers again: going on {place}"));
                }
                let before = last.clone();
                let cut = match read(response, &mut last, &mut take).await {
                    Ok(true) => return Ok(()),
                    Ok(false) => "the service ended it".to_owned(),
                    Err(Broken::Taker(error)) => return Err(error),
                    Err(Broken::Stream(error)) => error.root_cause().to_string(),
                };
                cuts = if last == before { cuts } else { 0 };
                cut
            }
            Err(error) if exit_code(&error) == 2 || !has_met => return Err(error),
            Err(error) => error.root_cause().to_string(),
        };
        let wait = (AGAIN * 2_u32.saturating_pow(cuts)).min(AGAIN_MAX);
        cuts += 1;
        say(&format!("the events were cut off ({}); trying again in {} s", one_line(&cut, CUT_CHARS_MAX), wait.as_secs()));
        tokio::time::sleep(wait).await;
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
