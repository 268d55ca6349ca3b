//! What is downloaded of a job.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bytes as they are.
#[derive(Clone, Debug, PartialEq, Eq, ToSchema)]
#[schema(value_type = String, format = Binary)]
pub struct Bytes(pub Vec<u8>);

/// A receipt: an in-toto statement in a DSSE envelope (<https://github.com/secure-systems-lab/dsse>).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Receipt {
    /// `application/vnd.in-toto+json`.
    #[serde(rename = "payloadType")]
    pub payload_type: String,
    /// The statement's JSON, in base64.
    pub payload: String,
    /// One.
    pub signatures: Vec<Signature>,
}

/// A signature of a receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Signature {
    /// The key, as `/v1/key` names it.
    pub keyid: String,
    /// Ed25519 over the pre-authentication encoding of the payload, in base64.
    pub sig: String,
}
