//! The routes from outside, without a network: who may what, and that nothing a caller sends is our fault.

use std::io::Write as _;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use nodus_api::{Code, Problem, SubmitRequest, Submitted};
use nodus_state::{Access, Finish, ItemKind, JobId, Lane, NewItem, Outcome, Owner, Quota, State};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio_stream::StreamExt as _;
use tower::ServiceExt as _;

use super::{document, router};
use crate::cli::{Dtype, SandboxArgs};
use crate::import;
use crate::random::{Recipe, Shape};
use crate::serve::service::{App, Offers};
use crate::store::Store;

mod bounds;
mod planning;

/// A service with two tenants, a model of random weights, a shared component and each tenant's data.
struct Rig {
    folder: tempfile::TempDir,
    app: App,
    router: Router,
    /// Tokens of tenants `a` and `b`.
    tokens: [String; 2],
}

fn rig() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let open = || cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
    let store = Store::open(open()).unwrap();
    import::random(&store, &Recipe::new(Shape::Qwen2_5_0_5b, 0, Dtype::Bf16), &"m".parse().unwrap()).unwrap();
    open().create_dir("service").unwrap();
    let state = State::open(open().open_dir("service").unwrap(), &folder.path().join("service"), Access::Whole).unwrap();
    let quota = Quota { requests_per_second: None, ..Quota::DEFAULT };
    let tokens = ["a", "b"].map(|name| {
        let tenant = state.add_tenant(name, quota).unwrap();
        add(&state, Owner::Tenant(tenant.id), ItemKind::Data, "rows", b"{\"tokens\": [1, 2, 3]}\n{\"tokens\": [4, 5]}\n");
        state.add_token(Some(tenant.id)).unwrap()
    });
    add(&state, Owner::Shared, ItemKind::Component, "sft", b"a component");
    let numbers = crate::serve::gauges::recorder().unwrap().handle();
    let app = App::new(
        store.into(),
        state.into(),
        SandboxArgs::default(),
        numbers,
        Offers { merged: false, lanes: vec![Lane::Fused, Lane::Solo], limits: crate::limits::MAXIMA, holds: true },
    )
    .unwrap();
    Rig { router: router(app.clone()), app, tokens, folder }
}

fn add(state: &State, owner: Owner, kind: ItemKind, name: &str, content: &[u8]) {
    let mut staged = state.stage(1 << 20).unwrap();
    staged.write_all(content).unwrap();
    let files = [("content".to_owned(), staged.keep().unwrap())];
    let about = json!({ "rows": String::from_utf8_lossy(content).lines().count(), "form": "tokens" });
    state.add_item(&NewItem { kind, owner, name: Some(name), digest: files[0].1.digest(), about: &about, files: &files }).unwrap();
}

impl Rig {
    async fn call(&self, method: &str, path: &str, token: Option<&str>, body: impl Into<Body>) -> (StatusCode, Vec<u8>) {
        let mut request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let answer = self.router.clone().oneshot(request.body(body.into()).unwrap()).await.unwrap();
        let status = answer.status();
        (status, to_bytes(answer.into_body(), 1 << 24).await.unwrap().to_vec())
    }

    async fn problem(&self, method: &str, path: &str, token: Option<&str>, body: impl Into<Body>) -> Problem {
        let (status, body) = self.call(method, path, token, body).await;
        let problem: Problem = serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{method} {path}: {status} without a problem"));
        assert_eq!(problem.status, status.as_u16());
        problem
    }

    /// A job of tenant `a`'s, with what there can be of one.
    async fn finished(&self) -> Submitted {
        let (status, body) = self.call("POST", "/v1/jobs", Some(&self.tokens[0]), submission()).await;
        assert_eq!(status, StatusCode::CREATED, "{}", String::from_utf8_lossy(&body));
        let submitted: Submitted = serde_json::from_slice(&body).unwrap();
        let job: JobId = submitted.jobs[0].id.parse().unwrap();
        let claim = self.app.state.claim(&[job], "cpu").unwrap()[0];
        let mut staged = self.app.state.stage(99).unwrap();
        staged.write_all(b"weights").unwrap();
        let artifacts = [("adapter/weights".to_owned(), staged.keep().unwrap())];
        let receipt = Some(&b"{}"[..]);
        let finish = Finish { outcome: Outcome::Succeeded, message: None, receipt, artifacts: &artifacts, events: &[], device_ms: 1 };
        self.app.state.finish(&claim, &finish).unwrap();
        submitted
    }
}

fn submission() -> String {
    json!({ "component": "sft", "model": "m", "data": "rows", "parameters": {"rank": 2}, "held_out": {"count": 1} }).to_string()
}

/// Every path with its methods, and whether it needs a token.
fn operations() -> Vec<(String, String, bool)> {
    let document = serde_json::to_value(crate::serve::document::openapi()).unwrap();
    let paths = document["paths"].as_object().unwrap();
    let each = |(path, item): (&String, &Value)| {
        let methods = item.as_object().unwrap().iter().filter(|(name, _)| name.as_str() != "parameters");
        methods.map(|(method, operation)| (path.clone(), method.to_uppercase(), operation["security"] != json!([{}]))).collect::<Vec<_>>()
    };
    paths.iter().flat_map(each).collect()
}

#[test]
fn the_document_in_docs_is_the_services_own() {
    let kept = include_str!("../../../../docs/openapi.json");
    let own = document::text().unwrap();
    assert!(kept == own, "docs/openapi.json is stale: `nodus-host openapi > docs/openapi.json` writes it anew");
}

#[tokio::test]
async fn every_documented_route_is_there_and_needs_a_token_where_it_says_so() {
    let rig = rig();
    let operations = operations();
    assert!(operations.len() > 20, "{operations:?}");
    for (path, method, needs_token) in &operations {
        let place = path.replace("{id}", "x").replace("{name}", "x").replace("{path}", "x").replace("{digest}", "x");
        let (status, body) = rig.call(method, &place, None, "{}").await;
        assert_eq!(status == StatusCode::UNAUTHORIZED, *needs_token, "{method} {path}: {status}");
        let problem = serde_json::from_slice::<Problem>(&body);
        assert!(problem.is_ok_and(|problem| problem.code != Code::UnknownRoute) || status.is_success(), "{method} {path}: {status}");
    }
    let others = ["GET", "PUT", "POST", "DELETE", "PATCH"];
    for (path, ..) in &operations {
        for method in others.iter().filter(|method| !operations.iter().any(|(other, known, _)| other == path && known == *method)) {
            let place = path.replace("{id}", "x").replace("{name}", "x").replace("{path}", "x").replace("{digest}", "x");
            assert_eq!(rig.problem(method, &place, None, "").await.code, Code::WrongMethod, "{method} {path} is not documented");
        }
    }
    assert_eq!(rig.problem("GET", "/v1/nothing", None, "").await.code, Code::UnknownRoute);
}

/// Made from the document: a route that is added is tried without a word.
#[tokio::test]
async fn what_is_another_tenants_is_what_is_not_there() {
    let rig = rig();
    let submitted = rig.finished().await;
    let (job, cohort) = (submitted.jobs[0].id.as_str(), submitted.cohort.as_str());
    let [a, b] = rig.tokens.each_ref().map(|token| Some(token.as_str()));
    let own = b"{\"tokens\": [7, 8, 9]}\n";
    let of_a = nodus_protocol::Digest::of(own).to_string();
    let tenant = rig.app.state.tenant_named("a").unwrap().id;
    add(&rig.app.state, Owner::Tenant(tenant), ItemKind::Component, "own", own);
    add(&rig.app.state, Owner::Tenant(tenant), ItemKind::Data, "secret", own);
    let nobodys = "01890000-0000-7000-8000-000000000000";
    let mut tried = 0;
    for (path, method, _) in operations() {
        // Who puts under a name makes something of their own.
        if !path.contains('{') || method == "PUT" || path.starts_with("/v1/uploads/") {
            continue;
        }
        let (theirs, absent) = match path.as_str() {
            path if path.starts_with("/v1/components/") => (of_a.as_str(), "sha256:none"),
            path if path.starts_with("/v1/data/") => ("secret", "none"),
            path if path.starts_with("/v1/cohorts/") => (cohort, nobodys),
            _ => (job, nobodys),
        };
        let place = |id: &str| path.replace("{id}", id).replace("{name}", id).replace("{path}", "adapter/weights");
        let (theirs, absent) = (place(theirs), place(absent));
        let refused = rig.problem(&method, &theirs, b, "{}").await;
        assert_eq!(refused.code, Code::NotFound, "{method} {theirs}");
        assert_eq!(refused, rig.problem(&method, &absent, b, "{}").await, "{method} {path}");
        // Weights are the operator's to give away.
        if method == "GET" && !path.ends_with("merged.tar") {
            assert!(rig.call(&method, &theirs, a, "").await.0.is_success(), "{method} {theirs} is not the owner's either");
        }
        tried += 1;
    }
    assert!(tried > 12, "{tried}");
    for (field, value) in [("data", "secret"), ("component", &of_a), ("component", "own")] {
        let mut request: Value = serde_json::from_str(&submission()).unwrap();
        request[field] = json!(value);
        assert_eq!(rig.problem("POST", "/v1/jobs", b, request.to_string()).await.code, Code::JobRefused, "{field}");
    }
    assert_eq!(rig.problem("GET", &format!("/v1/jobs?before={job}"), b, "").await.code, Code::NotFound);
    let (_, listed) = rig.call("GET", &format!("/v1/jobs?cohort={cohort}"), b, "").await;
    assert_eq!(serde_json::from_slice::<Value>(&listed).unwrap(), json!({ "jobs": [] }));
}

#[tokio::test]
async fn a_sweep_is_planned_and_queued_and_a_key_makes_it_one() {
    let rig = rig();
    let token = Some(rig.tokens[0].as_str());
    let mut request: SubmitRequest = serde_json::from_str(&submission()).unwrap();
    request.sweep = vec![nodus_api::SweepAxis { key: "learning_rate".into(), values: vec![json!(1e-3), json!(1e-4)] }];
    let body = serde_json::to_string(&request).unwrap();
    let send = || async {
        let builder = Request::builder().method("POST").uri("/v1/jobs").header("idempotency-key", "k");
        let builder = builder.header("authorization", format!("Bearer {}", rig.tokens[0])).header("content-type", "application/json");
        let answer = rig.router.clone().oneshot(builder.body(Body::from(body.clone())).unwrap()).await.unwrap();
        (answer.status(), to_bytes(answer.into_body(), 1 << 20).await.unwrap())
    };
    let ((first, made), (second, again)) = (send().await, send().await);
    assert_eq!((first, second), (StatusCode::CREATED, StatusCode::OK), "{}", String::from_utf8_lossy(&made));
    assert_eq!(made, again);
    let tenant = rig.app.state.tenant_named("a").unwrap().id;
    rig.app.state.remove_item(Owner::Tenant(tenant), ItemKind::Data, &nodus_state::Reference::Name("rows".into())).unwrap();
    assert_eq!(send().await, (StatusCode::OK, made.clone()), "also when its data set is gone");
    let submitted: Submitted = serde_json::from_slice(&made).unwrap();
    let names: Vec<&str> = submitted.jobs.iter().map(|job| job.name.as_str()).collect();
    assert_eq!(names, ["learning_rate=0.001", "learning_rate=0.0001"]);
    let (_, body) = rig.call("GET", &format!("/v1/jobs/{}", submitted.jobs[1].id), token, "").await;
    let job: nodus_api::Job = serde_json::from_slice(&body).unwrap();
    assert_eq!((job.state, job.ahead, job.member), (nodus_api::JobState::Queued, Some(1), 1));
    assert_eq!(Value::Object(job.parameters), json!({ "learning_rate": 0.0001, "rank": 2 }));
    assert!(job.limits["device-bytes"] > 0 && job.limits["wall-ms"] > 0);
    let mut place = format!("/v1/cohorts/{}?limit=1", submitted.cohort);
    for member in 0..2 {
        let cohort: nodus_api::Cohort = serde_json::from_slice(&rig.call("GET", &place, token, "").await.1).unwrap();
        assert_eq!((cohort.jobs.len(), cohort.jobs[0].member, cohort.next), (1, member, (member == 0).then_some(0)));
        place += "&after=0";
    }
}

#[tokio::test]
async fn refusals_say_what_would_be_right() {
    let rig = rig();
    let token = Some(rig.tokens[0].as_str());
    assert_eq!(rig.call("PUT", "/v1/data/text", token, "{\"text\": \"x\"}\n").await.0, StatusCode::CREATED);
    for (change, code, word) in [
        (json!({ "model": "mm" }), Code::JobRefused, "there are: m"),
        (json!({ "data": "row" }), Code::JobRefused, "row"),
        (json!({ "component": "sfx" }), Code::JobRefused, "sfx"),
        (json!({ "limits": { "wal-ms": 1 } }), Code::JobRefused, "wall-ms"),
        (json!({ "limits": { "component-bytes": 1 } }), Code::JobRefused, "operator"),
        (json!({ "held_out": { "count": 2 } }), Code::JobRefused, "data set `rows`"),
        (json!({ "held_out": { "fraction": 2.0 } }), Code::JobRefused, "below 1"),
        (json!({ "sweep": [{ "key": "rank", "values": [1] }] }), Code::JobRefused, "both set and swept"),
        (json!({ "sweep": [{ "key": "x", "values": [1, 1.0] }] }), Code::JobRefused, "twice"),
        (json!({ "parameters": { "x": "y".repeat(300_000) } }), Code::JobRefused, "parameter-bytes"),
        (json!({ "limits": { "device-bytes": 1_u64 << 40 } }), Code::QuotaExceeded, "device-bytes"),
        (json!({ "limits": { "guest-memory-bytes": (256_u64 << 20) + 1 } }), Code::JobRefused, "at most 268435456: the service's operator"),
        (json!({ "limits": { "activation-bytes": u64::MAX } }), Code::JobRefused, "activation-bytes"),
        (json!({ "lane": "mps" }), Code::NotOffered, "one of fused, solo"),
        (json!({ "hold_out": 1 }), Code::BadBody, "hold_out"),
        (json!({ "seed": -1 }), Code::BadBody, "seed"),
        (json!({ "data": "txet" }), Code::JobRefused, "there are: rows, text"),
        (json!({ "component": "sfx" }), Code::JobRefused, "there are: sft"),
        (json!({ "data": "text" }), Code::JobRefused, "model `m` came without a tokenizer"),
        (json!({ "held_out": { "data": "text" } }), Code::JobRefused, "data set `text` is text"),
    ] {
        let mut request: Value = serde_json::from_str(&submission()).unwrap();
        for (key, value) in change.as_object().unwrap() {
            request[key] = value.clone();
        }
        let problem = rig.problem("POST", "/v1/jobs", token, request.to_string()).await;
        let detail = problem.detail.unwrap_or_default();
        assert!(problem.code == code && (detail.contains(word) || code == Code::BadBody), "{change}: {:?} {detail}", problem.code);
    }
    for (body, said) in [("{\"model\" 1}", "expected JSON: what is at line 1, column 10 is none"), ("{}", "missing field `component`")] {
        let detail = rig.problem("POST", "/v1/jobs", token, body).await.detail.unwrap();
        assert!(detail.starts_with(said), "{detail}");
    }
    let detail = rig.problem("GET", "/v1/jobs?state=runing", token, "").await.detail.unwrap();
    assert!(detail.starts_with("query: state: unknown variant `runing`, expected one of `queued`"), "{detail}");
    for (path, code) in [
        ("/v1/jobs?limit=0", Code::BadParameter),
        ("/v1/jobs?state=done", Code::BadParameter),
        ("/v1/jobs?sort=age", Code::BadParameter),
        ("/v1/jobs/%ff", Code::BadParameter),
        ("/v1/jobs/x", Code::NotFound),
    ] {
        assert_eq!(rig.problem("GET", path, token, "").await.code, code, "{path}");
    }
    assert_eq!(rig.problem("PUT", "/v1/data/bad", token, "{\"txt\": 1}\n").await.code, Code::DataRefused);
    assert_eq!(rig.problem("PUT", "/v1/data/bad", token, "").await.code, Code::BadBody);
    assert_eq!(rig.problem("PUT", "/v1/data/rows", token, "{\"text\": \"x\"}\n").await.code, Code::NameTaken);
    assert_eq!(rig.call("PUT", "/v1/data/new", token, "{\"text\": \"x\"}\n").await.0, StatusCode::CREATED);
    assert_eq!(rig.call("PUT", "/v1/data/new", token, "{\"text\": \"x\"}\n").await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_stream_tells_what_was_and_ends_with_its_job() {
    let rig = rig();
    let submitted = rig.finished().await;
    let token = Some(rig.tokens[0].as_str());
    let (_, all) = rig.call("GET", &format!("/v1/jobs/{}/events", submitted.jobs[0].id), token, "").await;
    let all = String::from_utf8(all).unwrap();
    let ids: Vec<&str> = all.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert_eq!(ids, ["1", "2", "3"], "{all}");
    assert!(all.trim_end().ends_with("event: end\ndata: {}"), "{all}");
    let (_, rest) = rig.call("GET", &format!("/v1/cohorts/{}/events?after=2", submitted.cohort), token, "").await;
    let rest = String::from_utf8(rest).unwrap();
    assert!(all.ends_with(&rest) && rest.contains("succeeded") && !rest.contains("running"), "{rest}");
    let archive = rig.call("GET", &format!("/v1/jobs/{}/artifacts.tar", submitted.jobs[0].id), token, "").await.1;
    let mut archive = tar::Archive::new(archive.as_slice());
    let paths: Vec<_> = archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().to_string_lossy().into_owned()).collect();
    assert_eq!(paths, ["adapter/weights", "receipt.json"]);
}

/// An operator rotates and disables in another process, beside the service.
#[tokio::test]
async fn a_stream_ends_when_its_token_is_revoked_or_its_tenant_disabled() {
    let rig = rig();
    tokio::spawn(crate::serve::housekeeping::watch_bars(rig.app.clone()));
    let open = async |token: &str| {
        let (status, body) = rig.call("POST", "/v1/jobs", Some(token), submission()).await;
        assert_eq!(status, StatusCode::CREATED);
        let job = serde_json::from_slice::<Submitted>(&body).unwrap().jobs[0].id.clone();
        let request = Request::builder().uri(format!("/v1/jobs/{job}/events")).header("authorization", format!("Bearer {token}"));
        let answer = rig.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        answer.into_body().into_data_stream()
    };
    let rest = async |stream: &mut axum::body::BodyDataStream| {
        let mut told = Vec::new();
        while let Some(piece) = tokio::time::timeout(Duration::from_secs(3), stream.next()).await.ok()? {
            told.extend_from_slice(&piece.unwrap());
        }
        Some(String::from_utf8(told).unwrap())
    };
    let [a, b] = ["a", "b"].map(|name| rig.app.state.tenant_named(name).unwrap().id);
    let (mut first, mut other) = (open(&rig.tokens[0]).await, open(&rig.tokens[1]).await);
    let fresh = rig.app.state.rotate_tokens(Some(a)).unwrap();
    let told = rest(&mut first).await.expect("it ends");
    assert!(told.contains("queued") && !told.contains("event: end"), "{told}");
    assert!(rest(&mut other).await.is_none(), "the other tenant's goes on");
    let mut second = open(&fresh).await;
    rig.app.state.set_disabled(a, true).unwrap();
    assert!(rest(&mut second).await.is_some());
    rig.app.state.set_disabled(b, true).unwrap();
    assert!(rest(&mut other).await.is_some());
}

#[tokio::test]
async fn too_many_requests_are_told_when_to_come_again() {
    let rig = rig();
    let tenant = rig.app.state.tenant_named("a").unwrap();
    rig.app.state.set_quota(tenant.id, &Quota { requests_per_second: Some(1), ..Quota::DEFAULT }).unwrap();
    let mut codes = Vec::new();
    for _ in 0..50 {
        codes.push(rig.call("GET", "/v1/usage", Some(&rig.tokens[0]), "").await.0.as_u16());
    }
    assert_eq!(codes[..2], [200, 200], "a burst");
    assert!(codes.contains(&429), "{codes:?}");
    assert_eq!(rig.call("GET", "/v1/usage", Some(&rig.tokens[1]), "").await.0, StatusCode::OK);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever is cut out of a body or flipped in it, the fault is never ours.
    #[test]
    fn a_damaged_body_is_never_our_fault(cut in 0_usize..400, flips in proptest::collection::vec((0_usize..400, 0_u8..8), 0..4)) {
        thread_local!(static RIG: (tokio::runtime::Runtime, Rig) = (tokio::runtime::Runtime::new().unwrap(), rig()));
        RIG.with(|(runtime, rig)| {
            let whole = json!({
                "component": "sft", "model": "m", "data": "rows", "held_out": {"fraction": 0.5}, "parameters": {"rank": 2, "x": [1, {"y": null}]},
                "sweep": [{"key": "learning_rate", "values": [0.001, "a"]}], "seed": 7, "limits": {"wall-ms": 9}, "lane": "solo", "priority": "high"
            })
            .to_string();
            for (method, path, whole) in [
                ("POST", "/v1/jobs", whole.as_bytes()),
                ("POST", "/v1/jobs/01890000-0000-7000-8000-000000000000/cancel", b"{\"how\": \"cancel\"}"),
                ("PUT", "/v1/data/fuzz", b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"assistant\", \"content\": \"y\"}]}\n"),
            ] {
                let mut body = whole[..whole.len().saturating_sub(cut % (whole.len() + 1))].to_vec();
                for (place, bit) in &flips {
                    let place = place % body.len().max(1);
                    if let Some(byte) = body.get_mut(place) {
                        *byte ^= 1 << bit;
                    }
                }
                let (status, answer) = runtime.block_on(rig.call(method, path, Some(&rig.tokens[0]), body.clone()));
                assert!(!status.is_server_error(), "{method} {path} {}: {}", String::from_utf8_lossy(&body), String::from_utf8_lossy(&answer));
            }
        });
    }
}
