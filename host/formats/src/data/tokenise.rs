//! Lines to sequences for one model at one maximum length.
//!
//! Shifts once: a line of n tokens gives n - 1 rows that read tokens 0..n-1, are asked for tokens 1..n, and weigh by the weights
//! of tokens 1..n. No target crosses a line, and a real end token keeps its label whatever a model pads with.

use std::io::BufRead;
use std::sync::Arc;

use nodus_protocol::{ModelConfig, Sequence};

use super::line::{Form, Line, Lines};
use crate::error::{FormatError, Place};
use crate::text::{TextError, TextModel};

/// A data file, tokenised.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokenised {
    /// One for each line that keeps a label, in the order of the file.
    pub examples: Vec<Arc<Sequence>>,
    /// The number of each example's line, from 1.
    pub lines: Vec<u64>,
    /// The numbers of the lines that were longer than the maximum and were cut.
    pub cut_lines: Vec<u64>,
    /// What the lines look like.
    pub form: Form,
    /// Number of lines that were longer than the maximum and were cut.
    pub truncated: u64,
    /// Number of lines that were left out because no labelled token remained after the cut.
    pub unlabelled: u64,
}

/// Tokenises a data file, called `name` in messages, for a model. `max_length` counts tokens of a line; what is longer is cut
/// at its end.
///
/// `text` and `completion` end with the model's end token, unless they spell it out; a text, or a prompt, begins with what the
/// tokenizer itself puts at a beginning. Prompt and completion are tokenised apart. A conversation is rendered by the chat
/// template and tokenised whole, as transformers does it; a token is labelled when it begins inside a turn of the assistant.
///
/// # Errors
/// The first bad line, with its number and the reason; text for a model without a tokenizer; a `max_length` under 2 or over the
/// model's context.
pub fn tokenise(
    lines: impl BufRead,
    name: &str,
    model: &ModelConfig,
    text: Option<&TextModel>,
    max_length: usize,
) -> Result<Tokenised, FormatError> {
    let (mut examples, mut numbers) = (Vec::new(), Vec::new());
    let seen = each(lines, name, model, text, max_length, |number, example| {
        examples.push(Arc::new(example));
        numbers.push(number);
    })?;
    let Seen { cut_lines, form, unlabelled } = seen;
    let truncated = cut_lines.len() as u64;
    Ok(Tokenised { examples, lines: numbers, cut_lines, form, truncated, unlabelled })
}

/// What is said of a file beside its sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The numbers of the lines that were longer than the maximum and were cut.
    pub cut_lines: Vec<u64>,
    /// What the lines look like.
    pub form: Form,
    /// Number of lines that were left out because no labelled token remained after the cut.
    pub unlabelled: u64,
}

/// As [`tokenise`], a sequence at a time: `take` is given each with the number of its line, and nothing of the file is kept.
///
/// # Errors
/// As [`tokenise`].
pub fn each(
    lines: impl BufRead,
    name: &str,
    model: &ModelConfig,
    text: Option<&TextModel>,
    max_length: usize,
    mut take: impl FnMut(u64, Sequence),
) -> Result<Seen, FormatError> {
    if !(2..=model.max_position_embeddings).contains(&max_length) {
        let expected = format!("from 2 to the model's context of {}", model.max_position_embeddings);
        return Err(FormatError::invalid(name, Place::File, format!("a maximum length of {max_length} tokens"), expected));
    }
    let (mut taken, mut cut_lines, mut unlabelled) = (0_u64, Vec::new(), 0);
    let form = walk(lines, name, model, text, |mut labelled, place| {
        if labelled.tokens.len() > max_length {
            labelled.tokens.truncate(max_length);
            labelled.weights.truncate(max_length);
            cut_lines.push(place.number);
        }
        if labelled.any() {
            take(place.number, labelled.shifted(model, place)?);
            taken += 1;
        } else {
            unlabelled += 1;
        }
        Ok(())
    })?;
    if taken == 0 {
        let expected = "a labelled token within the maximum length in at least one line";
        return Err(FormatError::invalid(
            name,
            Place::File,
            format!("no label within the first {max_length} tokens of any line"),
            expected,
        ));
    }
    Ok(Seen { cut_lines, form, unlabelled })
}

/// How the targets of each line weigh before any cut, with the line's number: n - 1 of a line of n tokens. Whoever cuts at `max_length` is left with the
/// first `max_length - 1` of them.
///
/// # Errors
/// As [`tokenise`], but for what follows from a cut, and for tokens that the model does not know.
pub fn targets(
    lines: impl BufRead,
    name: &str,
    model: &ModelConfig,
    text: Option<&TextModel>,
    mut take: impl FnMut(u64, &[f32]),
) -> Result<(), FormatError> {
    walk(lines, name, model, text, |labelled, place| {
        take(place.number, labelled.weights.get(1..).unwrap_or_default());
        Ok(())
    })
    .map(drop)
}

/// Gives each line, uncut; what the lines look like.
fn walk(
    lines: impl BufRead,
    name: &str,
    model: &ModelConfig,
    text: Option<&TextModel>,
    mut take: impl FnMut(Labelled, Where<'_>) -> Result<(), FormatError>,
) -> Result<Form, FormatError> {
    let mut lines = Lines::new(lines, name);
    while let Some((number, line)) = lines.next_line()? {
        let place = Where { name, number };
        let labelled = Labelled::of(line, model, text, place)?;
        if labelled.tokens.len() < 2 {
            return Err(place.refuse(format!("{} token", labelled.tokens.len()), "at least 2: one to read and one to predict"));
        }
        if !labelled.any() {
            return Err(place.refuse("no labelled token", "at least one after the first token"));
        }
        take(labelled, place)?;
    }
    Ok(lines.summary()?.form)
}

/// A line, for messages.
#[derive(Clone, Copy)]
struct Where<'a> {
    name: &'a str,
    number: u64,
}

impl Where<'_> {
    fn refuse(self, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> FormatError {
        FormatError::invalid(self.name, Place::Line(self.number), found, expected)
    }

    fn text(self, error: &TextError) -> FormatError {
        self.refuse(error, "a line that the model's tokenizer and chat template accept")
    }
}

/// The tokens of a line, each with its weight as a target.
struct Labelled {
    tokens: Vec<u32>,
    weights: Vec<f32>,
}

impl Labelled {
    fn of(line: Line, model: &ModelConfig, text: Option<&TextModel>, place: Where<'_>) -> Result<Self, FormatError> {
        let needed = || {
            text.ok_or_else(|| {
                let what = "text for a model that came without a tokenizer";
                FormatError::unsupported(place.name, Place::Line(place.number), what, "lines of `tokens` and `weights`")
            })
        };
        match line {
            Line::Text(body) => Self::text(&body, model, needed()?, place),
            Line::PromptCompletion(prompt, completion) => Self::completion(&prompt, &completion, model, needed()?, place),
            Line::Messages(messages) => Self::conversation(&messages, needed()?, place),
            Line::Tokens(tokens, weights) => {
                let weights = weights.unwrap_or_else(|| vec![1.0; tokens.len()]);
                Ok(Self { tokens, weights })
            }
        }
    }

    fn text(body: &str, model: &ModelConfig, text: &TextModel, place: Where<'_>) -> Result<Self, FormatError> {
        let mut tokens = text.encode_document(body).map_err(|e| place.text(&e))?;
        end(&mut tokens, model, place)?;
        Ok(Self { weights: vec![1.0; tokens.len()], tokens })
    }

    fn completion(prompt: &str, completion: &str, model: &ModelConfig, text: &TextModel, place: Where<'_>) -> Result<Self, FormatError> {
        let mut tokens = text.encode_document(prompt).map_err(|e| place.text(&e))?;
        let mut answer = text.encode(completion).map_err(|e| place.text(&e))?;
        end(&mut answer, model, place)?;
        let mut weights = vec![0.0; tokens.len()];
        weights.resize(tokens.len() + answer.len(), 1.0);
        tokens.append(&mut answer);
        Ok(Self { tokens, weights })
    }

    fn conversation(messages: &[(String, String)], text: &TextModel, place: Where<'_>) -> Result<Self, FormatError> {
        let (rendering, spans) = assistant_spans(messages, text, place)?;
        let encoded = text.encode_spans(&rendering).map_err(|e| place.text(&e))?;
        let weights = encoded.offsets.iter().map(|(start, _)| {
            let inside = spans.iter().any(|span| span.contains(start));
            if inside { 1.0 } else { 0.0 }
        });
        Ok(Self { weights: weights.collect(), tokens: encoded.tokens })
    }

    /// Whether any target is labelled.
    fn any(&self) -> bool {
        self.weights.iter().skip(1).any(|w| *w > 0.0)
    }

    fn shifted(self, model: &ModelConfig, place: Where<'_>) -> Result<Sequence, FormatError> {
        let Self { mut tokens, weights } = self;
        let targets = tokens.iter().skip(1).copied().collect();
        let weights = weights.into_iter().skip(1).collect();
        let known = |id: &u32| (*id as usize) < model.vocab_size;
        if let Some((i, id)) = tokens.iter().enumerate().find(|(_, id)| !known(id)) {
            return Err(place.refuse(format!("token {i} is {id}"), format!("below the model's vocabulary of {}", model.vocab_size)));
        }
        tokens.pop();
        Sequence::new(model, tokens, targets, weights).map_err(|e| place.refuse(e, "a sequence for this model"))
    }
}

/// Puts the end token at the end, unless it is there.
fn end(tokens: &mut Vec<u32>, model: &ModelConfig, place: Where<'_>) -> Result<(), FormatError> {
    let Some(eos) = model.eos_token_id else {
        let what = "text for a model that names no end-of-sequence token";
        return Err(FormatError::unsupported(place.name, Place::Line(place.number), what, "lines of `messages` or of `tokens`"));
    };
    if tokens.last() != Some(&eos) {
        tokens.push(eos);
    }
    Ok(())
}

/// Renders a conversation and finds where in the rendering the assistant speaks: from where the rendering of all messages
/// before a turn, with the prompt for an answer, ends, to where the rendering with the turn ends.
fn assistant_spans(
    messages: &[(String, String)],
    text: &TextModel,
    place: Where<'_>,
) -> Result<(String, Vec<std::ops::Range<usize>>), FormatError> {
    let render =
        |n: usize, prompt: bool| text.apply_chat_template(messages.get(..n).unwrap_or(messages), prompt).map_err(|e| place.text(&e));
    let whole = render(messages.len(), false)?;
    let extended = |prefix: &str, n: usize| {
        if whole.starts_with(prefix) {
            return Ok(prefix.len());
        }
        let found = format!("a chat template that renders message {n} differently once others follow");
        Err(place.refuse(found, "renderings that extend each other, or lines of `tokens`"))
    };
    let mut spans = Vec::new();
    for (i, _) in messages.iter().enumerate().filter(|(_, (role, _))| role == "assistant") {
        let start = extended(&render(i, true)?, i + 1)?;
        let end = extended(&render(i + 1, false)?, i + 1)?;
        if start >= end {
            return Err(place.refuse(format!("an assistant's turn, message {}, that renders to nothing", i + 1), "a turn with content"));
        }
        spans.push(start..end);
    }
    Ok((whole, spans))
}
