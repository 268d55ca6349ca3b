//! The options that choose a device and how it is used.
//!
//! Parses only; what a machine has is looked up elsewhere.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use nodus_kernels::cuda::Precision;
use serde::{Deserialize, Serialize};

use crate::text::{escape, parse_bytes};

/// Which device, and how it is used. Device and type are part of a result's device class; nothing else here changes a result.
#[derive(Clone, Copy, Debug, Default, Args, Serialize, Deserialize)]
pub struct DeviceArgs {
    /// Where to compute: cpu, cuda, cuda:N for the card of that number, or auto, which is cuda where it can be used, else cpu [default: NODUS_DEVICE, else auto]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
    /// What frozen weights and activations are computed in [default: on cuda the type that the model is stored in, f16 as bf16; on a cpu f32]
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// CPU threads; results do not depend on it [default: all]
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// Memory for activations of the frozen layers that later epochs use again, such as 512MiB; 0 keeps none [default: the engine's]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub trunk_cache: Option<u64>,
    /// Memory that the jobs' needs must fit into, such as 8GiB [default: what the device has free]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub memory: Option<u64>,
}

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceChoice {
    /// On the first card where one can be used, else on the CPU.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On the card of this number.
    Cuda(usize),
}

/// A text that names no device.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no device: expected cpu, cuda, cuda:N or auto")]
pub struct DeviceChoiceError(String);

impl FromStr for DeviceChoice {
    type Err = DeviceChoiceError;

    fn from_str(text: &str) -> Result<Self, DeviceChoiceError> {
        let number = |text: &str| text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        match text {
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda(0)),
            _ => text.strip_prefix("cuda:").and_then(number).map(Self::Cuda),
        }
        .ok_or_else(|| DeviceChoiceError(escape(&text.chars().take(80).collect::<String>())))
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Cpu => write!(f, "cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What frozen weights and activations are computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Dtype {
    /// float32.
    F32,
    /// bfloat16, added up in float32.
    Bf16,
}

impl Dtype {
    /// The card's word for it.
    #[must_use]
    pub fn precision(self) -> Precision {
        match self {
            Self::F32 => Precision::F32,
            Self::Bf16 => Precision::Bf16,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceChoice;

    #[test]
    fn devices_are_named_as_elsewhere() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:0", DeviceChoice::Cuda(0)),
            ("cuda:12", DeviceChoice::Cuda(12)),
        ] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap(), choice);
        }
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "CPU", "cpu:0"] {
            let error = bad.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(error.contains("cuda:N"), "{error}");
        }
    }
}
