//! The device memory that a job is held to, planned from its parameters before it runs.
//!
//! A function of the job alone. Reads parameters as `sft` names them; a component that names them otherwise is planned as if it were
//! `sft` without a word, and its user gives `--limit device-bytes` or `activation-bytes` where that is too little.

use nodus_engine::plan::{BatchSize, evaluation_bytes, needs};
use nodus_protocol::{LayerSelection, LoraConfig, ModelConfig, Module, Sequence};
use nodus_sandbox::services::Dataset;
use nodus_sandbox::{EVALUATION_ROW_ALIGN, EVALUATION_ROWS_MAX, Limits};
use serde_json::{Map, Value};

use super::inputs::OpenModel;
use super::rows::Rows;
use crate::limits::{Limit, over};

/// What `sft` takes where the parameters do not say, as its README has it: sequences of a batch, and the adapter's rank.
const BATCH_SIZE: usize = 8;
const RANK: u32 = 8;
/// Any will do: no byte depends on it.
const ALPHA: f32 = 16.0;
/// A job gets no less of either kind: room for a few small adapters more than its parameters tell of, and for larger batches.
const BYTES_MIN: u64 = 64 << 20;
/// Rows at a multiple of which a device may begin each sequence. The coarsest of all, since a limit must not depend on the device.
const ROW_ALIGN: usize = EVALUATION_ROW_ALIGN as usize;

/// The limits of a job: the defaults, its planned device memory, and what was given over both. With them the tokens that the plan
/// follows from, which are best kept until the job has them.
pub(super) fn limits(
    model: &OpenModel,
    train: &Rows,
    held_out: Option<&Rows>,
    parameters: &Map<String, Value>,
    given: &[Limit],
) -> (Limits, Vec<Dataset>) {
    let is_given = |name: &str| given.iter().any(|limit| limit.name() == name);
    let (mut limits, mut data) = (Limits::DEFAULT, Vec::new());
    if !(is_given("device-bytes") && is_given("activation-bytes"))
        && let Some(need) = plan(model, train, held_out, parameters, &mut data)
    {
        (limits.device_bytes, limits.activation_bytes) = need;
    }
    (over(limits, given), data)
}

/// Bytes for adapters and for activations; none where the parameters do not fit the model, since the component will refuse them.
fn plan(
    model: &OpenModel,
    train: &Rows,
    held_out: Option<&Rows>,
    parameters: &Map<String, Value>,
    data: &mut Vec<Dataset>,
) -> Option<(u64, u64)> {
    let config = config(parameters, &model.config)?;
    let number = |key: &str| parameters.get(key).and_then(Value::as_u64).and_then(|number| usize::try_from(number).ok());
    let max_length = number("max_length").unwrap_or(model.config.max_position_embeddings);
    for rows in [Some(train), held_out].into_iter().flatten() {
        data.push(rows.tokenise(model, max_length).ok()?);
    }
    let batch = largest(&data.first()?.examples, number("batch_size").unwrap_or(BATCH_SIZE));
    let needs = needs(&model.config, &config, batch, ROW_ALIGN);
    let pieces = data.iter().map(|data| evaluation_bytes(&model.config, &config, piece(&data.examples), ROW_ALIGN));
    let activation_bytes = pieces.fold(needs.activation_bytes, u64::max);
    Some((needs.adapter_bytes.max(BYTES_MIN), activation_bytes.max(BYTES_MIN)))
}

/// The largest batch of so many sequences that the data can give.
fn largest(examples: &[std::sync::Arc<Sequence>], sequences: usize) -> BatchSize {
    let most = |size: &dyn Fn(&Sequence) -> usize| {
        let mut sizes: Vec<usize> = examples.iter().map(|example| size(example)).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.into_iter().take(sequences).sum()
    };
    BatchSize { sequences: sequences.min(examples.len()), rows: most(&Sequence::rows), labelled: most(&labelled) }
}

/// The largest piece of an evaluation: full, or one long sequence.
fn piece(examples: &[std::sync::Arc<Sequence>]) -> BatchSize {
    let longest = examples.iter().map(|example| example.rows()).max().unwrap_or(0);
    let rows = longest.max(usize::try_from(EVALUATION_ROWS_MAX).unwrap_or(usize::MAX));
    // The rows count in whole multiples already.
    BatchSize { sequences: 0, rows: rows.next_multiple_of(ROW_ALIGN), labelled: rows.next_multiple_of(ROW_ALIGN) }
}

fn labelled(example: &Sequence) -> usize {
    example.weights().iter().filter(|weight| **weight > 0.0).count()
}

/// The adapter that the parameters describe; none where they describe none that the model could have.
fn config(parameters: &Map<String, Value>, model: &ModelConfig) -> Option<LoraConfig> {
    let rank = match parameters.get("rank") {
        None | Some(Value::Null) => RANK,
        Some(rank) => u32::try_from(rank.as_u64()?).ok()?,
    };
    let config = LoraConfig {
        rank,
        alpha: ALPHA,
        rslora: false,
        dropout: 0.0,
        targets: targets(parameters.get("targets"))?,
        layers: layers(parameters.get("layers"))?,
        overrides: Vec::new(),
    };
    config.validate(model).ok().map(|()| config)
}

fn targets(value: Option<&Value>) -> Option<Vec<Module>> {
    let named = |name: &str| Module::ALL.into_iter().find(|module| module.to_string() == name);
    match value {
        None | Some(Value::Null) => ["q_proj", "v_proj"].into_iter().map(named).collect(),
        Some(Value::String(all)) if all == "all-linear" => Some(Module::ALL.to_vec()),
        Some(Value::Array(names)) => names.iter().map(|name| name.as_str().and_then(named)).collect(),
        Some(_) => None,
    }
}

fn layers(value: Option<&Value>) -> Option<LayerSelection> {
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    match value {
        None | Some(Value::Null) => Some(LayerSelection::All),
        Some(Value::String(all)) if all == "all" => Some(LayerSelection::All),
        Some(Value::Object(object)) => object.get("last").and_then(number).map(LayerSelection::Last),
        Some(Value::Array(list)) => list.iter().map(number).collect::<Option<_>>().map(LayerSelection::Only),
        Some(_) => None,
    }
}
