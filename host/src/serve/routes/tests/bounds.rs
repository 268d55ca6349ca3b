//! Numbers that no caller may go beyond, those that none reaches, and turns of their own.
//!
//! Never waits for what is slow elsewhere: that is what is tested.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use nodus_api::{Code, JobLedger};
use nodus_receipts::ledger::BytesEvent;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_stream::StreamExt as _;

use super::rig;
use crate::books::{Account, Again, Books};
use crate::serve::body::JSON_BYTES_USUAL;

#[tokio::test]
async fn nothing_comes_after_the_last_position_that_there_can_be() {
    let rig = rig();
    let submitted = rig.finished().await;
    let (job, token) = (&submitted.jobs[0].id, Some(rig.tokens[0].as_str()));
    for after in [i64::MAX as u64 + 1, u64::MAX] {
        let (status, none) = rig.call("GET", &format!("/v1/jobs/{job}/events?after={after}"), token, "").await;
        assert_eq!((status, String::from_utf8(none).unwrap().trim_end()), (StatusCode::OK, "event: end\ndata: {}"), "{after}");
        let (status, none) = rig.call("GET", &format!("/v1/jobs/{job}/metrics?after={after}"), token, "").await;
        assert_eq!((status, none.as_slice()), (StatusCode::OK, &b"{\"events\":[]}"[..]), "{after}");
    }
}

#[tokio::test]
async fn a_tenant_has_few_downloads_at_the_same_time_and_another_has_its_own() {
    let rig = rig();
    let submitted = rig.finished().await;
    let place = format!("/v1/jobs/{}/artifacts.tar", submitted.jobs[0].id);
    let token = Some(rig.tokens[0].as_str());
    let [a, b] = ["a", "b"].map(|name| rig.app.state.tenant_named(name).unwrap().id);
    let slots: Vec<_> = std::iter::from_fn(|| rig.app.download_slots.take(a)).collect();
    let refused = rig.problem("GET", &place, token, "").await;
    assert!(refused.code == Code::RateLimited && refused.detail.unwrap().contains(&format!("{} downloads", slots.len())));
    assert!(rig.app.download_slots.take(b).is_some());
    drop(slots);
    assert_eq!(rig.call("GET", &place, token, "").await.0, StatusCode::OK);
    // It is given back when all was sent.
    while rig.app.downloads.available_permits() < 128 {
        tokio::task::yield_now().await;
    }
}

/// Whoever reads the ledger does not wait for components that are compiled, and has no more of it at once than an answer may have.
#[tokio::test]
async fn a_jobs_ledger_is_read_in_turns_of_its_own_and_page_by_page() {
    let rig = rig();
    let job = rig.finished().await.jobs[0].id.clone();
    let account = |job: &str| Account { job: job.to_owned(), tenant: "a".to_owned(), again: Again::Never };
    let mut books = Books::open(rig.app.store.dir().unwrap()).unwrap();
    let entry = |number| (number, BytesEvent::Written, 7);
    books.enter(&account(&job), (0..3000).map(entry)).unwrap();
    books.enter(&account("another"), (0..10).map(entry)).unwrap();
    let of = rig.app.state.tenants().unwrap()[0].id;
    let _compiling = (rig.app.compiling.take(of).await, rig.app.compiling.take(of).await);
    let place = format!("/v1/jobs/{job}/ledger");
    let asked = rig.call("GET", &place, Some(&rig.tokens[0]), "");
    let (status, body) = tokio::time::timeout(Duration::from_secs(60), asked).await.expect("it waits for what is compiled");
    assert_eq!(status, StatusCode::OK);
    let mut ledger: JobLedger = serde_json::from_slice(&body).unwrap();
    assert_eq!((ledger.entries.len(), ledger.next), (1000, Some(1000)), "a page of it");
    while let Some(from) = ledger.next {
        let (_, body) = rig.call("GET", &format!("{place}?from={from}&limit=700"), Some(&rig.tokens[0]), "").await;
        let page: JobLedger = serde_json::from_slice(&body).unwrap();
        ledger.entries.extend(page.entries);
        ledger.next = page.next;
    }
    assert!(ledger.entries.len() == 3000 && ledger.entries.iter().all(|entry| entry["job"] == *job && entry["bytes"] == 7));
    assert_eq!(rig.problem("GET", &format!("{place}?limit=1001"), Some(&rig.tokens[0]), "").await.code, Code::BadParameter);
    assert_eq!(rig.problem("GET", &place, Some(&rig.tokens[1]), "").await.code, Code::NotFound, "another tenant's is not there");
}

/// What waits to be looked at has come, and takes neither a thread nor a place of those that come.
#[tokio::test]
async fn uploads_of_one_tenant_that_wait_to_be_looked_at_hold_up_nobody_elses() {
    let rig = Arc::new(rig());
    let a = rig.app.state.tenant_named("a").unwrap().id;
    let first = rig.app.reading.take(a).await;
    let _second = rig.app.reading.take(a).await;
    let put = |by: usize, number: usize| {
        let (rig, path) = (rig.clone(), format!("/v1/data/more-{number}"));
        let row = format!("{{\"tokens\": [1, {number}]}}\n");
        tokio::spawn(async move { rig.call("PUT", &path, Some(&rig.tokens[by]), row).await.0 })
    };
    let waits = async |count| {
        while rig.app.reading.waiting() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let own: Vec<_> = (0..6).map(|number| put(0, number)).collect();
    waits(6).await;
    assert_eq!(rig.app.uploads.available_permits(), 64);
    // Components have places of their own.
    let refused = rig.problem("POST", "/v1/components", Some(&rig.tokens[1]), "no component").await;
    assert_eq!(refused.code, Code::ComponentRefused);
    let other = put(1, 7);
    waits(7).await;
    drop(first);
    let put = tokio::time::timeout(Duration::from_secs(60), other).await.expect("it waits for all of the other tenant's");
    assert_eq!(put.unwrap(), StatusCode::CREATED);
    for own in own {
        assert_eq!(own.await.unwrap(), StatusCode::CREATED);
    }
    assert!(rig.app.slots.take(a).is_some());
}

/// A body of this many bytes that then goes on for ever; what it sends is counted.
fn stalled(bytes: usize) -> Body {
    let first = tokio_stream::once(Ok::<_, std::io::Error>(vec![b' '; bytes]));
    Body::from_stream(first.chain(tokio_stream::pending()))
}

#[tokio::test]
async fn bodies_that_stall_hold_little_memory_and_nobody_up() {
    let rig = Arc::new(rig());
    let [a, b] = ["a", "b"].map(|name| rig.app.state.tenant_named(name).unwrap().id);
    let large = || {
        let rig = rig.clone();
        tokio::spawn(async move { rig.problem("POST", "/v1/jobs", Some(&rig.tokens[0]), stalled(JSON_BYTES_USUAL + 1)).await.code })
    };
    let under_way: Vec<_> = (0..4).map(|_| large()).collect();
    while rig.app.body_slots.take(a).is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(large().await.unwrap(), Code::RateLimited);
    // Usual ones are taken, and others' large ones.
    let (status, _) = rig.call("POST", "/v1/jobs", Some(&rig.tokens[0]), super::submission()).await;
    assert_eq!(status, StatusCode::CREATED);
    assert!(rig.app.body_slots.take(b).is_some());
    under_way.iter().for_each(tokio::task::JoinHandle::abort);
    while rig.app.body_slots.take(a).is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Nothing is read for whoever has no token.
    let refused = rig.problem("POST", "/v1/jobs", None, Body::from_stream(tokio_stream::pending::<std::io::Result<Vec<u8>>>())).await;
    assert_eq!(refused.code, Code::Unauthenticated);
}

/// The service at an address of its own.
async fn listening(rig: &super::Rig) -> tokio::net::TcpStream {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, router) = (listener.local_addr().unwrap(), rig.router.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });
    tokio::net::TcpStream::connect(address).await.unwrap()
}

#[tokio::test]
async fn a_stranger_with_a_large_body_sees_that_he_is_refused_and_one_that_asks_first_sends_nothing() {
    let rig = rig();
    let head = |more: &str, bytes: usize| format!("POST /v1/jobs HTTP/1.1\r\nhost: x\r\n{more}content-length: {bytes}\r\n\r\n");
    let length = 16 << 20;
    let mut stream = listening(&rig).await;
    stream.write_all(head("connection: close\r\n", length).as_bytes()).await.unwrap();
    for _ in 0..length >> 16 {
        stream.write_all(&[b' '; 1 << 16]).await.expect("he is hung up on");
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");

    let mut stream = listening(&rig).await;
    stream.write_all(head("expect: 100-continue\r\n", length).as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(Duration::from_secs(4), stream.read_to_string(&mut answer)).await.expect("it is waited for").unwrap();
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");

    // Who sends without an end is cut off.
    let mut stream = listening(&rig).await;
    stream.write_all(head("", usize::MAX >> 1).as_bytes()).await.unwrap();
    let began = std::time::Instant::now();
    while stream.write_all(&[b' '; 1 << 16]).await.is_ok() {
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
