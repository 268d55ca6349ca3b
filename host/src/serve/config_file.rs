//! The service's settings as a TOML file has them.
//!
//! Refuses a key that it does not know, and names the nearest that it does.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use toml::{Table, Value};

use crate::cli::{FloorArgs, ReadyMade, parse_memory};
use crate::error::user;
use crate::limits::Limit;
use crate::text::{escape, nearest, parse_bytes, parse_seconds};

/// Every key of a file.
pub(super) const KEYS: [&str; 24] = [
    "listen",
    "tls_cert",
    "tls_key",
    "insecure",
    "offer_merged",
    "otlp",
    "devices",
    "dtype",
    "threads",
    "trunk_cache",
    "memory",
    "snapshot_every",
    "journal_bytes",
    "lanes",
    "mps_engines",
    "device_jobs",
    "patience",
    "idle",
    "pass_time",
    "hold",
    "require_os_sandbox",
    "guest_silence_ms",
    "components",
    "limits",
];
/// Shortest time that a guest process may be silent, in milliseconds, as on the command line.
const SILENCE_MS_MIN: u64 = 1000;
/// Highest number that a limit may be allowed to have: more bytes than there are, and more time. Several of them add up.
const LIMIT_MAX: u64 = 1 << 48;

/// What a file says.
#[derive(Debug, Default)]
pub(super) struct File {
    pub(super) listen: Option<SocketAddr>,
    pub(super) tls_cert: Option<PathBuf>,
    pub(super) tls_key: Option<PathBuf>,
    pub(super) insecure: bool,
    pub(super) offer_merged: bool,
    pub(super) otlp: Option<String>,
    pub(super) floor: FloorArgs,
    pub(super) require_os_sandbox: bool,
    pub(super) guest_silence_ms: Option<u64>,
    pub(super) components: Vec<ReadyMade>,
    /// What tenants may set a job's limits to.
    pub(super) limits: Vec<Limit>,
}

/// Reads one. Paths are relative to the file's folder.
///
/// # Errors
/// The user's: what is wrong with it, and what would be right.
pub(super) fn file(text: &str, folder: &Path) -> anyhow::Result<File> {
    let table: Table = text.parse().map_err(|error| user(format!("not TOML: {error}")))?;
    let mut file = File::default();
    for (key, value) in &table {
        let setting = Setting { key, value };
        match key.as_str() {
            "listen" => file.listen = Some(setting.parsed("an address and a port, such as \"127.0.0.1:7643\"")?),
            "tls_cert" => file.tls_cert = Some(folder.join(setting.text("a path")?)),
            "tls_key" => file.tls_key = Some(folder.join(setting.text("a path")?)),
            "insecure" => file.insecure = setting.flag()?,
            "offer_merged" => file.offer_merged = setting.flag()?,
            "otlp" => file.otlp = Some(setting.text("a collector's URL")?.to_owned()),
            "require_os_sandbox" => file.require_os_sandbox = setting.flag()?,
            "guest_silence_ms" => file.guest_silence_ms = Some(setting.number(SILENCE_MS_MIN)?),
            "components" => file.components = components(&setting, folder)?,
            "limits" => file.limits = limits(&setting)?,
            _ => setting.of_floor(&mut file.floor)?,
        }
    }
    Ok(file)
}

/// A key and what it has.
struct Setting<'a> {
    key: &'a str,
    value: &'a Value,
}

impl<'a> Setting<'a> {
    /// Where jobs run, and how.
    fn of_floor(&self, floor: &mut FloorArgs) -> anyhow::Result<()> {
        match self.key {
            "devices" => floor.devices = self.list(|text| text.parse().ok(), "a list of cpu, cuda, cuda:N or auto")?,
            "lanes" => floor.lanes = self.list(|text| ValueEnum::from_str(text, false).ok(), "a list of fused, mps and solo")?,
            "dtype" => {
                let dtype = self.value.as_str().and_then(|text| ValueEnum::from_str(text, false).ok());
                floor.dtype = Some(dtype.ok_or_else(|| self.wrong("\"f32\" or \"bf16\""))?);
            }
            "threads" => floor.threads = Some(self.count()?),
            "trunk_cache" => floor.trunk_cache = Some(self.bytes()?),
            "memory" => {
                let memory = parse_memory(&self.bytes()?.to_string());
                floor.memory = Some(memory.map_err(|_| self.wrong("at least 16MiB, such as \"8GiB\""))?);
            }
            "snapshot_every" => floor.snapshot_every = Some(self.seconds()?),
            "journal_bytes" => floor.journal_bytes = Some(self.bytes()?),
            "mps_engines" => floor.mps_engines = Some(self.count()?),
            "device_jobs" => floor.device_jobs = Some(self.count()?),
            "patience" => floor.patience = Some(self.seconds()?),
            "idle" => floor.idle = Some(self.seconds()?),
            "pass_time" => floor.pass_time = Some(self.seconds()?),
            "hold" => floor.hold = self.flag()?,
            other => {
                let hint = nearest(other, &KEYS)
                    .map_or_else(|| format!("expected one of {}", KEYS.join(", ")), |near| format!("did you mean `{near}`?"));
                return Err(user(format!("there is no key `{}`; {hint}", escape(other))));
            }
        }
        Ok(())
    }

    fn wrong(&self, expected: &str) -> anyhow::Error {
        user(format!("`{}` is {}, expected {expected}", self.key, escape(&self.value.to_string())))
    }

    fn text(&self, expected: &str) -> anyhow::Result<&'a str> {
        self.value.as_str().ok_or_else(|| self.wrong(expected))
    }

    fn parsed<T: FromStr>(&self, expected: &str) -> anyhow::Result<T> {
        self.text(expected)?.parse().map_err(|_| self.wrong(expected))
    }

    fn flag(&self) -> anyhow::Result<bool> {
        self.value.as_bool().ok_or_else(|| self.wrong("true or false"))
    }

    fn number(&self, least: u64) -> anyhow::Result<u64> {
        let number = self.value.as_integer().and_then(|number| u64::try_from(number).ok()).filter(|number| *number >= least);
        number.ok_or_else(|| self.wrong(&format!("a whole number from {least}")))
    }

    fn count(&self) -> anyhow::Result<NonZeroUsize> {
        let count = self.number(1)?;
        usize::try_from(count).ok().and_then(NonZeroUsize::new).ok_or_else(|| self.wrong("a whole number from 1"))
    }

    /// A number, or a text with a unit.
    fn bytes(&self) -> anyhow::Result<u64> {
        let number = self.value.as_integer().and_then(|number| u64::try_from(number).ok());
        let text = || self.value.as_str().and_then(|text| parse_bytes(text).ok());
        number.or_else(text).ok_or_else(|| self.wrong("a number of bytes, such as 4096 or \"512MiB\""))
    }

    fn seconds(&self) -> anyhow::Result<Duration> {
        let is_number = self.value.is_integer() || self.value.is_float();
        let seconds = is_number.then(|| parse_seconds(&self.value.to_string()).ok()).flatten();
        seconds.ok_or_else(|| self.wrong("a number of seconds above 0, such as 30 or 0.5"))
    }

    fn list<T>(&self, one: impl Fn(&str) -> Option<T>, expected: &str) -> anyhow::Result<Vec<T>> {
        let values = self.value.as_array().filter(|values| !values.is_empty()).ok_or_else(|| self.wrong(expected))?;
        values.iter().map(|value| value.as_str().and_then(&one).ok_or_else(|| self.wrong(expected))).collect()
    }
}

fn components(setting: &Setting<'_>, folder: &Path) -> anyhow::Result<Vec<ReadyMade>> {
    let table = setting.value.as_table().ok_or_else(|| setting.wrong("a table of names and paths"))?;
    let component = |(name, path): (&String, &Value)| {
        let path = path.as_str().ok_or_else(|| user(format!("`components.{}` is no path", escape(name))))?;
        let name = name.parse().map_err(|error: crate::name::NameError| user(format!("components: {error}")))?;
        Ok(ReadyMade { name, path: folder.join(path) })
    };
    table.iter().map(component).collect()
}

fn limits(setting: &Setting<'_>) -> anyhow::Result<Vec<Limit>> {
    let table = setting.value.as_table().ok_or_else(|| setting.wrong("a table of limits and numbers"))?;
    let limit = |(name, value): (&String, &Value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let limit = Limit::new(name, &text).map_err(|error| user(format!("limits: {error}")))?;
        if limit.is_of_uploads() {
            return Err(user(format!("limits: `{name}` bounds what is uploaded, expected limits of jobs alone")));
        }
        if limit.value() > LIMIT_MAX {
            return Err(user(format!("limits: `{name}` is {}, expected at most {LIMIT_MAX}", limit.value())));
        }
        Ok(limit)
    };
    table.iter().map(limit).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;

    use super::{KEYS, file};

    /// With every key.
    pub(in crate::serve) const TEXT: &str = r#"
listen = "0.0.0.0:80"
tls_cert = "cert.pem"
tls_key = "/key.pem"
insecure = true
offer_merged = true
otlp = "http://127.0.0.1:4318"
devices = ["cuda:0", "cpu"]
dtype = "bf16"
threads = 4
trunk_cache = 0
memory = "8GiB"
snapshot_every = 2.5
journal_bytes = "16GiB"
lanes = ["fused", "solo"]
mps_engines = 8
device_jobs = 16
patience = 30
idle = 60
pass_time = 120
hold = true
require_os_sandbox = true
guest_silence_ms = 90000
[components]
sft = "sft.wasm"
eval = "eval.wasm"
[limits]
guest-memory-bytes = "512MiB"
wall-ms = 1000
"#;

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        for (text, words) in [
            ("listn = \"x\"", "did you mean `listen`?"),
            ("snapshots_every = 3", "did you mean `snapshot_every`?"),
            ("xyzzy = 1", "expected one of listen, tls_cert"),
            ("listen = 80", "\"127.0.0.1:7643\""),
            ("insecure = \"yes\"", "true or false"),
            ("components = 3", "a table"),
            ("limits = 3", "a table"),
            ("[limits]\nwal-ms = 3", "did you mean `wall-ms`?"),
            ("[limits]\nwall-ms = -3", "whole number"),
            ("[limits]\ncomponent-bytes = 3", "limits of jobs alone"),
            ("[limits]\nwall-ms = 281474976710657", "at most 281474976710656"),
            ("[components]\n\"../x\" = \"y\"", "cannot be a name"),
            ("listen = ", "not TOML"),
            ("devices = \"cpu\"", "a list of cpu"),
            ("devices = [\"gpu\"]", "a list of cpu"),
            ("lanes = []", "a list of fused"),
            ("dtype = \"f16\"", "\"bf16\""),
            ("memory = \"much\"", "512MiB"),
            ("memory = -1", "512MiB"),
            ("memory = \"10KiB\"", "at least 16MiB"),
            ("snapshot_every = 0", "a number of seconds above 0"),
            ("patience = \"30\"", "a number of seconds above 0"),
            ("mps_engines = 0", "a whole number from 1"),
            ("guest_silence_ms = 10", "a whole number from 1000"),
        ] {
            let error = file(text, Path::new("")).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    /// The document names every key, in an example that is read as it stands.
    #[test]
    fn the_document_has_every_key() {
        let text = include_str!("../../../docs/SERVICE.md");
        let example = text.split("```toml").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let example: String = example.lines().map(|line| line.trim_start().to_owned() + "\n").collect();
        file(&example, Path::new("")).unwrap();
        for key in KEYS {
            assert!(example.lines().any(|line| line.starts_with(&format!("{key} = "))), "{key}");
        }
    }
}
