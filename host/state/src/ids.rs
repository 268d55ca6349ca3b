//! Ids of tenants, jobs and cohorts.
//!
//! A job's id says when it was submitted (UUID v7) and nothing else.

use std::fmt;
use std::str::FromStr;

use rusqlite::ToSql;
use rusqlite::types::{FromSql, FromSqlResult, ToSqlOutput, ValueRef};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A tenant, within this folder. Never shown to anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub(crate) i64);

impl TenantId {
    /// As a number, for who counts by tenant.
    #[must_use]
    pub fn number(self) -> u128 {
        u128::from(self.0.unsigned_abs())
    }
}

impl ToSql for TenantId {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.0.into())
    }
}

impl FromSql for TenantId {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        value.as_i64().map(Self)
    }
}

/// A text that is no id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no id: expected 32 hexadecimal digits in the form of a UUID")]
pub struct IdError;

macro_rules! ids {
    ($($(#[$doc:meta])+ $name:ident;)+) => {$(
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(into = "String", try_from = "String")]
        pub struct $name(Uuid);

        impl $name {
            /// A new one, later than all before.
            pub(crate) fn new() -> Self {
                Self(Uuid::now_v7())
            }

            /// As a number, which grows with time.
            #[must_use]
            pub fn as_u128(self) -> u128 {
                self.0.as_u128()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            /// Hyphenated lower-case digits alone, so that an id has one text.
            fn from_str(text: &str) -> Result<Self, IdError> {
                let id = Uuid::try_parse(text).map(Self).map_err(|_| IdError)?;
                if id.to_string() == text { Ok(id) } else { Err(IdError) }
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.to_string()
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl ToSql for $name {
            fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
                Ok(self.0.as_bytes().as_slice().into())
            }
        }

        impl FromSql for $name {
            fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
                <[u8; 16]>::column_result(value).map(|bytes| Self(Uuid::from_bytes(bytes)))
            }
        }
    )+};
}

ids! {
    /// A job.
    JobId;
    /// The members of one sweep, or one job alone.
    CohortId;
}
