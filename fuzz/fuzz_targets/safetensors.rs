//! safetensors files, as a model's weights and as an adapter's.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nodus_formats::{hf, peft};
use nodus_fuzz::{CONFIG, folder, model};

const ADAPTER: &str = r#"{"peft_type":"LORA","task_type":"CAUSAL_LM","r":1,"lora_alpha":2,"target_modules":["v_proj"],"bias":"none"}"#;

fuzz_target!(|data: &[u8]| {
    let folder = folder();
    for (name, bytes) in [
        ("config.json", CONFIG.as_bytes()),
        ("model.safetensors", data),
        ("adapter_config.json", ADAPTER.as_bytes()),
        ("adapter_model.safetensors", data),
    ] {
        folder.write(name, bytes).expect("a file");
    }
    if let Ok(opened) = hf::open(folder) {
        assert_eq!(opened.config, model());
        // Every byte is where the file says.
        assert!(opened.tensors.values().map(|tensor| tensor.bytes().len()).sum::<usize>() <= data.len());
    }
    if let Ok(weights) = peft::read(folder, &model()) {
        weights.validate(&model()).expect("what was read fits");
        assert!(weights.modules.iter().all(|module| module.a.iter().chain(&module.b).all(|x| x.is_finite())));
    }
});
