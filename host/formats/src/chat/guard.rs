//! A chat template rewritten so that what it joins, filters and stores is weighed first.
//!
//! The template library pays for what an operator has made, so a small program could make gigabytes, or a value that holds itself, before
//! anybody looks. Changes nothing of what an ordinary template renders.

use minijinja::machinery::{Span, Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Output, State, Value, escape_formatter};

/// Deepest nesting of a value.
const DEPTH_MAX: usize = 64;
/// Bytes that are paid with one unit of fuel, as the library counts them.
const BYTES_PER_FUEL: usize = 64;
/// Most digits of a number in a format string: widths and precisions make text of that length.
const WIDTH_DIGITS_MAX: usize = 3;

/// Most words and signs between two braces: the library's parser takes time by the square of them, and stack.
const PARTS_MAX: usize = 4096;

/// The filter that weighs a value.
pub(super) const WEIGHED: &str = "_weighed";
/// The filter that weighs a value and refuses a namespace in it.
pub(super) const STORED: &str = "_stored";

/// Tests that compare, each a comparison by another name.
const COMPARING: [&str; 11] = ["eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge", "in", "sameas"];

/// The template with the two filters in their places: around `~` and `+`, before `|`, `in`, comparisons and tests that compare, and where
/// something is set.
pub(super) fn guarded(source: &str, syntax: &SyntaxConfig) -> Result<String, Error> {
    let tokens = tokenize(source, false, syntax.clone()).collect::<Result<Vec<_>, _>>()?;
    refuse_long(&tokens)?;
    let mut inserts = Vec::new();
    for (i, (token, span)) in tokens.iter().enumerate() {
        let weigh = |at: u32, after: &str| (at as usize, format!("|{WEIGHED}{after}"));
        match token {
            Token::Pipe => inserts.push(weigh(span.start_offset, "")),
            // What is joined by `+` is longer than either side, so that the sum is paid for by its parts.
            Token::Tilde | Token::Plus => {
                inserts.push(weigh(span.start_offset, " "));
                inserts.extend(operand_end(&tokens, i + 1).map(|end| weigh(end, "")));
            }
            // What is compared is walked on both sides, as far as the smaller one goes.
            Token::Eq | Token::Ne | Token::Lt | Token::Lte | Token::Gt | Token::Gte => inserts.push(weigh(span.start_offset, " ")),
            Token::Ident("is") if is_comparing(&tokens, i) => inserts.push(weigh(span.start_offset, " ")),
            Token::Ident("in") if !is_of_loop(&tokens, i) && !is_of_test(&tokens, i) => {
                let before = i.checked_sub(1).and_then(|before| tokens.get(before));
                let at = before.filter(|(token, _)| matches!(token, Token::Ident("not"))).map_or(span, |(_, span)| span);
                inserts.push(weigh(at.start_offset, " "));
            }
            Token::Mul => refuse_lists(&tokens, i)?,
            Token::Ident("set") if i.checked_sub(1).is_some_and(|before| is(&tokens, before, |t| matches!(t, Token::BlockStart))) => {
                inserts.extend(stored(&tokens, i + 1));
            }
            _ => {}
        }
    }
    inserts.sort_by_key(|(at, _)| *at);
    let mut out = String::with_capacity(source.len() + 16 * inserts.len());
    let mut done = 0;
    for (at, text) in inserts {
        out.push_str(source.get(done..at).unwrap_or_default());
        out.push_str(&text);
        done = at;
    }
    out.push_str(source.get(done..).unwrap_or_default());
    Ok(out)
}

type Tokens<'a> = [(Token<'a>, Span)];

fn is(tokens: &Tokens<'_>, i: usize, wanted: impl Fn(&Token<'_>) -> bool) -> bool {
    tokens.get(i).is_some_and(|(token, _)| wanted(token))
}

fn refuse_long(tokens: &Tokens<'_>) -> Result<(), Error> {
    let parts = tokens.split(|(token, _)| matches!(token, Token::TemplateData(_) | Token::BlockEnd | Token::VariableEnd)).map(<[_]>::len);
    match parts.max() {
        Some(most) if most > PARTS_MAX => {
            let why = format!("an expression has {most} words and signs, expected at most {PARTS_MAX}");
            Err(Error::new(ErrorKind::InvalidOperation, why))
        }
        _ => Ok(()),
    }
}

/// Lists are repeated without being made, so a few characters could stand for any number of items: only text may be repeated.
fn refuse_lists(tokens: &Tokens<'_>, at: usize) -> Result<(), Error> {
    let is_text = |i: usize| is(tokens, i, |token| matches!(token, Token::Str(_) | Token::String(_)));
    if is_text(at.saturating_sub(1)) || is_text(at + 1) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidOperation, "the operator * is supported with a text in quotes beside it only"))
}

/// Whether this `in` is the one of a loop's head.
fn is_of_loop(tokens: &Tokens<'_>, at: usize) -> bool {
    let start = (0..at).rev().find(|i| is(tokens, *i, |token| matches!(token, Token::BlockStart | Token::VariableStart)));
    let Some(start) = start else { return false };
    let earlier = (start..at).any(|i| is(tokens, i, |token| matches!(token, Token::Ident("in"))));
    is(tokens, start, |token| matches!(token, Token::BlockStart)) && is(tokens, start + 1, |t| matches!(t, Token::Ident("for"))) && !earlier
}

/// Whether this `is` begins a test that compares.
fn is_comparing(tokens: &Tokens<'_>, at: usize) -> bool {
    let name = if is(tokens, at + 1, |token| matches!(token, Token::Ident("not"))) { at + 2 } else { at + 1 };
    is(tokens, name, |token| matches!(token, Token::Ident(name) if COMPARING.contains(name)))
}

/// Whether this `in` is the name of a test.
fn is_of_test(tokens: &Tokens<'_>, at: usize) -> bool {
    let is_word =
        |back: usize, word: &str| at.checked_sub(back).is_some_and(|i| is(tokens, i, |t| matches!(t, Token::Ident(w) if *w == word)));
    is_word(1, "is") || (is_word(1, "not") && is_word(2, "is"))
}

/// The end of what stands at the right of `~` or `+`: a sign, one value, and all that is looked up in it.
fn operand_end(tokens: &Tokens<'_>, mut at: usize) -> Option<u32> {
    while is(tokens, at, |token| matches!(token, Token::Minus | Token::Plus | Token::Ident("not"))) {
        at += 1;
    }
    let mut last = closing(tokens, at)?;
    loop {
        last = match tokens.get(last + 1).map(|(token, _)| token) {
            Some(Token::Dot) => last + 2,
            Some(Token::BracketOpen | Token::ParenOpen) => closing(tokens, last + 1)?,
            // Neighbouring texts are one.
            Some(Token::Str(_) | Token::String(_)) => last + 1,
            _ => return tokens.get(last).map(|(_, span)| span.end_offset),
        };
    }
}

/// The token that closes what is opened at `at`; itself where nothing is.
fn closing(tokens: &Tokens<'_>, at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (i, (token, _)) in tokens.iter().enumerate().skip(at) {
        match token {
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => depth += 1,
            Token::BracketClose | Token::ParenClose | Token::BraceClose => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return Some(i);
        }
    }
    None
}

/// What is set passes through a filter: values that grow from one `set` to the next are paid for each time.
fn stored(tokens: &Tokens<'_>, target: usize) -> Vec<(usize, String)> {
    let is_end = |token: &Token<'_>| matches!(token, Token::BlockEnd);
    let Some(end) = (target..tokens.len()).find(|i| is(tokens, *i, is_end)) else { return Vec::new() };
    let value = (target..end).find(|i| is(tokens, *i, |token| matches!(token, Token::Assign | Token::Pipe))).unwrap_or(end);
    let has_attribute = (target..value).any(|i| is(tokens, i, |token| matches!(token, Token::Dot)));
    let filter = if has_attribute { STORED } else { WEIGHED };
    let (Some((kind, at)), Some((_, end))) = (tokens.get(value), tokens.get(end)) else { return Vec::new() };
    let end = end.start_offset as usize;
    match kind {
        Token::Assign => vec![(at.end_offset as usize, "(".to_owned()), (end, format!(")|{filter} "))],
        Token::Pipe => vec![(end, format!("|{filter} "))],
        _ => Vec::new(),
    }
}

/// Pays for a value as for its text, before anything is made of it.
pub(super) fn weighed(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    weigh(state, &value, 0, true)?;
    Ok(value)
}

/// As [`weighed`]; a namespace inside is refused, since it could come to hold itself.
pub(super) fn stored_value(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    weigh(state, &value, 0, false)?;
    Ok(value)
}

fn weigh(state: &mut State<'_, '_>, value: &Value, depth: usize, may_hold_namespaces: bool) -> Result<(), Error> {
    let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, what.to_owned()));
    if let Some(text) = value.as_str() {
        // A text by itself is paid for where it was made.
        return if depth == 0 { Ok(()) } else { state.consume_fuel(1 + (text.len() / BYTES_PER_FUEL) as u64) };
    }
    let Some(object) = value.as_object() else { return Ok(()) };
    if depth >= DEPTH_MAX {
        return refuse("a value is nested too deeply");
    }
    if !may_hold_namespaces && object.type_name().ends_with("::Namespace") {
        return refuse("a namespace is put into a namespace");
    }
    state.consume_fuel(1)?;
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                let item = value.get_item(&key)?;
                weigh(state, &key, depth + 1, may_hold_namespaces)?;
                weigh(state, &item, depth + 1, may_hold_namespaces)?;
                state.consume_fuel(1)?;
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                weigh(state, &item, depth + 1, may_hold_namespaces)?;
                state.consume_fuel(1)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Prints a value that was weighed.
pub(super) fn print(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    weigh(state, value, 0, true)?;
    escape_formatter(output, state, value)
}

/// Python's methods, of weighed values; widths that make text out of nothing are refused.
pub(super) fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    for each in std::iter::once(value).chain(arguments) {
        weigh(state, each, 0, true)?;
    }
    if name == "format" && value.as_str().is_some_and(is_wide) {
        return Err(Error::new(ErrorKind::InvalidOperation, "a format has a width or precision above 999"));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

/// Whether a format string has a width or precision of more digits than any template needs.
fn is_wide(text: &str) -> bool {
    let fields = text.split('{').skip(1).map(|rest| rest.split('}').next().unwrap_or(rest));
    fields.flat_map(|field| field.split(|c: char| !c.is_ascii_digit())).any(|digits| digits.len() > WIDTH_DIGITS_MAX)
}
