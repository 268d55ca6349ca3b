//! What is read of data for a submission: nothing where it is refused for something else, and nothing twice.

use axum::http::StatusCode;
use nodus_api::{Code, Submitted};
use nodus_state::{CohortId, Filter, ItemKind, Owner, Quota, Reference};
use serde_json::{Value, json};

use super::{Rig, add, rig};

/// A submission on the tenant's own data, with these fields over it.
fn asking(fields: &Value) -> String {
    let mut request = json!({ "component": "sft", "model": "m", "data": "long", "parameters": {"rank": 2, "batch_size": 2} });
    for (name, value) in fields.as_object().unwrap() {
        request[name] = value.clone();
    }
    request.to_string()
}

fn with_data(rig: &Rig) {
    let of = rig.app.state.tenant_named("a").unwrap().id;
    // Of many lengths; and the last one has a token that no model knows, where only long jobs read it.
    let rows = (1..60_usize).map(|n| json!({ "tokens": vec![n; 20 * n] }).to_string() + "\n");
    let mut last = vec![1; 300];
    last.push(200_000_000);
    let last = json!({ "tokens": last }).to_string();
    add(&rig.app.state, Owner::Tenant(of), ItemKind::Data, "long", (rows.collect::<String>() + &last).as_bytes());
}

/// The planned memory of each of its jobs.
async fn planned(rig: &Rig, fields: Value) -> Vec<(u64, u64)> {
    let (status, body) = rig.call("POST", "/v1/jobs", Some(&rig.tokens[0]), asking(&fields)).await;
    assert_eq!(status, StatusCode::CREATED, "{}", String::from_utf8_lossy(&body));
    let submitted: Submitted = serde_json::from_slice(&body).unwrap();
    let cohort: CohortId = submitted.cohort.parse().unwrap();
    let of = rig.app.state.tenant_named("a").unwrap().id;
    let jobs = rig.app.state.jobs(of, &Filter { cohort: Some(cohort), ..Filter::default() }, 200).unwrap().jobs;
    let limit = |job: &nodus_state::Job, name| job.spec.common.limits.get(name).copied().unwrap();
    let mut jobs: Vec<_> = jobs.iter().map(|job| (job.id, (limit(job, "device-bytes"), limit(job, "activation-bytes")))).collect();
    jobs.sort_by_key(|(id, _)| submitted.jobs.iter().position(|job| job.id == id.to_string()));
    jobs.into_iter().map(|(_, bytes)| bytes).collect()
}

/// From now on whoever reads it fails.
fn lose(rig: &Rig) {
    let of = rig.app.state.tenant_named("a").unwrap().id;
    let files = rig.app.state.item_files(of, ItemKind::Data, &Reference::Name("long".to_owned())).unwrap();
    let hex = files[0].digest.to_string().replace("sha256:", "");
    let folder = cap_std::fs::Dir::open_ambient_dir(rig.folder.path(), cap_std::ambient_authority()).unwrap();
    folder.remove_file(format!("service/blobs/{}/{hex}", &hex[..2])).unwrap();
}

#[tokio::test]
async fn a_sweep_over_lengths_is_planned_from_one_reading_and_as_each_alone() {
    // Neither knows what the other has read.
    let [one, other] = [rig(), rig()];
    [&one, &other].into_iter().for_each(with_data);
    let lengths = [64, 300, 301, 900, 1100];
    for held_out in [Value::Null, json!({ "count": 7 })] {
        let mut alone = Vec::new();
        for length in lengths {
            let parameters = json!({ "rank": 2, "batch_size": 2, "max_length": length });
            alone.extend(planned(&one, json!({ "parameters": parameters, "held_out": held_out })).await);
        }
        let swept = json!({ "sweep": [{ "key": "max_length", "values": lengths }], "held_out": held_out });
        assert_eq!(planned(&other, swept).await, alone);
        assert!(alone[0].1 < alone[4].1, "{alone:?}");
    }
}

#[tokio::test]
async fn what_is_known_of_data_is_not_read_again_and_who_is_refused_has_none_read() {
    let rig = rig();
    with_data(&rig);
    let lengths = json!([{ "key": "max_length", "values": [64, 900] }]);
    let first = planned(&rig, json!({ "sweep": lengths })).await;
    lose(&rig);
    let other =
        planned(&rig, json!({ "sweep": [{ "key": "rank", "values": [1, 2, 64] }], "parameters": {"batch_size": 2, "max_length": 900} }))
            .await;
    assert_eq!(other[1], first[1], "the same of another rank, and nothing was read");
    // All memory given: nothing is to be planned.
    let given = planned(&rig, json!({ "limits": { "device-bytes": 1 << 30, "activation-bytes": 1 << 30 } })).await;
    assert_eq!(given, [(1 << 30, 1 << 30)]);
    let unread = async |fields: Value| rig.problem("POST", "/v1/jobs", Some(&rig.tokens[0]), asking(&fields)).await;
    let length = |length: u64| json!({ "rank": 2, "max_length": length });
    assert_eq!(unread(json!({ "parameters": length(77) })).await.code, Code::Internal, "it would have to be read");
    let large = json!({ "max_length": 78, "words": "x".repeat(2000) });
    let (words, ranks) = (["x", "y"].map(|letter| letter.repeat(6000)), (1..=100).collect::<Vec<_>>());
    let varied = json!([{ "key": "words", "values": words }, { "key": "rank", "values": ranks }]);
    for (fields, code, word) in [
        (json!({ "parameters": { "max_length": 78 }, "sweep": varied }), Code::JobRefused, "what varies"),
        (json!({ "parameters": large, "limits": { "parameter-bytes": 1000 } }), Code::JobRefused, "parameter-bytes"),
        (json!({ "parameters": length(78), "limits": { "dataset-bytes": 1000 } }), Code::JobRefused, "dataset-bytes"),
        (json!({ "parameters": length(78), "limits": { "wall-ms": u64::MAX } }), Code::JobRefused, "wall-ms"),
        (json!({ "parameters": length(78), "lane": "mps" }), Code::NotOffered, "lane"),
        (json!({ "parameters": length(78), "held_out": { "count": 60 } }), Code::JobRefused, "holding out"),
        (
            json!({ "parameters": { "max_length": 78 }, "sweep": [{ "key": "rank", "values": (1..=4000).collect::<Vec<_>>() }] }),
            Code::JobRefused,
            "1024 members",
        ),
    ] {
        let refused = unread(fields.clone()).await;
        assert_eq!(refused.code, code, "{refused:?}");
        assert!(refused.detail.as_deref().is_some_and(|detail| detail.contains(word)), "{word}: {refused:?}");
    }
    let tenant = rig.app.state.tenant_named("a").unwrap();
    rig.app.state.set_quota(tenant.id, &Quota { queued_jobs: Some(1), ..tenant.quota }).unwrap();
    assert_eq!(unread(json!({ "parameters": length(78) })).await.code, Code::QuotaExceeded);
}
