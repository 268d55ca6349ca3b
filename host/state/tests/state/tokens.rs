//! Tokens open what they are for, and nothing once they are revoked.

use nodus_state::{Bearer, Quota, StateError};

use crate::support::fixture;

#[test]
fn a_token_is_its_tenants_until_it_is_revoked_or_the_tenant_disabled() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let (first, second) = (f.state.add_token(Some(a)).unwrap(), f.state.add_token(Some(a)).unwrap());
    let other = f.state.add_token(Some(b)).unwrap();
    let operator = f.state.add_token(None).unwrap();
    let whose = |token: &str| match f.state.bearer(token).unwrap() {
        None => "nobody".to_owned(),
        Some(Bearer::Operator) => "operator".to_owned(),
        Some(Bearer::Tenant(tenant)) => tenant.name,
    };
    assert_eq!([&first, &second, &other, &operator].map(|token| whose(token)), ["a", "a", "b", "operator"]);
    let third = f.state.rotate_tokens(Some(a)).unwrap();
    assert_eq!([&first, &second, &third, &other, &operator].map(|token| whose(token)), ["nobody", "nobody", "a", "b", "operator"]);
    assert_eq!(f.state.tokens(Some(a)).unwrap().iter().filter(|token| token.revoked_ms.is_none()).count(), 1);
    f.state.set_disabled(a, true).unwrap();
    assert_eq!(whose(&third), "nobody");
    f.state.set_disabled(a, false).unwrap();
    assert_eq!(whose(&third), "a");
    for bad in ["", "nodus_", &third[1..], &third.to_uppercase(), &format!("{third} "), &"nodus_".repeat(1000)] {
        assert_eq!(whose(bad), "nobody", "{bad}");
    }
}

#[test]
fn whatever_shuts_a_bearer_out_is_seen() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    f.state.add_token(Some(a)).unwrap();
    let mut before = f.state.bars().unwrap();
    f.state.add_token(Some(b)).unwrap();
    assert_eq!(f.state.bars().unwrap(), before, "a new token shuts nobody out");
    let mut is_seen = |change: &dyn Fn()| {
        change();
        std::mem::replace(&mut before, f.state.bars().unwrap()) != before
    };
    assert!(is_seen(&|| drop(f.state.rotate_tokens(Some(a)).unwrap())));
    assert!(is_seen(&|| f.state.set_disabled(a, true).unwrap()));
    assert!(is_seen(&|| {
        f.state.set_disabled(a, false).unwrap();
        f.state.set_disabled(b, true).unwrap();
    }));
}

#[test]
fn no_file_holds_a_token() {
    let f = fixture();
    let a = f.tenant("a");
    let token = f.state.add_token(Some(a)).unwrap();
    assert!(token.starts_with("nodus_") && token.len() == 6 + 64);
    for file in ["state.db", "state.db-wal"] {
        let content = std::fs::read(f.folder.path().join(file)).unwrap();
        let secret = &token.as_bytes()[6..];
        assert!(!content.windows(secret.len()).any(|part| part == secret), "{file}");
    }
}

#[test]
fn a_tenants_name_is_taken_once_and_its_quota_is_kept() {
    let f = fixture();
    let a = f.tenant("a");
    assert!(matches!(f.state.add_tenant("a", Quota::DEFAULT).unwrap_err(), StateError::Taken(name) if name == "a"));
    let quota = Quota { queued_jobs: Some(3), device_ms: Some(9), requests_per_second: None, ..Quota::DEFAULT };
    f.state.set_quota(a, &quota).unwrap();
    assert_eq!(f.state.tenant_named("a").unwrap().quota, quota);
    assert!(matches!(f.state.tenant_named("b").unwrap_err(), StateError::NotFound("tenant")));
}
