//! A job's limits as the command line and manifests give them: `NAME=VALUE`, over the defaults.
//!
//! Knows no limit's meaning: names and defaults are the sandbox's.

use std::str::FromStr;

use nodus_sandbox::Limits;
use nodus_sandbox::limits::RECEIPT_MAXIMA;

use crate::text::{escape, nearest, parse_bytes};

/// More memory than any device has.
const DEVICE_BYTES_MAX: u64 = 1 << 48;
/// What a service's tenants may set limits to where its operator says nothing: what they are without a word. Device memory is bounded by a quota.
pub(crate) const MAXIMA: Limits = Limits { device_bytes: DEVICE_BYTES_MAX, activation_bytes: DEVICE_BYTES_MAX, ..Limits::DEFAULT };
/// The limits that follow from a job's parameters.
pub(crate) const PLANNED: [&str; 2] = ["device-bytes", "activation-bytes"];

/// One limit, set to other than its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    name: &'static str,
    value: u64,
}

/// A text that sets no limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// There is no `=`.
    #[error("`{0}` sets no limit: expected name=value, for example device-bytes=512MiB")]
    Form(String),
    /// There is no limit of this name.
    #[error("there is no limit `{name}`; {hint}")]
    Name {
        /// As given.
        name: String,
        /// What there is.
        hint: String,
    },
    /// The value is no number.
    #[error("limit `{name}` is `{value}`: expected a whole number, in the unit that ends the name; bytes may have a unit, such as 512MiB")]
    Value {
        /// Which.
        name: &'static str,
        /// As given.
        value: String,
    },
    /// More than a receipt can hold.
    #[error("limit `{name}` is {value}, expected at most {max}: all that it bounds stands in the job's receipt")]
    Receipt {
        /// Which.
        name: &'static str,
        /// As given.
        value: u64,
        /// What a receipt can hold.
        max: u64,
    },
    /// Beyond what a service allows its tenants.
    #[error(
        "limit `{name}` would be {value}, expected at most {max}: the service's operator can allow more, under `limits` of its settings"
    )]
    High {
        /// Which.
        name: &'static str,
        /// As given, or planned.
        value: u64,
        /// What is allowed.
        max: u64,
    },
}

impl Limit {
    /// Reads a limit of this name.
    ///
    /// # Errors
    /// There is none, or the value is no number, or more than a receipt can hold.
    pub fn new(name: &str, value: &str) -> Result<Self, LimitError> {
        let Some(known) = Limits::NAMES.iter().find(|known| **known == name) else {
            let hint = match nearest(name, Limits::NAMES) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("expected one of {}", Limits::NAMES.join(", ")),
            };
            return Err(LimitError::Name { name: escape(&name.chars().take(80).collect::<String>()), hint });
        };
        let wrong = || LimitError::Value { name: known, value: escape(&value.chars().take(80).collect::<String>()) };
        let number = if known.ends_with("-bytes") { parse_bytes(value).ok() } else { value.parse().ok() };
        let value = number.ok_or_else(wrong)?;
        match RECEIPT_MAXIMA.iter().find(|(name, _)| name == known) {
            Some((_, max)) if value > *max => Err(LimitError::Receipt { name: known, value, max: *max }),
            _ => Ok(Self { name: known, value }),
        }
    }

    /// Whether it bounds what is uploaded, and so holds for a whole run.
    #[must_use]
    pub fn is_of_uploads(&self) -> bool {
        self.name.starts_with("component-") || self.name.starts_with("compile-") || ["memories", "tables"].contains(&self.name)
    }

    /// Its value.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl FromStr for Limit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        match text.split_once('=') {
            Some((name, value)) => Self::new(name.trim(), value.trim()),
            None => Err(LimitError::Form(escape(&text.chars().take(80).collect::<String>()))),
        }
    }
}

/// The defaults with these over them, the last of a name.
#[must_use]
pub fn over(mut limits: Limits, given: &[Limit]) -> Limits {
    for limit in given {
        limits.set(limit.name, limit.value);
    }
    limits
}

/// A tenant's limits within what its operator allows. One that nobody asked for is lowered to that.
///
/// # Errors
/// One that was given, or is planned, is beyond it.
pub(crate) fn within(mut limits: Limits, given: &[Limit], maxima: &Limits) -> Result<Limits, LimitError> {
    for ((name, value), (_, max)) in limits.entries().into_iter().zip(maxima.entries()) {
        if value <= max {
            continue;
        }
        if PLANNED.contains(&name) || given.iter().any(|limit| limit.name == name) {
            return Err(LimitError::High { name, value, max });
        }
        limits.set(name, max);
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use nodus_sandbox::Limits;

    use super::{Limit, LimitError, MAXIMA, RECEIPT_MAXIMA, over, within};

    /// Of every limit, so that none is forgotten.
    #[test]
    fn a_tenant_lowers_limits_and_raises_them_as_far_as_the_operator_allows() {
        for (name, max) in MAXIMA.entries() {
            let asked = |value: u64| {
                let given = [Limit::new(name, &value.to_string())?];
                within(over(Limits::DEFAULT, &given), &given, &MAXIMA)
            };
            for value in [0, max] {
                assert!(asked(value).unwrap().entries().contains(&(name, value)), "{name} {value}");
            }
            assert_eq!(asked(max + 1).unwrap_err(), LimitError::High { name, value: max + 1, max });
            let (value, of_receipts) = (u64::MAX, RECEIPT_MAXIMA.iter().find(|(other, _)| *other == name));
            let expected =
                of_receipts.map_or(LimitError::High { name, value, max }, |(_, max)| LimitError::Receipt { name, value, max: *max });
            assert_eq!(asked(value).unwrap_err(), expected);
        }
        let maxima = Limits { wall_ms: 5, device_bytes: 7, ..MAXIMA };
        let small = Limits { device_bytes: 7, ..Limits::DEFAULT };
        assert_eq!(within(small, &[], &maxima).unwrap(), Limits { wall_ms: 5, ..small });
        let planned = within(Limits::DEFAULT, &[], &maxima).unwrap_err().to_string();
        assert!(["device-bytes", "at most 7", "operator"].iter().all(|word| planned.contains(word)), "{planned}");
    }

    #[test]
    fn a_limit_is_set_by_its_name_and_the_last_one_holds() {
        let given: Vec<Limit> = ["device-bytes=2MiB", "wall-ms=500", "wall-ms = 700"].map(|text| text.parse().unwrap()).into();
        assert_eq!(over(Limits::DEFAULT, &given), Limits { device_bytes: 2 << 20, wall_ms: 700, ..Limits::DEFAULT });
        assert_eq!(over(Limits::DEFAULT, &[]), Limits::DEFAULT);
    }

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        for (text, words) in [
            ("device-bytes", &["device-bytes", "name=value"][..]),
            ("device-byte=1", &["`device-byte`", "did you mean `device-bytes`?"]),
            ("xyzzy=1", &["xyzzy", "expected one of component-bytes"]),
            ("wall-ms=1s", &["wall-ms", "1s", "whole number"]),
            ("wall-ms=1MiB", &["wall-ms", "1MiB", "whole number"]),
            ("device-bytes=-1", &["device-bytes", "-1", "512MiB"]),
            ("de\u{1b}[2J=1", &["\\u{1b}[2J"]),
        ] {
            let error = text.parse::<Limit>().unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{text:?}: {error}");
        }
    }
}
