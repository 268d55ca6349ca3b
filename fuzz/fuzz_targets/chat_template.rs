//! A chat template: it ends, and what it makes is bounded, whatever it says.
#![no_main]

use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use nodus_formats::TextModel;
use nodus_fuzz::{folder, tokenizer};

fuzz_target!(|data: &[u8]| {
    let folder = folder();
    folder.write("tokenizer.json", tokenizer()).expect("a file");
    folder.write("chat_template.jinja", data).expect("a file");
    let Ok(Some(text)) = TextModel::open(folder) else { return };
    let turn = |role: &str, content: &str| (role.to_owned(), content.to_owned());
    let began = Instant::now();
    let rendered = text.apply_chat_template(&[turn("user", "{{ 7 * 7 }}"), turn("assistant", "hello")], true);
    assert!(began.elapsed() < Duration::from_secs(20), "the template ran for {:?}", began.elapsed());
    assert!(rendered.map_or(0, |text| text.len()) <= 64 << 20);
});
