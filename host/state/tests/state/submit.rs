//! What comes in: items, sweeps, idempotency keys, quotas.

use nodus_protocol::Digest;
use nodus_state::{Filter, ItemKind, Key, NewItem, Owner, Priority, Quota, Reference, Role, StateError};

use crate::support::{event, fixture, sweep};

#[test]
fn the_same_request_under_one_key_is_one_submission() {
    let f = fixture();
    let a = f.tenant("a");
    let spec = f.spec(a);
    let key = |text: &str, request: &[u8]| Key { key: text.into(), request: Digest::of(request) };
    let first = f.state.submit(a, Some(&key("k", b"1")), &sweep(&[spec.clone(), spec.clone()])).unwrap();
    let again = f.state.submit(a, Some(&key("k", b"1")), &sweep(&[spec.clone(), spec.clone()])).unwrap();
    assert!(first.is_new && !again.is_new);
    assert_eq!((&first.jobs, first.cohort), (&again.jobs, again.cohort));
    assert!(matches!(f.state.submit(a, Some(&key("k", b"2")), &spec.into()).unwrap_err(), StateError::KeyReused));
    let b = f.tenant("b");
    assert!(f.state.submit(b, Some(&key("k", b"2")), &f.spec(b).into()).unwrap().is_new, "keys are a tenant's own");
    assert_eq!(f.state.jobs(a, &Filter::default(), 10).unwrap().jobs.len(), 2);
}

#[test]
fn a_key_is_answered_without_what_the_request_names_and_with_the_members_that_are_there() {
    let f = fixture();
    let a = f.tenant("a");
    let named = |name: &str| nodus_state::JobSpec { name: name.into(), ..f.spec(a) };
    let key = Key { key: "k".into(), request: Digest::of(b"1") };
    assert_eq!(f.state.submitted(a, &key).unwrap(), None);
    let first = f.state.submit(a, Some(&key), &sweep(&[named("x=1"), named("x=\"2\""), named("x=3")])).unwrap();
    f.state.remove_item(Owner::Tenant(a), ItemKind::Data, &Reference::Name("rows".into())).unwrap();
    f.state.cancel(a, first.jobs[0], nodus_state::Stop::Cancel).unwrap();
    f.state.delete_job(a, first.jobs[0]).unwrap();
    let again = f.state.submitted(a, &key).unwrap().unwrap();
    assert_eq!((again.cohort, again.is_new, again.jobs.as_slice()), (first.cohort, false, &first.jobs[1..]));
    assert_eq!(again.names, ["x=\"2\"", "x=3"]);
    assert!(matches!(f.state.submitted(a, &Key { request: Digest::of(b"2"), ..key }).unwrap_err(), StateError::KeyReused));
}

#[test]
fn a_submission_is_all_or_nothing() {
    let f = fixture();
    let a = f.tenant("a");
    let (good, mut bad) = (f.spec(a), f.spec(a));
    bad.init_adapter = Some(Digest::of(b"nothing of this content"));
    assert!(matches!(f.state.submit(a, None, &sweep(&[good.clone(), bad])).unwrap_err(), StateError::NotFound("adapter")));
    let mut bad = good.clone();
    bad.common.data.digest = Digest::of(b"nothing of this content");
    assert!(matches!(f.state.submit(a, None, &bad.into()).unwrap_err(), StateError::NotFound("data set")));
    f.state.set_quota(a, &Quota { queued_jobs: Some(2), ..Quota::DEFAULT }).unwrap();
    let three = [good.clone(), good.clone(), good.clone()];
    let error = f.state.submit(a, None, &sweep(&three)).unwrap_err();
    assert!(matches!(error, StateError::Quota { quota: "queued-jobs", max: 2, used: 0, asked: 3 }), "{error}");
    f.state.set_quota(a, &Quota { device_bytes: Some(29), ..Quota::DEFAULT }).unwrap();
    let error = f.state.submit(a, None, &sweep(&three[..1])).unwrap_err();
    assert!(matches!(error, StateError::Quota { quota: "device-bytes", asked: 30, .. }), "{error}");
    f.state.set_quota(a, &Quota { device_ms: Some(0), ..Quota::DEFAULT }).unwrap();
    assert!(matches!(f.state.submit(a, None, &sweep(&three[..1])).unwrap_err(), StateError::Quota { quota: "device-ms", .. }));
    assert!(f.state.jobs(a, &Filter::default(), 10).unwrap().jobs.is_empty() && f.state.queued().unwrap().is_empty());
}

#[test]
fn the_queue_goes_by_priority_then_age_and_leaves_disabled_tenants_out() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let low = f.job(a);
    let mut urgent = f.spec(b);
    urgent.common.priority = Priority::High;
    let high = f.state.submit(b, None, &urgent.into()).unwrap().jobs[0];
    let last = f.job(a);
    let order = || f.state.queued().unwrap().iter().map(|queued| queued.job).collect::<Vec<_>>();
    assert_eq!(order(), [high, low, last]);
    let ahead = [low, last].map(|job| f.state.job(a, job).unwrap().ahead);
    assert_eq!(ahead, [Some(0), Some(1)], "another tenant's job is not counted");
    let mut urgent = f.spec(a);
    urgent.common.priority = Priority::High;
    f.state.submit(a, None, &urgent.into()).unwrap();
    let page = f.state.jobs(a, &Filter::default(), 2).unwrap().jobs;
    assert_eq!(page.iter().map(|job| job.ahead).collect::<Vec<_>>(), [Some(0), Some(2)], "of a page too, beyond it");
    f.state.cancel(a, page[0].id, nodus_state::Stop::Cancel).unwrap();
    assert_eq!(f.state.job(a, page[0].id).unwrap().ahead, None);
    f.state.set_disabled(b, true).unwrap();
    assert_eq!(order(), [low, last]);
    f.state.say_why(&[(low, "waiting for device memory".into()), (high, "x".into())]).unwrap();
    assert_eq!(f.state.job(a, low).unwrap().reason.as_deref(), Some("waiting for device memory"));
}

#[test]
fn a_job_keeps_its_inputs_when_the_item_is_removed() {
    let f = fixture();
    let a = f.tenant("a");
    let job = f.job(a);
    f.state.remove_item(Owner::Tenant(a), ItemKind::Data, &Reference::Name("rows".into())).unwrap();
    assert_eq!(f.state.gc().unwrap().blobs, 0);
    let work = f.state.work(job).unwrap();
    assert_eq!((work.tenant_name.as_str(), work.spec.common.seed, work.inputs.len()), ("a", u64::MAX, 2));
    for (role, file) in &work.inputs {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut f.state.open_file(file).unwrap(), &mut text).unwrap();
        assert_eq!(text, if *role == Role::Component { "component" } else { "rows" });
    }
}

#[test]
fn a_name_has_one_content_and_a_page_begins_where_the_last_one_ended() {
    let f = fixture();
    let a = f.tenant("a");
    let add = |content: &[u8]| f.item(Owner::Tenant(a), ItemKind::Data, Some("d"), content);
    assert_eq!(add(b"1").unwrap(), add(b"1").unwrap());
    assert!(matches!(add(b"2").unwrap_err(), StateError::Taken(name) if name == "d"));
    f.state.set_quota(a, &Quota { stored_bytes: Some(1), ..Quota::DEFAULT }).unwrap();
    let again = f.item(Owner::Tenant(a), ItemKind::Data, Some("e"), b"1");
    assert!(again.is_ok(), "the same content costs nothing more");
    let error = f.item(Owner::Tenant(a), ItemKind::Data, Some("f"), b"3").unwrap_err();
    assert!(matches!(error, StateError::Quota { quota: "stored-bytes", max: 1, used: 1, asked: 1 }), "{error}");
    f.state.set_quota(a, &Quota::DEFAULT).unwrap();
    let jobs: Vec<_> = (0..5).map(|_| f.job(a)).collect();
    let page =
        |before| f.state.jobs(a, &Filter { before, ..Filter::default() }, 2).unwrap().jobs.iter().map(|job| job.id).collect::<Vec<_>>();
    assert_eq!(page(None), [jobs[4], jobs[3]]);
    assert_eq!(page(Some(jobs[3])), [jobs[2], jobs[1]]);
    assert_eq!(page(Some(jobs[1])), [jobs[0]]);
}

/// Nobody can remove an adapter by itself: it comes with the jobs that start from it, and goes with the last of them.
#[test]
fn an_adapter_stays_as_long_as_a_job_that_starts_from_it() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let submit = |of, weights: &[u8], is_good: bool| {
        let files = [("config".to_owned(), f.blob(b"the same of all")), ("weights".to_owned(), f.blob(weights))];
        let (digest, about) = (Digest::of(weights), serde_json::Value::Null);
        let new = NewItem { kind: ItemKind::Adapter, owner: Owner::Tenant(of), name: None, digest, about: &about, files: &files };
        let mut spec = f.spec(of);
        spec.init_adapter = Some(digest);
        if !is_good {
            spec.common.data.digest = digest;
        }
        f.state.submit_from(of, None, &spec.into(), &[new]).map(|submitted| submitted.jobs[0])
    };
    let there = |of| f.state.items(of, ItemKind::Adapter).unwrap().into_iter().map(|item| item.digest).collect::<Vec<_>>();
    submit(a, b"one", false).unwrap_err();
    assert_eq!(there(a), []);
    let (first, second, other) = (submit(a, b"one", true).unwrap(), submit(a, b"one", true).unwrap(), submit(a, b"two", true).unwrap());
    submit(b, b"one", true).unwrap();
    let delete = |job| {
        f.state.cancel(a, job, nodus_state::Stop::Cancel).unwrap();
        f.state.delete_job(a, job).unwrap();
    };
    delete(first);
    assert_eq!(there(a), [Digest::of(b"one"), Digest::of(b"two")]);
    delete(second);
    assert_eq!(there(a), [Digest::of(b"two")], "another tenant's job keeps nothing of this one's");
    delete(other);
    assert_eq!((there(a), there(b)), (vec![], vec![Digest::of(b"one")]));
    f.state.gc().unwrap();
    let usage = f.state.usage(a).unwrap().stored_bytes;
    assert_eq!(usage, ("component".len() + "rows".len()) as u64);
}

/// What a sweep has in common is there once, whatever it has members; a page of them, or of jobs, is no larger than an answer may be.
#[test]
fn large_parameters_are_kept_once_counted_and_shown_a_few_at_a_time() {
    let f = fixture();
    let a = f.tenant("a");
    let before = f.state.usage(a).unwrap().stored_bytes;
    let large = 1 << 20;
    let member = |n: u64| {
        let mut spec = f.spec(a);
        spec.common.parameters.insert("text".into(), "x".repeat(large).into());
        spec.common.parameters.insert("lr".into(), n.into());
        spec.common.parameters.sort_keys();
        nodus_state::JobSpec { name: format!("lr={n}"), varied: [("lr".to_owned(), n.into())].into_iter().collect(), ..spec }
    };
    let specs: Vec<_> = (0..20).map(member).collect();
    let submitted = f.state.submit(a, None, &sweep(&specs)).unwrap();
    let grown = usize::try_from(f.state.usage(a).unwrap().stored_bytes - before).unwrap();
    assert!((large..large + 20_000).contains(&grown), "{grown}");
    let (mut after, mut shown) = (None, Vec::new());
    loop {
        let page = f.state.members(a, submitted.cohort, after, 100).unwrap();
        assert!((1..=4).contains(&page.jobs.len()), "{}", page.jobs.len());
        after = page.jobs.last().map(|job| job.member);
        shown.extend(page.jobs.into_iter().map(|job| job.spec));
        if !page.is_more {
            break;
        }
    }
    assert_eq!(shown, specs);
    assert_eq!(f.state.work(submitted.jobs[7]).unwrap().spec, specs[7]);
    let (mut before, mut listed) = (None, Vec::new());
    loop {
        let page = f.state.jobs(a, &Filter { before, ..Filter::default() }, 100).unwrap();
        before = page.jobs.last().map(|job| job.id);
        listed.splice(0..0, page.jobs.iter().rev().map(|job| job.id));
        if !page.is_more {
            break;
        }
    }
    assert_eq!(listed, submitted.jobs);
    f.state.set_quota(a, &Quota { stored_bytes: Some(2 << 20), ..Quota::DEFAULT }).unwrap();
    let error = f.state.submit(a, None, &sweep(&specs[..1])).unwrap_err();
    assert!(matches!(error, StateError::Quota { quota: "stored-bytes", .. }), "{error}");
    f.state.set_quota(a, &Quota::DEFAULT).unwrap();
    let own: Vec<_> = (0..5).map(|n| nodus_state::JobSpec { name: format!("{n}{}", "x".repeat(large)), ..f.spec(a) }).collect();
    let error = f.state.submit(a, None, &sweep(&own)).unwrap_err();
    assert!(matches!(error, StateError::Sweep { .. }) && error.is_refusal(), "{error}");
    for job in submitted.jobs {
        f.state.cancel(a, job, nodus_state::Stop::Cancel).unwrap();
        f.state.delete_job(a, job).unwrap();
    }
    assert_eq!(f.state.usage(a).unwrap().stored_bytes, ("component".len() + "rows".len()) as u64, "all of it goes with the last member");
}

#[test]
fn jobs_of_high_priority_have_a_quota_of_their_own() {
    let f = fixture();
    let a = f.tenant("a");
    f.state.set_quota(a, &Quota { high_jobs: Some(2), ..Quota::DEFAULT }).unwrap();
    let mut high = f.spec(a);
    high.common.priority = Priority::High;
    let first = f.state.submit(a, None, &high.clone().into()).unwrap().jobs[0];
    f.state.claim(&[first], "cpu").unwrap();
    let refused = f.state.submit(a, None, &sweep(&[high.clone(), high.clone()])).unwrap_err();
    assert!(matches!(refused, StateError::Quota { quota: "high-jobs", max: 2, used: 1, asked: 2 }), "{refused}");
    f.state.submit(a, None, &high.clone().into()).unwrap();
    assert!(f.state.submit(a, None, &high.into()).is_err());
    f.state.submit(a, None, &f.spec(a).into()).unwrap();
    assert_eq!(f.state.usage(a).unwrap().high_jobs, 2);
}

#[test]
fn what_jobs_tell_is_stored_and_a_job_is_granted_no_more_than_there_is_room_for() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let [job, other] = [a, b].map(|of| f.job(of));
    let claim = f.state.claim(&[job], "cpu").unwrap()[0];
    let stored = |of| f.state.usage(of).unwrap().stored_bytes;
    let (before, others) = (stored(a), stored(b));
    let events: Vec<_> = (1..=10).map(event).collect();
    f.state.append(&claim, &events).unwrap();
    // Told again, it is there already.
    f.state.append(&claim, &events).unwrap();
    let told: u64 = events.iter().map(nodus_state::NewEvent::bytes).sum();
    assert_eq!((stored(a), stored(b), told), (before + told, others, 10 * 256 + 9 * 10 + 11));
    assert_eq!(f.state.grant(&claim, 5, 100).unwrap(), 100);
    f.state.set_quota(a, &Quota { stored_bytes: Some(stored(a) + 50), ..Quota::DEFAULT }).unwrap();
    assert_eq!([5, 50].map(|needed| f.state.grant(&claim, needed, 100).unwrap()), [50, 50]);
    assert!(matches!(f.state.grant(&claim, 51, 100), Err(StateError::Quota { quota: "stored-bytes", asked: 51, .. })));
    f.state.set_quota(a, &Quota { stored_bytes: None, ..Quota::DEFAULT }).unwrap();
    assert_eq!(f.state.grant(&claim, 5, 100).unwrap(), 100);
    assert!(f.state.job(b, other).is_ok());
}
