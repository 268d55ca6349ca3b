//! Numbers that no caller may go beyond, and those that none reaches.

use axum::http::StatusCode;
use nodus_api::Code;

use super::rig;

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
