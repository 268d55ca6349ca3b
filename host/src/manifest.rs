//! A manifest: the jobs of one run as a TOML file.
//!
//! Parses only; opens nothing that it names. An unknown key is an error, never passed over.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::{Map, Number, Value as Json};
use toml::{Table, Value};

use crate::cli::HeldOutArgs;
use crate::error::user;
use crate::limits::Limit;
use crate::name::Name;
use crate::text::{escape, nearest};

/// Largest manifest.
pub const MANIFEST_BYTES_MAX: u64 = 4 << 20;
/// Jobs of one manifest at most.
const JOBS_MAX: usize = 1024;
const LIST: &str = "jobs";
const KEYS: [&str; 10] =
    ["name", "component", "model", "data", "held_out", "held_out_fraction", "held_out_count", "params", "seed", "limits"];

/// One job. Paths are as written: relative to the manifest's folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The name of its folder.
    pub name: Name,
    /// The component's file.
    pub component: PathBuf,
    /// The base model.
    pub model: Name,
    /// The data set to train on.
    pub data: Name,
    /// What it may evaluate on.
    pub held_out: HeldOutArgs,
    /// Its parameters.
    pub params: Params,
    /// The seed of everything random in it.
    pub seed: u64,
    /// Its limits, where they are not the default.
    pub limits: Vec<Limit>,
}

/// Where a job's parameters are.
#[derive(Clone, Debug, PartialEq)]
pub enum Params {
    /// In the manifest.
    Here(Map<String, Json>),
    /// In a JSON file.
    File(PathBuf),
}

/// Reads a manifest.
///
/// # Errors
/// The user's: the first thing that is wrong, with the job, the key and what would be right.
pub fn parse(text: &str) -> anyhow::Result<Vec<Entry>> {
    let table: Table = text.parse().map_err(|error: toml::de::Error| user(format!("not TOML: {}", error.to_string().trim_end())))?;
    refuse_unknown(&table, &[LIST], "the manifest")?;
    let jobs = match table.get(LIST) {
        Some(Value::Array(jobs)) if !jobs.is_empty() => jobs,
        _ => return Err(user("it lists no job: expected at least one [[jobs]] with name, component, model and data")),
    };
    if jobs.len() > JOBS_MAX {
        return Err(user(format!("it lists {} jobs, expected at most {JOBS_MAX}", jobs.len())));
    }
    let mut names = BTreeSet::new();
    let mut entries = Vec::new();
    for (i, job) in jobs.iter().enumerate() {
        let Value::Table(job) = job else { return Err(user(format!("job {} is not a table, expected [[jobs]]", i + 1))) };
        let entry = Job { table: job, place: place(job, i) }.entry()?;
        if !names.insert(entry.name.as_str().to_ascii_lowercase()) {
            return Err(user(format!("two jobs are named `{}`, expected different names, since each is a folder", entry.name)));
        }
        entries.push(entry);
    }
    Ok(entries)
}

/// How messages name a job.
fn place(job: &Table, index: usize) -> String {
    match job.get("name").and_then(Value::as_str) {
        Some(name) => format!("job `{}`", escape(&name.chars().take(80).collect::<String>())),
        None => format!("job {}", index + 1),
    }
}

fn refuse_unknown(table: &Table, known: &[&str], place: &str) -> anyhow::Result<()> {
    let Some(key) = table.keys().find(|key| !known.contains(&key.as_str())) else { return Ok(()) };
    let hint = match nearest(key, known) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("expected one of {}", known.join(", ")),
    };
    Err(user(format!("{place} has the unknown key `{}`; {hint}", escape(key))))
}

/// A job being read.
struct Job<'a> {
    table: &'a Table,
    place: String,
}

impl Job<'_> {
    fn entry(&self) -> anyhow::Result<Entry> {
        refuse_unknown(self.table, &KEYS, &self.place)?;
        Ok(Entry {
            name: self.name("name")?,
            component: PathBuf::from(self.string("component")?),
            model: self.name("model")?,
            data: self.name("data")?,
            held_out: self.held_out()?,
            params: self.params()?,
            seed: self.seed()?,
            limits: self.limits()?,
        })
    }

    fn wrong(&self, key: &str, found: &Value, expected: &str) -> anyhow::Error {
        user(format!("{}: `{key}` is {}, expected {expected}", self.place, escape(&found.to_string())))
    }

    fn string(&self, key: &str) -> anyhow::Result<&str> {
        match self.table.get(key) {
            Some(Value::String(text)) if !text.is_empty() => Ok(text),
            Some(other) => Err(self.wrong(key, other, "a string")),
            None => Err(user(format!("{} has no `{key}`, which every job needs", self.place))),
        }
    }

    fn name(&self, key: &str) -> anyhow::Result<Name> {
        self.string(key)?.parse().map_err(|error| user(format!("{}: `{key}`: {error}", self.place)))
    }

    fn held_out(&self) -> anyhow::Result<HeldOutArgs> {
        let given: Vec<&str> = KEYS.into_iter().filter(|key| key.starts_with("held_out") && self.table.contains_key(*key)).collect();
        if let [first, second, ..] = given.as_slice() {
            return Err(user(format!("{} has both `{first}` and `{second}`, expected one at most", self.place)));
        }
        let mut held_out = HeldOutArgs::default();
        match given.first().map(|key| (*key, self.table.get(*key))) {
            Some((key @ "held_out", _)) => held_out.held_out = Some(self.name(key)?),
            Some((key @ "held_out_fraction", Some(value))) => match value.as_float() {
                Some(part) if part > 0.0 && part < 1.0 => held_out.held_out_fraction = Some(part),
                _ => return Err(self.wrong(key, value, "a number above 0 and below 1")),
            },
            Some((key, Some(value))) => {
                let count = value.as_integer().and_then(|count| usize::try_from(count).ok()).and_then(std::num::NonZeroUsize::new);
                held_out.held_out_count = Some(count.ok_or_else(|| self.wrong(key, value, "a whole number, 1 or more"))?);
            }
            _ => {}
        }
        Ok(held_out)
    }

    fn seed(&self) -> anyhow::Result<u64> {
        let Some(value) = self.table.get("seed") else { return Ok(0) };
        value.as_integer().and_then(|seed| u64::try_from(seed).ok()).ok_or_else(|| self.wrong("seed", value, "a whole number, 0 or more"))
    }

    fn limits(&self) -> anyhow::Result<Vec<Limit>> {
        let table = match self.table.get("limits") {
            None => return Ok(Vec::new()),
            Some(Value::Table(table)) => table,
            Some(other) => return Err(self.wrong("limits", other, "a table of limits by name")),
        };
        let limit = |(name, value): (&String, &Value)| {
            let text = match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let limit = Limit::new(name, &text).map_err(|error| user(format!("{}: {error}", self.place)))?;
            if limit.is_of_uploads() {
                return Err(user(format!(
                    "{}: limit `{name}` bounds components, which jobs share: expected --limit {name}=.., for all of them",
                    self.place
                )));
            }
            Ok(limit)
        };
        table.iter().map(limit).collect()
    }

    fn params(&self) -> anyhow::Result<Params> {
        match self.table.get("params") {
            None => Ok(Params::Here(Map::new())),
            Some(Value::String(path)) if !path.is_empty() => Ok(Params::File(PathBuf::from(path))),
            Some(Value::Table(table)) => {
                let json = table.iter().map(|(key, value)| Ok((key.clone(), self.json(key, value)?)));
                Ok(Params::Here(json.collect::<anyhow::Result<_>>()?))
            }
            Some(other) => Err(self.wrong("params", other, "a table or the path of a JSON file")),
        }
    }

    /// A parameter as the job will see it.
    fn json(&self, key: &str, value: &Value) -> anyhow::Result<Json> {
        Ok(match value {
            Value::String(text) => Json::String(text.clone()),
            Value::Integer(number) => Json::from(*number),
            Value::Float(number) => match Number::from_f64(*number) {
                Some(number) => Json::Number(number),
                None => return Err(self.wrong(&format!("params.{key}"), value, "a finite number")),
            },
            Value::Boolean(yes) => Json::Bool(*yes),
            Value::Datetime(_) => return Err(self.wrong(&format!("params.{key}"), value, "what JSON has: dates are strings there")),
            Value::Array(items) => Json::Array(items.iter().map(|item| self.json(key, item)).collect::<anyhow::Result<_>>()?),
            Value::Table(table) => {
                let fields = table.iter().map(|(name, value)| Ok((name.clone(), self.json(&format!("{key}.{name}"), value)?)));
                Json::Object(fields.collect::<anyhow::Result<_>>()?)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Params, parse};
    use crate::error::exit_code;

    const JOB: &str = "[[jobs]]\nname = \"a\"\ncomponent = \"sft.wasm\"\nmodel = \"m\"\ndata = \"d\"\n";

    fn refusal(text: &str) -> String {
        let error = parse(text).unwrap_err();
        assert_eq!(exit_code(&error), 2);
        error.to_string()
    }

    #[test]
    fn jobs_are_read_whole() {
        let text = format!(
            "{JOB}seed = 7\nheld_out_count = 3\nlimits = {{ wall-ms = 500, device-bytes = \"1MiB\" }}\nparams = {{ rank = 8, learning_rate = 1e-3, layers = {{ last = 1 }}, targets = [\"q_proj\"] }}\n\
             [[jobs]]\nname = \"b\"\ncomponent = \"own.wasm\"\nmodel = \"n\"\ndata = \"e\"\nheld_out = \"f\"\nparams = \"b.json\"\n"
        );
        let entries = parse(&text).unwrap();
        let [a, b] = entries.as_slice() else { panic!("{entries:?}") };
        assert_eq!((a.name.as_str(), a.seed, a.held_out.held_out_count.unwrap().get()), ("a", 7, 3));
        assert_eq!(a.limits, ["device-bytes=1MiB", "wall-ms=500"].map(|text| text.parse().unwrap()));
        let Params::Here(params) = &a.params else { panic!("{:?}", a.params) };
        let expected = json!({"rank": 8, "learning_rate": 1e-3, "layers": {"last": 1}, "targets": ["q_proj"]});
        assert_eq!(Value::Object(params.clone()), expected);
        assert_eq!((b.seed, &b.params), (0, &Params::File("b.json".into())));
        assert_eq!(b.held_out.held_out.as_ref().unwrap().as_str(), "f");
    }

    #[test]
    fn unknown_keys_are_named_with_the_nearest() {
        assert_eq!(refusal(&format!("{JOB}hold_out = \"x\"")), "job `a` has the unknown key `hold_out`; did you mean `held_out`?");
        assert!(refusal(&format!("{JOB}xyzzy = 1")).contains("expected one of name, component, model"));
        assert_eq!(refusal("[[job]]\nname = \"a\""), "the manifest has the unknown key `job`; did you mean `jobs`?");
    }

    #[test]
    fn refusals_name_the_job_and_what_would_be_right() {
        for (text, words) in [
            ("", &["no job", "[[jobs]]"][..]),
            ("jobs = []", &["no job"]),
            ("jobs = [1]", &["job 1"]),
            ("[[jobs]]\nname = ", &["TOML", "2"]),
            ("[[jobs]]\nmodel = \"m\"", &["job 1", "`name`"]),
            ("[[jobs]]\nname = \"../x\"", &["../x", "letters, digits"]),
            (&format!("{JOB}seed = -1"), &["job `a`", "`seed`", "-1", "0 or more"]),
            (&format!("{JOB}held_out = \"x\"\nheld_out_count = 1"), &["`held_out` and `held_out_count`"]),
            (&format!("{JOB}held_out_fraction = 2"), &["held_out_fraction", "below 1"]),
            (&format!("{JOB}held_out_count = 0"), &["held_out_count", "1 or more"]),
            (&format!("{JOB}limits = 3"), &["job `a`", "`limits`", "table"]),
            (&format!("{JOB}limits = {{ wal-ms = 3 }}"), &["job `a`", "`wal-ms`", "did you mean `wall-ms`?"]),
            (&format!("{JOB}limits = {{ tables = 9 }}"), &["job `a`", "`tables`", "--limit tables="]),
            (&format!("{JOB}limits = {{ wall-ms = 1.5 }}"), &["job `a`", "1.5", "whole number"]),
            (&format!("{JOB}params = 3"), &["`params`", "table"]),
            (&format!("{JOB}params = {{ x = nan }}"), &["params.x", "finite"]),
            (&format!("{JOB}params = {{ x = {{ y = 2020-01-01 }} }}"), &["params.x.y", "JSON"]),
            (&format!("{JOB}{}", JOB.replace("\"a\"", "\"A\"")), &["two jobs", "`A`"]),
            (&JOB.replace("\"a\"", "\"summary.json\""), &["summary.json", "another one"]),
        ] {
            let error = refusal(text);
            for word in words {
                assert!(error.contains(word), "{text:?}: `{word}` is missing in: {error}");
            }
        }
    }
}
