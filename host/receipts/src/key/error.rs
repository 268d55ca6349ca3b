//! What can be wrong with a key.
//!
//! Never quotes a key.

use std::io;

/// Why there is no key to work with.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The folder or a file in it cannot be used.
    #[error("{action} {file}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file of the folder.
        file: &'static str,
        /// Why it failed; `WouldBlock` where another process has been making the key for longer than 30 seconds.
        source: io::Error,
    },
    /// Others than the owner may read the private key, or somebody may run it.
    #[error("{file} has permissions {mode:04o}; a signing key must be 0600: find out who could read it, then `chmod 600` or replace it")]
    Permissions {
        /// The file.
        file: &'static str,
        /// Its permissions.
        mode: u32,
    },
    /// Not the length of a key's file.
    #[error("{file} has {bytes} bytes; a PKCS#8 ed25519 key in PEM has {expected_min} to {expected_max}")]
    Length {
        /// The file.
        file: &'static str,
        /// Its size.
        bytes: u64,
        /// The smallest that is a key.
        expected_min: u64,
        /// The largest that is read.
        expected_max: u64,
    },
    /// Not a private key.
    #[error("{file} is no ed25519 private key in PKCS#8 PEM: {reason}")]
    Malformed {
        /// The file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// Not a public key.
    #[error("not an ed25519 public key (SubjectPublicKeyInfo in PEM): {0}")]
    PublicMalformed(String),
    /// The public key's file is not that of the private key.
    #[error("{file} is not the public key of {private}: expected {expected}; restore the pair, or remove {file} to have it written again")]
    PublicDiffers {
        /// The public key's file.
        file: &'static str,
        /// The private key's file.
        private: &'static str,
        /// The id of the private key.
        expected: super::KeyId,
    },
    /// A key of small order.
    #[error("the public key is of small order: anybody can sign with it")]
    Weak,
    /// The system gave no random bytes.
    #[error("the system gave no random bytes for a new key: {0}")]
    Random(getrandom::Error),
}
