//! What tenants bring and use: components, data sets, models.
//!
//! Names and digests; contents travel as bodies of their own.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A WebAssembly component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Component {
    /// `sha256:` and 64 hexadecimal digits, over its bytes. The same bytes have the same id.
    pub id: String,
    /// What a ready-made one is called.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// Its length.
    pub bytes: u64,
    /// Whether it is ready-made, there for all tenants.
    pub shared: bool,
    /// When it was added, Unix milliseconds.
    pub created_ms: u64,
}

/// Components.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ComponentList {
    /// The ready-made ones first, then by age.
    pub components: Vec<Component>,
}

/// A data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DataSet {
    /// What it is called.
    pub name: String,
    /// `sha256:` and 64 hexadecimal digits, over its bytes.
    pub digest: String,
    /// Its length.
    pub bytes: u64,
    /// How many rows it has.
    pub rows: u64,
    /// What the rows are, such as `prompt and completion`.
    pub form: String,
    /// Whether it is there for all tenants.
    pub shared: bool,
    /// When it was added, Unix milliseconds.
    pub created_ms: u64,
}

/// Data sets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DataSetList {
    /// Those of all tenants first, then by age.
    pub data: Vec<DataSet>,
}

/// A frozen base model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Model {
    /// What it is called.
    pub name: String,
    /// Over configuration, weights and tokenizer.
    pub digest: String,
    /// By its transformers name.
    pub architecture: String,
    /// How many parameters it has.
    pub parameters: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Whether text can be tokenised; without a tokenizer only data of `tokens` works.
    pub tokenizer: bool,
}

/// Models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ModelList {
    /// By name.
    pub models: Vec<Model>,
}

/// How much of an upload is there that broke off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Upload {
    /// From the content's beginning.
    pub bytes: u64,
}

/// What the host's ledger says of one job. Its chain, and what it says of others, is the operator's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobLedger {
    /// In their order: the job's receipt, what became of its adapters' bytes, that it ended without a receipt.
    #[schema(value_type = Vec<Object>)]
    pub entries: Vec<serde_json::Value>,
    /// `from` of the next page; none where this is the last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next: Option<u64>,
}
