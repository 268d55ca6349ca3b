//! The host's key as a file: made once, with mode 0600, whole or not at all.
//!
//! Never overwrites a private key, and never uses one that others may read.

use std::io::{self, Read as _, Write as _};

use cap_std::fs::{Dir, File, OpenOptions, OpenOptionsExt as _, PermissionsExt as _};
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey as _, EncodePrivateKey as _, KeypairBytes};
use zeroize::Zeroizing;

use super::{HostKey, KeyError};
use crate::files::{exclusive, sync_dir};

/// The private key's file: PKCS#8 in PEM.
pub const PRIVATE_KEY_FILE: &str = "host_key.pem";
/// The public key's file, for auditors: SubjectPublicKeyInfo in PEM.
pub const PUBLIC_KEY_FILE: &str = "host_key.pub.pem";
const PARTIAL: &str = ".host_key.pem.partial";
const PARTIAL_PUBLIC: &str = ".host_key.pub.pem.partial";
const LOCK: &str = "host_key.lock";
/// A PEM without the optional public half and without a newline at its end.
const BYTES_MIN: u64 = 118;
/// Room for the public half and for other line endings.
const BYTES_MAX: u64 = 1024;

impl HostKey {
    /// The key in this folder; at the first start, a new one. Several processes may start at once: they get the same key.
    ///
    /// # Errors
    /// The folder refuses, or what is there is no key, is not the owner's alone, or does not match its public half.
    pub fn open_or_create(dir: &Dir) -> Result<Self, KeyError> {
        if let Some(key) = read(dir)?
            && is_published(dir, &key)?
        {
            return Ok(key);
        }
        let _lock = exclusive(dir, LOCK).map_err(io("locking", LOCK))?;
        let key = match read(dir)? {
            Some(key) => key,
            None => create(dir)?,
        };
        if !is_published(dir, &key)? {
            publish(dir, &key)?;
        }
        Ok(key)
    }

    /// The key in this folder, which must be there.
    ///
    /// # Errors
    /// As [`HostKey::open_or_create`], and `NotFound` where there is none.
    pub fn open(dir: &Dir) -> Result<Self, KeyError> {
        read(dir)?.ok_or_else(|| io("opening", PRIVATE_KEY_FILE)(io::ErrorKind::NotFound.into()))
    }
}

fn io(action: &'static str, file: &'static str) -> impl FnOnce(io::Error) -> KeyError {
    move |source| KeyError::Io { action, file, source }
}

fn read(dir: &Dir) -> Result<Option<HostKey>, KeyError> {
    let file = match dir.open(PRIVATE_KEY_FILE) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io("opening", PRIVATE_KEY_FILE)(error)),
    };
    let metadata = file.metadata().map_err(io("reading", PRIVATE_KEY_FILE))?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & !0o600 != 0 {
        return Err(KeyError::Permissions { file: PRIVATE_KEY_FILE, mode });
    }
    let bytes = metadata.len();
    if !(BYTES_MIN..=BYTES_MAX).contains(&bytes) {
        return Err(KeyError::Length { file: PRIVATE_KEY_FILE, bytes, expected_min: BYTES_MIN, expected_max: BYTES_MAX });
    }
    let mut text = Zeroizing::new(Vec::with_capacity(BYTES_MAX as usize));
    file.take(BYTES_MAX).read_to_end(&mut text).map_err(io("reading", PRIVATE_KEY_FILE))?;
    let malformed = |reason: String| KeyError::Malformed { file: PRIVATE_KEY_FILE, reason };
    let text = std::str::from_utf8(&text).map_err(|error| malformed(error.to_string()))?;
    let key = SigningKey::from_pkcs8_pem(text).map_err(|error| malformed(error.to_string()))?;
    Ok(Some(HostKey(key)))
}

/// Makes a key under another name and links it into place, which fails if something has come to be there. Called under the lock.
fn create(dir: &Dir) -> Result<HostKey, KeyError> {
    let mut secret = Zeroizing::new([0; 32]);
    getrandom::fill(secret.as_mut()).map_err(KeyError::Random)?;
    let key = HostKey::from_secret(&secret);
    // Without the public half: the older form of PKCS#8, which every tool reads.
    let pair = KeypairBytes { secret_key: *secret, public_key: None };
    let text =
        pair.to_pkcs8_pem(LineEnding::LF).map_err(|error| KeyError::Malformed { file: PRIVATE_KEY_FILE, reason: error.to_string() })?;
    write(dir, PARTIAL, 0o600, text.as_bytes()).map_err(io("writing", PARTIAL))?;
    dir.hard_link(PARTIAL, dir, PRIVATE_KEY_FILE).map_err(io("creating", PRIVATE_KEY_FILE))?;
    dir.remove_file(PARTIAL).map_err(io("removing", PARTIAL))?;
    sync_dir(dir).map_err(io("creating", PRIVATE_KEY_FILE))?;
    Ok(key)
}

/// Whether the public key's file is there; an error where it is another key's.
fn is_published(dir: &Dir, key: &HostKey) -> Result<bool, KeyError> {
    match dir.read(PUBLIC_KEY_FILE) {
        Ok(found) if found == key.public().to_pem()?.as_bytes() => Ok(true),
        Ok(_) => Err(KeyError::PublicDiffers { file: PUBLIC_KEY_FILE, private: PRIVATE_KEY_FILE, expected: key.public().id() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io("reading", PUBLIC_KEY_FILE)(error)),
    }
}

/// Writes the public key beside the private one. Called under the lock.
fn publish(dir: &Dir, key: &HostKey) -> Result<(), KeyError> {
    let pem = key.public().to_pem()?;
    write(dir, PARTIAL_PUBLIC, 0o644, pem.as_bytes())
        .and_then(|()| dir.rename(PARTIAL_PUBLIC, dir, PUBLIC_KEY_FILE))
        .and_then(|()| sync_dir(dir))
        .map_err(io("writing", PUBLIC_KEY_FILE))
}

/// A new file, on the disk when this returns. What a killed process left under that name is removed.
fn write(dir: &Dir, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
    match dir.remove_file(name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file: File = dir.open_with(name, OpenOptions::new().write(true).create_new(true).mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()
}
