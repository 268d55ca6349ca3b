//! A GGUF file: refused, or imported to a folder that opens.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nodus_formats::gguf::{TokenizerChoice, import};
use nodus_formats::hf;
use nodus_fuzz::folder;

fuzz_target!(|data: &[u8]| {
    let folder = folder();
    folder.write("x.gguf", data).expect("a file");
    drop(folder.remove_dir_all("out"));
    folder.create_dir("out").expect("a folder");
    let (out, file) = (folder.open_dir("out").expect("the folder"), folder.open("x.gguf").expect("the file").into_std());
    if let Ok(report) = import(&file, "x.gguf", &out, TokenizerChoice::Import, &mut |_, _| ()) {
        let model = hf::open(&out).expect("what was imported opens");
        assert_eq!(model.config, report.config);
    }
});
