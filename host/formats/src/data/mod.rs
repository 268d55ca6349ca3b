//! Training data as JSON Lines: one object a line, all lines of one form.
//!
//! | form | a line | labelled |
//! |---|---|---|
//! | text | `{"text": ...}` | every token, and an end token at the end |
//! | prompt and completion | `{"prompt": ..., "completion": ...}` | the completion, and an end token at its end |
//! | messages | `{"messages": [{"role": ..., "content": ...}, ...]}` | what the assistant says, by the model's chat template |
//! | tokens | `{"tokens": [...], "weights": [...]}` | token i as a target, by weight i; without `weights` every token |
//!
//! The first token of a line is no target, so its label or weight is ignored. Never pads: a line is a sequence of its own length.

mod line;
mod split;
mod tokenise;

pub use line::{Form, Summary, check};
pub use split::{HeldOut, Part, Split, SplitError, split};
pub use tokenise::{Seen, Tokenised, each, targets, tokenise};
