//! A job that asks for what others own, through every function of the contract: it hears the same as if nobody owned it, and learns nothing.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::{BTreeMap, BTreeSet};

use nodus_tests::{Host, golden, guest, root, text, token_lines, told_guest};

/// Every function of the WIT package, as `interface.function` or `interface.resource.function`.
fn functions() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(root().join("wit")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "wit") {
            continue;
        }
        let (mut interface, mut resource) = (String::new(), None);
        for line in std::fs::read_to_string(&path).unwrap().lines() {
            let indent = line.len() - line.trim_start().len();
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["interface", name, "{"] => interface = (*name).to_owned(),
                ["resource", name, "{"] => resource = Some((*name).to_owned()),
                ["}"] if indent == 2 => resource = None,
                [name, rest @ ..] if rest.iter().take(2).any(|word| word.starts_with("func(")) && name.ends_with(':') => {
                    let name = name.trim_end_matches(':');
                    found.insert(
                        resource.as_ref().map_or(format!("{interface}.{name}"), |resource| format!("{interface}.{resource}.{name}")),
                    );
                }
                _ => {}
            }
        }
    }
    assert!(found.len() >= 30, "{found:?}");
    found
}

/// Answers by function and word, out of a job's log.
fn answers(log: &str) -> BTreeMap<(String, String), String> {
    let answer = |line: &str| {
        let (call, answer) = line.strip_prefix("info: ")?.split_once(" = ")?;
        let (function, word) = call.strip_suffix(')')?.split_once('(')?;
        Some(((function.to_owned(), word.to_owned()), answer.to_owned()))
    };
    log.lines().filter_map(answer).collect()
}

#[test]
fn what_others_own_is_as_if_it_were_not_there() {
    let host = Host::new();
    let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    std::fs::write(host.path("tokens"), lines).unwrap();
    let model = host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "theirmodel"]);
    let data = host.ok(["data", "put", host.path("tokens").to_str().unwrap(), "--name", "theirdata"]);
    assert!(model.contains("theirmodel") && data.contains("theirdata"));
    let job = |name: &str, component: &str, params: &str| {
        format!("[[jobs]]\nname = {name:?}\ncomponent = {component:?}\nmodel = \"theirmodel\"\ndata = \"theirdata\"\nparams = {params}\n")
    };
    let victim = job("victim", guest("sft").to_str().unwrap(), "{ epochs = 2 }");
    let run = |name: &str, manifest: &str| {
        std::fs::write(host.path("jobs.toml"), manifest).unwrap();
        let (manifest, out) = (host.path("jobs.toml"), host.path(name));
        host.call(["run", "--manifest", manifest.to_str().unwrap(), "--out", out.to_str().unwrap()])
    };
    // The same job saves the same adapter, so that its digest is known to whoever has run it before.
    assert!(run("before", &victim).status.success());
    let receipt = nodus_tests::statement(&std::fs::read(host.path("before/victim/receipt.json")).unwrap());
    let digest = |value: &serde_json::Value| format!("sha256:{}", value["digest"]["sha256"].as_str().unwrap());
    let predicate = &receipt["predicate"];
    let (adapter, component) = (digest(&predicate["artifacts"][0]), digest(&predicate["component"]));
    let nobodys = format!("sha256:{}", "5".repeat(64));
    // What there is, and the like that there is not.
    let pairs = [
        ("victim", "nobody"),
        ("theirmodel", "nosuchmodel"),
        ("theirdata", "nosuchset"),
        ("../victim/adapter", "../nobody/adapter"),
        ("/etc/passwd", "/etc/nothing"),
        (adapter.as_str(), nobodys.as_str()),
        (component.as_str(), nobodys.as_str()),
    ];
    let words: BTreeSet<&str> = pairs.iter().flat_map(|(there, not)| [*there, *not]).collect();
    let words = words.into_iter().collect::<Vec<_>>().join(" ");
    let prober = job("prober", told_guest().to_str().unwrap(), &format!("{{ do = \"probe {words}\" }}"));
    let panics = job("panics", told_guest().to_str().unwrap(), "{ do = \"panic \\u001b[31mred\" }");
    let output = run("out", &(victim.clone() + &prober + &panics));
    let told = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");

    let log = std::fs::read_to_string(host.path("out/prober/log.txt")).unwrap();
    let answers = answers(&log);
    let asked: BTreeSet<String> = answers.keys().map(|(function, _)| function.clone()).collect();
    assert_eq!(asked, functions(), "every function is asked, and there are no others");
    for function in &asked {
        for (there, not) in pairs {
            // A long name is shown by its beginning.
            let shown = |word: &str| answers[&(function.clone(), word.to_owned())].replace(word, "WORD");
            let answer = |word: &str| shown(word).replace(word.get(..64).unwrap_or(word), "WORD");
            assert_eq!(answer(there), answer(not), "{function}({there})");
        }
    }
    let refused = |function: &str, word: &str| answers[&(function.to_owned(), word.to_owned())].clone();
    for (function, word) in [
        ("trunk.trunk.open", "theirmodel"),
        ("data.dataset.open", "theirdata"),
        ("training.adapter.load", adapter.as_str()),
        ("training.adapter.load", component.as_str()),
    ] {
        assert!(refused(function, word).starts_with("Err(Error::NotFound("), "{function}: {}", refused(function, word));
    }
    for word in ["../victim/adapter", "/etc/passwd"] {
        assert!(
            refused("training.adapter.save", word).starts_with("Err(Error::InvalidArgument("),
            "{}",
            refused("training.adapter.save", word)
        );
    }

    // Nobody else's words, no place of the host, and nothing that a terminal would obey.
    let data_folder = host.dir.path().to_str().unwrap().to_owned();
    let metrics = std::fs::read_to_string(host.path("out/prober/metrics.jsonl")).unwrap();
    for (what, text) in [("log", &log), ("metrics", &metrics), ("terminal", &told)] {
        let bad = text.chars().find(|c| c.is_control() && *c != '\n');
        assert!(bad.is_none(), "{what} holds {bad:?}");
        let is_host = what != "terminal" && text.contains(&data_folder);
        assert!(!is_host && !text.contains("0x7f"), "{what} tells of the host: {text}");
    }
    assert!(told.contains("\\u{1b}[31mred"), "{told}");
}
