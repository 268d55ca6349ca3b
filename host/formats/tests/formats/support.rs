//! A tiny model in a temporary folder, for tests to bend.

use cap_std::ambient_authority;
use cap_std::fs::Dir;
use cap_tempfile::TempDir;
use nodus_formats::{Model, hf};

/// A folder of `tests/golden` at the root of the repository.
pub(crate) fn golden(path: &str) -> Dir {
    Dir::open_ambient_dir(format!("{}/../../tests/golden/{path}", env!("CARGO_MANIFEST_DIR")), ambient_authority()).unwrap()
}

/// This crate's fixtures.
pub(crate) fn fixtures() -> Dir {
    Dir::open_ambient_dir(format!("{}/tests/fixtures", env!("CARGO_MANIFEST_DIR")), ambient_authority()).unwrap()
}

pub(crate) fn temp() -> TempDir {
    cap_tempfile::tempdir(ambient_authority()).unwrap()
}

/// A copy of a golden folder that a test may spoil.
pub(crate) fn copy(of: &str) -> TempDir {
    let (from, to) = (golden(of), temp());
    for entry in from.entries().unwrap() {
        let name = entry.unwrap().file_name();
        to.write(&name, from.read(&name).unwrap()).unwrap();
    }
    to
}

/// Replaces a text in a file; the text must be there.
pub(crate) fn edit(dir: &Dir, file: &str, from: &str, to: &str) {
    let text = dir.read_to_string(file).unwrap();
    assert!(text.contains(from), "{file} has no {from}");
    dir.write(file, text.replace(from, to)).unwrap();
}

pub(crate) fn open_error(dir: &Dir) -> String {
    hf::open(dir).map(|_| ()).unwrap_err().to_string()
}

/// The tiny golden Llama with a byte-level tokenizer: token = byte, then `<s>` (bos is 1 and eos 2 by number, `\x01` and `\x02`
/// by text), and a ChatML-like template.
pub(crate) fn with_tokenizer(settings: &str) -> (TempDir, Model) {
    let dir = copy("models/llama");
    dir.write("tokenizer.json", byte_tokenizer("null")).unwrap();
    dir.write("tokenizer_config.json", settings).unwrap();
    let model = hf::open(&dir).unwrap();
    (dir, model)
}

/// A tokenizer of 256 tokens, one a byte; bytes 1 and 2 are the special tokens `<s>` and `</s>`.
pub(crate) fn byte_tokenizer(post_processor: &str) -> String {
    let printable = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let vocab: Vec<String> = (0..256_u32)
        .map(|b| {
            let c = if printable(b) {
                b
            } else {
                next += 1;
                next - 1
            };
            let token = match b {
                1 => "<s>".to_owned(),
                2 => "</s>".to_owned(),
                _ => char::from_u32(c).unwrap().to_string(),
            };
            format!("{}:{b}", serde_json::to_string(&token).unwrap())
        })
        .collect();
    let added = |id: u32, text: &str| {
        format!(r#"{{"id":{id},"content":"{text}","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}"#)
    };
    format!(
        r#"{{"version":"1.0","truncation":{{"direction":"Right","max_length":4,"strategy":"LongestFirst","stride":0}},"padding":null,
        "added_tokens":[{},{}],"normalizer":null,
        "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}},
        "post_processor":{post_processor},"decoder":{{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}},
        "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,
        "byte_fallback":false,"vocab":{{{}}},"merges":[]}}}}"#,
        added(1, "<s>"),
        added(2, "</s>"),
        vocab.join(",")
    )
}
