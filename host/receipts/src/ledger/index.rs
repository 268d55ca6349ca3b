//! Where in a ledger the entries of each job are.
//!
//! Knows places alone, and only of lines that were checked: what stands there is read, and checked once more, whenever somebody asks for it. Never
//! written to the disk: what an index of an earlier process says of lines that nobody has looked at since would have to be believed.

use std::collections::HashMap;
use std::io::{BufReader, Read as _, Seek as _, SeekFrom, Take};

use cap_std::fs::{Dir, File};
use nodus_protocol::Digest;

use super::LEDGER_FILE;
use super::entry::Entry;
use super::error::{LedgerError, io};
use super::scan::{Found, Position, Scanner};
use crate::files::open_regular;

/// Entries of one stretch at most, so that whoever wants a few of a job's reads little more.
const STRETCH_MAX: u64 = 256;

/// Places, by the digest of the job's name.
#[derive(Clone, Debug, Default)]
pub(super) struct Index(HashMap<Digest, Vec<Stretch>>);

/// Entries of one job that stand one after the other.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    start: Position,
    end: u64,
    entries: u64,
}

impl Index {
    /// An entry that stands between these two places.
    pub(super) fn note(&mut self, entry: &Entry, start: Position, end: Position) {
        let Some(job) = entry.event.job() else { return };
        let stretches = self.0.entry(Digest::of(job.as_bytes())).or_default();
        match stretches.last_mut() {
            Some(last) if last.end == start.offset && last.entries < STRETCH_MAX => {
                last.end = end.offset;
                last.entries += 1;
            }
            _ => stretches.push(Stretch { start, end: end.offset, entries: 1 }),
        }
    }

    /// A job's entries from the so-manieth of them on, from 0. Nothing else of the file is read.
    pub(super) fn entries(&self, dir: &Dir, job: &str, mut from: u64) -> Result<JobEntries, LedgerError> {
        let mut wanted = Vec::new();
        for stretch in self.0.get(&Digest::of(job.as_bytes())).into_iter().flatten() {
            if wanted.is_empty() && from >= stretch.entries {
                from -= stretch.entries;
            } else {
                wanted.push(*stretch);
            }
        }
        let file = open_regular(dir, LEDGER_FILE).map_err(io("opening", LEDGER_FILE))?;
        Ok(JobEntries { file, stretches: wanted.into_iter(), scanner: None, skip: from })
    }
}

/// A job's entries, in order, each checked against the one before where that is the job's too. Ends after the first error.
pub struct JobEntries {
    file: File,
    stretches: std::vec::IntoIter<Stretch>,
    scanner: Option<Scanner<BufReader<Take<File>>>>,
    skip: u64,
}

impl JobEntries {
    fn begin(&self, stretch: Stretch) -> std::io::Result<Scanner<BufReader<Take<File>>>> {
        let Stretch { start, end, .. } = stretch;
        let mut file = self.file.try_clone()?;
        file.seek(SeekFrom::Start(start.offset))?;
        Ok(Scanner::new(BufReader::new(file.take(end - start.offset)), start))
    }

    fn step(&mut self) -> Result<Option<Entry>, LedgerError> {
        loop {
            let Some(scanner) = &mut self.scanner else {
                let Some(stretch) = self.stretches.next() else { return Ok(None) };
                self.scanner = Some(self.begin(stretch).map_err(io("reading", LEDGER_FILE))?);
                continue;
            };
            match scanner.next()? {
                Found::Entry(_) if self.skip > 0 => self.skip -= 1,
                Found::Entry(entry) => return Ok(Some(entry)),
                // It was whole when it was noted.
                Found::Torn(torn, _) => return Err(LedgerError::Corrupt { line: torn.line, fault: torn.fault }),
                Found::End => self.scanner = None,
            }
        }
    }
}

impl Iterator for JobEntries {
    type Item = Result<Entry, LedgerError>;

    fn next(&mut self) -> Option<Self::Item> {
        let stepped = self.step();
        if stepped.is_err() {
            (self.stretches, self.scanner) = (Vec::new().into_iter(), None);
        }
        stepped.transpose()
    }
}
