//! Numbers that no caller may go beyond, those that none reaches, and turns of their own.
//!
//! Never waits for what is slow elsewhere: that is what is tested.

use std::time::Duration;

use axum::http::StatusCode;
use nodus_api::{Code, JobLedger};
use nodus_receipts::ledger::BytesEvent;

use super::rig;
use crate::books::{Account, Again, Books};

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
    let _checks = rig.app.checks.acquire_many(2).await.unwrap();
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
