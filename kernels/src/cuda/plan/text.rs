//! A plan as a text: what a receipt's digest is of, and what is kept.
//!
//! Never takes a text that is not whole, or that another version wrote.

use std::fmt::Write as _;
use std::str::FromStr;

use super::{BUCKETS, Choice, GateUp, Key, NAMES, Plan};

/// The first line of a plan's text.
const TITLE: &str = "nodus-cuda-plan 2";

const GATE_UPS: [(GateUp, &str); 2] = [(GateUp::Apart, "apart"), (GateUp::Own, "own")];

/// A gate's line in a plan begins so.
pub(in crate::cuda) const GATE_UP: &str = "gate-up";

/// A text is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the plan: {what}")]
pub struct PlanError {
    line: usize,
    what: &'static str,
}

/// An algorithm's words.
fn text(words: [u64; 8]) -> String {
    words.iter().fold("cublaslt".to_owned(), |mut text, word| {
        // Writing to a string does not fail.
        let _ = write!(text, " {word:016x}");
        text
    })
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{TITLE}")?;
        for (name, value) in &self.header {
            writeln!(f, "{name}: {value}")?;
        }
        self.write_products(f, text)?;
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
    /// Every product, then every bucket of rows with an algorithm of its own, a line each; `algorithm` says how cuBLASLt's are written.
    pub(in crate::cuda) fn write_products(&self, out: &mut impl std::fmt::Write, algorithm: fn([u64; 8]) -> String) -> std::fmt::Result {
        for (Key { product, outputs, inputs }, choice) in &self.choices {
            let choice = match choice {
                Choice::Own => "own".to_owned(),
                Choice::CublasLt(words) => algorithm(*words),
            };
            writeln!(out, "{} {outputs} {inputs} {choice}", product.name())?;
        }
        for ((Key { product, outputs, inputs }, bucket), words) in &self.buckets {
            writeln!(out, "{} {outputs} {inputs} to {bucket} {}", product.name(), algorithm(*words))?;
        }
        Ok(())
    }

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
    use super::super::{Choice, GateUp, Key, Plan, Product};

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
