//! The verbs of a tenant: what is uploaded, listed, deleted and fetched, for people and for programs.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]

use std::process::Command;

use nodus_tests::{Host, Server, guest, host, text};
use serde_json::Value;

fn json(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

#[test]
fn a_tenant_uploads_lists_and_deletes_and_sees_what_it_uses() {
    let own = Host::with_llama();
    let token = own.tenant("a", &["stored-bytes=10MiB"]);
    let server = Server::start(&own, &["--hold", "--component", &format!("sft={}", guest("sft").display())]);
    let path = |name: &str| own.path(name).to_str().unwrap().to_owned();
    let (data, eval) = (path("tokens.jsonl"), guest("eval"));
    assert_eq!(server.ok(&token, &["upload", &data, "--name", "rows"]), "rows\n");
    let id = server.ok(&token, &["upload", eval.to_str().unwrap()]);
    assert!(id.starts_with("sha256:"), "{id}");
    let listed = server.ok(&token, &["uploads"]);
    assert!(listed.contains("data       rows") && listed.contains("component  sft") && listed.contains(id.trim()), "{listed}");
    assert_eq!(json(&server.ok(&token, &["uploads", "--json"])).len(), 3);
    assert!(server.ok(&token, &["models"]).contains("llama") && json(&server.ok(&token, &["models", "--json"]))[0]["name"] == "llama");
    let used = json(&server.ok(&token, &["usage", "--json"]))[0]["usage"]["stored_bytes"].as_u64().unwrap();
    assert!(used > std::fs::metadata(&eval).unwrap().len());
    assert!(server.ok(&token, &["usage"]).contains("stored-bytes"));

    // A file for held-out rows is uploaded as the data is, and what both are called is said.
    let held_out = path("held.jsonl");
    std::fs::write(&held_out, "{\"tokens\": [1, 2, 3]}\n").unwrap();
    let submitted = server.call(&token, &["submit", "sft", "--model", "llama", "--data", &data, "--held-out", &held_out]);
    let (said, told) = (text(&submitted.stderr), text(&submitted.stdout));
    assert!(submitted.status.success() && said.contains("is data set `held-") && said.contains("is data set `tokens-"), "{said}");
    let job = told.strip_suffix('\n').unwrap();
    assert_eq!(job, job.trim(), "an id, and nothing behind it");
    let note = server.ok(&token, &["jobs"]);
    assert!(note.contains("the service takes jobs and starts none now") && note.contains("HELD-OUT"), "{note}");
    // What looks like no file, and is one.
    std::fs::copy(&data, own.path("bare")).unwrap();
    let mut bare = Command::new(host());
    bare.args(["submit", "sft", "--model", "llama", "--data", "bare"]).current_dir(own.dir.path());
    let bare = bare.env("NODUS_URL", &server.url).env("NODUS_TOKEN", &token).output().unwrap();
    assert!(bare.status.code() == Some(2) && text(&bare.stderr).contains("`./bare`"), "{}", text(&bare.stderr));
    let absent = server.refused(&token, &["submit", "sft", "--model", "llama", "--data", "nosuch"]);
    assert!(absent.contains("there is no data set `nosuch`; there are: rows"), "{absent}");
    assert!(server.refused(&token, &["jobs", "--state", "runing"]).contains("possible values: queued, running"));

    let waits = server.refused(&token, &["rm", job, "nonsense"]);
    assert!(waits.contains(&format!("`{job}`: wrong-state")) && waits.contains("`nonsense`: not-found"), "{waits}");
    server.ok(&token, &["cancel", job]);
    assert_eq!(json(&server.ok(&token, &["rm", job, "--data", "rows", "--component", id.trim(), "--json"])).len(), 3);
    assert_eq!(server.ok(&token, &["jobs", "--json"]), "");
    assert!(!server.ok(&token, &["uploads"]).contains(id.trim()));
}

#[test]
fn a_fetch_is_whole_or_leaves_nothing_and_programs_can_read_what_it_says() {
    let own = Host::with_llama();
    let token = own.tenant("a", &[]);
    let server = Server::start(&own, &["--device", "cpu"]);
    let (sft, data) = (guest("sft"), own.path("tokens.jsonl"));
    let common = [sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap(), "--held-out-count", "6"];
    let good = server.submit(&token, &[&common[..], &["--set", "steps=3"]].concat()).remove(0);
    let bad = server.submit(&token, &[&common[..], &["--set", "rank=0"]].concat()).remove(0);
    assert_eq!(server.ended(&token, &good)["state"], "succeeded");
    assert_eq!(server.ended(&token, &bad)["state"], "failed");
    let path = |name: &str| own.path(name).to_str().unwrap().to_owned();

    let refused = server.refused(&token, &["fetch", &good, "--out", &path("out"), "--merged"]);
    assert!(refused.contains("not-offered"), "{refused}");
    assert_eq!(std::fs::read_dir(own.path("out")).unwrap().count(), 0, "nothing half-filled");
    // As a fetch that was killed leaves it.
    std::fs::create_dir_all(own.path("out/.incomplete/adapter")).unwrap();
    let told = json(&server.ok(&token, &["fetch", &good, "--out", &path("out"), "--verify", "--json"]));
    assert_eq!((told[0]["id"].as_str(), &told[0]["receipt"]), (Some(good.as_str()), &Value::Bool(true)));
    assert!(told.iter().any(|line| line["ok"] == true && line["checks"][0]["outcome"] == "ok"), "{told:?}");
    assert!(own.path("out/receipt.json").is_file() && !own.path("out/.incomplete").exists());
    assert!(server.refused(&token, &["fetch", &good, "--out", &path("out")]).contains("not empty"));
    assert!(server.refused(&token, &["fetch", &bad, "--out", &path("bad"), "--verify"]).contains("nothing to verify"));
    let audited = json(&server.ok(&token, &["audit", "job", &good, "--out", &path("audited"), "--json"]));
    assert!(audited.iter().any(|line| line["ledger"] == "ok"), "{audited:?}");

    let listed = server.ok(&token, &["jobs"]);
    let column = listed.lines().next().unwrap().find("HELD-OUT").unwrap();
    let row = listed.lines().find(|line| line.starts_with(&good)).unwrap();
    let held_out = server.job(&token, &good)["last_evaluation"]["loss"].as_f64().unwrap();
    assert!(row[column..].starts_with(&format!("{held_out:.4}")), "{listed}");
}

#[test]
fn what_is_wrong_with_an_address_or_a_certificate_is_said_as_what_would_be_right() {
    let own = Host::with_llama();
    let token = own.tenant("a", &[]);
    let path = |name: &str| own.path(name).to_str().unwrap().to_owned();
    let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    std::fs::write(own.path("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    std::fs::write(own.path("key.pem"), key.serialize_pem()).unwrap();
    let server = Server::start(&own, &["--hold", "--tls-cert", &path("ca.pem"), "--tls-key", &path("key.pem")]);
    let said = server.refused(&token, &["jobs", "--ca", &path("ca.pem")]);
    assert!(said.contains("basicConstraints=critical,CA:FALSE") && !said.contains("CaUsedAsEndEntity"), "{said}");
    assert!(server.refused(&token, &["jobs", "--ca", &path("key.pem")]).contains("expected a certificate"));
    // A profile beside its certificate.
    std::fs::write(own.path("profile.toml"), "ca = \"ca.pem\"\n").unwrap();
    assert!(server.refused(&token, &["jobs", "--profile", &path("profile.toml")]).contains("CA:FALSE"));

    for (url, words) in [("http://127.0.0.1:1", "cannot be reached"), ("127.0.0.1", "no address of a service")] {
        let said = server.refused(&token, &["jobs", "--url", url]);
        assert!(said.contains(words) && !said.contains("our side"), "{url}: {said}");
    }
}
