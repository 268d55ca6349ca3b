//! What the service takes and answers is what its OpenAPI document says: every operation is asked, and every body held against its schema.
//!
//! Which operations there are is asked of the document: one that is added without being asked here fails the test.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

use std::collections::BTreeSet;

use nodus_tests::{Host, Server, guest, text};
use serde_json::{Value, json};

/// A running service with its document, and which operations were answered well.
struct Asked<'a> {
    server: &'a Server,
    document: Value,
    answered: BTreeSet<(String, String)>,
}

impl Asked<'_> {
    /// Everything that does not fit a schema of the document, in words.
    fn misfits(&self, schema: &Value, body: &Value) -> Vec<String> {
        let mut whole = schema.clone();
        whole["components"] = self.document["components"].clone();
        let validator = jsonschema::validator_for(&whole).unwrap();
        validator.iter_errors(body).map(|error| format!("{}: {error}", error.instance_path())).collect()
    }

    /// Asks an operation, with `values` for what is in braces in its path, and holds both bodies against the document.
    fn ask(&mut self, token: Option<&str>, (method, template): (&str, &str), values: &[&str], body: &[u8]) -> (u16, Vec<u8>) {
        let operation = self.document["paths"][template][method.to_lowercase()].clone();
        assert!(operation.is_object(), "{method} {template} is not in the document");
        let mut path = template.to_owned();
        for value in values {
            let (open, close) = (path.find('{').unwrap(), path.find('}').unwrap());
            path.replace_range(open..=close, value);
        }
        let taken = operation["requestBody"]["content"].as_object().and_then(|content| content.iter().next());
        let kind = taken.map_or("application/json", |(kind, _)| kind);
        let (status, head, answer) = self.server.request(token, method, &path, &[("content-type", kind)], body);
        let name = format!("{method} {path}: {status} {}", text(&answer).chars().take(600).collect::<String>());
        if let (Some((_, content)), "application/json") = (taken, kind) {
            let misfits = self.misfits(&content["schema"], &serde_json::from_slice(body).unwrap());
            assert_eq!(
                misfits.is_empty(),
                status < 300,
                "what was asked with does not fit as the service says it does: {misfits:?}, {name}"
            );
        }
        let responses = &operation["responses"];
        let response = responses.get(status.to_string()).or_else(|| responses.get("default")).unwrap_or_else(|| panic!("{name}"));
        match response["content"].as_object().and_then(|content| content.iter().next()) {
            None => assert!(answer.is_empty(), "{name}"),
            Some((kind, content)) => {
                let said = head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-type: ").map(str::to_owned));
                assert!(said.is_some_and(|said| said.starts_with(kind)), "{name}\n{head}");
                if kind.ends_with("json") {
                    let misfits = self.misfits(&content["schema"], &serde_json::from_slice(&answer).unwrap());
                    assert!(misfits.is_empty(), "{misfits:#?}\n{name}");
                }
            }
        }
        if status < 300 {
            self.answered.insert((method.to_owned(), template.to_owned()));
        }
        (status, answer)
    }

    /// Asks with no body; expects it to go well.
    fn get(&mut self, token: Option<&str>, template: &str, values: &[&str]) -> Vec<u8> {
        let (status, answer) = self.ask(token, ("GET", template), values, b"");
        assert!(status < 300, "GET {template}: {status} {}", text(&answer));
        answer
    }
}

#[test]
fn every_operation_takes_and_answers_what_the_document_says() {
    let host = Host::with_llama();
    let token = host.tenant("a", &["requests-per-second=none"]);
    let operator = host.ok(["tenant", "rotate", "--operator"]).split_whitespace().last().unwrap().to_owned();
    let sft = format!("sft={}", guest("sft").display());
    let server = Server::start(&host, &["--device", "cpu", "--component", &sft, "--offer-merged"]);
    let (_, _, document) = server.request(None, "GET", "/openapi.json", &[], b"");
    let mut asked = Asked { server: &server, document: serde_json::from_slice(&document).unwrap(), answered: BTreeSet::new() };
    let own = Some(token.as_str());

    for path in ["/", "/healthz", "/readyz", "/openapi.json"] {
        asked.get(None, path, &[]);
    }
    asked.get(Some(&operator), "/metrics", &[]);
    for path in ["/v1/models", "/v1/key", "/v1/usage"] {
        asked.get(own, path, &[]);
    }
    let wasm = std::fs::read(guest("sft")).unwrap();
    let (_, component) = asked.ask(own, ("POST", "/v1/components"), &[], &wasm);
    let component = serde_json::from_slice::<Value>(&component).unwrap()["id"].as_str().unwrap().to_owned();
    asked.ask(own, ("PUT", "/v1/data/{name}"), &["rows"], &std::fs::read(host.path("tokens.jsonl")).unwrap());
    asked.get(own, "/v1/components", &[]);
    asked.get(own, "/v1/components/{id}", &[&component]);
    asked.get(own, "/v1/data", &[]);
    asked.get(own, "/v1/data/{name}", &["rows"]);

    let submission = json!({
        "component": component, "model": "llama", "data": "rows", "held_out": {"count": 6}, "parameters": {"steps": 3, "layers": {"last": 1}},
        "sweep": [{"key": "learning_rate", "values": [0.01, 0.001]}, {"key": "targets", "values": [["q_proj"]]}],
        "seed": 7, "limits": {"wall-ms": 3_600_000}, "lane": "fused", "priority": "high"
    });
    let (status, made) = asked.ask(own, ("POST", "/v1/jobs"), &[], submission.to_string().as_bytes());
    assert_eq!(status, 201, "{}", text(&made));
    let made: Value = serde_json::from_slice(&made).unwrap();
    let (cohort, job) = (made["cohort"].as_str().unwrap(), made["jobs"][0]["id"].as_str().unwrap());
    for id in made["jobs"].as_array().unwrap() {
        assert_eq!(server.ended(&token, id["id"].as_str().unwrap())["state"], "succeeded");
    }
    asked.get(own, "/v1/jobs", &[]);
    asked.get(own, "/v1/cohorts/{id}", &[cohort]);
    for of_job in
        ["", "/artifacts", "/artifacts.tar", "/inputs.tar", "/ledger", "/log", "/merged.tar", "/metrics", "/metrics.csv", "/receipt"]
    {
        asked.get(own, &format!("/v1/jobs/{{id}}{of_job}"), &[job]);
    }
    asked.get(own, "/v1/jobs/{id}/artifacts/{path}", &[job, "adapter/adapter_config.json"]);
    for (of, id) in [("jobs", job), ("cohorts", cohort)] {
        let told = text(&asked.get(own, &format!("/v1/{of}/{{id}}/events"), &[id])).to_owned();
        let events: Vec<Value> = told.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data:")?).ok()).collect();
        assert!(events.len() > 10, "{told}");
        let schema = json!({ "$ref": "#/components/schemas/Event" });
        for event in events.iter().filter(|event| event.get("kind").is_some()) {
            assert_eq!(asked.misfits(&schema, event), Vec::<String>::new(), "{event}");
        }
    }

    // What is refused is a problem of the document's too.
    assert_eq!(asked.ask(None, ("GET", "/v1/usage"), &[], b"").0, 401);
    assert_eq!(asked.ask(own, ("GET", "/v1/jobs/{id}"), &[cohort], b"").0, 404);
    assert_eq!(asked.ask(own, ("POST", "/v1/jobs"), &[], b"{\"component\": 7}").0, 400);
    assert_eq!(asked.ask(own, ("POST", "/v1/jobs/{id}/cancel"), &[job], b"{\"how\": \"softly\"}").0, 400);

    let endless = json!({ "component": "sft", "model": "llama", "data": "rows", "parameters": {"steps": 1_000_000} });
    let (_, made) = asked.ask(own, ("POST", "/v1/jobs"), &[], endless.to_string().as_bytes());
    let endless = serde_json::from_slice::<Value>(&made).unwrap()["jobs"][0]["id"].as_str().unwrap().to_owned();
    asked.ask(own, ("POST", "/v1/jobs/{id}/cancel"), &[&endless], b"{\"how\": \"cancel\"}");
    server.ended(&token, &endless);
    for (path, value) in [("/v1/jobs/{id}", job), ("/v1/data/{name}", "rows"), ("/v1/components/{id}", component.as_str())] {
        assert_eq!(asked.ask(own, ("DELETE", path), &[value], b"").0, 204);
    }

    let documented = asked.document["paths"].as_object().unwrap().iter().flat_map(|(path, item)| {
        let methods = item.as_object().unwrap().iter().filter(|(_, operation)| operation["responses"].is_object());
        methods.map(|(method, _)| (method.to_uppercase(), path.clone())).collect::<Vec<_>>()
    });
    let missed: Vec<_> = documented.filter(|operation| !asked.answered.contains(operation)).collect();
    // An upload that broke off is another test's: `uploads.rs` of the state, `service.rs`.
    assert!(missed.iter().all(|(_, path)| path == "/v1/uploads/{digest}"), "{missed:?}");
    assert_eq!(server.end(), Some(0));
}
