//! The plan: the pinned algorithm of every base product on this device, as a text that can be kept, compared and digested.
//!
//! Never chooses: it records.

mod text;

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::compile::hex;
pub(super) use text::GATE_UP;
pub use text::PlanError;

/// A base product. Weights are outputs x inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Product {
    /// rows x inputs -> rows x outputs.
    Linear,
    /// The same, plus a bias.
    LinearBias,
    /// rows x outputs -> rows x inputs; also added to what is there.
    LinearBackward,
    /// rows x inputs -> rows x outputs in float32, rows a multiple of 8 elements apart: the head.
    Logits,
    /// Its backward, one slice of the vocabulary by itself: rows a multiple of 8 elements apart -> slices x rows x inputs in float32.
    LogitsBackward,
    /// What of the vocabulary the slices leave: -> rows x inputs in float32.
    LogitsBackwardRest,
}

const NAMES: [(Product, &str); 6] = [
    (Product::Linear, "linear"),
    (Product::LinearBias, "linear-bias"),
    (Product::LinearBackward, "linear-backward"),
    (Product::Logits, "logits"),
    (Product::LogitsBackward, "logits-backward"),
    (Product::LogitsBackwardRest, "logits-backward-rest"),
];

impl Product {
    /// All of them.
    #[must_use]
    pub fn all() -> [Self; 6] {
        NAMES.map(|(product, _)| product)
    }

    /// Its name in a plan.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(product, _)| *product == self).map_or("", |(_, name)| name)
    }
}

/// What an algorithm is pinned for. The number of rows is no part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The product.
    pub product: Product,
    /// Rows of the weight.
    pub outputs: usize,
    /// Columns of the weight.
    pub inputs: usize,
}

/// How the gradient of a head adds up over the vocabulary: in slices of one width, then the rest, in that order. A function of the
/// head's sizes alone. One slice's product is long enough to be quick, and there are enough of them to fill a card with few rows: the wider the
/// head's inputs, the fewer it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slices {
    pub(super) count: usize,
    /// Columns of a slice; a multiple of 8 where there are several, so that a slice begins at a multiple of 16 bytes.
    pub(super) width: usize,
    pub(super) rest: usize,
}

impl Slices {
    pub(super) fn new(vocabulary: usize, inputs: usize) -> Self {
        // Of 8192 columns or more, and some 128 tiles of 128 inputs in all; best a number of slices that leaves no rest.
        let near = (vocabulary / 8192).min((128 * 128_usize).div_ceil(inputs.max(1)));
        if near <= 1 {
            return Self { count: 1, width: vocabulary, rest: 0 };
        }
        let count = (near..2 * near).chain((near / 2..near).rev()).find(|count| vocabulary.is_multiple_of(8 * count)).unwrap_or(near);
        let width = vocabulary / count / 8 * 8;
        Self { count, width, rest: vocabulary - count * width }
    }

    /// Partial results of a row.
    pub(super) fn parts(self) -> usize {
        self.count + usize::from(self.rest > 0)
    }
}

/// The algorithm pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// cuBLASLt's, as its opaque words (valid for one version of the library).
    CublasLt([u64; 8]),
    /// This crate's kernel of fixed tiles.
    Own,
}

/// How rows go through gate, up and SwiGLU, where a kernel of this crate's does all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateUp {
    /// By the product of both and SwiGLU's kernel after it: what is planned.
    Apart,
    /// By the one kernel: what the gate raises a shape to, where all bytes are the same.
    Own,
}

/// Pinned algorithms, and what they are valid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Names and values: library version, card, precision. Another header means another plan.
    pub header: Vec<(String, String)>,
    choices: BTreeMap<Key, Choice>,
    /// For a product with at most so many rows, and more than the bucket below has: another algorithm of cuBLASLt's whose bytes are those of
    /// the choice above.
    buckets: BTreeMap<(Key, usize), [u64; 8]>,
    /// By outputs (of gate and up together) and inputs.
    gate_ups: BTreeMap<(usize, usize), GateUp>,
}

impl Plan {
    /// A plan without choices.
    #[must_use]
    pub fn new(header: Vec<(String, String)>) -> Self {
        Self { header, choices: BTreeMap::new(), buckets: BTreeMap::new(), gate_ups: BTreeMap::new() }
    }

    /// What is pinned for a product.
    #[must_use]
    pub fn get(&self, key: Key) -> Option<Choice> {
        self.choices.get(&key).copied()
    }

    /// Pins, for every number of rows.
    pub fn set(&mut self, key: Key, choice: Choice) {
        self.buckets.retain(|(pinned, _), _| *pinned != key);
        self.choices.insert(key, choice);
    }

    /// Pins another algorithm for the rows of a bucket.
    pub(super) fn set_bucket(&mut self, key: Key, bucket: usize, words: [u64; 8]) {
        self.buckets.insert((key, bucket), words);
    }

    /// What is pinned for a product with so many rows.
    #[must_use]
    pub fn get_for(&self, key: Key, rows: usize) -> Option<Choice> {
        let bucket = bucket(rows);
        self.buckets.get(&(key, bucket)).map(|words| Choice::CublasLt(*words)).or_else(|| self.get(key))
    }

    /// Every product with its algorithm, in order.
    pub fn choices(&self) -> impl Iterator<Item = (Key, Choice)> + '_ {
        self.choices.iter().map(|(key, choice)| (*key, *choice))
    }

    /// How gate, up and SwiGLU are done with weights of this shape (outputs of both together, and inputs); none where no one kernel is for it.
    #[must_use]
    pub fn gate_up(&self, shape: (usize, usize)) -> Option<GateUp> {
        self.gate_ups.get(&shape).copied()
    }

    /// Plans gate, up and SwiGLU of this shape.
    pub fn set_gate_up(&mut self, shape: (usize, usize), choice: GateUp) {
        self.gate_ups.insert(shape, choice);
    }

    /// Every shape of gate and up, in order.
    pub fn gate_ups(&self) -> impl Iterator<Item = ((usize, usize), GateUp)> + '_ {
        self.gate_ups.iter().map(|(shape, choice)| (*shape, *choice))
    }

    /// The plan for weights of these sizes (outputs and inputs) alone.
    #[must_use]
    pub fn of(&self, matrices: &[(usize, usize)]) -> Self {
        let choices = self.choices().filter(|(key, _)| matrices.contains(&(key.outputs, key.inputs))).collect();
        let buckets = self.buckets.iter().filter(|((key, _), _)| matrices.contains(&(key.outputs, key.inputs)));
        Self {
            header: self.header.clone(),
            choices,
            buckets: buckets.map(|(place, words)| (*place, *words)).collect(),
            gate_ups: self.gate_ups().filter(|(shape, _)| matrices.contains(shape)).collect(),
        }
    }

    /// Takes over what another plan has of products that this one does not. What the gate raised is for the gate to raise.
    pub(super) fn adopt(&mut self, other: &Self) {
        let is_new = |key: &Key| !self.choices.contains_key(key);
        let buckets: Vec<_> = other.buckets.iter().filter(|((key, _), _)| is_new(key)).map(|(place, words)| (*place, *words)).collect();
        let choices: Vec<_> = other.choices().filter(|(key, _)| is_new(key)).collect();
        self.choices.extend(choices);
        self.buckets.extend(buckets);
    }

    /// SHA-256 of the text, in hexadecimal digits.
    #[must_use]
    pub fn digest(&self) -> String {
        hex(&Sha256::digest(self.to_string()))
    }
}

/// Buckets of rows end here; the last has no end.
pub(super) const BUCKETS: [usize; 7] = [128, 256, 512, 1024, 2048, 8192, usize::MAX];

/// The end of the bucket that so many rows fall into.
fn bucket(rows: usize) -> usize {
    BUCKETS.into_iter().find(|end| rows <= *end).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::Slices;

    #[test]
    fn slices_cover_the_vocabulary() {
        for (vocabulary, inputs) in
            [1, 3, 8, 9, 1003, 32_000, 49_152, 50_257, 128_256, 151_936, 152_064].map(|n| [(n, 64), (n, 4096)]).concat()
        {
            let Slices { count, width, rest } = Slices::new(vocabulary, inputs);
            assert_eq!(count * width + rest, vocabulary);
            assert!(width > 0 && (count == 1 || width % 8 == 0) && rest <= 8 * count, "{vocabulary}: {count} x {width} + {rest}");
        }
        assert_eq!(Slices::new(151_936, 896), Slices { count: 16, width: 9496, rest: 0 });
        assert_eq!(Slices::new(128_256, 4096), Slices { count: 4, width: 32_064, rest: 0 });
    }
}
