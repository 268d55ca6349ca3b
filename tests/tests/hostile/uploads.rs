//! Attacks by what is uploaded: refused before anything starts, by their own names, each with a line in the ledger.

use nodus_tests::{Host, guest};

use crate::guests::{component, refused_at_upload};
use crate::{failures, prepared};

/// What is said of an upload; the ledger has one line more, with this code.
fn refusal(host: &Host, code: &str, component: &[u8]) -> String {
    let path = host.path("component.wasm");
    std::fs::write(&path, component).unwrap();
    let out = host.path("out");
    let before = failures(host);
    let args = ["run", path.to_str().unwrap(), "--model", "llama", "--data", "tokens", "--out", out.to_str().unwrap()];
    let error = host.refused(2, args);
    assert!(!out.exists());
    assert_eq!(failures(host), [before, vec![(0, code.to_owned())]].concat(), "{error}");
    error
}

#[test]
fn what_is_no_training_job_is_refused_before_it_starts() {
    let host = prepared();
    for (name, source, code, expected) in refused_at_upload() {
        let error = refusal(&host, code, &component((name, source)));
        assert!(error.contains(expected), "{name}: {error}");
    }
    let sft = std::fs::read(guest("sft")).unwrap();
    let forms: [(&[u8], &str, &str); 6] = [
        (b"", "component-no-wasm", "nothing, being empty"),
        (b"(component)", "component-text", "WebAssembly text"),
        (b"\0asm\x01\0\0\0", "component-core-module", "a core module"),
        (b"\x7fELF\x02\x01\x01", "component-precompiled", "precompiled native code"),
        (&sft[..sft.len() / 2], "component-invalid", "the component is invalid"),
        (b"%PDF-1.7", "component-no-wasm", "no WebAssembly component"),
    ];
    for (bytes, code, expected) in forms {
        let error = refusal(&host, code, bytes);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// 32: what is cheap to write and dear to compile.
#[test]
fn bombs_are_refused_within_limits() {
    let host = prepared();
    let component = |inside: &str| wat::parse_str(format!("(component {inside})")).unwrap();
    let many = |count: usize, item: &str| item.repeat(count);
    let functions = component(&format!("(core module {})", many(300_000, "(func)")));
    assert!(refusal(&host, "component-functions", &functions).contains("300000 component-functions, expected at most 200000"));
    let imports = component(&format!("(core module {})", many(30_000, "(import \"\" \"\" (func))")));
    assert!(refusal(&host, "component-imports", &imports).contains("30000 component-imports, expected at most 20000"));
    let types = component(&many(150_000, "(type u8)"));
    assert!(refusal(&host, "component-types", &types).contains("150000 component-types, expected at most 100000"));
    // Deep, but nothing in it: the compiler bears it.
    let error = refusal(&host, "component-no-run", &nested(5000));
    assert!(error.contains("the component exports no `run`"), "{error}");
    let body = component(&format!("(core module (func {}))", many(8_000_000, "nop ")));
    let error = refusal(&host, "component-invalid", &body);
    assert!(error.contains("the component is invalid"), "{error}");
    // A length that promises more than there is.
    let mut promise = b"\0asm\x0d\0\x01\0\x01\xff\xff\xff\xff\x0f".to_vec();
    promise.extend_from_slice(b"\0asm\x01\0\0\0");
    assert!(refusal(&host, "component-invalid", &promise).contains("the component is invalid"));
}

/// Components within components.
fn nested(depth: usize) -> Vec<u8> {
    let begin = b"\0asm\x0d\0\x01\0".to_vec();
    (0..depth).fold(begin.clone(), |inner, _| {
        let mut length = inner.len();
        let mut outer = begin.clone();
        outer.push(4);
        while length >= 0x80 {
            outer.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        outer.push(length as u8);
        outer.extend(inner);
        outer
    })
}
