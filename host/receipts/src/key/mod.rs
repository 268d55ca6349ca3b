//! The host's ed25519 key, and the public keys that an auditor trusts.
//!
//! Never shows a secret: not in an error, not in a debug text, not in a file that others may read.

mod error;
mod file;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePublicKey as _, EncodePublicKey as _};
use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

pub use error::KeyError;
pub use file::{PRIVATE_KEY_FILE, PUBLIC_KEY_FILE};

/// A key's name: SHA-256 over the 32 bytes of the public key, written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct KeyId(Digest);

/// A text that is no [`KeyId`].
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no key id: expected 64 lower-case hexadecimal digits")]
pub struct KeyIdParseError(String);

impl FromStr for KeyId {
    type Err = KeyIdParseError;

    fn from_str(text: &str) -> Result<Self, KeyIdParseError> {
        format!("sha256:{text}").parse().map(Self).map_err(|_| KeyIdParseError(text.chars().take(80).collect()))
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.hex())
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl From<KeyId> for String {
    fn from(id: KeyId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for KeyId {
    type Error = KeyIdParseError;

    fn try_from(text: String) -> Result<Self, KeyIdParseError> {
        text.parse()
    }
}

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

impl PublicKey {
    /// Reads a public key as `openssl pkey -pubout` writes it: SubjectPublicKeyInfo in PEM.
    ///
    /// # Errors
    /// It is no ed25519 key, or one of the few with which anybody can sign.
    pub fn from_pem(text: &str) -> Result<Self, KeyError> {
        let key = VerifyingKey::from_public_key_pem(text).map_err(|error| KeyError::PublicMalformed(error.to_string()))?;
        if key.is_weak() { Err(KeyError::Weak) } else { Ok(Self(key)) }
    }

    /// The key as SubjectPublicKeyInfo in PEM.
    ///
    /// # Errors
    /// None that is known: the encoder's type says that there could be one.
    pub fn to_pem(&self) -> Result<String, KeyError> {
        self.0.to_public_key_pem(LineEnding::LF).map_err(|error| KeyError::PublicMalformed(error.to_string()))
    }

    /// The key's name.
    #[must_use]
    pub fn id(&self) -> KeyId {
        KeyId(Digest::of(self.0.as_bytes()))
    }

    /// Whether this is the key's signature over `message`, by the strict rules: one signature has one writing, and keys of small
    /// order sign nothing.
    #[must_use]
    pub fn has_signed(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        self.0.verify_strict(message, &Signature::from_bytes(signature)).is_ok()
    }
}

/// The key that a host signs with. It is wiped from memory when dropped.
#[derive(Clone)]
pub struct HostKey(SigningKey);

impl HostKey {
    /// A key that is kept elsewhere than in a file of this crate: its 32 secret bytes.
    #[must_use]
    pub fn from_secret(secret: &[u8; 32]) -> Self {
        Self(SigningKey::from_bytes(secret))
    }

    /// Signs; the same message gives the same signature.
    #[must_use]
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.0.sign(message).to_bytes()
    }

    /// The public half.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }
}

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKey({})", self.public().id())
    }
}

/// The keys whose signatures are believed.
#[derive(Clone, Debug, Default)]
pub struct KnownKeys(BTreeMap<KeyId, PublicKey>);

impl KnownKeys {
    /// The key of this name.
    #[must_use]
    pub fn get(&self, id: KeyId) -> Option<&PublicKey> {
        self.0.get(&id)
    }
}

impl FromIterator<PublicKey> for KnownKeys {
    fn from_iter<I: IntoIterator<Item = PublicKey>>(keys: I) -> Self {
        Self(keys.into_iter().map(|key| (key.id(), key)).collect())
    }
}

impl fmt::Display for KnownKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        let ids: Vec<_> = self.0.keys().map(KeyId::to_string).collect();
        f.write_str(&ids.join(", "))
    }
}
