//! What nobody refers to any more is gone from the disk, at once, and nothing else is.

use std::io::Write as _;

use nodus_protocol::Digest;
use nodus_state::{Collected, Depth, ItemKind, NewItem, Owner, Quota, Reference, StateError};

use crate::support::{Fixture, fixture};

fn remove(f: &Fixture, owner: Owner, content: &[u8]) {
    f.state.remove_item(owner, ItemKind::Data, &Reference::Digest(Digest::of(content))).unwrap();
}

#[test]
fn a_content_goes_with_the_last_that_refers_to_it() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    for owner in [Owner::Tenant(a), Owner::Tenant(b), Owner::Shared] {
        f.item(owner, ItemKind::Data, None, b"the same").unwrap();
    }
    let job = f.finished(a);
    let weights = format!("weights of {job}").into_bytes();
    let reference = Reference::Name("rows".into());
    let file = f.state.item_files(a, ItemKind::Data, &reference).unwrap().remove(0);
    f.state.remove_item(Owner::Tenant(a), ItemKind::Data, &reference).unwrap();
    remove(&f, Owner::Tenant(a), b"the same");
    remove(&f, Owner::Shared, b"the same");
    let there = |content: &[u8]| f.blob_path(content).exists();
    assert!(there(b"the same") && there(b"rows") && there(&weights), "another tenant has one, a job the others");
    assert!(f.state.open_file(&file).is_ok());
    assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
    remove(&f, Owner::Tenant(b), b"the same");
    f.state.delete_job(a, job).unwrap();
    assert!(!there(b"the same") && !there(b"rows") && !there(&weights));
    // Who was about to read it is told that it is not there, and not that anything is damaged.
    assert!(matches!(f.state.open_file(&file).unwrap_err(), StateError::NotFound("file")));
    assert_eq!(f.disk_bytes(), "component".len() as u64);
    assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
    assert_eq!(f.state.gc().unwrap(), Collected::default());
}

/// Uploaded and deleted, again and again.
#[test]
fn a_tenant_has_no_more_on_the_disk_than_its_quota() {
    let f = fixture();
    let a = f.state.add_tenant("a", Quota { stored_bytes: Some(20), ..Quota::DEFAULT }).unwrap().id;
    for round in 0..10_u8 {
        let content = [round; 15];
        let mut staged = f.state.receive(a, 100).unwrap();
        staged.write_all(&content).unwrap();
        let files = [("content".to_owned(), staged.keep().unwrap())];
        let (owner, digest, about) = (Owner::Tenant(a), Digest::of(&content), serde_json::Value::Null);
        f.state.add_item(&NewItem { kind: ItemKind::Data, owner, name: None, digest, about: &about, files: &files }).unwrap();
        drop(files);
        assert_eq!((f.disk_bytes(), f.state.usage(a).unwrap().stored_bytes), (15, 15));
        remove(&f, owner, &content);
        assert_eq!((f.disk_bytes(), f.state.usage(a).unwrap().stored_bytes), (0, 0));
    }
}

#[test]
fn what_was_kept_and_not_referred_to_goes_when_it_is_looked() {
    let f = fixture();
    let (a, held) = (f.tenant("a"), f.blob(b"held"));
    f.item(Owner::Tenant(a), ItemKind::Data, None, b"referred to").unwrap();
    drop(f.blob(b"nobody's"));
    drop(f.blob(b"held"));
    f.state.sweep().unwrap();
    let there = |content: &[u8]| f.blob_path(content).exists();
    assert!(there(b"held") && there(b"referred to") && !there(b"nobody's"));
    drop(held);
    f.state.sweep().unwrap();
    assert!(!there(b"held") && there(b"referred to"));
}

/// One lets a content go at the moment at which another brings it.
#[test]
fn who_brings_a_content_has_it_whoever_lets_it_go_meanwhile() {
    let f = fixture();
    let tenants = ["a", "b", "c"].map(|name| f.tenant(name));
    std::thread::scope(|scope| {
        for of in tenants {
            let f = &f;
            scope.spawn(move || {
                for _ in 0..60 {
                    f.item(Owner::Tenant(of), ItemKind::Data, None, b"the same").unwrap();
                    let reference = Reference::Digest(Digest::of(b"the same"));
                    let file = f.state.item_files(of, ItemKind::Data, &reference).unwrap().remove(0);
                    assert_eq!(f.state.read_file(&file).unwrap(), b"the same");
                    remove(f, Owner::Tenant(of), b"the same");
                }
            });
        }
        // Nor is what goes meanwhile a fault.
        for _ in 0..20 {
            assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
        }
    });
    f.state.sweep().unwrap();
    assert_eq!(f.disk_bytes(), 0);
    assert!(tenants.iter().all(|of| f.state.usage(*of).unwrap().stored_bytes == 0));
}
