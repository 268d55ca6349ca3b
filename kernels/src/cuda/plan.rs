//! The plan: the pinned algorithm of every base product on this device, as a text that can be kept, compared and digested.
//!
//! Never chooses: it records.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use super::compile::hex;

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

const GATE_UPS: [(GateUp, &str); 2] = [(GateUp::Apart, "apart"), (GateUp::Own, "own")];

/// A gate's line in a plan begins so.
pub(super) const GATE_UP: &str = "gate-up";

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

/// A text is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the plan: {what}")]
pub struct PlanError {
    line: usize,
    what: &'static str,
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

/// The first line of a plan's text.
const TITLE: &str = "nodus-cuda-plan 2";

/// An algorithm's words.
fn text(words: &[u64; 8]) -> String {
    words.iter().fold("cublaslt".to_owned(), |mut text, word| {
        // Writing to a string does not fail.
        let _ = write!(text, " {word:016x}");
        text
    })
}

/// Buckets of rows end here; the last has no end.
pub(super) const BUCKETS: [usize; 7] = [128, 256, 512, 1024, 2048, 8192, usize::MAX];

/// The end of the bucket that so many rows fall into.
fn bucket(rows: usize) -> usize {
    BUCKETS.into_iter().find(|end| rows <= *end).unwrap_or(usize::MAX)
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{TITLE}")?;
        for (name, value) in &self.header {
            writeln!(f, "{name}: {value}")?;
        }
        for (key, choice) in &self.choices {
            let choice = match choice {
                Choice::Own => "own".to_owned(),
                Choice::CublasLt(words) => text(words),
            };
            writeln!(f, "{} {} {} {choice}", key.product.name(), key.outputs, key.inputs)?;
        }
        for ((key, bucket), words) in &self.buckets {
            writeln!(f, "{} {} {} to {bucket} {}", key.product.name(), key.outputs, key.inputs, text(words))?;
        }
        for ((outputs, inputs), choice) in &self.gate_ups {
            let choice = GATE_UPS.iter().find(|(known, _)| known == choice).map_or("", |(_, name)| name);
            writeln!(f, "{GATE_UP} {outputs} {inputs} {choice}")?;
        }
        Ok(())
    }
}

impl FromStr for Plan {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let mut plan = Self::new(Vec::new());
        if text.is_empty() {
            return Err(PlanError { line: 1, what: "nothing is there" });
        }
        for (index, line) in text.lines().enumerate() {
            let fault = |what| PlanError { line: index + 1, what };
            if index == 0 {
                if line != TITLE {
                    return Err(fault("not the first line of a plan that this version knows"));
                }
            } else if let Some((name, value)) = line.split_once(": ") {
                plan.header.push((name.to_owned(), value.to_owned()));
            } else {
                plan.take(line).map_err(fault)?;
            }
        }
        Ok(plan)
    }
}

impl Plan {
    /// One line of a text after its header.
    fn take(&mut self, line: &str) -> Result<(), &'static str> {
        let mut words = line.split(' ');
        let mut word = || words.next().ok_or("too few words");
        let size = |word: &str| word.parse::<usize>().map_err(|_| "a size is a number");
        let (name, outputs, inputs) = (word()?, size(word()?)?, size(word()?)?);
        if name == GATE_UP {
            let kind = word()?;
            let choice = GATE_UPS.iter().find(|(_, known)| *known == kind).ok_or("gate and up are apart or own")?.0;
            self.set_gate_up((outputs, inputs), choice);
        } else {
            let product = NAMES.iter().find(|(_, known)| *known == name).ok_or("an unknown product")?.0;
            let (mut kind, mut bucket) = (word()?, None);
            if kind == "to" {
                bucket = Some(size(word()?)?);
                kind = word()?;
            }
            let choice = match kind {
                "own" => Choice::Own,
                "cublaslt" => {
                    let mut algorithm = [0; 8];
                    for part in &mut algorithm {
                        *part = u64::from_str_radix(word()?, 16).map_err(|_| "an algorithm is eight hexadecimal words")?;
                    }
                    Choice::CublasLt(algorithm)
                }
                _ => return Err("an unknown kind of algorithm"),
            };
            let key = Key { product, outputs, inputs };
            match (bucket, choice) {
                (None, choice) => self.set(key, choice),
                (Some(bucket), Choice::CublasLt(words)) if BUCKETS.contains(&bucket) && self.get(key).is_some() => {
                    self.set_bucket(key, bucket, words);
                }
                (Some(_), _) => return Err("a bucket of rows that this version does not know, or of no product before it"),
            }
        }
        if words.next().is_some() { Err("too many words") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Choice, GateUp, Key, Plan, Product, Slices};

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

    #[test]
    fn a_plan_survives_its_text() {
        let mut plan = Plan::new(vec![("gpu".to_owned(), "NVIDIA: H200".to_owned())]);
        plan.set(Key { product: Product::Logits, outputs: 7, inputs: 5 }, Choice::CublasLt([1, 2, 3, 4, 5, 6, 7, u64::MAX]));
        plan.set(Key { product: Product::Linear, outputs: 7, inputs: 5 }, Choice::Own);
        plan.set_gate_up((32, 8), GateUp::Apart);
        plan.set_gate_up((48, 8), GateUp::Own);
        plan.set_bucket(Key { product: Product::Logits, outputs: 7, inputs: 5 }, 256, [8; 8]);
        plan.set_bucket(Key { product: Product::Logits, outputs: 7, inputs: 5 }, usize::MAX, [9; 8]);
        let text = plan.to_string();
        assert_eq!(text.parse(), Ok(plan.clone()));
        let of = |rows| plan.get_for(Key { product: Product::Logits, outputs: 7, inputs: 5 }, rows);
        assert_eq!(of(129), Some(Choice::CublasLt([8; 8])));
        assert_eq!(of(128), Some(Choice::CublasLt([1, 2, 3, 4, 5, 6, 7, u64::MAX])));
        assert_eq!(of(8193), Some(Choice::CublasLt([9; 8])));
        let digest = plan.digest();
        plan.set(Key { product: Product::Linear, outputs: 7, inputs: 5 }, Choice::CublasLt([0; 8]));
        assert_ne!(plan.digest(), digest);
        let (digest, of) = (plan.digest(), plan.of(&[(32, 8)]));
        assert_eq!(of.gate_ups().collect::<Vec<_>>(), [((32, 8), GateUp::Apart)]);
        plan.set_gate_up((32, 8), GateUp::Own);
        assert_ne!(plan.digest(), digest, "what a receipt says changes with what runs");
    }

    #[test]
    fn a_broken_plan_is_refused_with_its_line() {
        let refused = |text: &str| text.parse::<Plan>().unwrap_err().to_string();
        assert!(refused("").contains("nothing"));
        assert!(refused("something").starts_with("line 1 "));
        assert!(refused("nodus-cuda-plan 2\nlinear 3 x own").contains("line 2 of the plan: a size"));
        assert!(refused("nodus-cuda-plan 2\nlinear 3 4 cublaslt 1 2").contains("too few words"));
        assert!(refused("nodus-cuda-plan 1\n").contains("line 1 of the plan: not the first line"));
        assert!(refused("nodus-cuda-plan 2\nlinear 3 4 apart").contains("unknown kind"));
        assert!(refused("nodus-cuda-plan 2\ngate-up 32 8 cublaslt").contains("apart or own"));
        assert!(refused("nodus-cuda-plan 2\ngate-up 32 8 own own").contains("too many"));
        assert!(refused("nodus-cuda-plan 2\nlinear 3 4 own own").contains("too many"));
        assert!(
            refused("nodus-cuda-plan 2\nlinear 3 4 own\nlinear 3 4 to 77 cublaslt 1 2 3 4 5 6 7 8")
                .contains("line 3 of the plan: a bucket")
        );
        assert!(refused("nodus-cuda-plan 2\nlinaer 3 4 own").contains("unknown product"));
    }
}
