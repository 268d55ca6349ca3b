//! Holds `losses.jsonl` and `held_out.jsonl` against the loss bits of a receipt.
//!
//! Believes no printed loss: only its bits are signed, so the number beside them must be the same one.

use std::io::{self, BufRead as _, BufReader, Read as _};

use cap_std::fs::Dir;
use nodus_protocol::Digest;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

use super::report::{Mismatch, Outcome};
use super::subjects::cannot_read;
use crate::files::open_regular;
use crate::statement::{Evaluation, Statement};

/// One line a step.
pub const LOSSES_FILE: &str = "losses.jsonl";
/// One line an evaluation.
pub const HELD_OUT_FILE: &str = "held_out.jsonl";
/// Longer lines are not the host's.
const LINE_BYTES_MAX: u64 = 1 << 16;
/// After so many wrong lines the rest is counted only.
const MISMATCHES_MAX: usize = 20;

/// The part of a line that a receipt vouches for.
#[derive(Deserialize)]
struct LossLine {
    /// `null` for a loss that is not finite: JSON has no number for it.
    loss: Option<f64>,
    loss_bits: String,
}

impl LossLine {
    /// The loss must be that of the bits. Decimal and back may move the last digit, no more.
    fn check(&self, at: &str) -> Option<Mismatch> {
        let bits = self.loss_bits.strip_prefix("0x").filter(|hex| hex.len() == 8).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let Some(bits) = bits else {
            return Some(Mismatch::new(format!("{at}, loss_bits"), "0x and the 8 hexadecimal digits of a float32", &self.loss_bits));
        };
        let loss = f64::from(f32::from_bits(bits));
        let tolerance = loss.abs() * f64::from(f32::EPSILON) + f64::from(f32::MIN_POSITIVE);
        let is_same = self.loss.map_or(!loss.is_finite(), |found| (found - loss).abs() <= tolerance);
        let found = self.loss.map_or_else(|| "null".to_owned(), |found| found.to_string());
        (!is_same).then(|| Mismatch::new(format!("{at}, loss"), format!("{loss}, as its loss_bits say"), found))
    }
}

/// The losses have the receipt's digest, and are as many as its steps.
pub(super) fn check_losses(statement: &Statement, run: &Dir) -> Outcome {
    let Some(expected) = statement.predicate.losses else {
        return Outcome::not_checked("the receipt has no digest of the losses");
    };
    let (mut hash, mut mismatches, mut count) = (Sha256::new(), Mismatches::default(), 0_u64);
    let read = each_line(run, LOSSES_FILE, |number, line| {
        count = number;
        match parse::<LossLine>(LOSSES_FILE, number, line) {
            Ok(line) => {
                hash.update(&line.loss_bits);
                hash.update("\n");
                mismatches.extend(line.check(&format!("{LOSSES_FILE} line {number}")));
            }
            Err(mismatch) => mismatches.extend(Some(mismatch)),
        }
    });
    if let Err(error) = read {
        return Outcome::of(vec![Mismatch::new(LOSSES_FILE, "a line for every step", cannot_read(&error))]);
    }
    let found = Digest::from_bytes(hash.finalize().into());
    let mut mismatches = mismatches.finish();
    if found != expected.0 {
        mismatches.push(Mismatch::new(format!("digest over the loss_bits of {LOSSES_FILE}"), expected.0, found));
    }
    if let Some(steps) = statement.predicate.steps
        && steps != count
    {
        mismatches.push(Mismatch::new(format!("lines of {LOSSES_FILE}"), steps, count));
    }
    Outcome::of(mismatches)
}

/// The evaluations are the receipt's, line by line.
pub(super) fn check_held_out(statement: &Statement, run: &Dir) -> Outcome {
    let Some(expected) = &statement.predicate.held_out_losses else {
        return Outcome::not_checked("the receipt has no held-out losses");
    };
    let (mut mismatches, mut count, mut evaluations) = (Mismatches::default(), 0, expected.iter());
    let read = each_line(run, HELD_OUT_FILE, |number, line| {
        count = number;
        let Some(expected) = evaluations.next() else { return };
        let at = format!("{HELD_OUT_FILE} line {number}");
        let parsed = parse::<Evaluation>(HELD_OUT_FILE, number, line)
            .and_then(|line_of| Ok((line_of, parse::<LossLine>(HELD_OUT_FILE, number, line)?)));
        match parsed {
            Ok((found, loss)) => {
                mismatches.extend((found != *expected).then(|| Mismatch::new(&at, evaluation(expected), evaluation(&found))));
                mismatches.extend(loss.check(&at));
            }
            Err(mismatch) => mismatches.extend(Some(mismatch)),
        }
    });
    if let Err(error) = read {
        return Outcome::of(vec![Mismatch::new(HELD_OUT_FILE, "a line for every evaluation", cannot_read(&error))]);
    }
    let mut mismatches = mismatches.finish();
    if count != expected.len() as u64 {
        mismatches.push(Mismatch::new(format!("lines of {HELD_OUT_FILE}"), expected.len(), count));
    }
    Outcome::of(mismatches)
}

fn evaluation(of: &Evaluation) -> String {
    format!("adapter {}, step {}, loss_bits {}", of.adapter, of.step, of.loss_bits)
}

fn parse<T: DeserializeOwned>(file: &str, number: u64, line: &[u8]) -> Result<T, Mismatch> {
    serde_json::from_slice(line).map_err(|error| Mismatch::new(format!("{file} line {number}"), "a line of the host", error))
}

/// Calls `take` with every line and its number from 1.
fn each_line(run: &Dir, name: &str, mut take: impl FnMut(u64, &[u8])) -> io::Result<()> {
    let mut reader = BufReader::new(open_regular(run, name)?);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            break;
        }
        if line.last() != Some(&b'\n') {
            let message = format!("line {number} does not end within {LINE_BYTES_MAX} bytes with a newline");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        take(number, &line);
    }
    Ok(())
}

/// The first mismatches, and how many more there are.
#[derive(Default)]
struct Mismatches {
    first: Vec<Mismatch>,
    more: u64,
}

impl Mismatches {
    fn extend(&mut self, mismatch: Option<Mismatch>) {
        match mismatch {
            Some(mismatch) if self.first.len() < MISMATCHES_MAX => self.first.push(mismatch),
            Some(_) => self.more += 1,
            None => {}
        }
    }

    fn finish(mut self) -> Vec<Mismatch> {
        if self.more > 0 {
            self.first.push(Mismatch::new("further lines", "no mismatch", format!("{} more", self.more)));
        }
        self.first
    }
}
