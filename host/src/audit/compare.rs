//! What a replay gave, held against what was recorded: the first difference, or none.
//!
//! Compares bytes and bits; knows no tolerance.

use std::io::{self, Read as _};

use cap_std::fs::Dir;
use nodus_receipts::statement::DigestSet;
use serde_json::Value;

use crate::receipt::Statement;
use crate::run::record::{Figures, HELD_OUT, LOSSES};
use crate::store::digest_of;
use crate::text::escape;

/// Most of a record's line that is shown.
const SHOWN_CHARS_MAX: usize = 200;

/// Something that is not as it was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) what: String,
    pub(super) expected: String,
    pub(super) got: String,
}

impl Difference {
    fn new(what: impl Into<String>, expected: impl ToString, got: impl ToString) -> Self {
        Self { what: what.into(), expected: expected.to_string(), got: got.to_string() }
    }
}

/// What was equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Equal {
    pub(super) losses: u64,
    pub(super) held_out: u64,
    pub(super) files: u64,
    pub(super) bytes: u64,
}

/// Compares a replay's folder and figures with the recorded folder and the receipt. The records are looked at first, since they say
/// where; the receipt, which is signed, has the last word.
///
/// # Errors
/// The replay's own files cannot be read.
pub(super) fn compare(recorded: &Dir, statement: &Statement, replayed: &Dir, figures: &Figures) -> io::Result<Result<Equal, Difference>> {
    for name in [LOSSES, HELD_OUT] {
        // A record that is gone says nothing; the receipt still does.
        if !recorded.is_file(name) {
            continue;
        }
        let Ok(expected) = recorded.read_to_string(name) else { continue };
        if let Some(difference) = first_line(name, &expected, &replayed.read_to_string(name)?) {
            return Ok(Err(difference));
        }
    }
    let predicate = &statement.predicate;
    let numbers = [
        ("steps", predicate.steps, figures.steps),
        ("evaluations", predicate.held_out_losses.len() as u64, figures.evaluations.len() as u64),
    ];
    for (what, expected, got) in numbers {
        if expected != got {
            return Ok(Err(Difference::new(format!("number of {what}"), expected, got)));
        }
    }
    for (expected, got) in predicate.held_out_losses.iter().zip(&figures.evaluations) {
        if expected != got {
            return Ok(Err(Difference::new(format!("held-out loss after step {}", expected.step), &expected.loss_bits, &got.loss_bits)));
        }
    }
    let DigestSet(expected) = predicate.losses;
    if expected != figures.loss_digest {
        return Ok(Err(Difference::new("digest over all losses", expected, figures.loss_digest)));
    }
    let mut equal = Equal { losses: figures.steps, held_out: figures.evaluations.len() as u64, ..Equal::default() };
    for subject in &statement.subject {
        let DigestSet(expected) = subject.digest;
        let found = match replayed.open(&subject.name) {
            Ok(file) => digest_of(file)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Err(Difference::new(escape(&subject.name), expected, "no such file")));
            }
            Err(error) => return Err(error),
        };
        if found.0 != expected {
            return Ok(Err(Difference::new(escape(&subject.name), expected, found.0)));
        }
        if let Some(difference) = first_byte(&subject.name, recorded, replayed)? {
            return Ok(Err(difference));
        }
        (equal.files, equal.bytes) = (equal.files + 1, equal.bytes + found.1);
    }
    Ok(Ok(equal))
}

/// The first line of two records that differs: by its loss bits where those differ, else whole.
fn first_line(name: &str, expected: &str, got: &str) -> Option<Difference> {
    let (mut expected_lines, mut got_lines) = (expected.lines(), got.lines());
    let mut number = 0;
    loop {
        number += 1;
        let (expected, got) = match (expected_lines.next(), got_lines.next()) {
            (None, None) => return None,
            (Some(expected), Some(got)) if expected == got => continue,
            lines => lines,
        };
        let parsed = [expected, got].map(|line| line.and_then(|line| serde_json::from_str::<Value>(line).ok()).unwrap_or_default());
        let [step, other_step] = parsed.each_ref().map(|line| line.get("step").and_then(Value::as_u64));
        let [expected_bits, got_bits] = parsed.each_ref().map(|line| line.get("loss_bits").and_then(Value::as_str));
        let place = match step.or(other_step) {
            Some(step) => format!("{name}, step {step}"),
            None => format!("{name}, line {number}"),
        };
        if let (Some(expected), Some(got)) = (expected_bits, got_bits)
            && expected != got
            && step == other_step
        {
            return Some(Difference::new(place, escape(expected), escape(got)));
        }
        let shown = |line: Option<&str>| {
            line.map_or_else(|| "no line".to_owned(), |line| escape(&line.chars().take(SHOWN_CHARS_MAX).collect::<String>()))
        };
        return Some(Difference::new(place, shown(expected), shown(got)));
    }
}

/// The first byte in which a recorded file differs from the replay's, which is known to be what was signed.
fn first_byte(name: &str, recorded: &Dir, replayed: &Dir) -> io::Result<Option<Difference>> {
    let Ok(mut file) = recorded.open(name) else { return Ok(None) };
    let (mut expected, mut got) = (Vec::new(), Vec::new());
    file.read_to_end(&mut expected)?;
    replayed.open(name)?.read_to_end(&mut got)?;
    if expected == got {
        return Ok(None);
    }
    let at = expected.iter().zip(&got).take_while(|(expected, got)| expected == got).count();
    let shown = |bytes: &[u8]| bytes.get(at).map_or_else(|| "the end of the file".to_owned(), |byte| format!("0x{byte:02x}"));
    Ok(Some(Difference::new(format!("{}, byte {at}", escape(name)), shown(&expected), shown(&got))))
}

#[cfg(test)]
mod tests {
    use super::{Difference, first_byte, first_line};

    const LINE: &str = "{\"step\":1,\"loss\":5.75,\"loss_bits\":\"0x40b80c4a\",\"grad_norm\":0.5}\n";

    #[test]
    fn the_first_differing_line_is_named_by_its_step_and_bits() {
        assert_eq!(first_line("losses.jsonl", LINE, LINE), None);
        let other = LINE.replace("4a\"", "4b\"").replace("\"step\":1", "\"step\":2");
        let second = LINE.replace("\"step\":1", "\"step\":2");
        let found = first_line("losses.jsonl", &format!("{LINE}{other}"), &format!("{LINE}{second}")).unwrap();
        assert_eq!(found, Difference::new("losses.jsonl, step 2", "0x40b80c4b", "0x40b80c4a"));
    }

    #[test]
    fn other_differences_show_the_lines() {
        let norm = first_line("losses.jsonl", LINE, &LINE.replace("0.5", "0.25")).unwrap();
        assert!(norm.what == "losses.jsonl, step 1" && norm.expected.contains("0.5") && norm.got.contains("0.25"), "{norm:?}");
        let short = first_line("losses.jsonl", &format!("{LINE}{LINE}"), LINE).unwrap();
        assert_eq!(short.got, "no line");
        let garbage = first_line("losses.jsonl", "x\u{1b}\n", LINE).unwrap();
        assert_eq!((garbage.what.as_str(), garbage.expected.as_str()), ("losses.jsonl, step 1", "x\\u{1b}"));
    }

    #[test]
    fn the_first_differing_byte_is_named() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let (a, b) = ("a", "b");
        for folder in [a, b] {
            root.create_dir(folder).unwrap();
        }
        let [first, second] = [a, b].map(|folder| root.open_dir(folder).unwrap());
        first.write("f", [1, 2, 3]).unwrap();
        second.write("f", [1, 2, 3]).unwrap();
        assert_eq!(first_byte("f", &first, &second).unwrap(), None);
        first.write("f", [1, 9, 3]).unwrap();
        assert_eq!(first_byte("f", &first, &second).unwrap(), Some(Difference::new("f, byte 1", "0x09", "0x02")));
        first.write("f", [1]).unwrap();
        assert_eq!(first_byte("f", &first, &second).unwrap().unwrap().expected, "the end of the file");
        first.remove_file("f").unwrap();
        assert_eq!(first_byte("f", &first, &second).unwrap(), None);
    }
}
