//! The receipt of a finished run: an in-toto statement (Statement v1) over the adapter's files.
//!
//! Holds times in one object, `times`; but for those, the receipt before, the lane and the neighbours, everything is a function of
//! what went in. Not signed here: the envelope is the ledger's business.

use std::collections::BTreeMap;

use nodus_protocol::Digest;
use nodus_receipts::statement::DigestSet;
use nodus_sandbox::Limits;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The file's name.
pub const FILE: &str = "receipt.json";
pub use nodus_receipts::statement::{PREDICATE_TYPE, STATEMENT_TYPE};
/// The contract that the component was run under.
pub const CONTRACT: &str = "nodus:gpu@0.1.0";

/// An in-toto statement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    /// The files that came out of the run.
    pub subject: Vec<Resource>,
    #[serde(rename = "predicateType")]
    predicate_type: String,
    /// What is said of the run.
    pub predicate: Predicate,
}

impl Statement {
    /// A statement that these files came out of this run.
    #[must_use]
    pub fn new(subject: Vec<Resource>, predicate: Predicate) -> Self {
        Self { kind: STATEMENT_TYPE.to_owned(), subject, predicate_type: PREDICATE_TYPE.to_owned(), predicate }
    }

    /// Whether both are of runs that came to the same: equal but for times, the receipt before, the lane and the neighbours.
    ///
    /// # Errors
    /// One of them is no JSON.
    pub fn is_of_the_same_result(&self, other: &Self) -> serde_json::Result<bool> {
        let result = |statement: &Self| {
            let mut value = serde_json::to_value(statement)?;
            if let Some(predicate) = value.get_mut("predicate").and_then(Value::as_object_mut) {
                predicate.retain(|field, _| !["lane", "co_resident_jobs", "previous_receipt", "times"].contains(&field.as_str()));
            }
            serde_json::Result::Ok(value)
        };
        Ok(result(self)? == result(other)?)
    }
}

/// A file or another thing with a digest; in-toto's ResourceDescriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resource {
    /// What it is called: a path below the run's folder, or the user's own name for it.
    pub name: String,
    /// SHA-256, as in-toto writes it.
    pub digest: DigestSet,
}

impl Resource {
    /// A thing of this name and digest.
    pub fn new(name: impl Into<String>, digest: Digest) -> Self {
        Self { name: name.into(), digest: DigestSet(digest) }
    }
}

/// Everything that went in and came out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Predicate {
    /// The component.
    pub component: Resource,
    /// The contract it was run under.
    pub contract: String,
    /// The program that ran it.
    pub engine: Program,
    /// The job's parameters, as the component saw them.
    pub parameters: Map<String, Value>,
    /// The job's seed.
    pub seed: u64,
    /// The frozen model.
    pub trunk: Resource,
    /// The data set trained on.
    pub data: Resource,
    /// What was evaluated on.
    pub held_out: HeldOut,
    /// Adapters that the job was given.
    pub loaded_artifacts: Vec<Resource>,
    /// What decides the bits besides: names and values. Results of different classes are never compared.
    pub device_class: BTreeMap<String, String>,
    /// How the job shared the device.
    pub lane: String,
    /// Other jobs that were in the engine at some time while this one ran; never their names.
    pub co_resident_jobs: u64,
    /// The job's own limits.
    pub limits: Limits,
    /// What came from outside while it ran.
    pub events: Vec<ExternalEvent>,
    /// Optimiser steps, of all adapters.
    pub steps: u64,
    /// SHA-256 over the `loss_bits` of every line of `losses.jsonl`, each with a newline.
    pub losses: DigestSet,
    /// Every evaluation, in order.
    pub held_out_losses: Vec<EvaluationEntry>,
    /// Every adapter saved, by name.
    pub artifacts: Vec<Artifact>,
    /// Bytes of the files of all of them.
    pub adapter_bytes: u64,
    /// The receipt before this one on the same host: SHA-256 over its file; none in the first.
    pub previous_receipt: Option<DigestSet>,
    /// When and how long.
    pub times: Times,
}

/// A program and its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// What was evaluated on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "from")]
pub enum HeldOut {
    /// Nothing.
    Nothing,
    /// A second data set.
    Dataset {
        /// Which.
        #[serde(flatten)]
        resource: Resource,
    },
    /// Rows of the data set that were taken out of it.
    Data {
        /// How many.
        rows: u64,
    },
}

/// Something from outside that a job could see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum ExternalEvent {
    /// The job asked whether to stop and was told so.
    StopRequested {
        /// At which question for the first time, from 1: its calls of `should-stop`, and one before each further piece of an evaluation.
        call: u64,
    },
}

/// One evaluation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvaluationEntry {
    /// Which of the job's adapters, from 0.
    pub adapter: u32,
    /// Its step count at that time.
    pub step: u64,
    /// The float32's bits.
    pub loss_bits: String,
}

/// One saved adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Its name and digest.
    #[serde(flatten)]
    pub resource: Resource,
    /// Which of the job's adapters, from 0.
    pub adapter: u32,
    /// Its step count when it was saved.
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
}

/// When and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// Start of the job, milliseconds since 1970 in UTC.
    pub started_unix_ms: u64,
    /// From start to end.
    pub wall_ms: u64,
    /// CPU time of the component and of the host within its calls.
    pub component_cpu_ms: u64,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use nodus_protocol::Digest;
    use nodus_receipts::statement::DigestSet;
    use nodus_sandbox::Limits;
    use nodus_sandbox::limits::{ARTIFACT_NAME_BYTES_MAX, RECEIPT_MAXIMA};
    use serde_json::{Value, json};

    use super::{Artifact, CONTRACT, EvaluationEntry, ExternalEvent, HeldOut, Predicate, Program, Resource, Statement, Times};
    use crate::books::{Account, Again, Books};
    use crate::error::{is_disk, is_unsealable};

    fn statement(started_unix_ms: u64) -> Value {
        serde_json::to_value(small(started_unix_ms)).unwrap()
    }

    fn small(started_unix_ms: u64) -> Statement {
        let predicate = Predicate {
            component: Resource::new("sft.wasm", Digest::of(b"component")),
            contract: CONTRACT.into(),
            engine: Program { name: "nodus-host".into(), version: "0.1.0".into() },
            parameters: json!({"rank": 8}).as_object().unwrap().clone(),
            seed: 7,
            trunk: Resource::new("smol", Digest::of(b"trunk")),
            data: Resource::new("jargon", Digest::of(b"data")),
            held_out: HeldOut::Dataset { resource: Resource::new("other", Digest::of(b"other")) },
            loaded_artifacts: vec![],
            device_class: BTreeMap::from([("backend".into(), "cpu".into())]),
            lane: "solo".into(),
            co_resident_jobs: 0,
            limits: Limits::DEFAULT,
            events: vec![ExternalEvent::StopRequested { call: 3 }],
            steps: 2,
            losses: DigestSet(Digest::of(b"losses")),
            held_out_losses: vec![EvaluationEntry { adapter: 0, step: 0, loss_bits: "0x40b80d3c".into() }],
            artifacts: vec![Artifact { resource: Resource::new("adapter", Digest::of(b"adapter")), adapter: 0, step: 2, bytes: 10 }],
            adapter_bytes: 10,
            previous_receipt: None,
            times: Times { started_unix_ms, wall_ms: started_unix_ms / 2, component_cpu_ms: 1 },
        };
        Statement::new(vec![Resource::new("adapter/adapter_model.safetensors", Digest::of(b"file"))], predicate)
    }

    /// Of a job that did all that its limits can be set to, and so many times as many adapters.
    fn large(times: u64) -> Statement {
        let [artifacts, evaluations, parameter_bytes] = RECEIPT_MAXIMA.map(|(_, max)| usize::try_from(max).unwrap());
        let mut statement = small(u64::MAX);
        let predicate = &mut statement.predicate;
        predicate.parameters.insert("x".to_owned(), "y".repeat(parameter_bytes).into());
        let evaluation = EvaluationEntry { adapter: u32::MAX, step: u64::MAX, loss_bits: "0x40b80d3c".into() };
        predicate.held_out_losses = vec![evaluation; evaluations];
        let resource = |number: usize, end: &str| Resource::new(format!("{number:0ARTIFACT_NAME_BYTES_MAX$}{end}"), Digest::of(b"file"));
        let artifact = |number| Artifact { resource: resource(number, ""), adapter: u32::MAX, step: u64::MAX, bytes: u64::MAX };
        let numbers = 0..artifacts * usize::try_from(times).unwrap();
        predicate.artifacts = numbers.clone().map(artifact).collect();
        let files = |number| ["/README.md", "/adapter_config.json", "/adapter_model.safetensors"].map(|file| resource(number, file));
        statement.subject = numbers.flat_map(files).collect();
        statement
    }

    #[test]
    fn whatever_the_limits_allow_has_a_receipt_and_what_has_none_never_will() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let mut books = Books::open(root.try_clone().unwrap()).unwrap();
        let account = Account { job: "job".to_owned(), tenant: "t".repeat(64), again: Again::Attempt };
        let mut seal = |statement: &Statement| {
            books.seal(&account, |previous| {
                let mut statement = statement.clone();
                statement.predicate.previous_receipt = previous.map(DigestSet);
                serde_json::to_vec(&statement)
            })
        };
        let refused = seal(&large(2)).unwrap_err();
        assert!(is_unsealable(&refused) && !is_disk(&refused), "{refused:#}");
        seal(&large(1)).unwrap();
    }

    #[test]
    fn it_is_an_in_toto_statement() {
        let statement = statement(1000);
        assert_eq!(statement["_type"], "https://in-toto.io/Statement/v1");
        assert_eq!(statement["predicateType"], "https://nodus.dev/receipt/v1");
        assert_eq!(
            statement["subject"],
            json!([{"name": "adapter/adapter_model.safetensors", "digest": {"sha256": Digest::of(b"file").hex()}}])
        );
        assert_eq!(statement["predicate"]["events"], json!([{"kind": "stop_requested", "call": 3}]));
        assert_eq!(statement["predicate"]["held_out"]["from"], "dataset");
        assert_eq!(statement["predicate"]["limits"]["adapters"], json!(Limits::DEFAULT.adapters));
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        let written = statement(1000);
        let read: Statement = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), written);
        assert_eq!(nodus_receipts::statement::Statement::parse(written.to_string().as_bytes()).unwrap().predicate.steps, Some(2));
    }

    #[test]
    fn only_times_differ_between_equal_runs() {
        let (mut first, mut second) = (statement(1000), statement(5000));
        assert_ne!(first, second);
        for statement in [&mut first, &mut second] {
            assert!(statement["predicate"].as_object_mut().unwrap().remove("times").is_some());
        }
        assert_eq!(first.to_string(), second.to_string());
    }
}
