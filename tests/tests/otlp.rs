//! Spans to a collector: told of requests and of attempts at jobs with their ids; and a collector that is not there, or hangs, holds up nobody.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nodus_tests::{Host, Server, guest, text};

/// Takes what is sent to `/v1/traces`, and answers as collectors do.
fn collect(mut stream: TcpStream, bodies: &Mutex<Vec<Vec<u8>>>) {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
        let length = end.and_then(|end| {
            let head = text(&bytes[..end]).to_lowercase();
            assert!(head.starts_with("post /v1/traces ") && head.contains("content-type: application/x-protobuf"), "{head}");
            Some(end + 4 + head.split("content-length: ").nth(1)?.lines().next()?.parse::<usize>().ok()?)
        });
        if let (Some(end), Some(length)) = (end, length)
            && bytes.len() >= length
        {
            bodies.lock().unwrap().push(bytes[end + 4..length].to_vec());
            bytes.drain(..length);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n").unwrap();
            continue;
        }
        match stream.read(&mut piece) {
            Ok(count) if count > 0 => bytes.extend_from_slice(&piece[..count]),
            _ => return,
        }
    }
}

fn submit(own: &Host, server: &Server, token: &str) -> String {
    let (sft, data) = (guest("sft"), own.path("tokens.jsonl"));
    let id =
        server.submit(token, &[sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap(), "--set", "steps=20"]).remove(0);
    assert_eq!(server.ended(token, &id)["state"], "succeeded");
    id
}

#[test]
fn a_collector_is_told_of_requests_and_attempts() {
    let (listener, bodies) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(Mutex::new(Vec::new())));
    let (url, taken) = (format!("http://{}", listener.local_addr().unwrap()), bodies.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let taken = taken.clone();
            std::thread::spawn(move || collect(stream.unwrap(), &taken));
        }
    });
    let own = Host::with_llama();
    let token = own.tenant("a", &[]);
    let server = Server::start(&own, &["--device", "cpu", "--otlp", &url]);
    let id = submit(&own, &server, &token);
    assert_eq!(server.end(), Some(0));
    let told = bodies.lock().unwrap().concat();
    let has = |words: &str| told.windows(words.len()).any(|window| window == words.as_bytes());
    for words in ["service.name", "nodus", "POST /v1/jobs", "GET /v1/jobs/{id}", "http.response.status_code", "attempt", "fused", &id] {
        assert!(has(words), "{words}");
    }
    assert!(!has(&token) && !has("hyper"), "it tells what is nobody's business");
}

#[test]
fn a_collector_that_is_gone_or_hangs_holds_up_nobody() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    // Connections are taken by the system, and answered by nobody.
    let hanging = TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [gone, hanging.local_addr().unwrap()] {
        let own = Host::with_llama();
        let token = own.tenant("a", &[]);
        let server = Server::start(&own, &["--device", "cpu", "--otlp", &format!("http://{address}")]);
        submit(&own, &server, &token);
        let began = Instant::now();
        for _ in 0..3000 {
            assert_eq!(server.request(None, "GET", "/healthz", &[], b"").0, 204);
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{:?} for more requests than the queue has room for", began.elapsed());
        let began = Instant::now();
        assert_eq!(server.end(), Some(0));
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        let log = std::fs::read_to_string(own.path("log")).unwrap();
        assert_eq!(log.matches("spans cannot be exported").count(), 1, "{log}");
    }
}
