//! A job's log: lines of the guest's `log`, standard output and standard error, bounded by `log-bytes`.
//!
//! Never ends a job and never blocks it: what is beyond the limit is dropped and counted.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::limits::{LOG_LINE_BYTES_MAX, MESSAGE_BYTES_MAX};
use crate::services::Level;

/// Which of the guest's streams a byte came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// The log, shared between the job's state and the streams that its WASI holds.
#[derive(Clone, Debug)]
pub(crate) struct Log(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    /// Bytes that may still be kept; a line costs its length and one.
    left: u64,
    /// Lines that may still be kept.
    lines_left: u64,
    kept: u64,
    dropped: u64,
    /// Kept and not yet told.
    lines: Vec<(Level, String)>,
    /// The unfinished line of each stream.
    out: Vec<u8>,
    err: Vec<u8>,
    panic: Panic,
}

impl Log {
    /// A log that keeps so many bytes and lines.
    pub(crate) fn new(log_bytes: u64, log_lines: u64) -> Self {
        let (lines, out, err) = (Vec::new(), Vec::new(), Vec::new());
        Self(Arc::new(Mutex::new(Inner {
            left: log_bytes,
            lines_left: log_lines,
            kept: 0,
            dropped: 0,
            lines,
            out,
            err,
            panic: Panic::default(),
        })))
    }

    /// Adds a line of the guest's own.
    pub(crate) fn line(&self, level: Level, message: String) {
        self.lock().keep(level, message);
    }

    /// Adds output; every finished line becomes a line of the log.
    pub(crate) fn write(&self, stream: Stream, bytes: &[u8]) {
        self.lock().write(stream, bytes);
    }

    /// Ends the unfinished lines: nothing more will be written.
    pub(crate) fn finish(&self) {
        let mut inner = self.lock();
        inner.end_line(Stream::Out, false);
        inner.end_line(Stream::Err, false);
    }

    /// The lines since the last call.
    pub(crate) fn take(&self) -> Vec<(Level, String)> {
        std::mem::take(&mut self.lock().lines)
    }

    /// Bytes kept and bytes dropped.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let inner = self.lock();
        (inner.kept, inner.dropped)
    }

    /// The guest's panic message, if its standard error holds one.
    pub(crate) fn panic(&self) -> Option<String> {
        self.lock().panic.message()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn keep(&mut self, level: Level, message: String) {
        let cost = message.len() as u64 + 1;
        if cost > self.left || self.lines_left == 0 {
            // Nothing after it is kept either: what is kept is the log's beginning, without holes.
            self.left = 0;
            self.dropped += cost;
            return;
        }
        self.left -= cost;
        self.lines_left -= 1;
        self.kept += cost;
        self.lines.push((level, message));
    }

    fn write(&mut self, stream: Stream, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let line = self.unfinished(stream);
            let room = LOG_LINE_BYTES_MAX - line.len();
            let window = bytes.get(..room).unwrap_or(bytes);
            let newline = window.iter().position(|byte| *byte == b'\n');
            let (part, rest) = bytes.split_at(newline.unwrap_or(window.len()));
            line.extend_from_slice(part);
            let full = line.len() == LOG_LINE_BYTES_MAX;
            bytes = rest.get(usize::from(newline.is_some())..).unwrap_or_default();
            if newline.is_some() || full {
                self.end_line(stream, newline.is_some());
            }
        }
    }

    fn end_line(&mut self, stream: Stream, keep_empty: bool) {
        let bytes = std::mem::take(self.unfinished(stream));
        if bytes.is_empty() && !keep_empty {
            return;
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if stream == Stream::Err {
            self.panic.line(&text);
        }
        self.keep(if stream == Stream::Out { Level::Info } else { Level::Warn }, text);
    }

    fn unfinished(&mut self, stream: Stream) -> &mut Vec<u8> {
        match stream {
            Stream::Out => &mut self.out,
            Stream::Err => &mut self.err,
        }
    }
}

/// Finds the last panic on a guest's standard error, whatever the log's limit: "thread 'x' panicked at PLACE:" and the lines after.
#[derive(Debug, Default)]
struct Panic {
    place: Option<String>,
    message: String,
}

impl Panic {
    fn line(&mut self, line: &str) {
        if let Some((_, place)) = line.split_once("panicked at ") {
            self.place = Some(place.chars().take(500).collect());
            self.message.clear();
        } else if self.place.is_some() && !line.starts_with("note: ") && self.message.len() + line.len() < MESSAGE_BYTES_MAX {
            if !self.message.is_empty() {
                self.message.push('\n');
            }
            self.message.push_str(line);
        }
    }

    fn message(&self) -> Option<String> {
        let place = self.place.as_ref()?;
        Some(format!("{place} {}", self.message).trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_and_levels_follow_the_stream() {
        let log = Log::new(1000, 100);
        log.write(Stream::Out, b"a\nb");
        log.write(Stream::Err, b"e\n");
        log.write(Stream::Out, b"c\n\nlast");
        log.finish();
        let lines: Vec<_> = log.take();
        let expected = [(Level::Info, "a"), (Level::Warn, "e"), (Level::Info, "bc"), (Level::Info, ""), (Level::Info, "last")];
        assert_eq!(lines, expected.map(|(level, text)| (level, text.to_owned())));
        assert!(log.take().is_empty());
    }

    #[test]
    fn what_is_beyond_the_limit_is_dropped_and_counted() {
        let log = Log::new(10, 100);
        for text in ["1234", "12345678", "1"] {
            log.line(Level::Info, text.into());
        }
        assert_eq!(log.take().len(), 1);
        assert_eq!(log.counts(), (5, 11));
    }

    #[test]
    fn empty_lines_count_too() {
        let log = Log::new(1000, 3);
        log.write(Stream::Out, &[b'\n'; 10]);
        assert_eq!((log.take().len(), log.counts()), (3, (3, 7)));
    }

    #[test]
    fn a_line_without_an_end_is_broken_and_holds_no_more_than_its_maximum() {
        let log = Log::new(1 << 20, 100);
        for _ in 0..3 {
            log.write(Stream::Out, &vec![b'x'; LOG_LINE_BYTES_MAX - 1]);
        }
        log.finish();
        let lengths: Vec<_> = log.take().into_iter().map(|(_, line)| line.len()).collect();
        assert_eq!(lengths, [LOG_LINE_BYTES_MAX, LOG_LINE_BYTES_MAX, LOG_LINE_BYTES_MAX - 3]);
    }

    #[test]
    fn the_last_panic_is_found_even_when_the_log_is_full() {
        let log = Log::new(0, 100);
        assert_eq!(log.panic(), None);
        log.write(Stream::Err, b"\nthread 'main' (1) panicked at src/lib.rs:3:5:\nfirst\n");
        log.write(Stream::Err, b"\nthread 'main' (1) panicked at src/lib.rs:9:1:\nboom\nmore\nnote: run with `RUST_BACKTRACE=1`\n");
        assert_eq!(log.panic().as_deref(), Some("src/lib.rs:9:1: boom\nmore"));
    }
}
