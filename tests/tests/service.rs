//! The service from outside: a server on a free port, operators and tenants with the same binary.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::io::{Read as _, Write as _};
use std::process::Command;
use std::time::{Duration, Instant};

use nodus_tests::{Host, Server, children, guest, text};
use serde_json::Value;

fn json(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

#[test]
fn tenants_upload_submit_list_and_cancel_and_it_is_there_after_a_restart() {
    let host = Host::with_llama();
    let (a, b) = (host.tenant("a", &[]), host.tenant("b", &[]));
    let sft = format!("sft={}", guest("sft").display());
    let server = Server::start(&host, &["--component", &sft]);
    let data = host.path("tokens.jsonl");
    // A learning rate that no job gets far with before it is cancelled would still be a job: many steps are asked for.
    let common = ["--model", "llama", "--data", data.to_str().unwrap(), "--held-out-count", "6", "--set", "steps=1000000", "--json"];
    let sweep = [&["submit", "sft"][..], &common, &["--sweep", "learning_rate=0.01,0.02", "--key", "k"]].concat();
    let made = json(&server.ok(&a, &sweep)).remove(0);
    assert_eq!(json(&server.ok(&a, &sweep)).remove(0), made, "the same key is the same submission");
    let path = guest("sft");
    let own = json(&server.ok(&a, &[&["submit", path.to_str().unwrap()][..], &common].concat())).remove(0);

    let listed = json(&server.ok(&a, &["jobs", "--json"]));
    let names: Vec<&str> = listed.iter().map(|job| job["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["", "learning_rate=0.02", "learning_rate=0.01"]);
    assert_eq!(listed[0]["component_id"], listed[1]["component_id"], "the same bytes have the same id");
    assert!(listed[0]["limits"]["device-bytes"].as_u64().unwrap() > 0);
    assert!(server.ok(&a, &["jobs"]).starts_with("ID"), "a table for people");

    assert_eq!(server.ok(&b, &["jobs", "--json"]), "");
    let job = own["jobs"][0]["id"].as_str().unwrap();
    for verb in ["watch", "logs", "metrics", "cancel"] {
        assert!(server.refused(&b, &[verb, job]).contains("not-found: there is no such job"), "{verb}");
    }
    assert!(server.refused("nodus_0", &["jobs"]).contains("unauthenticated"));
    let misspelt = [&["submit", "stf"][..], &common].concat();
    assert!(server.refused(&a, &misspelt).contains("there is no component `stf`"));

    let cohort = made["cohort"].as_str().unwrap();
    assert_eq!(json(&server.ok(&a, &["cancel", "--now", cohort, "--json"])).len(), 2);
    assert_eq!(server.end(), Some(0), "a service that is asked to end ends well");

    let server = Server::start(&host, &[]);
    let ids = |jobs: &[Value]| jobs.iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(ids(&json(&server.ok(&a, &["jobs", "--json"]))), ids(&listed));
    let half = server.refused(&a, &["cancel", "--now", "nonsense", job]);
    assert!(half.contains("`nonsense`: not-found"), "{half}");
    assert!(server.ended(&a, job)["state"] == "cancelled", "one that is none keeps no other from its end");
    let watched = server.refused(&a, &["watch", cohort]);
    assert!(watched.contains("2 of 2 jobs did not end well") && watched.contains("cancelled"), "{watched}");
    assert!(server.refused(&a, &["cancel", cohort]).contains("all 2 jobs of the sweep have ended"));
    let out = host.path("out");
    server.ok(&a, &["fetch", cohort, "--out", out.to_str().unwrap()]);
    assert!(out.join("learning_rate=0.01").is_dir());

    host.ok(["tenant", "disable", "a"]);
    assert!(server.refused(&a, &["jobs"]).contains("unauthenticated"), "beside the running service");
    assert!(host.refused(2, ["tenant", "rotate", "a"]).contains("tenant enable a"), "a token that never works");
    assert!(host.ok(["tenant", "list"]).contains("disabled (1 token refused)"));
    host.ok(["tenant", "enable", "a"]);
    server.ok(&a, &["jobs"]);
    let rotated = host.ok(["tenant", "rotate", "b"]);
    assert!(server.refused(&b, &["jobs"]).contains("unauthenticated"));
    server.ok(rotated.trim(), &["jobs"]);
}

#[test]
fn what_strangers_could_reach_needs_tls_and_one_service_has_the_folder() {
    let host = Host::with_llama();
    let refused = host.refused(2, ["serve", "--listen", "0.0.0.0:0"]);
    assert!(refused.contains("--tls-cert") && refused.contains("--insecure"), "{refused}");
    let _server = Server::start(&host, &[]);
    let second = host.refused(2, ["serve", "--listen", "127.0.0.1:0"]);
    assert!(second.contains("the service runs already"), "{second}");
    assert!(host.refused(2, ["tenant", "add", "../a"]).contains("cannot be a name"));
    host.ok(["tenant", "add", "a", "--quota", "queued-jobs=3"]);
    assert!(host.refused(2, ["tenant", "add", "a"]).contains("already"));
    assert!(host.ok(["tenant", "quota", "a", "device-ms=none"]).contains("queued-jobs=3\n"));
    assert!(host.refused(2, ["tenant", "rotate", "aa"]).contains("there are: a"));
    assert!(host.ok(["tenant", "list"]).starts_with("a  0 queued"));
}

#[test]
fn tls_is_spoken_with_those_who_trust_the_certificate() {
    let host = Host::with_llama();
    let token = host.tenant("a", &[]);
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(host.path("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(host.path("key.pem"), made.signing_key.serialize_pem()).unwrap();
    std::fs::write(host.path("serve.toml"), "tls_cert = \"cert.pem\"\ntls_key = \"key.pem\"\n").unwrap();
    let path = |name: &str| host.path(name).to_str().unwrap().to_owned();
    std::fs::write(host.path("mixed.toml"), "tls_cert = \"key.pem\"\ntls_key = \"cert.pem\"\n").unwrap();
    let mixed = host.call(["serve", "--listen", "127.0.0.1:0", "--config", &path("mixed.toml")]);
    assert!(!mixed.status.success() && text(&mixed.stderr).contains("expected a certificate chain"), "{}", text(&mixed.stderr));
    assert_eq!(text(&mixed.stdout), "", "it does not say that it listens");
    let server = Server::start(&host, &["--config", &path("serve.toml")]);
    assert!(server.url.starts_with("https://127.0.0.1:"), "{}", server.url);
    server.ok(&token, &["jobs", "--ca", &path("cert.pem")]);
    assert!(server.refused(&token, &["jobs"]).contains("--ca"));
    let address = server.url.strip_prefix("https://").unwrap();
    let both: [&[u8]; 2] = [b"h2", b"http/1.1"];
    let (spoken, answer) = speak(address, made.cert.der().clone(), &both).unwrap();
    assert_eq!(spoken.as_deref(), Some(&b"http/1.1"[..]), "whoever offers HTTP/2 too is told at once what there is");
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    assert!(speak(address, made.cert.der().clone(), &both[..1]).is_err(), "HTTP/2 alone is refused by the handshake");
}

/// What a TLS client that offers these protocols gets to speak, and what it is answered.
fn speak(address: &str, root: rustls::pki_types::CertificateDer<'static>, offered: &[&[u8]]) -> std::io::Result<(Option<Vec<u8>>, String)> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(root).unwrap();
    let builder = rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into());
    let mut config = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = offered.iter().map(|name| name.to_vec()).collect();
    let mut connection = rustls::ClientConnection::new(config.into(), "127.0.0.1".try_into().unwrap()).unwrap();
    let mut socket = std::net::TcpStream::connect(address)?;
    let mut stream = rustls::Stream::new(&mut connection, &mut socket);
    stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok((connection.alpn_protocol().map(<[u8]>::to_vec), answer))
}

/// Scripts wait for the line that says that it listens.
#[test]
fn a_service_that_cannot_run_does_not_say_that_it_listens() {
    let host = Host::with_llama();
    let refused = host.call(["serve", "--listen", "127.0.0.1:0", "--device", "cuda:63"]);
    assert!(!refused.status.success() && text(&refused.stdout).is_empty(), "{}", text(&refused.stdout));
}

#[test]
fn what_the_quota_has_no_room_for_is_refused_by_name_before_it_comes_and_leaves_nothing() {
    let host = Host::with_llama();
    let token = host.tenant("a", &["stored-bytes=1MiB"]);
    let server = Server::start(&host, &["--hold"]);
    let (long, short) = (host.path("long.jsonl"), host.path("tokens.jsonl"));
    std::fs::write(&long, "{\"text\": \"one of many lines\"}\n".repeat(300_000)).unwrap();
    let sft = guest("sft");
    let submit = |data: &std::path::Path| {
        server.call(&token, &["submit", sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap()])
    };
    let said = text(&submit(&long).stderr);
    assert!(said.contains("quota-exceeded") && said.contains("`stored-bytes`") && !said.contains("broke off"), "{said}");
    let before = server.request(Some(&token), "GET", "/v1/usage", &[], b"").2;
    let used = json(&text(&before))[0]["usage"]["stored_bytes"].as_u64().unwrap();
    assert_eq!(used, std::fs::metadata(&sft).unwrap().len(), "the component alone");
    let small = submit(&short);
    assert!(small.status.success(), "{}", text(&small.stderr));
    // Who says no length is refused on the way, and nothing stays of it either.
    let digest = nodus_tests::text(&Command::new("sha256sum").arg(&long).output().unwrap().stdout);
    let digest = format!("sha256:{}", digest.split(' ').next().unwrap());
    let mut stream = server.connect();
    let head = format!("PUT /v1/data/x HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nupload-digest: {digest}\r\n");
    stream.write_all(format!("{head}connection: close\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes()).unwrap();
    let content = std::fs::read(&long).unwrap();
    stream.write_all(format!("{:x}\r\n", content.len()).as_bytes()).unwrap();
    stream.write_all(&content).unwrap();
    stream.write_all(b"\r\n0\r\n\r\n").unwrap();
    let (status, _, body) = nodus_tests::answer(stream).expect("it is answered while it still sends");
    assert!(status == 403 && text(&body).contains("stored-bytes"), "{status} {}", text(&body));
    let (status, ..) = server.request(Some(&token), "DELETE", &format!("/v1/uploads/{digest}"), &[], b"");
    assert_eq!(status, 404, "nothing is kept of it");
}

#[test]
fn results_are_checked_as_they_are_fetched_and_merged_where_that_is_offered() {
    let host = Host::with_llama();
    let (token, data) = (host.tenant("a", &[]), host.path("tokens.jsonl"));
    let (sft, eval) = (guest("sft"), guest("eval"));
    let path = |name: &str| host.path(name).to_str().unwrap().to_owned();
    let server = Server::start(&host, &["--device", "cpu", "--offer-merged"]);
    let submit =
        [sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap(), "--held-out-count", "6", "--set", "steps=40"];
    let job = server.submit(&token, &submit).remove(0);
    assert_eq!(server.ended(&token, &job)["state"], "succeeded");
    let told = server.ok(&token, &["fetch", &job, "--out", &path("out"), "--merged", "--verify"]);
    assert!(told.contains("believing the service's own word") && told.contains("signature"), "{told}");
    let with_key = ["fetch", &job, "--out", &path("again"), "--verify", "--key", &path("data/host_key.pub.pem")];
    assert!(!server.ok(&token, &with_key).contains("believing"));

    // The merged model is a model of its own, and is as good as the two side by side.
    host.ok(["model", "import", &path("out/merged"), "--name", "merged"]);
    host.ok(["data", "put", &path("tokens.jsonl"), "--name", "tokens"]);
    host.ok(["run", eval.to_str().unwrap(), "--model", "merged", "--data", "tokens", "--held-out-count", "6", "--out", &path("eval")]);
    let last = |folder: &str| {
        let lines = std::fs::read_to_string(host.path(folder).join("held_out.jsonl")).unwrap();
        json(&lines).iter().rfind(|line| line["data"] == "held-out").unwrap()["loss"].as_f64().unwrap()
    };
    let (side_by_side, merged) = (last("out"), last("eval"));
    assert!((side_by_side - merged).abs() < 1e-4, "{side_by_side} {merged}");
    assert_eq!(server.end(), Some(0));

    let server = Server::start(&host, &["--hold"]);
    assert!(server.refused(&token, &["fetch", &job, "--out", &path("refused"), "--merged"]).contains("not-offered"));
}

#[test]
fn an_upload_that_breaks_off_is_gone_on_with() {
    let host = Host::with_llama();
    let (token, other) = (host.tenant("a", &[]), host.tenant("b", &[]));
    let data = host.path("tokens.jsonl");
    let content = std::fs::read(&data).unwrap();
    let listed = nodus_tests::text(&Command::new("sha256sum").arg(&data).output().unwrap().stdout);
    let digest = format!("sha256:{}", listed.split(' ').next().unwrap());
    let there = |server: &Server, token: &str| {
        let (_, _, body) = server.request(Some(token), "GET", &format!("/v1/uploads/{digest}"), &[], b"");
        json(&text(&body))[0]["bytes"].as_u64().unwrap()
    };
    let server = Server::start(&host, &["--hold"]);
    let half = content.len() / 2;
    let mut stream = server.connect();
    let head = format!(
        "PUT /v1/data/x HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nupload-digest: {digest}\r\ncontent-length: {}\r\n\r\n",
        content.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&content[..half]).unwrap();
    let began = Instant::now();
    while there(&server, &token) < half as u64 {
        assert!(began.elapsed() < Duration::from_secs(20), "{} bytes came", there(&server, &token));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(there(&server, &other), 0, "another tenant's is not to be seen");
    drop((stream, server));

    // The service was killed on the way; the verb goes on behind what is there.
    let server = Server::start(&host, &["--hold"]);
    assert_eq!(there(&server, &token), half as u64);
    let sft = guest("sft");
    server.submit(&token, &[sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap()]);
    assert_eq!(there(&server, &token), 0, "it is a data set now");
    let (_, _, sets) = server.request(Some(&token), "GET", "/v1/data", &[], b"");
    assert_eq!(json(&text(&sets))[0]["data"][0]["digest"], digest);
    let (_, head, _) = server.request(Some(&token), "PUT", "/v1/data/y", &[("upload-digest", &digest), ("upload-offset", "7")], b"x");
    assert!(head.starts_with("http/1.1 409"), "{head}");
}

/// A compiler that is killed, as the kernel does where memory runs out, says nothing of the component; and it stands behind those that answer requests.
#[test]
#[cfg(target_os = "linux")]
fn a_compiler_stands_behind_requests_and_its_death_from_outside_is_no_refusal() {
    let host = Host::with_llama();
    let a = host.tenant("a", &[]);
    let server = Server::start(&host, &[]);
    let component = std::fs::read(guest("sft")).unwrap();
    let upload = || server.request(Some(&a), "POST", "/v1/components", &[], &component);
    // The place in the line is the 19th field of `stat`, the 17th behind the name.
    let nice = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(')').next().unwrap().split_whitespace().nth(16).unwrap().parse::<i32>().unwrap()
    };
    let (status, _, body) = std::thread::scope(|scope| {
        let uploading = scope.spawn(upload);
        let began = Instant::now();
        let compiler = loop {
            if let Some(pid) = children(server.pid(), "compile").first() {
                break *pid;
            }
            assert!(began.elapsed() < Duration::from_secs(60) && !uploading.is_finished(), "nothing compiles");
        };
        assert_eq!(nice(compiler), (nice(server.pid()) + 10).min(19));
        assert!(Command::new("kill").args(["-KILL", &compiler.to_string()]).status().unwrap().success());
        uploading.join().unwrap()
    });
    assert_eq!(status, 500, "{}", text(&body));
    let (status, _, body) = upload();
    assert_eq!(status, 201, "{}", text(&body));
}

/// What stands under a content's digest and is something else is never used for it, and the content itself puts it right.
#[test]
fn a_damaged_input_is_the_hosts_fault_and_heals() {
    let host = Host::with_llama();
    let a = host.tenant("a", &[]);
    let server = Server::start(&host, &["--device", "cpu"]);
    let (tokens, sft) = (host.path("tokens.jsonl"), guest("sft"));
    let common = ["--model", "llama", "--data", tokens.to_str().unwrap(), "--held-out-count", "6", "--set", "steps=9"];
    let submit = || server.submit(&a, &[&[sft.to_str().unwrap()], &common[..]].concat()).remove(0);
    let results = |id: &str| {
        let out = host.path(id);
        server.ok(&a, &["fetch", id, "--out", out.to_str().unwrap()]);
        ["losses.jsonl", "adapter/adapter_model.safetensors"].map(|file| std::fs::read(out.join(file)).unwrap())
    };
    let first = submit();
    assert_eq!(server.ended(&a, &first)["state"], "succeeded");
    let expected = results(&first);
    let (data, component) = (std::fs::read(&tokens).unwrap(), std::fs::read(&sft).unwrap());
    let files = |dir: &std::path::Path| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let blob = |content: &[u8]| {
        let mut all = files(&host.path("data/service/blobs")).into_iter().flat_map(|dir| files(&dir));
        all.find(|path| std::fs::read(path).unwrap() == content).unwrap()
    };
    let some = data.iter().take(data.len() / 2).rposition(|byte| *byte == b'\n').unwrap();
    let other = std::fs::read(guest("eval")).unwrap();
    for (whole, instead, method, path) in
        [(&data, &data[..=some], "PUT", "/v1/data/again"), (&component, &other[..], "POST", "/v1/components")]
    {
        let blob = blob(whole);
        std::fs::write(&blob, instead).unwrap();
        let id = submit();
        let job = server.wait(&a, &id, |job| job["attempts"] == 2 || (job["state"] != "queued" && job["state"] != "running"));
        assert!(job["ended_ms"].is_null(), "it was run with something else: {job}");
        assert!(server.request(Some(&a), method, path, &[], whole).0 < 300);
        assert_eq!(server.ended(&a, &id)["state"], "succeeded");
        assert_eq!(results(&id), expected);
        assert_eq!(&std::fs::read(blob).unwrap(), whole);
    }
    assert!(std::fs::read_to_string(host.path("log")).unwrap().contains("damaged"), "the operator's log says why");
}

/// An adapter that jobs start from is read once for all of them, cannot be removed by itself, and goes with the last of them.
#[test]
fn what_a_sweep_starts_from_is_kept_as_long_as_its_members() {
    let host = Host::with_llama();
    let a = host.tenant("a", &[]);
    let server = Server::start(&host, &["--device", "cpu"]);
    let (tokens, sft) = (host.path("tokens.jsonl"), guest("sft"));
    let submit = |more: &[&str]| {
        let common = [sft.to_str().unwrap(), "--model", "llama", "--data", tokens.to_str().unwrap(), "--set", "steps=3"];
        server.submit(&a, &[&common, more].concat())
    };
    let get = |path: &str| serde_json::from_slice::<Value>(&server.request(Some(&a), "GET", path, &[], b"").2).unwrap();
    let first = submit(&[]).remove(0);
    assert_eq!(server.ended(&a, &first)["state"], "succeeded");
    let before = get("/v1/usage")["usage"]["stored_bytes"].as_u64().unwrap();
    let start = format!("init_adapter={first}");
    let members = submit(&["--set", &start, "--sweep", "learning_rate=0.01,0.02,0.03"]);
    assert_eq!(members.len(), 3);
    for id in &members {
        let job = server.ended(&a, id);
        assert_eq!(job["state"], "succeeded", "{job}");
    }
    assert!(get("/v1/usage")["usage"]["stored_bytes"].as_u64().unwrap() > before);
    for id in &members {
        assert_eq!(server.request(Some(&a), "DELETE", &format!("/v1/jobs/{id}"), &[], b"").0, 204);
    }
    assert_eq!(get("/v1/usage")["usage"]["stored_bytes"].as_u64(), Some(before));
}

/// Who sends no request has no connection for ever, however it began.
#[test]
fn a_connection_without_a_request_is_cut() {
    let host = Host::with_llama();
    let server = Server::start(&host, &["--hold"]);
    let mut streams: Vec<_> = (0..2).map(|_| server.connect()).collect();
    for (stream, rest) in streams.iter_mut().zip(["", "GET /healthz HTTP/1.1\r\nhos"]) {
        write!(stream, "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n{rest}").unwrap();
    }
    let began = Instant::now();
    for mut stream in streams {
        let mut answer = Vec::new();
        // Reset or ended, it is over.
        drop(stream.read_to_end(&mut answer));
        assert!(answer.starts_with(b"HTTP/1.1 204"), "{}", text(&answer));
    }
    assert!((Duration::from_secs(20)..Duration::from_secs(90)).contains(&began.elapsed()), "{:?}", began.elapsed());
}
