//! JSON Lines to sequences: forms, labels, cuts, and what must be refused. Faults that other trainers had are named.

use nodus_formats::data::{Form, Tokenised, check, tokenise};
use nodus_formats::{Model, hf};
use proptest::prelude::*;

use crate::support::{edit, golden, with_tokenizer};

const TEMPLATE: &str = r#"{"bos_token": "<s>", "eos_token": "</s>",
    "chat_template": "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"}"#;

fn run(model: &Model, lines: &str, max_length: usize) -> Result<Tokenised, String> {
    tokenise(lines.as_bytes(), "d.jsonl", &model.config, model.text.as_ref(), max_length).map_err(|e| e.to_string())
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn a_text_is_labelled_whole_and_ends_with_a_labelled_end_token() {
    let (_dir, model) = with_tokenizer(r#"{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}"#);
    let done = run(&model, "{\"text\": \"abc\"}\n{\"text\": \"</s>\"}\n", 128).unwrap();
    assert_eq!((done.form, done.truncated, done.unlabelled, done.examples.len()), (Form::Text, 0, 0, 2));
    let first = &done.examples[0];
    assert_eq!(first.tokens(), [1, 97, 98, 99]);
    assert_eq!(first.targets(), [97, 98, 99, 2]);
    assert_eq!(first.weights(), [1.0; 4]);
    assert_eq!(done.examples[1].tokens(), [1], "an end token that is spelled out is not doubled");
}

/// Kind: pad == eos masks every EOS label, and the model never stops (transformers 23530, trl 976). There is no padding here, and
/// an end token keeps its label wherever it stands, even when the model pads with it.
#[test]
fn fault_pad_equals_eos_real_end_tokens_keep_their_labels() {
    let (_dir, model) = with_tokenizer(r#"{"eos_token": "</s>", "pad_token": "</s>"}"#);
    let done = run(&model, "{\"prompt\": \"q\", \"completion\": \"a</s>b\"}", 128).unwrap();
    assert_eq!(done.examples[0].targets(), [97, 2, 98, 2]);
    assert_eq!(done.examples[0].weights(), [1.0; 4]);
    let done = run(&model, "{\"tokens\": [5, 2, 2]}", 128).unwrap();
    assert_eq!((done.examples[0].targets(), done.examples[0].weights()), (&[2, 2][..], &[1.0, 1.0][..]));
}

/// Kind: labels shifted twice, so that row t predicts t + 2 (transformers 47394).
#[test]
fn fault_double_shift_each_row_predicts_the_next_token() {
    let model = hf::open(&golden("models/llama")).unwrap();
    let done = run(&model, "{\"tokens\": [10, 11, 12, 13], \"weights\": [9, 0, 0.5, 2]}", 128).unwrap();
    let example = &done.examples[0];
    assert_eq!(example.tokens(), [10, 11, 12]);
    assert_eq!(example.targets(), [11, 12, 13]);
    assert_eq!(example.weights(), [0.0, 0.5, 2.0], "weight i belongs to token i as a target; the first is ignored");
}

/// Kind: a row's last target comes from the next row (transformers 47394), or packing without a border (functionary 265).
#[test]
fn fault_targets_across_sequences_each_line_is_its_own() {
    let model = hf::open(&golden("models/llama")).unwrap();
    let done = run(&model, "{\"tokens\": [10, 11]}\n{\"tokens\": [20, 21, 22]}", 128).unwrap();
    let pairs: Vec<_> = done.examples.iter().map(|e| (e.tokens().to_vec(), e.targets().to_vec())).collect();
    assert_eq!(pairs, [(vec![10], vec![11]), (vec![20, 21], vec![21, 22])]);
}

/// Kind: labels = input ids with nothing masked (ainode 186). A prompt carries no label, and nothing is padded.
#[test]
fn fault_unmasked_prompt_only_the_completion_is_labelled() {
    let (_dir, model) = with_tokenizer(r#"{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}"#);
    let done = run(&model, "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n{\"prompt\": \"\", \"completion\": \"e\"}", 128).unwrap();
    assert_eq!(done.examples[0].tokens(), [1, 97, 98, 99, 100]);
    assert_eq!(done.examples[0].weights(), [0.0, 0.0, 1.0, 1.0, 1.0]);
    assert_eq!(done.examples[0].rows(), 5, "rows are tokens, not padding");
    assert_eq!((done.examples[1].targets(), done.examples[1].weights()), (&[101, 2][..], &[1.0, 1.0][..]));
}

#[test]
fn only_the_assistants_turns_of_a_conversation_are_labelled() {
    let (_dir, model) = with_tokenizer(TEMPLATE);
    let line = r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yé"}, {"role": "user", "content": "z"}, {"role": "assistant", "content": "w"}]}"#;
    let done = run(&model, line, 128).unwrap();
    let (tokens, weights) = (done.examples[0].targets(), done.examples[0].weights());
    let expected: Vec<(u32, f32)> = [("u:x", 0.0), ("\u{2}a:", 0.0), ("yé\u{2}", 1.0), ("u:z\u{2}a:", 0.0), ("w\u{2}", 1.0)]
        .iter()
        .flat_map(|(text, weight)| bytes(text).into_iter().map(|b| (b, *weight)))
        .skip(1)
        .collect();
    assert_eq!(tokens.iter().copied().zip(weights.iter().copied()).collect::<Vec<_>>(), expected);
}

#[test]
fn a_template_that_rewrites_earlier_turns_is_refused_with_its_line() {
    let (dir, _) = with_tokenizer(TEMPLATE);
    edit(&dir, "tokenizer_config.json", "m.content + eos_token", "(m.content if loop.last else '...') + eos_token");
    let model = hf::open(&dir).unwrap();
    let good = r#"{"messages": [{"role": "assistant", "content": "y"}]}"#;
    let bad = r#"{"messages": [{"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]}"#;
    let error = run(&model, &format!("{good}\n{bad}"), 128).unwrap_err();
    let expected = "d.jsonl, line 2: a chat template that renders message 1 differently once others follow, expected renderings that extend each other";
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn long_lines_are_cut_and_counted_and_dropped_when_no_label_is_left() {
    let (_dir, model) = with_tokenizer(r#"{"eos_token": "</s>"}"#);
    let lines = "{\"prompt\": \"abcdef\", \"completion\": \"g\"}\n{\"prompt\": \"a\", \"completion\": \"bcdefg\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    let done = run(&model, lines, 4).unwrap();
    assert_eq!((done.examples.len(), done.truncated, done.unlabelled), (2, 2, 1));
    assert_eq!((done.examples[0].tokens(), done.examples[0].targets()), (&bytes("abc")[..], &bytes("bcd")[..]));
    let error = run(&model, "{\"prompt\": \"abcdef\", \"completion\": \"g\"}", 4).unwrap_err();
    assert!(error.starts_with("d.jsonl: no label within the first 4 tokens of any line"), "{error}");
    for length in [0, 1, 129] {
        assert!(run(&model, "{\"text\": \"abc\"}", length).unwrap_err().contains("from 2 to the model's context of 128"));
    }
    let exact = run(&model, "{\"tokens\": [1, 2, 3, 4]}", 4).unwrap();
    assert_eq!((exact.truncated, exact.examples[0].rows()), (0, 3));
}

#[test]
fn bad_lines_are_refused_with_file_line_and_reason() {
    let model = hf::open(&golden("models/llama")).unwrap();
    let good = r#"{"tokens": [1, 2, 3]}"#;
    for (bad, reason) in [
        (r#"{"tokens": [1]}"#, "1 tokens, expected at least 2"),
        (r#"{"tokens": [1, 256]}"#, "token 1 is 256, expected below the model's vocabulary of 256"),
        (r#"{"tokens": [1, -2]}"#, "invalid value: integer `-2`"),
        (r#"{"tokens": [1, 2.5]}"#, "invalid type: floating point `2.5`"),
        (r#"{"tokens": [1, 2], "weights": [1]}"#, "1 weights for 2 tokens"),
        (r#"{"tokens": [1, 2], "weights": [1, -1]}"#, "weights[1] is -1, expected a finite number, 0 or more"),
        (r#"{"tokens": [1, 2], "weights": [1, 1e39]}"#, "number out of range"),
        (r#"{"tokens": [1, 2], "weights": [1, NaN]}"#, "expected value at column"),
        (r#"{"tokens": [1, 2], "weights": [1, 0]}"#, "no weight above 0 after the first token"),
        (r#"{"tokens": [1, 2], "labels": [1, 2]}"#, "unknown field `labels`"),
        (r#"{"tokens": [1, 2], "tokens": [1, 2]}"#, "duplicate field `tokens`"),
        (r#"{"tokens": [1, 2], "text": "x"}"#, "another set of fields"),
        (r#"{"prompt": "x"}"#, "another set of fields"),
        (r#"{"text": 1}"#, "invalid type: integer `1`"),
        (r#"{"text": "x"}"#, "a line of text, expected tokens, as in line 1"),
        (r#"{"messages": [{"role": "user", "content": "x"}]}"#, "no turn of the assistant"),
        (r#"{"messages": [{"role": "usr", "content": "x"}, {"role": "assistant", "content": "y"}]}"#, "messages[0] has the role \"usr\""),
        (r#"{"messages": [{"role": "user", "content": "x", "name": "y"}]}"#, "unknown field `name`"),
        (r"[1, 2]", "invalid type"),
        (r#"{"tokens": [1, 2]"#, "EOF while parsing"),
        ("\n{\"tokens\": [1, 2]}", "a blank line, expected one JSON object"),
    ] {
        let error = run(&model, &format!("{good}\n{bad}\n"), 128).unwrap_err();
        assert!(error.starts_with("d.jsonl, line 2: ") && error.contains(reason), "{bad}: {error}");
    }
    let broken = [good.as_bytes(), b"\n{\"text\": \"\xff\"}\n"].concat();
    let error = check(&broken[..], "d.jsonl").unwrap_err().to_string();
    assert_eq!(error, "d.jsonl, line 2: not UTF-8 at byte 11, expected UTF-8");
    assert!(run(&model, "", 128).unwrap_err().starts_with("d.jsonl: no lines"));
    assert!(run(&model, "\n\n", 128).unwrap_err().starts_with("d.jsonl: no lines"));
}

#[test]
fn check_counts_lines_and_lets_blank_ones_stand_at_the_end() {
    let summary = check(&b"{\"text\": \"a\"}\r\n{\"text\": \"b\"}\n\n  \n"[..], "d.jsonl").unwrap();
    assert_eq!((summary.rows, summary.form), (2, Form::Text));
}

#[test]
fn text_without_tokenizer_template_or_end_token_is_refused() {
    let model = hf::open(&golden("models/llama")).unwrap();
    let error = run(&model, "{\"text\": \"abc\"}", 128).unwrap_err();
    assert!(error.contains("line 1: text for a model that came without a tokenizer is not supported"), "{error}");
    let (dir, model) = with_tokenizer("{}");
    let error = run(&model, r#"{"messages": [{"role": "assistant", "content": "x"}]}"#, 128).unwrap_err();
    assert!(error.contains("line 1: the model came without a chat template"), "{error}");
    edit(&dir, "config.json", "\"eos_token_id\": 2", "\"eos_token_id\": null");
    let error = run(&hf::open(&dir).unwrap(), "{\"text\": \"abc\"}", 128).unwrap_err();
    assert!(error.contains("names no end-of-sequence token"), "{error}");
    let error = run(&hf::open(&with_tokenizer(TEMPLATE).0).unwrap(), "{\"text\": \"\"}", 128).unwrap_err();
    assert!(error.contains("line 1: 1 token, expected at least 2"), "{error}");
}

proptest! {
    /// Whatever a line holds, the answer is a value or a line number.
    #[test]
    fn hostile_bytes_are_answered(line in proptest::collection::vec(any::<u8>(), 0..200)) {
        match check(&line[..], "d.jsonl") {
            Ok(summary) => prop_assert!(summary.rows > 0),
            Err(e) => prop_assert!(e.to_string().starts_with("d.jsonl")),
        }
    }

    /// Tokens and weights come through shifted once, whatever they are.
    #[test]
    fn tokens_lines_round_trip(rows in proptest::collection::vec((0_u32..256, 0.5_f32..2.0), 2..60)) {
        let model = hf::open(&golden("models/llama")).unwrap();
        let (tokens, weights): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        let line = serde_json::json!({"tokens": tokens, "weights": weights}).to_string();
        let done = run(&model, &line, 128).unwrap();
        prop_assert_eq!(done.examples[0].tokens(), &tokens[..tokens.len() - 1]);
        prop_assert_eq!(done.examples[0].targets(), &tokens[1..]);
        prop_assert_eq!(done.examples[0].weights(), &weights[1..]);
    }
}

#[test]
fn what_is_no_json_lines_file_is_named_and_a_list_is_no_object() {
    let utf16: Vec<u8> = "\u{feff}{\"text\": \"a\"}\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let cases: [(&[u8], &str); 8] = [
        (b"\xef\xbb\xbf{\"text\": \"a\"}\n", "line 1: a byte-order mark, expected UTF-8 without one"),
        (&utf16, "text in UTF-16, expected UTF-8"),
        (b"{\0\"\0", "text in UTF-16"),
        (b"\x1f\x8b\x08\0rest", "a file packed with gzip, expected the file as it was before"),
        (b"PAR1rest", "a Parquet file, expected JSON Lines"),
        (b"[{\"text\": \"a\"}]", "expected an object in braces"),
        (b"[\"a\", null, null, null, null, null]", "expected an object in braces"),
        (b"{\"messages\": [[\"assistant\", \"a\"]]}", "expected an object in braces"),
    ];
    for (bytes, expected) in cases {
        let error = check(bytes, "d.jsonl").unwrap_err().to_string();
        assert!(error.starts_with("d.jsonl, line 1: ") && error.contains(expected), "{error}");
    }
}
