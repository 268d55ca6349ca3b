//! The key's files: made once, the owner's alone, never overwritten.
//!
//! Never runs as another user: permissions are read, not tried.

use cap_std::fs::{Permissions, PermissionsExt as _};
use nodus_receipts::key::{KeyError, PRIVATE_KEY_FILE, PUBLIC_KEY_FILE};
use nodus_receipts::{HostKey, KeyId, PublicKey};

use crate::support::{clone, folder};

#[test]
fn the_first_start_makes_a_key_and_later_ones_find_it() {
    let dir = folder();
    let first = HostKey::open_or_create(&dir).unwrap();
    let private = dir.read_to_string(PRIVATE_KEY_FILE).unwrap();
    assert_eq!(dir.metadata(PRIVATE_KEY_FILE).unwrap().permissions().mode() & 0o7777, 0o600);
    assert!(private.starts_with("-----BEGIN PRIVATE KEY-----\n") && private.ends_with("-----END PRIVATE KEY-----\n"));
    let again = HostKey::open_or_create(&dir).unwrap();
    assert_eq!(again.public(), first.public());
    assert_eq!(HostKey::open(&dir).unwrap().public(), first.public());
    assert_eq!(dir.read_to_string(PRIVATE_KEY_FILE).unwrap(), private);
    let mut names: Vec<_> = dir.entries().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["host_key.lock", "host_key.pem", "host_key.pub.pem"]);
    assert_ne!(HostKey::open_or_create(&folder()).unwrap().public(), first.public());
}

#[test]
fn an_auditor_reads_the_public_key() {
    let dir = folder();
    let key = HostKey::open_or_create(&dir).unwrap();
    let public = PublicKey::from_pem(&dir.read_to_string(PUBLIC_KEY_FILE).unwrap()).unwrap();
    assert_eq!(public, key.public());
    assert!(public.has_signed(b"message", &key.sign(b"message")));
    assert!(!public.has_signed(b"Message", &key.sign(b"message")));
    let id = public.id().to_string();
    assert_eq!((id.len(), id.parse::<KeyId>().unwrap()), (64, public.id()));
    assert!(id.to_uppercase().parse::<KeyId>().is_err());
    for bad in ["", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", &dir.read_to_string(PRIVATE_KEY_FILE).unwrap()] {
        assert!(matches!(PublicKey::from_pem(bad), Err(KeyError::PublicMalformed(_))), "{bad}");
    }
}

/// The identity point: every signature of zeros is one of its own.
#[test]
fn a_key_with_which_anybody_can_sign_is_refused() {
    let pem = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAAQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n-----END PUBLIC KEY-----\n";
    assert!(matches!(PublicKey::from_pem(pem), Err(KeyError::Weak)));
}

#[test]
fn the_key_of_rfc_8410_is_read_as_its_authors_wrote_it() {
    let dir = folder();
    let pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    dir.write(PRIVATE_KEY_FILE, pem).unwrap();
    dir.set_permissions(PRIVATE_KEY_FILE, Permissions::from_mode(0o600)).unwrap();
    let public = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n";
    assert_eq!(HostKey::open(&dir).unwrap().public().to_pem().unwrap(), public);
}

#[test]
fn a_key_that_others_may_read_is_refused_and_left_alone() {
    let dir = folder();
    HostKey::open_or_create(&dir).unwrap();
    for mode in [0o640, 0o604, 0o660, 0o700, 0o644, 0o4600] {
        dir.set_permissions(PRIVATE_KEY_FILE, Permissions::from_mode(mode)).unwrap();
        let error = HostKey::open_or_create(&dir).unwrap_err();
        assert!(matches!(error, KeyError::Permissions { mode: found, .. } if found == mode), "{error}");
        assert!(error.to_string().contains(&format!("{mode:04o}")) && error.to_string().contains("0600"), "{error}");
    }
    dir.set_permissions(PRIVATE_KEY_FILE, Permissions::from_mode(0o400)).unwrap();
    HostKey::open_or_create(&dir).unwrap();
}

#[test]
fn a_damaged_key_is_refused_and_never_overwritten() {
    let dir = folder();
    HostKey::open_or_create(&dir).unwrap();
    let whole = dir.read(PRIVATE_KEY_FILE).unwrap();
    let expect = |bytes: &[u8], is_length: bool| {
        dir.write(PRIVATE_KEY_FILE, bytes).unwrap();
        let error = HostKey::open_or_create(&dir).unwrap_err();
        assert_eq!(matches!(error, KeyError::Length { .. }), is_length, "{error}");
        assert_eq!(matches!(error, KeyError::Malformed { .. }), !is_length, "{error}");
        assert_eq!(dir.read(PRIVATE_KEY_FILE).unwrap(), bytes);
    };
    for bytes in 0..whole.len() - 1 {
        expect(&whole[..bytes], true);
    }
    expect(&vec![b'A'; 2000], true);
    expect(&vec![b'A'; whole.len()], false);
    expect(&vec![0xff; whole.len()], false);
    // 33 bytes where 32 belong.
    let long =
        "-----BEGIN PRIVATE KEY-----\nMC8CAQAwBQYDK2VwBCMEIdTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhCAA==\n-----END PRIVATE KEY-----\n";
    expect(long.as_bytes(), false);
}

#[test]
fn the_public_file_is_written_again_if_it_is_gone_and_refused_if_it_is_anothers() {
    let (dir, other) = (folder(), folder());
    let key = HostKey::open_or_create(&dir).unwrap();
    let pem = dir.read(PUBLIC_KEY_FILE).unwrap();
    dir.remove_file(PUBLIC_KEY_FILE).unwrap();
    assert_eq!(HostKey::open_or_create(&dir).unwrap().public(), key.public());
    assert_eq!(dir.read(PUBLIC_KEY_FILE).unwrap(), pem);
    HostKey::open_or_create(&other).unwrap();
    other.copy(PUBLIC_KEY_FILE, &dir, PUBLIC_KEY_FILE).unwrap();
    assert!(matches!(HostKey::open_or_create(&dir), Err(KeyError::PublicDiffers { .. })));
}

#[test]
fn what_a_killed_start_left_does_not_become_the_key() {
    let dir = folder();
    dir.write(".host_key.pem.partial", "half").unwrap();
    dir.set_permissions(".host_key.pem.partial", Permissions::from_mode(0o644)).unwrap();
    HostKey::open_or_create(&dir).unwrap();
    assert!(!dir.exists(".host_key.pem.partial"));
    assert_eq!(dir.metadata(PRIVATE_KEY_FILE).unwrap().permissions().mode() & 0o7777, 0o600);
}

#[test]
fn starts_at_the_same_time_get_the_same_key() {
    let dir = folder();
    let starts: Vec<_> = (0..8)
        .map(|_| {
            let dir = clone(&dir);
            std::thread::spawn(move || HostKey::open_or_create(&dir).unwrap().public().id())
        })
        .collect();
    let ids: std::collections::BTreeSet<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
    assert_eq!(ids.len(), 1);
}

#[test]
fn the_secret_is_not_shown() {
    let key = HostKey::from_secret(&[0xab; 32]);
    assert_eq!(format!("{key:?}"), format!("HostKey({})", key.public().id()));
}
