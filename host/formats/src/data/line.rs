//! Lines of a data file, each parsed and checked as far as it can be without a model.
//!
//! Never holds more than one line, and never reads more of one than its limit.

use std::fmt;
use std::io::{BufRead, Read};
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::{FormatError, Place, clip};

/// Most bytes of one line.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// The roles of chat templates. A template renders any other without a word, and the model would learn it.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// What the lines of a file look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `{"text"}`.
    Text,
    /// `{"prompt", "completion"}`.
    PromptCompletion,
    /// `{"messages"}`.
    Messages,
    /// `{"tokens", "weights"}`.
    Tokens,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::PromptCompletion => "prompt and completion",
            Self::Messages => "messages",
            Self::Tokens => "tokens",
        })
    }
}

/// What a data file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Number of lines.
    pub rows: u64,
    /// Their form.
    pub form: Form,
}

/// Checks a data file, called `name` in messages, before any model is known.
///
/// # Errors
/// The first bad line, with its number and the reason.
pub fn check(lines: impl BufRead, name: &str) -> Result<Summary, FormatError> {
    let mut lines = Lines::new(lines, name);
    while lines.next_line()?.is_some() {}
    lines.summary()
}

/// One line, checked.
pub(super) enum Line {
    Text(String),
    PromptCompletion(String, String),
    Messages(Vec<(String, String)>),
    Tokens(Vec<u32>, Option<Vec<f32>>),
}

/// A line before it is known which form it has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    text: Option<String>,
    prompt: Option<String>,
    completion: Option<String>,
    messages: Option<Vec<Object<Message>>>,
    tokens: Option<Vec<u32>>,
    weights: Option<Vec<f32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    role: String,
    content: String,
}

/// A value that stands in braces: serde reads a list in the order of the fields too.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Braces<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Braces<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object in braces")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(Braces(PhantomData))
    }
}

/// How files begin that are no text in UTF-8: what they are, and what would be right.
const BEGINNINGS: [(&[u8], &str, &str); 8] = [
    (b"\xef\xbb\xbf", "a byte-order mark", "UTF-8 without one"),
    (b"\xff\xfe", "text in UTF-16", "UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "UTF-8"),
    (b"{\0", "text in UTF-16", "UTF-8"),
    (b"\x1f\x8b", "a file packed with gzip", "the file as it was before, one JSON object a line"),
    (b"\x28\xb5\x2f\xfd", "a file packed with zstd", "the file as it was before, one JSON object a line"),
    (b"PK\x03\x04", "a zip archive", "the file in it, one JSON object a line"),
    (b"PAR1", "a Parquet file", "JSON Lines: one JSON object a line"),
];

/// Reads a file line by line.
pub(super) struct Lines<'a, R> {
    reader: R,
    name: &'a str,
    number: u64,
    rows: u64,
    form: Option<Form>,
}

impl<'a, R: BufRead> Lines<'a, R> {
    pub(super) fn new(reader: R, name: &'a str) -> Self {
        Self { reader, name, number: 0, rows: 0, form: None }
    }

    /// The next line with its number. Blank lines may stand at the end of the file only.
    pub(super) fn next_line(&mut self) -> Result<Option<(u64, Line)>, FormatError> {
        let mut blank = None;
        loop {
            let bytes = self.read()?;
            if bytes.is_empty() {
                return Ok(None);
            }
            self.number += 1;
            if bytes.iter().all(u8::is_ascii_whitespace) {
                blank.get_or_insert(self.number);
                continue;
            }
            if let Some(number) = blank {
                return Err(FormatError::invalid(self.name, Place::Line(number), "a blank line", "one JSON object"));
            }
            self.rows += 1;
            return self.parse(bytes.trim_ascii_end()).map(|line| Some((self.number, line)));
        }
    }

    pub(super) fn summary(&self) -> Result<Summary, FormatError> {
        match self.form {
            Some(form) => Ok(Summary { rows: self.rows, form }),
            None => Err(FormatError::invalid(self.name, Place::File, "no lines", "at least one JSON object")),
        }
    }

    pub(super) fn refuse(&self, found: impl fmt::Display, expected: impl fmt::Display) -> FormatError {
        FormatError::invalid(self.name, Place::Line(self.number), found, expected)
    }

    fn read(&mut self) -> Result<Vec<u8>, FormatError> {
        let mut bytes = Vec::new();
        let unreadable = |source| FormatError::Read { file: self.name.into(), source };
        self.reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes).map_err(unreadable)?;
        if bytes.len() as u64 > LINE_BYTES_MAX {
            self.number += 1;
            return Err(self.refuse(format!("more than {LINE_BYTES_MAX} bytes"), "a shorter line"));
        }
        Ok(bytes)
    }

    fn parse(&mut self, bytes: &[u8]) -> Result<Line, FormatError> {
        if self.number == 1
            && let Some((_, found, expected)) = BEGINNINGS.iter().find(|(magic, ..)| bytes.starts_with(magic))
        {
            return Err(self.refuse(found, expected));
        }
        let text = std::str::from_utf8(bytes).map_err(|e| self.refuse(format!("not UTF-8 at byte {}", e.valid_up_to() + 1), "UTF-8"))?;
        let Object(fields) = serde_json::from_str::<Object<Fields>>(text).map_err(|e| {
            // The error counts lines within the one it was given.
            let why = e.to_string().replace(" at line 1 column ", " at column ");
            self.refuse(clip(&why), "a JSON object with `text`, `prompt` and `completion`, `messages`, or `tokens` and `weights`")
        })?;
        let (form, line) = self.form_of(fields)?;
        match self.form.replace(form) {
            Some(first) if first != form => Err(self.refuse(format!("a line of {form}"), format!("{first}, as in line 1"))),
            _ => Ok(line),
        }
    }

    fn form_of(&self, fields: Fields) -> Result<(Form, Line), FormatError> {
        match fields {
            Fields { text: Some(text), prompt: None, completion: None, messages: None, tokens: None, weights: None } => {
                Ok((Form::Text, Line::Text(text)))
            }
            Fields { text: None, prompt: Some(prompt), completion: Some(completion), messages: None, tokens: None, weights: None } => {
                Ok((Form::PromptCompletion, Line::PromptCompletion(prompt, completion)))
            }
            Fields { text: None, prompt: None, completion: None, messages: Some(messages), tokens: None, weights: None } => {
                self.messages(messages)
            }
            Fields { text: None, prompt: None, completion: None, messages: None, tokens: Some(tokens), weights } => {
                self.tokens(tokens, weights)
            }
            _ => Err(self.refuse("another set of fields", "`text`, `prompt` and `completion`, `messages`, or `tokens` and `weights`")),
        }
    }

    fn messages(&self, messages: Vec<Object<Message>>) -> Result<(Form, Line), FormatError> {
        let messages: Vec<Message> = messages.into_iter().map(|Object(message)| message).collect();
        if let Some((i, message)) = messages.iter().enumerate().find(|(_, m)| !ROLES.contains(&m.role.as_str())) {
            let role: String = message.role.chars().take(40).collect();
            return Err(self.refuse(format!("messages[{i}] has the role {role:?}"), "one of system, user, assistant and tool"));
        }
        if !messages.iter().any(|m| m.role == "assistant") {
            return Err(self.refuse("no turn of the assistant", "at least one message whose role is `assistant`"));
        }
        let turns = messages.into_iter().map(|m| (m.role, m.content)).collect();
        Ok((Form::Messages, Line::Messages(turns)))
    }

    fn tokens(&self, tokens: Vec<u32>, weights: Option<Vec<f32>>) -> Result<(Form, Line), FormatError> {
        if tokens.len() < 2 {
            return Err(self.refuse(format!("{} tokens", tokens.len()), "at least 2: one to read and one to predict"));
        }
        if let Some(weights) = &weights {
            if weights.len() != tokens.len() {
                return Err(self.refuse(format!("{} weights for {} tokens", weights.len(), tokens.len()), "one for each token"));
            }
            if let Some((i, w)) = weights.iter().enumerate().find(|(_, w)| !w.is_finite() || **w < 0.0) {
                return Err(self.refuse(format!("weights[{i}] is {w}"), "a finite number, 0 or more"));
            }
            if weights.iter().skip(1).all(|w| *w == 0.0) {
                return Err(self.refuse("no weight above 0 after the first token", "at least one labelled token"));
            }
        }
        Ok((Form::Tokens, Line::Tokens(tokens, weights)))
    }
}
