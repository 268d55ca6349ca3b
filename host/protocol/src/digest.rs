//! A SHA-256 digest, written `sha256:` and 64 lower-case hexadecimal digits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest. Its text form is `sha256:` and 64 lower-case hexadecimal digits, also in JSON.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest([u8; 32]);

/// A text that is no digest.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no digest: expected `sha256:` and 64 lower-case hexadecimal digits")]
pub struct DigestParseError(String);

impl Digest {
    /// The digest of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// A digest that was computed elsewhere, piece by piece.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The 64 hexadecimal digits without the prefix, fit for a file name.
    #[must_use]
    pub fn hex(&self) -> String {
        self.0.iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Digest {
    type Err = DigestParseError;

    fn from_str(text: &str) -> Result<Self, DigestParseError> {
        let error = || DigestParseError(text.chars().take(80).collect());
        let hex = text.strip_prefix("sha256:").ok_or_else(error)?.as_bytes();
        if hex.len() != 64 {
            return Err(error());
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.chunks_exact(2)) {
            for &digit in pair {
                let value = match digit {
                    b'0'..=b'9' => digit - b'0',
                    b'a'..=b'f' => digit - b'a' + 10,
                    _ => return Err(error()),
                };
                *byte = *byte << 4 | value;
            }
        }
        Ok(Self(bytes))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestParseError;

    fn try_from(text: String) -> Result<Self, DigestParseError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::Digest;

    #[test]
    fn text_form_round_trips_and_other_texts_are_refused() {
        let digest = Digest::of(b"abc");
        let text = digest.to_string();
        assert_eq!(text, "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(text.parse::<Digest>().unwrap(), digest);
        for bad in ["", "sha256:", &text[7..], &text.to_uppercase(), &text[..70], &format!("{text}0"), &text.replace('b', "g")] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
