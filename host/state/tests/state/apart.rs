//! Two tenants cannot see each other through any function that takes a tenant.

use nodus_protocol::Digest;
use nodus_state::{EventKind, Filter, ItemKind, JobSpec, Owner, Reference, StateError, Stop, Stream, TenantId};

use crate::support::{Fixture, fixture};

/// All that a tenant can learn, as text, times and ids of its own left out.
fn view(f: &Fixture, of: TenantId) -> String {
    let kinds = ItemKind::ALL.iter();
    let items: Vec<_> = kinds.flat_map(|kind| f.state.items(of, *kind).unwrap()).map(|item| (item.name, item.digest, item.bytes)).collect();
    let jobs = f.state.jobs(of, &Filter::default(), 100).unwrap().jobs;
    let jobs: Vec<_> = jobs.iter().map(|job| (job.state, job.ahead, job.member, &job.spec, job.device_ms)).collect();
    format!("{items:?} {jobs:?} {:?}", f.state.usage(of).unwrap())
}

#[test]
fn nothing_of_another_tenant_is_there() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let before = view(&f, b);
    let (waiting, finished) = (f.job(a), f.finished(a));
    let cohort = f.state.job(a, finished).unwrap().cohort;
    assert_eq!(view(&f, b), before);
    let filter = Filter { before: Some(finished), ..Filter::default() };
    let digest = Reference::Digest(Digest::of(b"rows"));
    let errors = [
        f.state.job(b, finished).err(),
        f.state.jobs(b, &filter, 1).err(),
        f.state.members(b, cohort, None, 9).err(),
        f.state.artifacts(b, finished).err(),
        f.state.receipt(b, finished).err(),
        f.state.events(b, Stream::Job(finished), 0, &[], 9).err(),
        f.state.events(b, Stream::Cohort(cohort), 0, &[], 9).err(),
        f.state.latest_event(b, finished, EventKind::State).err(),
        f.state.has_ended(b, Stream::Job(finished)).err(),
        f.state.has_ended(b, Stream::Cohort(cohort)).err(),
        f.state.cancel(b, waiting, Stop::Cancel).err(),
        f.state.delete_job(b, finished).err(),
        f.state.item(b, ItemKind::Data, &digest).err(),
        f.state.item(b, ItemKind::Data, &Reference::Name("rows".into())).err(),
        f.state.item_files(b, ItemKind::Data, &digest).err(),
        f.state.remove_item(Owner::Tenant(b), ItemKind::Data, &digest).err(),
        f.state.remove_item(Owner::Shared, ItemKind::Data, &digest).err(),
        f.state.submit(b, None, &f.spec(a).into()).err(),
    ];
    for (number, error) in errors.iter().enumerate() {
        assert!(matches!(error, Some(StateError::NotFound(_))), "{number}: {error:?}");
    }
    assert_eq!(view(&f, b), before);
    assert_eq!(f.state.jobs(b, &Filter { cohort: Some(cohort), ..Filter::default() }, 9).unwrap().jobs, []);
    assert_eq!(f.state.job(a, waiting).unwrap().stop, None);
}

/// The same bytes are kept once, and neither tenant can tell: its own items, usage and quota are as if it were alone.
#[test]
fn the_same_content_is_one_blob_and_neither_can_tell() {
    let f = fixture();
    let (a, b, alone) = (f.tenant("a"), f.tenant("b"), fixture());
    let only = alone.tenant("only");
    let (spec, expected): (JobSpec, JobSpec) = (f.spec(a), alone.spec(only));
    assert_eq!((f.spec(b), spec), (expected.clone(), expected));
    f.finished(a);
    assert_eq!(view(&f, b), view(&alone, only));
    let blobs = std::fs::read_dir(f.folder.path().join("blobs")).unwrap().count();
    assert_eq!(blobs, 3, "component, rows and one artifact");
    f.state.remove_item(Owner::Tenant(a), ItemKind::Data, &Reference::Name("rows".into())).unwrap();
    f.state.gc().unwrap();
    let file = f.state.item_files(b, ItemKind::Data, &Reference::Name("rows".into())).unwrap().remove(0);
    assert!(f.state.open_file(&file).is_ok());
    assert_eq!(view(&f, b), view(&alone, only));
}

#[test]
fn what_the_operator_shares_is_there_for_all_and_removed_by_none() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let shared = f.item(Owner::Shared, ItemKind::Component, Some("sft"), b"ready-made").unwrap();
    let by_name = Reference::Name("sft".into());
    for tenant in [a, b] {
        assert_eq!(f.state.item(tenant, ItemKind::Component, &by_name).unwrap(), shared);
        assert!(f.state.remove_item(Owner::Tenant(tenant), ItemKind::Component, &by_name).is_err());
    }
    let own = f.item(Owner::Tenant(a), ItemKind::Component, Some("sft"), b"own").unwrap();
    assert_eq!(f.state.item(a, ItemKind::Component, &by_name).unwrap(), own, "the tenant's own goes first");
    assert_eq!(f.state.item(b, ItemKind::Component, &by_name).unwrap(), shared);
}
