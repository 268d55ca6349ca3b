//! An upload that broke off goes on, for its owner alone, and is its content only where the digest is right.

use std::io::Write as _;

use nodus_protocol::Digest;
use nodus_state::{Quota, StateError};

use crate::support::fixture;

#[test]
fn an_upload_goes_on_where_it_broke_off() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let digest = Digest::of(b"first second");
    let mut staged = f.state.resume(a, digest, 0, 100).unwrap();
    staged.write_all(b"first ").unwrap();
    let busy = f.state.resume(a, digest, 6, 100).map(drop).unwrap_err();
    assert!(matches!(&busy, StateError::Upload(why) if why.contains("being uploaded")), "{busy}");
    drop(staged);
    assert_eq!((f.state.uploaded(a, digest).unwrap(), f.state.uploaded(b, digest).unwrap()), (6, 0));
    let wrong = f.state.resume(a, digest, 3, 100).map(drop).unwrap_err();
    assert!(matches!(&wrong, StateError::Upload(why) if why.contains("go on at 6")), "{wrong}");
    // A restart leaves it.
    let f = f.reopened();
    let mut staged = f.state.resume(a, digest, 6, 100).unwrap();
    staged.write_all(b"second").unwrap();
    let staged = staged.finish().unwrap();
    assert_eq!(staged.bytes(), 12);
    let kept = staged.keep().unwrap();
    assert_eq!((kept.digest(), f.state.uploaded(a, digest).unwrap()), (digest, 0));
}

#[test]
fn another_content_than_was_said_is_forgotten_and_a_bound_holds_across_pieces() {
    let f = fixture();
    let a = f.tenant("a");
    let digest = Digest::of(b"what was said");
    let mut staged = f.state.resume(a, digest, 0, 100).unwrap();
    staged.write_all(b"something else").unwrap();
    assert!(matches!(staged.finish(), Err(StateError::Upload(why)) if why.contains("digest")));
    assert_eq!(f.state.uploaded(a, digest).unwrap(), 0);
    let mut staged = f.state.resume(a, digest, 0, 8).unwrap();
    staged.write_all(b"what was").unwrap();
    drop(staged);
    let mut staged = f.state.resume(a, digest, 8, 8).unwrap();
    assert_eq!(staged.write_all(b" ").unwrap_err().kind(), std::io::ErrorKind::FileTooLarge);
    drop(staged);
    for number in 0..7_u8 {
        f.state.resume(a, Digest::of(&[number]), 0, 8).unwrap().write_all(b"x").unwrap();
    }
    assert!(matches!(f.state.resume(a, Digest::of(b"one more"), 0, 8), Err(StateError::Upload(why)) if why.contains("unfinished")));
    assert_eq!(f.state.forget_uploads().unwrap(), 0, "none is a day old");
}

#[test]
fn what_came_of_an_upload_counts_in_the_quota() {
    let f = fixture();
    let a = f.state.add_tenant("a", Quota { stored_bytes: Some(10), ..Quota::DEFAULT }).unwrap().id;
    f.state.resume(a, Digest::of(b"first"), 0, 100).unwrap().write_all(b"sixsix").unwrap();
    assert_eq!(f.state.usage(a).unwrap().stored_bytes, 6);
    let mut second = f.state.resume(a, Digest::of(b"second"), 0, 100).unwrap();
    second.write_all(b"four").unwrap();
    let refused = second.write_all(b"x").unwrap_err().downcast::<StateError>().unwrap();
    assert!(matches!(refused, StateError::Quota { quota: "stored-bytes", max: 10, used: 6, asked: 5 }), "{refused}");
    drop(second);
    assert!(matches!(f.state.resume(a, Digest::of(b"third"), 0, 100).map(drop), Err(StateError::Quota { .. })));
    // Those that are there go on, within it.
    assert!(f.state.resume(a, Digest::of(b"first"), 6, 100).is_ok());
}

#[test]
fn what_is_announced_is_refused_before_it_comes_and_what_came_can_be_dropped() {
    let f = fixture();
    let a = f.state.add_tenant("a", Quota { stored_bytes: Some(10), ..Quota::DEFAULT }).unwrap().id;
    let digest = Digest::of(b"eleven bytes");
    let mut staged = f.state.resume(a, digest, 0, 100).unwrap();
    staged.write_all(b"eleven").unwrap();
    assert!(staged.announce(4).is_ok());
    let refused = staged.announce(5).unwrap_err().downcast::<StateError>().unwrap();
    assert!(matches!(refused, StateError::Quota { max: 10, used: 0, asked: 11, .. }), "{refused}");
    assert_eq!(staged.announce(u64::MAX).unwrap_err().kind(), std::io::ErrorKind::FileTooLarge);
    assert!(matches!(f.state.drop_upload(a, digest), Err(StateError::Upload(why)) if why.contains("being uploaded")));
    drop(staged);
    assert!(matches!(f.state.drop_upload(f.tenant("b"), digest), Err(StateError::NotFound("upload"))));
    f.state.drop_upload(a, digest).unwrap();
    assert!(matches!(f.state.drop_upload(a, digest), Err(StateError::NotFound("upload"))));
    let mut staged = f.state.resume(a, digest, 0, 100).unwrap();
    staged.write_all(b"ten bytes!").unwrap();
    staged.forget();
    assert_eq!((f.state.uploaded(a, digest).unwrap(), f.state.usage(a).unwrap().stored_bytes), (0, 0));
    assert!(f.state.receive(a, 10).unwrap().announce(10).is_ok(), "nothing of it takes room");
}

/// Each of them alone would fit.
#[test]
fn uploads_at_the_same_time_share_the_rest_of_the_quota() {
    let f = fixture();
    let a = f.state.add_tenant("a", Quota { stored_bytes: Some(10), ..Quota::DEFAULT }).unwrap().id;
    let resume = |content: &[u8]| f.state.resume(a, Digest::of(content), 0, 100).unwrap();
    let (mut first, mut second, mut plain) = (resume(b"sixsix"), resume(b"second"), f.state.receive(a, 100).unwrap());
    first.write_all(b"sixsix").unwrap();
    second.write_all(b"tw").unwrap();
    plain.write_all(b"12").unwrap();
    for staged in [&mut first, &mut second, &mut plain] {
        let refused = staged.write_all(b"x").unwrap_err().downcast::<StateError>().unwrap();
        assert!(matches!(refused, StateError::Quota { max: 10, .. }), "{refused}");
    }
    assert!(matches!(f.state.receive(a, 100).map(drop), Err(StateError::Quota { .. })), "nothing is left for another");
    // What is given up is there for the others; what is kept is not, whether or not a row names it yet.
    drop(plain);
    second.write_all(b"o").unwrap();
    let first = first.finish().unwrap();
    let kept = first.keep().unwrap();
    second.write_all(b"!").unwrap();
    assert!(second.write_all(b"x").is_err());
    drop(kept);
    // What no row names by then was not kept.
    second.write_all(b"sixsix").unwrap();
    assert!(second.write_all(b"x").is_err());
    drop(second);
    // Nothing is under way, and 10 bytes are of the one that broke off.
    assert!(matches!(f.state.receive(a, 100).map(drop), Err(StateError::Quota { used: 10, .. })));
    let mut other = f.state.receive(f.tenant("b"), 100).unwrap();
    other.write_all(b"of another tenant").unwrap();
}
