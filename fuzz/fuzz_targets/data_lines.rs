//! A data file: counted, and tokenised for a model with a tokenizer.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use nodus_formats::TextModel;
use nodus_formats::data::{check, tokenise};
use nodus_fuzz::{folder, model, tokenizer};

const TEMPLATE: &str =
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}";

fuzz_target!(|data: &[u8]| {
    static TEXT: OnceLock<TextModel> = OnceLock::new();
    let text = TEXT.get_or_init(|| {
        folder().write("tokenizer.json", tokenizer()).expect("a file");
        folder().write("chat_template.jinja", TEMPLATE).expect("a file");
        TextModel::open(folder()).expect("a tokenizer").expect("a tokenizer")
    });
    let counted = check(data, "data");
    if let Ok(tokenised) = tokenise(data, "data", &model(), Some(text), 64) {
        assert!(counted.is_ok(), "tokenised what is no data");
        for example in &tokenised.examples {
            assert!(example.rows() < 64 && example.labelled() > 0);
        }
    }
});
