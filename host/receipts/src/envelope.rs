//! A signed statement, in the form of DSSE v1 with one ed25519 signature: <https://github.com/secure-systems-lab/dsse>.
//!
//! Never looks into the payload, and reads no other writing of an envelope than its own: whatever is parsed, written again, gives
//! the same bytes. So an altered bit anywhere in a receipt's file is an error, also in what the signature does not cover.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

use crate::key::{HostKey, KeyId, KnownKeys, PublicKey};

/// The payload type of in-toto statements.
pub const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
/// The largest envelope that is read or written, in bytes.
pub const ENVELOPE_BYTES_MAX: usize = 64 << 20;

/// Why bytes are no envelope, or an envelope is not to be trusted.
#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    /// Larger than [`ENVELOPE_BYTES_MAX`].
    #[error("the envelope has {bytes} bytes; at most {ENVELOPE_BYTES_MAX} are allowed")]
    TooLarge {
        /// Its size, or the size that it would have.
        bytes: usize,
    },
    /// Not the JSON of an envelope.
    #[error("not a DSSE envelope: {0}")]
    Json(#[source] serde_json::Error),
    /// A field is not base64.
    #[error("`{field}` of the envelope is not base64: {source}")]
    Base64 {
        /// `payload` or `sig`.
        field: &'static str,
        /// Where and why.
        source: base64::DecodeError,
    },
    /// More signatures than one, or none.
    #[error("the envelope has {0} signatures; a receipt has exactly one")]
    SignatureCount(usize),
    /// Not an ed25519 signature.
    #[error("the signature has {0} bytes; an ed25519 signature has 64")]
    SignatureLength(usize),
    /// The same envelope, but written in another way.
    #[error("the envelope is not written as this program writes one (fields in order, no spaces, one newline at the end)")]
    NotCanonical,
    /// Signed by a key that is not known.
    #[error("signed with the unknown key {found}; known are: {known}")]
    UnknownKey {
        /// The key that the envelope names.
        found: KeyId,
        /// The keys that are known, separated by commas.
        known: String,
    },
    /// The named key did not sign this.
    #[error("the signature is not one of key {0} over this payload")]
    BadSignature(KeyId),
}

/// A payload, its type, and one signature over both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    payload_type: String,
    payload: Vec<u8>,
    keyid: KeyId,
    signature: [u8; 64],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    #[serde(rename = "payloadType")]
    payload_type: String,
    payload: String,
    signatures: Vec<WireSignature>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireSignature {
    keyid: KeyId,
    sig: String,
}

/// DSSE's pre-authentication encoding, the bytes that are signed: `DSSEv1`, then type and payload, each with its length in bytes.
#[must_use]
pub fn pre_authentication_encoding(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut bytes = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len()).into_bytes();
    bytes.extend_from_slice(payload);
    bytes
}

impl Envelope {
    /// Signs an in-toto statement. The same statement and key give the same envelope.
    #[must_use]
    pub fn sign(statement: Vec<u8>, key: &HostKey) -> Self {
        let signature = key.sign(&pre_authentication_encoding(PAYLOAD_TYPE, &statement));
        Self { payload_type: PAYLOAD_TYPE.to_owned(), payload: statement, keyid: key.public().id(), signature }
    }

    /// Reads an envelope. Says nothing yet of its signature: see [`Envelope::verify`].
    ///
    /// # Errors
    /// The bytes are not exactly what [`Envelope::to_bytes`] writes.
    pub fn parse(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        if bytes.len() > ENVELOPE_BYTES_MAX {
            return Err(EnvelopeError::TooLarge { bytes: bytes.len() });
        }
        let wire: Wire = serde_json::from_slice(bytes).map_err(EnvelopeError::Json)?;
        let decode = |field, text: &str| STANDARD.decode(text).map_err(|source| EnvelopeError::Base64 { field, source });
        let [signature] = wire.signatures.as_slice() else {
            return Err(EnvelopeError::SignatureCount(wire.signatures.len()));
        };
        let raw = decode("sig", &signature.sig)?;
        let envelope = Self {
            payload: decode("payload", &wire.payload)?,
            keyid: signature.keyid,
            signature: raw.as_slice().try_into().map_err(|_| EnvelopeError::SignatureLength(raw.len()))?,
            payload_type: wire.payload_type,
        };
        if envelope.to_bytes()? != bytes {
            return Err(EnvelopeError::NotCanonical);
        }
        Ok(envelope)
    }

    /// The envelope as a file: JSON on one line, with a newline.
    ///
    /// # Errors
    /// It would be larger than [`ENVELOPE_BYTES_MAX`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, EnvelopeError> {
        let wire = Wire {
            payload_type: self.payload_type.clone(),
            payload: STANDARD.encode(&self.payload),
            signatures: vec![WireSignature { keyid: self.keyid, sig: STANDARD.encode(self.signature) }],
        };
        let mut bytes = serde_json::to_vec(&wire).map_err(EnvelopeError::Json)?;
        bytes.push(b'\n');
        if bytes.len() > ENVELOPE_BYTES_MAX {
            return Err(EnvelopeError::TooLarge { bytes: bytes.len() });
        }
        Ok(bytes)
    }

    /// Checks the signature against the known key that the envelope names; that key.
    ///
    /// # Errors
    /// The key is not known, or did not sign this.
    pub fn verify<'k>(&self, known: &'k KnownKeys) -> Result<&'k PublicKey, EnvelopeError> {
        let key = known.get(self.keyid).ok_or_else(|| EnvelopeError::UnknownKey { found: self.keyid, known: known.to_string() })?;
        let signed = pre_authentication_encoding(&self.payload_type, &self.payload);
        if key.has_signed(&signed, &self.signature) { Ok(key) } else { Err(EnvelopeError::BadSignature(self.keyid)) }
    }

    /// What the payload is said to be.
    #[must_use]
    pub fn payload_type(&self) -> &str {
        &self.payload_type
    }

    /// The payload, not yet to be trusted unless [`Envelope::verify`] was content.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The key that the envelope says it is signed with.
    #[must_use]
    pub fn keyid(&self) -> KeyId {
        self.keyid
    }
}

/// The digest by which the ledger and the next receipt name a receipt: over its file's bytes, as `sha256sum receipt.json` says.
#[must_use]
pub fn receipt_digest(envelope: &[u8]) -> Digest {
    Digest::of(envelope)
}
