//! Which examples are held out: a pure function of their number, the share and the seed.
//!
//! Keeps no list of them, since a data set may have a thousand million lines.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// How much is held out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeldOut {
    /// So many examples.
    Count(usize),
    /// This part of them, above 0 and below 1, rounded to the nearest whole number, at least one.
    Fraction(f64),
}

impl HeldOut {
    /// How many of `examples` are held out.
    ///
    /// # Errors
    /// When one of the parts would be empty.
    pub fn count(self, examples: usize) -> Result<usize, SplitError> {
        let refuse = |asked: String| Err(SplitError { asked, examples });
        let count = match self {
            Self::Count(count) => count,
            Self::Fraction(part) if part > 0.0 && part < 1.0 => part_of(examples, part),
            Self::Fraction(part) => return refuse(format!("the fraction {part}")),
        };
        if count == 0 || count >= examples { refuse(count.to_string()) } else { Ok(count) }
    }
}

/// Some of the examples of a data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    seed: u64,
    /// The last key that is held out.
    last: Key,
    is_held_out: bool,
    len: usize,
}

type Key = [u8; 32];

impl Part {
    /// Whether the example at an index is among them.
    #[must_use]
    pub fn has(&self, index: usize) -> bool {
        (key(self.seed, index) <= self.last) == self.is_held_out
    }

    /// How many there are.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "neither part is ever empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// Both parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// What is trained on.
    pub train: Part,
    /// What is held out.
    pub held_out: Part,
}

/// A share that leaves one of the parts empty.
#[derive(Debug, thiserror::Error)]
#[error("holding out {asked} of {examples} examples, expected both parts to keep at least one")]
pub struct SplitError {
    asked: String,
    examples: usize,
}

/// Splits `examples` examples. Held out are those whose SHA-256 over `nodus held-out`, the seed and the index (both 64 bits,
/// little-endian) is smallest, so that who is held out does not depend on the order in which anybody draws.
///
/// # Errors
/// When one of the parts would be empty.
pub fn split(examples: usize, held_out: HeldOut, seed: u64) -> Result<Split, SplitError> {
    let count = held_out.count(examples)?;
    let last = smallest(examples, count, seed);
    let part = |is_held_out, len| Part { seed, last, is_held_out, len };
    Ok(Split { train: part(false, examples - count), held_out: part(true, count) })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a number of examples")]
fn part_of(examples: usize, part: f64) -> usize {
    ((examples as f64 * part).round() as usize).max(1)
}

/// The greatest of the so many smallest keys: their first two bytes by counting, then the key among those that share them. Memory does not grow with
/// the examples but for one in 65,536.
fn smallest(examples: usize, count: usize, seed: u64) -> Key {
    let first = |key: &Key| u16::from_be_bytes([key[0], key[1]]);
    let mut counts = vec![0_usize; 1 << 16];
    for index in 0..examples {
        counts.get_mut(usize::from(first(&key(seed, index)))).into_iter().for_each(|count| *count += 1);
    }
    let (mut left, mut shared) = (count, 0_u16);
    for (first, count) in (0..=u16::MAX).zip(counts) {
        if left <= count {
            shared = first;
            break;
        }
        left -= count;
    }
    let mut keys: Vec<Key> = (0..examples).map(|index| key(seed, index)).filter(|key| first(key) == shared).collect();
    keys.sort_unstable();
    keys.get(left.saturating_sub(1)).copied().unwrap_or_default()
}

fn key(seed: u64, index: usize) -> Key {
    let mut hash = Sha256::new();
    hash.update(b"nodus held-out");
    hash.update(seed.to_le_bytes());
    hash.update((index as u64).to_le_bytes());
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, as it is read.
    fn defined(examples: usize, count: usize, seed: u64) -> Vec<usize> {
        let mut order: Vec<_> = (0..examples).map(|index| (key(seed, index), index)).collect();
        order.sort_unstable();
        let mut held_out: Vec<usize> = order.into_iter().take(count).map(|(_, index)| index).collect();
        held_out.sort_unstable();
        held_out
    }

    fn of(part: &Part, examples: usize) -> Vec<usize> {
        (0..examples).filter(|index| part.has(*index)).collect()
    }

    #[test]
    fn both_parts_together_are_everything_once_and_the_seed_decides() {
        for held_out in [HeldOut::Count(7), HeldOut::Fraction(0.07)] {
            let a = split(100, held_out, 1).unwrap();
            assert_eq!((a.train.len(), a.held_out.len()), (93, 7));
            assert_eq!(of(&a.held_out, 100), defined(100, 7, 1));
            assert_eq!(of(&a.train, 100), (0..100).filter(|index| !a.held_out.has(*index)).collect::<Vec<_>>());
            assert_eq!(a, split(100, held_out, 1).unwrap());
            assert_ne!(a, split(100, held_out, 2).unwrap());
        }
        // Pinned: another order would silently change who is held out of every job.
        assert_eq!(of(&split(10, HeldOut::Count(3), 0).unwrap().held_out, 10), [3, 5, 6]);
        // More than share their first two bytes with none.
        for count in [1, 999, 100_000, 199_999] {
            assert_eq!(of(&split(200_000, HeldOut::Count(count), 3).unwrap().held_out, 200_000), defined(200_000, count, 3));
        }
    }

    #[test]
    fn empty_parts_are_refused() {
        for held_out in [HeldOut::Count(0), HeldOut::Count(5), HeldOut::Fraction(0.0), HeldOut::Fraction(1.0), HeldOut::Fraction(f64::NAN)]
        {
            assert!(split(5, held_out, 0).is_err(), "{held_out:?}");
        }
        assert_eq!(split(5, HeldOut::Fraction(0.01), 0).unwrap().held_out.len(), 1);
        let error = split(5, HeldOut::Count(5), 0).unwrap_err().to_string();
        assert_eq!(error, "holding out 5 of 5 examples, expected both parts to keep at least one");
    }
}
