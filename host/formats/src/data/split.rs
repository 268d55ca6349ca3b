//! Which examples are held out: a pure function of their number, the share and the seed.

use sha2::{Digest as _, Sha256};

/// How much is held out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeldOut {
    /// So many examples.
    Count(usize),
    /// This part of them, above 0 and below 1, rounded to the nearest whole number, at least one.
    Fraction(f64),
}

/// Indices of both parts, each ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// What is trained on.
    pub train: Vec<usize>,
    /// What is held out.
    pub held_out: Vec<usize>,
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
    let refuse = |asked: String| Err(SplitError { asked, examples });
    let count = match held_out {
        HeldOut::Count(count) => count,
        HeldOut::Fraction(part) if part > 0.0 && part < 1.0 => part_of(examples, part),
        HeldOut::Fraction(part) => return refuse(format!("the fraction {part}")),
    };
    if count == 0 || count >= examples {
        return refuse(count.to_string());
    }
    let mut order: Vec<([u8; 32], usize)> = (0..examples).map(|i| (key(seed, i), i)).collect();
    order.sort_unstable();
    let mut indices = order.into_iter().map(|(_, i)| i);
    let mut held_out: Vec<usize> = indices.by_ref().take(count).collect();
    let mut train: Vec<usize> = indices.collect();
    held_out.sort_unstable();
    train.sort_unstable();
    Ok(Split { train, held_out })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a number of examples")]
fn part_of(examples: usize, part: f64) -> usize {
    ((examples as f64 * part).round() as usize).max(1)
}

fn key(seed: u64, index: usize) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"nodus held-out");
    hash.update(seed.to_le_bytes());
    hash.update((index as u64).to_le_bytes());
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_parts_together_are_everything_once_and_the_seed_decides() {
        for held_out in [HeldOut::Count(7), HeldOut::Fraction(0.07)] {
            let a = split(100, held_out, 1).unwrap();
            assert_eq!((a.train.len(), a.held_out.len()), (93, 7));
            let mut all = [a.train.clone(), a.held_out.clone()].concat();
            all.sort_unstable();
            assert_eq!(all, (0..100).collect::<Vec<_>>());
            assert_eq!(a, split(100, held_out, 1).unwrap());
            assert_ne!(a, split(100, held_out, 2).unwrap());
        }
        // Pinned: another order would silently change who is held out of every job.
        assert_eq!(split(10, HeldOut::Count(3), 0).unwrap().held_out, [3, 5, 6]);
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
