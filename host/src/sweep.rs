//! Sweeps: parameters with the values to try, their combinations, and the names of the members.
//!
//! Pure: a member's name follows from its own parameters alone, never from the order or the number of members.

use std::str::FromStr;

use nodus_protocol::Digest;
use serde_json::{Map, Value};

use crate::error::user;
use crate::settings::{sorted, value_of};
use crate::text::escape;

/// Members of one sweep at most.
pub const MEMBERS_MAX: usize = 1024;
/// Longest name of a member before it is shortened; file systems take 255 bytes.
const NAME_CHARS_MAX: usize = 160;

/// One `--sweep key=v1,v2`. Values are JSON, else strings; a comma within brackets or quotes belongs to a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    key: String,
    values: Vec<Value>,
}

/// The swept parameters of one member, by key.
pub type Point = Map<String, Value>;

/// A text that is no sweep.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// No key, no `=`, or an empty value.
    #[error("`{0}` is not a sweep: expected key=v1,v2, for example learning_rate=1e-4,3e-4")]
    Form(String),
    /// A value is there twice.
    #[error("`{key}` is swept over {value} twice, expected different values")]
    Twice {
        /// Which parameter.
        key: String,
        /// The value.
        value: String,
    },
}

impl FromStr for Sweep {
    type Err = SweepError;

    fn from_str(text: &str) -> Result<Self, SweepError> {
        let form = || SweepError::Form(escape(&text.chars().take(80).collect::<String>()));
        let (key, list) = text.split_once('=').filter(|(key, _)| !key.trim().is_empty()).ok_or_else(form)?;
        let parts: Vec<&str> = split(list).into_iter().map(str::trim).collect();
        if parts.iter().any(|part| part.is_empty()) {
            return Err(form());
        }
        Self::new(key.trim().to_owned(), parts.into_iter().map(value_of).collect())
    }
}

/// Parts of a list at the commas that stand outside quotes and brackets.
fn split(list: &str) -> Vec<&str> {
    let (mut depth, mut is_quoted, mut is_escaped) = (0_i32, false, false);
    let at_comma = |c: char| {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            '[' | '{' if !is_quoted => depth += 1,
            ']' | '}' if !is_quoted => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0 && !is_quoted
    };
    list.split(at_comma).collect()
}

/// Whether two values are one to a job: 1e-4 is 0.0001, and 8 is 8.0.
fn is_same(a: &Value, b: &Value) -> bool {
    a == b || matches!((a.as_f64(), b.as_f64()), (Some(a), Some(b)) if a == b)
}

/// Every combination of the sweeps' values, the last sweep fastest.
///
/// # Errors
/// The user's: a parameter is swept twice, or there are too many combinations.
pub fn points(sweeps: &[Sweep]) -> anyhow::Result<Vec<Point>> {
    for (i, sweep) in sweeps.iter().enumerate() {
        if sweeps.iter().take(i).any(|earlier| earlier.key == sweep.key) {
            return Err(user(format!("`{}` is swept twice, expected one --sweep with all its values", escape(&sweep.key))));
        }
    }
    let members = sweeps.iter().try_fold(1_usize, |product, sweep| product.checked_mul(sweep.values.len()));
    if members.is_none_or(|members| members > MEMBERS_MAX) {
        return Err(user(format!("the sweep has more than {MEMBERS_MAX} members, expected fewer values")));
    }
    let mut points = vec![Point::new()];
    for sweep in sweeps {
        let with = |point: &Point, value: &Value| {
            let mut point = point.clone();
            point.insert(sweep.key.clone(), value.clone());
            point
        };
        points = points.iter().flat_map(|point| sweep.values.iter().map(move |value| with(point, value))).collect();
    }
    Ok(points.into_iter().map(sorted).collect())
}

impl Sweep {
    /// A sweep over these values.
    ///
    /// # Errors
    /// There is no key or no value, or a value is there twice.
    pub fn new(key: String, values: Vec<Value>) -> Result<Self, SweepError> {
        if key.is_empty() || values.is_empty() {
            return Err(SweepError::Form(escape(&key.chars().take(80).collect::<String>())));
        }
        for (i, value) in values.iter().enumerate() {
            if values.iter().take(i).any(|other| is_same(other, value)) {
                return Err(SweepError::Twice { key: escape(&key), value: escape(&value.to_string()) });
            }
        }
        Ok(Self { key, values })
    }

    /// The values.
    #[must_use]
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// Which parameter.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }
}

/// A member's name, fit for a folder: `learning_rate=0.0001,rank=4`. Where a value does not fit one as it is, what does not fit is
/// replaced and eight digits of the digest over the parameters follow, so that different members always have different names.
#[must_use]
pub fn name_of(point: &Point) -> String {
    let parts: Vec<String> = point.iter().map(|(key, value)| format!("{}={}", safe(key), safe(&shown(value)))).collect();
    let is_exact = point.iter().all(|(key, value)| safe(key) == *key && safe(&shown(value)) == shown(value));
    let mut name = parts.join(",");
    if is_exact && name.len() <= NAME_CHARS_MAX && !name.starts_with(['.', '-']) {
        return name;
    }
    name.truncate(NAME_CHARS_MAX);
    let digest = Digest::of(Value::Object(point.clone()).to_string().as_bytes()).hex();
    format!("_{name}~{}", digest.get(..8).unwrap_or_default())
}

/// A value as it is typed: a string bare where it cannot be taken for another value.
#[must_use]
pub fn shown(value: &Value) -> String {
    match value {
        Value::String(text) if value_of(text) == *value => text.clone(),
        _ => value.to_string(),
    }
}

/// The text with everything but letters, digits, `.`, `_`, `-` and `+` replaced.
fn safe(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+') { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::{Point, Sweep, name_of, points};

    fn sweep(text: &str) -> Sweep {
        text.parse().unwrap()
    }

    fn refusal(text: &str) -> String {
        text.parse::<Sweep>().unwrap_err().to_string()
    }

    fn named(value: Value) -> String {
        name_of(value.as_object().unwrap())
    }

    #[test]
    fn values_are_json_else_strings_and_commas_inside_them_do_not_split() {
        assert_eq!(sweep("rank=4,8").values, [json!(4), json!(8)]);
        assert_eq!(sweep("lr=1e-4, 3e-4").values, [json!(1e-4), json!(3e-4)]);
        assert_eq!(sweep("schedule=linear,cosine").values, [json!("linear"), json!("cosine")]);
        assert_eq!(sweep(r#"targets=["q_proj","v_proj"],all-linear"#).values, [json!(["q_proj", "v_proj"]), json!("all-linear")]);
        assert_eq!(sweep(r#"layers={"last":1},{"last":2}"#).values.len(), 2);
        assert_eq!(sweep(r#"note="a,\"b",c"#).values, [json!("a,\"b"), json!("c")]);
    }

    #[test]
    fn what_is_no_sweep_is_refused_with_what_would_be_right() {
        for bad in ["", "rank", "=4", "rank=", "rank=4,", "rank=,4"] {
            assert!(refusal(bad).contains("key=v1,v2"), "{bad}");
        }
        for twice in ["rank=4,8,4", "lr=1e-4,0.0001", "rank=8,8.0", "s=a,a"] {
            assert!(refusal(twice).contains("twice"), "{twice}");
        }
        let error = points(&[sweep("rank=4,8"), sweep("rank=16")]).unwrap_err();
        assert!(error.to_string().contains("`rank` is swept twice"), "{error}");
        let many: Vec<String> = (0..40).map(|n| n.to_string()).collect();
        let wide = |key: &str| sweep(&format!("{key}={}", many.join(",")));
        assert!(points(&[wide("a"), wide("b")]).unwrap_err().to_string().contains("1024"));
    }

    #[test]
    fn the_product_has_every_combination_once() {
        let found = points(&[sweep("rank=4,8"), sweep("lr=0.1,0.2,0.3")]).unwrap();
        assert_eq!(found.len(), 6);
        let names: BTreeSet<String> = found.iter().map(name_of).collect();
        assert_eq!(names.len(), 6);
        assert_eq!(name_of(&found[0]), "lr=0.1,rank=4");
        assert_eq!(name_of(&found[1]), "lr=0.2,rank=4", "the last sweep is the fastest");
        assert_eq!(points(&[]).unwrap(), [Point::new()]);
    }

    #[test]
    fn names_depend_on_the_parameters_alone_and_never_collide() {
        let order = |sweeps: &[&str]| {
            points(&sweeps.iter().map(|text| sweep(text)).collect::<Vec<_>>()).unwrap().iter().map(name_of).collect::<BTreeSet<_>>()
        };
        assert_eq!(order(&["rank=4,8", "lr=1e-4,2e-5"]), order(&["lr=2e-5,1e-4", "rank=8,4"]));
        assert_eq!(named(json!({"learning_rate": 1e-4, "rank": 4})), "learning_rate=0.0001,rank=4");
        let alike = [
            json!({"a": 4}),
            json!({"a": "4"}),
            json!({"a": "x y"}),
            json!({"a": "x_y"}),
            json!({"a": "x/y"}),
            json!({"a": "1,b=2"}),
            json!({"a": 1, "b": 2}),
            json!({"a": null}),
            json!({"a": "null "}),
            json!({"a": ["q"]}),
            json!({"a": "_q_"}),
            json!({"a": "é".repeat(300)}),
            json!({"a": "é".repeat(301)}),
            json!({".a": 1}),
        ];
        let names: BTreeSet<String> = alike.into_iter().map(named).collect();
        assert_eq!(names.len(), 14, "{names:?}");
        for name in names {
            assert!(name.len() < 200 && !name.contains(['/', '\\', ' ']) && !name.starts_with(['.', '-']), "{name}");
        }
    }
}
