//! Whose signatures are believed, and which ledger a receipt is held against.
//!
//! Makes no key and no ledger.

use std::path::{Path, PathBuf};

use nodus_receipts::{KnownKeys, PublicKey, Reader};

use crate::books::{own_key, reader};
use crate::error::user;
use crate::paths::{Paths, shown};

/// Largest public key file.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// What an auditor starts from.
pub(super) struct Trust {
    pub(super) known: KnownKeys,
    /// None where none is at hand: chains are then not checked.
    pub(super) ledger: Option<Reader>,
}

/// The keys named, else this host's own; the ledger of the folder named, else this host's own with its own key.
///
/// # Errors
/// The user's: a key or folder is not there, or no key.
pub(super) fn trust(paths: Paths, data_dir: &Path, keys: &[PathBuf], ledger: Option<&Path>) -> anyhow::Result<Trust> {
    let named = ledger.map(|path| {
        let dir = paths.open_dir(path)?;
        reader(dir).ok_or_else(|| user(format!("{} has no ledger.jsonl", shown(path))))
    });
    let named = named.transpose()?;
    if keys.is_empty() {
        let own = paths.open_dir(data_dir).ok();
        let known = own.as_ref().map(own_key).transpose()?.flatten();
        let missing = || user(format!("this host has no key in {} yet: give the signing host's public key with --key", shown(data_dir)));
        return Ok(Trust { known: known.ok_or_else(missing)?, ledger: named.or_else(|| own.and_then(reader)) });
    }
    Ok(Trust { known: known(paths, keys)?, ledger: named })
}

/// The public keys in these files.
///
/// # Errors
/// The user's: one is not there, or no key.
pub(crate) fn known(paths: Paths, keys: &[PathBuf]) -> anyhow::Result<KnownKeys> {
    let read = |path: &PathBuf| {
        let text = String::from_utf8_lossy(&paths.read(path, KEY_BYTES_MAX)?).into_owned();
        PublicKey::from_pem(&text).map_err(|error| user(format!("{}: {error}", shown(path))))
    };
    keys.iter().map(read).collect()
}
