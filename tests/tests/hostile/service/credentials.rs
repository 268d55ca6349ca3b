//! 47: tokens that open nothing, or nothing of this, and what they are told. (Every id of one tenant with the token of another, byte for byte:
//! `host/src/serve/routes/tests.rs`.)

use nodus_tests::{Server, text};
use serde_json::Value;

use super::{NEIGHBOUR, Scene, code};

/// Every documented way to ask for something by its id, with what to put there.
fn asked(server: &Server, [job, cohort, data]: [&str; 3]) -> Vec<(String, String)> {
    let (_, _, document) = server.request(None, "GET", "/openapi.json", &[], b"");
    let document: Value = serde_json::from_slice(&document).unwrap();
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let id = match path.as_str() {
            path if path.starts_with("/v1/components/") => "sft",
            path if path.starts_with("/v1/data/") => data,
            path if path.starts_with("/v1/cohorts/") => cohort,
            // Whose there is nothing has 0 bytes, as everybody else.
            path if path.starts_with("/v1/uploads/") => continue,
            path if path.contains('{') => job,
            _ => continue,
        };
        let place = path.replace("{path}", "adapter/adapter_model.safetensors").replace("{id}", id).replace("{name}", id);
        for method in item.as_object().unwrap().keys().filter(|method| *method != "put" && *method != "parameters") {
            found.push((method.to_uppercase(), place.clone()));
        }
    }
    assert!(found.len() > 12, "{found:?}");
    found
}

#[test]
fn n47_a_token_opens_what_is_its_tenants_and_nothing_else_says_more() {
    let scene = Scene::new(&["requests-per-second=none"]);
    let server = scene.serve(&[]);
    let job = scene.sft(&server, &scene.a, &NEIGHBOUR).remove(0);
    let cohort = server.ended(&scene.a, &job)["cohort"].as_str().unwrap().to_owned();
    let (_, _, sets) = server.request(Some(&scene.a), "GET", "/v1/data", &[], b"");
    let sets: Value = serde_json::from_slice(&sets).unwrap();
    let data = sets["data"][0]["name"].as_str().unwrap();
    let nobodys = "01890000-0000-7000-8000-000000000000";
    let json = [("content-type", "application/json")];
    let ask = |token: Option<&str>, (method, place): &(String, String)| {
        let (status, _, body) = server.request(token, method, place, &json, b"{\"how\": \"cancel\"}");
        (status, code(&body), body)
    };
    let theirs = asked(&server, [&job, &cohort, data]);
    let absent = asked(&server, [nobodys, nobodys, "none"]);
    let operator = scene.host.ok(["tenant", "rotate", "--operator"]).trim().to_owned();
    let revoked = scene.host.tenant("gone", &[]);
    scene.host.ok(["tenant", "disable", "gone"]);
    let shortened = &scene.a[..scene.a.len() - 1];
    let (other, upper) = (format!("{shortened}{}", if scene.a.ends_with('0') { '1' } else { '0' }), scene.a.to_uppercase());
    for (theirs, absent) in theirs.iter().zip(&absent) {
        // A ready-made component is everybody's, and none is there.
        let (status, code, body) = ask(Some(&scene.b), theirs);
        assert_eq!((status, code.as_str()), (404, "not-found"), "{theirs:?}");
        assert_eq!(text(&body), text(&ask(Some(&scene.b), absent).2), "{theirs:?}");
        assert_eq!(ask(Some(&operator), theirs).1, "wrong-bearer", "{theirs:?}");
        let shut: Vec<String> = [None, Some(shortened), Some(&other), Some(&upper), Some(&revoked), Some("")]
            .into_iter()
            .map(|token| text(&ask(token, theirs).2))
            .collect();
        assert!(shut.iter().all(|answer| *answer == shut[0] && answer.contains("unauthenticated")), "{theirs:?}: {shut:?}");
    }
    // Nothing of it did anything.
    assert_eq!(server.job(&scene.a, &job)["state"], "succeeded");
    scene.assert_sound(&server);
}
