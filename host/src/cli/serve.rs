//! The options of `serve` and `tenant`.
//!
//! Parses only.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use nodus_state::Quota;

use super::{FloorArgs, SandboxArgs};
use crate::name::Name;
use crate::text::{escape, nearest, parse_bytes};

/// `serve`.
#[derive(Debug, Default, Args)]
pub struct ServeArgs {
    /// A TOML file with settings by the names of these options; what is given here goes over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address and port to listen on; port 0 takes a free one, which is printed [default: 127.0.0.1:7643]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// A certificate chain (PEM): the service then speaks TLS
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Listen without TLS where others can reach it, for a proxy that speaks TLS
    #[arg(long, conflicts_with = "tls_cert")]
    pub insecure: bool,
    /// Give tenants their adapters merged into the models they were trained on, weights and all
    #[arg(long)]
    pub offer_merged: bool,
    /// A ready-made component that all tenants may name, such as sft=sft.wasm. May be given many times
    #[arg(long = "component", value_name = "NAME=FILE")]
    pub components: Vec<ReadyMade>,
    /// An OpenTelemetry collector, such as http://127.0.0.1:4318, that is told of every request and every attempt at a job (OTLP over HTTP)
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,
    /// Where and how jobs run.
    #[command(flatten)]
    pub floor: FloorArgs,
    /// How components are kept apart.
    #[command(flatten)]
    pub sandbox: SandboxArgs,
}

/// A component for all tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyMade {
    /// What tenants call it.
    pub name: Name,
    /// Where it is.
    pub path: PathBuf,
}

impl FromStr for ReadyMade {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = text.split_once('=').ok_or("expected NAME=FILE, for example sft=sft.wasm")?;
        Ok(Self { name: name.parse().map_err(|error: crate::name::NameError| error.to_string())?, path: PathBuf::from(path) })
    }
}

/// The service's tenants. These work beside a running service.
#[derive(Debug, Subcommand)]
pub enum TenantMode {
    /// Add a tenant and show its first token, once
    Add {
        /// Its name
        name: Name,
        /// A bound other than the default, such as queued-jobs=100, stored-bytes=10GiB or device-ms=none. May be given many times
        #[arg(long = "quota", value_name = "NAME=VALUE")]
        quotas: Vec<Bound>,
    },
    /// List the tenants with what they use
    List {
        /// One JSON object a tenant
        #[arg(long)]
        json: bool,
    },
    /// Show a new token, once, and revoke the others
    Rotate {
        /// The tenant's name
        #[arg(required_unless_present = "operator")]
        name: Option<Name>,
        /// A token for the operator, in place of a tenant's
        #[arg(long, conflicts_with = "name")]
        operator: bool,
        /// Leave the others valid, until the next rotation without this
        #[arg(long)]
        keep: bool,
    },
    /// Refuse a tenant's tokens and leave its waiting jobs where they are; what runs goes on
    Disable {
        /// The tenant's name
        name: Name,
    },
    /// Take a disabled tenant's tokens and start its jobs again
    Enable {
        /// The tenant's name
        name: Name,
    },
    /// Show a tenant's bounds, or change some
    Quota {
        /// The tenant's name
        name: Name,
        /// Such as queued-jobs=100, stored-bytes=10GiB or device-ms=none
        #[arg(value_name = "NAME=VALUE")]
        quotas: Vec<Bound>,
    },
}

/// The service's state.
#[derive(Debug, Subcommand)]
pub enum StateMode {
    /// Check that rows, blobs, receipts and the ledger agree; works beside a running service
    Fsck {
        /// Read every byte of every blob
        #[arg(long)]
        deep: bool,
    },
    /// Remove blobs that nothing refers to; a running service does so by itself
    Gc,
}

/// One bound of a quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Which.
    pub name: &'static str,
    /// The bound; none is none.
    pub value: Option<u64>,
}

impl FromStr for Bound {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE, for example queued-jobs=100")?;
        let Some(known) = Quota::NAMES.iter().find(|known| **known == name) else {
            let hint = nearest(name, &Quota::NAMES)
                .map_or_else(|| format!("expected one of {}", Quota::NAMES.join(", ")), |near| format!("did you mean `{near}`?"));
            return Err(format!("there is no quota `{}`; {hint}", escape(name)));
        };
        let number = if known.ends_with("-bytes") { parse_bytes(value).ok() } else { value.parse().ok() };
        match (value, number) {
            ("none", _) => Ok(Self { name: known, value: None }),
            (_, Some(number)) => Ok(Self { name: known, value: Some(number) }),
            _ => Err(format!(
                "quota `{known}` is `{}`: expected a whole number (bytes may have a unit, such as 10GiB) or none",
                escape(value)
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Bound, ReadyMade};

    #[test]
    fn bounds_are_numbers_or_none_under_known_names() {
        for (text, name, value) in [
            ("queued-jobs=3", "queued-jobs", Some(3)),
            ("stored-bytes=1KiB", "stored-bytes", Some(1024)),
            ("device-ms=none", "device-ms", None),
        ] {
            assert_eq!(text.parse::<Bound>().unwrap(), Bound { name, value });
        }
        for (text, words) in [("queued=3", "queued-jobs"), ("queued-jobs", "NAME=VALUE"), ("queued-jobs=many", "whole number")] {
            assert!(text.parse::<Bound>().unwrap_err().contains(words), "{text}");
        }
        assert!("sft".parse::<ReadyMade>().is_err() && "../x=sft.wasm".parse::<ReadyMade>().is_err());
    }
}
