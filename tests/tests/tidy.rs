//! The house rules that neither Cargo nor clippy can check.
#![expect(clippy::disallowed_methods, reason = "reads the repository")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::{Path, PathBuf};

use nodus_tests::root;

/// Files below a folder with one of these endings; build outputs and golden data left out.
fn files(folder: &str, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if !["target", "golden", ".git", "corpus"].contains(&path.file_name().unwrap().to_str().unwrap()) {
                    folders.push(path);
                }
            } else if endings.iter().any(|ending| path.to_string_lossy().ends_with(ending)) {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "no {endings:?} below {folder}");
    found.sort();
    found
}

/// The code of a Rust file: comments and test modules at its end left out.
fn code(path: &Path) -> Vec<(usize, String)> {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap();
    text.lines().enumerate().map(|(i, line)| (i + 1, line.split("//").next().unwrap().to_owned())).collect()
}

#[test]
fn folders_do_not_know_what_they_must_not() {
    // (folder or file, words its code must not contain)
    let rules: &[(&str, &[&str])] = &[
        ("kernels/src", &["tenant", "Tenant", "Job", "wasm", "tokio", "std::path", "File::open", "nodus_protocol"]),
        ("host/protocol/src", &["wasm", "nodus_kernels", "std::fs", "Tenant", "tenant"]),
        ("host/engine/src", &["wasm", "http", "Tenant", "tenant", "std::fs", "std::path", "cap_std"]),
        ("host/sandbox/src", &["cudarc", "nodus_kernels", "nodus_engine", "nodus_formats", "std::fs", "std::path", "cap_std"]),
        ("host/formats/src", &["nodus_engine", "nodus_sandbox", "wasm", "std::path", "tokio", "std::net"]),
        ("host/api/src", &["axum", "reqwest", "tokio", "rusqlite", "nodus_state"]),
        ("host/src/client", &["nodus_state", "crate::serve", "Store"]),
        ("host/state/src", &["http", "axum", "tokio", "wasm", "nodus_engine", "nodus_sandbox", "nodus_kernels"]),
        ("guest-sdk/src", &["nodus_protocol", "nodus_sandbox", "wasmtime", "std::fs", "std::net"]),
        ("host/schedule/src", &["std::time", "Instant", "tokio", "std::fs", "std::path", "nodus_"]),
        ("host/engine/src/form.rs", &["std::time", "Instant", "nodus_kernels", "Device", "tokio"]),
    ];
    let mut faults = Vec::new();
    for (place, words) in rules {
        let paths = if place.ends_with(".rs") { vec![root().join(place)] } else { files(place, &[".rs"]) };
        for path in paths {
            for (number, line) in code(&path) {
                for word in words.iter().filter(|word| line.contains(**word)) {
                    faults.push(format!("{}:{number}: `{word}` must not be known in {place}: {}", path.display(), line.trim()));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn unsafe_code_stands_only_at_its_addresses() {
    let cuda = "adamw attention blas buckets compile driver gate/bench gate/gate_up gate_up graph head host_side library linear lora lora_swiglu memory record rows shared staging support tiles weights";
    let cuda: Vec<String> = cuda.split(' ').map(|module| format!("kernels/src/cuda/{module}.rs")).collect();
    let others = ["kernels/src/cpu/matrix.rs", "kernels/src/weights.rs", "host/sandbox/src/precompiled.rs"];
    let addresses: Vec<&str> = cuda.iter().map(String::as_str).chain(others).collect();
    for folder in ["kernels/src", "host", "guest-sdk/src", "tests", "examples", "xtask/src", "tenants", "fuzz"] {
        for path in files(folder, &[".rs"]) {
            let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
            let found = code(&path)
                .iter()
                .any(|(_, line)| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == concat!("un", "safe")));
            // wit-bindgen's macro writes `unsafe` where the guest SDK expands it; the SDK's own code has none.
            assert!(
                !found || addresses.contains(&name.as_str()),
                "{name} holds code that the compiler cannot check; its addresses are {addresses:?}"
            );
        }
    }
}

#[test]
fn files_stay_short_and_say_what_they_are() {
    let mut faults = Vec::new();
    for folder in ["kernels", "host", "guest-sdk", "tenants", "tests", "examples", "xtask", "fuzz"] {
        for path in files(folder, &[".rs"]) {
            let text = std::fs::read_to_string(&path).unwrap();
            let lines = text.lines().count();
            if lines > 400 {
                faults.push(format!("{}: {lines} lines, at most 400", path.display()));
            }
            if !text.trim_start_matches("#!/usr/bin/env").trim_start().starts_with("//!") {
                faults.push(format!("{}: its first line must say what it is (`//! ...`)", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_wit_item_is_documented() {
    for path in files("wit", &[".wit"]) {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (i, line) in lines.iter().enumerate() {
            let skipped = ["", "}", "package", "use ", "import ", "@", "//"];
            if line.is_empty() || skipped.iter().skip(1).any(|start| line.starts_with(start)) {
                continue;
            }
            let before = lines[..i].iter().rev().find(|line| !line.starts_with("@since")).unwrap();
            assert!(before.starts_with("///"), "{}:{}: `{line}` has no documentation", path.display(), i + 1);
        }
    }
}

#[test]
fn every_operation_has_its_row_in_kernels_md() {
    let table = std::fs::read_to_string(root().join("kernels/KERNELS.md")).unwrap();
    let device = std::fs::read_to_string(root().join("kernels/src/device.rs")).unwrap();
    let operations: Vec<&str> =
        device.lines().filter_map(|line| line.trim().strip_prefix("fn ")).map(|line| line.split('(').next().unwrap()).collect();
    assert!(operations.len() > 20, "{operations:?}");
    let memory = [
        "class",
        "unproven",
        "row_align",
        "allocated_bytes",
        "free_bytes",
        "bound",
        "load",
        "share_weights",
        "load_together",
        "alloc",
        "alloc_together",
        "len",
        "upload",
        "download",
        "has_separate_memory",
        "copy",
        "begin_pass",
        "end_pass",
        "forget_passes",
        "share_weights",
        "mark",
        "pass_ns",
    ];
    for operation in operations.iter().filter(|operation| !memory.contains(operation)) {
        assert!(table.contains(&format!("| `{operation}` |")), "kernels/KERNELS.md has no row for `{operation}`");
    }
}

#[test]
fn every_limit_stands_in_the_users_list_with_its_words() {
    let table = std::fs::read_to_string(root().join("docs/LIMITS.md")).unwrap();
    let source = std::fs::read_to_string(root().join("host/sandbox/src/limits.rs")).unwrap();
    let declared = source.split("\nlimits! {").nth(1).unwrap().split("\n}").next().unwrap();
    let (mut words, mut rows) = (Vec::new(), 0);
    for line in declared.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(text) = line.strip_prefix("/// ") {
            words.push(text);
            continue;
        }
        let name = line.split('"').nth(1).unwrap();
        let row = table.lines().find(|row| row.starts_with(&format!("| `{name}` | ")));
        let row = row.unwrap_or_else(|| panic!("docs/LIMITS.md has no row for `{name}`"));
        assert!(row.ends_with(&format!(" | {} |", words.join(" "))), "docs/LIMITS.md says of `{name}` what the source does not");
        words.clear();
        rows += 1;
    }
    assert_eq!(table.lines().filter(|line| line.starts_with("| `")).count(), rows);
}

#[test]
fn every_workspace_is_audited() {
    let audit = std::fs::read_to_string(root().join("xtask/src/audit.rs")).unwrap();
    for lock in files("", &["Cargo.lock"]) {
        let folder = lock.parent().unwrap().strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        let folder = if folder.is_empty() { "." } else { &folder };
        assert!(audit.contains(&format!("\"{folder}\"")), "`cargo xtask audit` does not look at {folder}/Cargo.lock");
    }
}
