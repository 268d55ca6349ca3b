//! Every limit of a job, in one place.
//!
//! A limit is the job's own: it never changes with what other jobs do, so no neighbour can be seen through it.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Declares the fields, their names as the guest sees them, and their defaults, so that the three cannot drift apart.
macro_rules! limits {
    ($($(#[$doc:meta])+ $field:ident, $name:literal, $default:expr;)+) => {
        /// What one job may use. The unit ends the name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
        pub struct Limits { $($(#[$doc])+ pub $field: u64,)+ }

        impl Limits {
            /// The limits of a job that asks for nothing else.
            pub const DEFAULT: Self = Self { $($field: $default,)+ };

            /// All names.
            pub const NAMES: &[&str] = &[$($name,)+];

            /// Names, as in `job.limits` of the guest, and values.
            #[must_use]
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$(($name, self.$field),)+]
            }

            /// Sets a limit by its name; whether there is one of that name.
            pub fn set(&mut self, name: &str, value: u64) -> bool {
                match name {
                    $($name => self.$field = value,)+
                    _ => return false,
                }
                true
            }
        }
    };
}

limits! {
    /// Size of the component. Refuses the upload: compiling costs time and memory in proportion.
    component_bytes, "component-bytes", 64 << 20;
    /// Imports of the component and of all modules in it. Refuses the upload, before it is compiled.
    component_imports, "component-imports", 20_000;
    /// Types of the component and of all modules in it. Refuses the upload, before it is compiled: checking them costs more than their size.
    component_types, "component-types", 100_000;
    /// Functions of all modules in the component. Refuses the upload, before it is compiled.
    component_functions, "component-functions", 200_000;
    /// CPU time of the process that compiles the component. Refuses the upload.
    compile_ms, "compile-ms", 120_000;
    /// Addresses that the process that compiles may use. Refuses the upload.
    compile_memory_bytes, "compile-memory-bytes", 4 << 30;
    /// Size of the parameters. Refuses the job: they are kept in its receipt.
    parameter_bytes, "parameter-bytes", 256 << 10;
    /// All linear memories together. Growing beyond it fails as WebAssembly says (-1), so that a guest that can do with less goes on.
    guest_memory_bytes, "guest-memory-bytes", 256 << 20;
    /// Elements of all tables together, 8 bytes each. Growing beyond it fails as WebAssembly says (-1).
    table_elements, "table-elements", 100_000;
    /// Linear memories. Refuses the upload: an ordinary component has one.
    memories, "memories", 4;
    /// Tables. Refuses the upload.
    tables, "tables", 32;
    /// Core instances. Ends the job at its start.
    instances, "instances", 64;
    /// Resources alive at once. Refuses the call where it can answer an error, else ends the job.
    handles, "handles", 10_000;
    /// What one call may carry from the guest to the host. Ends the job: the host cannot tell the guest before it has copied.
    host_call_bytes, "host-call-bytes", 16 << 20;
    /// Text of one `encode`, `decode` or `apply-chat-template`. Refuses the call: the host tokenises on the guest's own time.
    text_bytes, "text-bytes", 1 << 20;
    /// Random bytes of one call. Ends the job: WASI has no error for it.
    random_bytes, "random-bytes", 1 << 20;
    /// All log lines and output together. Drops what is beyond and counts it: a log must not end a job.
    log_bytes, "log-bytes", 4 << 20;
    /// All log lines and lines of output. Drops what is beyond and counts it: a log must not end a job.
    log_lines, "log-lines", 100_000;
    /// Reported metrics. Drops what is beyond and counts it. A number and no rate: what a rate drops would depend on the machine's speed, and
    /// equal jobs would leave unequal files.
    metrics, "metrics", 1_000_000;
    /// Progress reports. Drops what is beyond and counts it.
    progress_reports, "progress-reports", 1_000_000;
    /// CPU time of the guest in all, what the host does within its calls included, waiting excluded. Ends the job.
    cpu_ms, "cpu-ms", 3_600_000;
    /// CPU time of the guest since the engine last answered it. Ends the job: it is stuck.
    cpu_stretch_ms, "cpu-stretch-ms", 60_000;
    /// Time from start to end, whatever it is spent on. Ends the job.
    wall_ms, "wall-ms", 24 * 3_600_000;
    /// Rows of one batch to train on; an evaluation is split into pieces of at most this. Refuses the call.
    batch_tokens, "batch-tokens", 32_768;
    /// Rows of one sequence. Refuses the call; a data set opened without a maximum length is cut at it.
    sequence_tokens, "sequence-tokens", 32_768;
    /// Sequences of one batch. Refuses the call.
    batch_sequences, "batch-sequences", 65_536;
    /// What all batches alive hold of the host's memory. Refuses the call.
    batch_bytes, "batch-bytes", 256 << 20;
    /// All data sets of the job, as they were uploaded. Refuses the job: they are read to plan its memory, and held tokenised.
    dataset_bytes, "dataset-bytes", 1 << 30;
    /// Data sets open at once. Refuses the call: each is held tokenised.
    datasets, "datasets", 16;
    /// Adapters alive at once. Refuses the call.
    adapters, "adapters", 64;
    /// Adapters made in all. Refuses the call: each has an account in the host's ledger.
    adapters_made, "adapters-made", 4096;
    /// Device memory of all adapters alive: weights, gradient and two moments, float32. Refuses the call.
    device_bytes, "device-bytes", 4 << 30;
    /// Device memory for the activations of one batch. Refuses the call: so much is reserved, whatever others use.
    activation_bytes, "activation-bytes", 8 << 30;
    /// Calls of one adapter that are not yet answered. A further call waits for the oldest: the engine is no faster for a longer queue.
    calls_in_flight, "calls-in-flight", 64;
    /// Names under which adapters are saved. Refuses the call.
    artifacts, "artifacts", 64;
    /// Weights of all saved adapters, the latest of each name. Refuses the call.
    artifact_bytes, "artifact-bytes", 4 << 30;
    /// Evaluations in all. Refuses the call: each stands in the job's receipt.
    evaluations, "evaluations", 100_000;
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Beyond what nobody may set some limits: what they bound stands in the job's receipt and its line of the ledger, whose sizes are bounded.
pub const RECEIPT_MAXIMA: [(&str, u64); 3] = [("artifacts", 4000), ("evaluations", 400_000), ("parameter-bytes", 4 << 20)];

/// Rows of one piece of an evaluation at most, whatever `batch-tokens` says; a longer sequence is a piece of its own. A sequence
/// counts as a multiple of [`EVALUATION_ROW_ALIGN`], as a device may place it. After each piece the job's owner hears how far it is, and can
/// have it stopped. No result depends on it.
pub const EVALUATION_ROWS_MAX: u64 = 2048;
/// See [`EVALUATION_ROWS_MAX`].
pub const EVALUATION_ROW_ALIGN: u64 = 128;
/// A limit's name. Not written out as `&'static str` where values are read back, since serde would want to borrow it.
pub type LimitName = &'static str;

/// A limit's name in values that travel between processes: read back, it is one of the names that there are.
pub(crate) mod name {
    use serde::de::Error as _;

    use super::{Deserialize, Deserializer, LimitName, Limits, Serializer};

    pub(crate) fn serialize<S: Serializer>(name: &LimitName, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(name)
    }

    pub(crate) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<LimitName, D::Error> {
        let text = String::deserialize(from)?;
        let known = Limits::DEFAULT.entries().into_iter().find(|(name, _)| *name == text);
        known.map(|(name, _)| name).ok_or_else(|| D::Error::custom("no limit of this name"))
    }
}

/// Longest line of a log; a longer one is broken into several.
pub const LOG_LINE_BYTES_MAX: usize = 16 << 10;
/// Longest name of a metric; a longer one is cut.
pub const METRIC_NAME_BYTES_MAX: usize = 128;
/// Longest name of an artifact.
pub const ARTIFACT_NAME_BYTES_MAX: usize = 64;
/// What is kept of a panic's message or of a guest's own error.
pub const MESSAGE_BYTES_MAX: usize = 8 << 10;
/// Stack of the guest's code, per job. Ends the job.
pub const WASM_STACK_BYTES: usize = 512 << 10;
/// Stack on which guest code and host functions run, per job: what the guest leaves over is the host's.
pub const ASYNC_STACK_BYTES: usize = 2 << 20;
/// How long a guest process may say nothing. Ends it, and the jobs in it: it hangs.
pub const GUEST_SILENCE_MS_MAX: u64 = 60_000;
/// How often running guest code is looked at.
pub const TICK_MS: u64 = 10;

const _: () = {
    let limits = Limits::DEFAULT;
    assert!(limits.parameter_bytes <= limits.host_call_bytes, "a guest may copy its parameters");
    assert!(limits.text_bytes < limits.host_call_bytes, "the refusal must come before the end of the job");
    assert!(limits.batch_tokens * 12 <= limits.host_call_bytes, "a full batch of own examples fits one call");
    assert!(limits.batch_tokens * 12 <= limits.batch_bytes, "a full batch of own examples can be held");
    assert!(limits.batch_sequences * 8 <= limits.batch_bytes, "a full batch of a data set can be held");
    assert!(limits.cpu_stretch_ms <= limits.cpu_ms && limits.cpu_ms <= limits.wall_ms, "the narrower limit ends the job first");
    assert!(limits.cpu_stretch_ms >= 10 * TICK_MS, "a limit of a few ticks would be a lottery");
    assert!(limits.sequence_tokens <= limits.batch_tokens, "every sequence fits a batch");
    assert!(limits.log_lines <= limits.log_bytes, "a line costs a byte");
    assert!(GUEST_SILENCE_MS_MAX >= 100 * TICK_MS, "a loaded machine is no hang");
    assert!(limits.adapters < limits.handles, "the limit by name comes before the limit on handles");
    assert!(WASM_STACK_BYTES * 2 <= ASYNC_STACK_BYTES, "host functions need room below the guest's stack");
    assert!(LOG_LINE_BYTES_MAX as u64 <= limits.log_bytes, "one line fits the log");
};

#[cfg(test)]
mod tests {
    use super::Limits;

    #[test]
    fn names_are_the_fields_in_kebab_case_and_the_unit_ends_them() {
        let json = serde_json::to_value(Limits::DEFAULT).unwrap();
        let fields = json.as_object().unwrap();
        let entries = Limits::DEFAULT.entries();
        assert_eq!(fields.len(), entries.len());
        for (name, value) in entries {
            assert_eq!(fields[name].as_u64(), Some(value), "{name}");
        }
    }

    #[test]
    fn a_limit_is_set_by_its_name() {
        let mut limits = Limits::DEFAULT;
        for (name, value) in Limits::DEFAULT.entries() {
            assert!(limits.set(name, value + 1), "{name}");
        }
        let expected: Vec<_> = Limits::DEFAULT.entries().into_iter().map(|(name, value)| (name, value + 1)).collect();
        assert_eq!(limits.entries(), expected);
        assert!(!limits.set("handels", 1));
    }

    #[test]
    fn an_unknown_limit_is_an_error_and_a_missing_one_the_default() {
        let some: Limits = serde_json::from_str(r#"{"handles": 7}"#).unwrap();
        assert_eq!(some, Limits { handles: 7, ..Limits::DEFAULT });
        assert!(serde_json::from_str::<Limits>(r#"{"handels": 7}"#).is_err());
    }
}
