//! The device memory that a job is held to, planned from its parameters before it runs.
//!
//! A function of the job alone. Reads parameters as `sft` names them; a component that names them otherwise is planned as if it were
//! `sft` without a word, and its user gives `--limit device-bytes` or `activation-bytes` where that is too little.

use std::collections::BTreeSet;

use nodus_engine::plan::{BatchSize, Needs, evaluation_bytes, needs};
use nodus_protocol::{Digest, LayerSelection, LoraConfig, ModelConfig, Module};
use nodus_sandbox::{EVALUATION_ROWS_MAX, Limits};
use serde_json::{Map, Value};

use super::inputs::OpenModel;
use super::rows::Rows;
use super::sizes::{Reckoned, Sizes, Spread, measure};
use crate::limits::{Limit, PLANNED, over};

/// What `sft` takes where the parameters do not say, as its README has it: sequences of a batch, and the adapter's rank.
const BATCH_SIZE: usize = 8;
const RANK: u32 = 8;
/// Any will do: no byte depends on it.
const ALPHA: f32 = 16.0;
/// A job gets no less of either kind: room for a few small adapters more than its parameters tell of, and for larger batches.
const BYTES_MIN: u64 = 64 << 20;
/// Rows that are open, those to train on and those held out, and of which model.
pub(crate) type OfRows = (u64, Option<u64>, Digest);

/// The limits of a job: the defaults, its planned device memory, and what was given over both.
///
/// # Errors
/// Ours: the data cannot be read.
pub(crate) fn limits(
    model: &OpenModel,
    (train, held_out): (&Rows, Option<&Rows>),
    (parameters, adapter): (&Map<String, Value>, Option<&LoraConfig>),
    given: &[Limit],
    reckoned: &mut Reckoned<OfRows>,
) -> anyhow::Result<Limits> {
    if !is_planned(given) {
        return Ok(over(Limits::DEFAULT, given));
    }
    let (of, length) = ((train.id(), held_out.map(Rows::id), model.digest), max_length(parameters, &model.config));
    let sizes = match reckoned.get(&of, length) {
        Some(sizes) => sizes,
        None => {
            let measured = measure(model, (train, held_out), &BTreeSet::from([length]), || Ok(()))?;
            reckoned.learn(&of, measured).remove(&length).unwrap_or_default()
        }
    };
    Ok(over(planned(model, &sizes, (parameters, adapter)), given))
}

/// Whether any of a job's memory is to be planned: not all of it was given.
pub(crate) fn is_planned(given: &[Limit]) -> bool {
    PLANNED.iter().any(|name| !given.iter().any(|limit| limit.name() == *name))
}

/// The defaults, and the device memory that is planned for a job on data of these sizes.
pub(crate) fn planned(model: &OpenModel, sizes: &Sizes, (parameters, adapter): (&Map<String, Value>, Option<&LoraConfig>)) -> Limits {
    // What does not fit the model is refused by the component itself, which needs little for it.
    let config = adapter.cloned().or_else(|| config(parameters, &model.config));
    let needs = config.map(|config| plan(&model.config, &config, sizes, number(parameters, "batch_size").unwrap_or(BATCH_SIZE)));
    let Needs { adapter_bytes, activation_bytes } = needs.unwrap_or_default();
    Limits { device_bytes: adapter_bytes.max(BYTES_MIN), activation_bytes: activation_bytes.max(BYTES_MIN), ..Limits::DEFAULT }
}

/// How many tokens of a line the job reads, as far as its parameters say.
pub(crate) fn max_length(parameters: &Map<String, Value>, model: &ModelConfig) -> usize {
    number(parameters, "max_length").unwrap_or(model.max_position_embeddings)
}

fn number(parameters: &Map<String, Value>, key: &str) -> Option<usize> {
    parameters.get(key).and_then(Value::as_u64).and_then(|number| usize::try_from(number).ok())
}

/// Bytes for one adapter, and for the activations of the largest batch to train on or piece of an evaluation.
fn plan(model: &ModelConfig, config: &LoraConfig, sizes: &Sizes, batch_size: usize) -> Needs {
    let train = sizes.first().map_or_else(BatchSize::default, |sizes| sizes.largest(batch_size));
    let needs = needs(model, config, train);
    let pieces = sizes.iter().map(|sizes| evaluation_bytes(model, config, piece(sizes)));
    Needs { activation_bytes: pieces.fold(needs.activation_bytes, u64::max), ..needs }
}

/// The largest piece of an evaluation: full, whatever the data, since a guest may evaluate a row many times; or one long sequence.
fn piece(examples: &Spread) -> BatchSize {
    let rows = examples.longest().max(usize::try_from(EVALUATION_ROWS_MAX).unwrap_or(usize::MAX));
    BatchSize { rows, labelled: rows }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nodus_engine::plan::{BatchSize, evaluation_bytes, needs};
    use nodus_protocol::{LayerSelection, LoraConfig, ModelConfig, Module, Sequence};
    use proptest::prelude::*;
    use serde_json::json;

    use nodus_sandbox::EVALUATION_ROW_ALIGN;

    use super::{EVALUATION_ROWS_MAX, Spread, config, plan};
    use crate::cli::Dtype;
    use crate::random::{Recipe, Shape};

    fn model() -> ModelConfig {
        Recipe::new(Shape::SmolLm2_135m, 0, Dtype::F32).config
    }

    fn sequence(model: &ModelConfig, rows: usize, labelled: usize) -> Arc<Sequence> {
        let weights = (0..rows).map(|i| if i < labelled { 1.0 } else { 0.0 }).collect();
        Arc::new(Sequence::new(model, vec![1; rows], vec![2; rows], weights).unwrap())
    }

    fn data(examples: &[Arc<Sequence>]) -> Spread {
        let mut spread = Spread::default();
        examples.iter().map(|example| BatchSize::of(example, 1)).for_each(|size| spread.add(size.rows, size.labelled));
        spread
    }

    fn size(batch: &[&Arc<Sequence>], align: usize) -> BatchSize {
        batch.iter().map(|sequence| BatchSize::of(sequence, align)).sum()
    }

    proptest! {
        /// Whatever batch a job draws, on whatever device, the engine asks for no more than was planned.
        #[test]
        fn the_plan_covers_every_batch_and_every_piece(
            lengths in prop::collection::vec((1_usize..400, 0_usize..400), 1..40),
            batch_size in 1_usize..6,
            picks in prop::collection::vec(any::<prop::sample::Index>(), 64),
            rank in 1_u32..20,
        ) {
            let model = model();
            let parameters = json!({"rank": rank, "targets": "all-linear"});
            let config = config(parameters.as_object().unwrap(), &model).unwrap();
            let examples: Vec<_> = lengths.iter().map(|(rows, labelled)| sequence(&model, *rows, *labelled.min(rows))).collect();
            let planned = plan(&model, &config, &vec![data(&examples)], batch_size);
            for align in [1, 128] {
                // A batch of different rows, and a piece in which rows may repeat.
                let batch: Vec<_> = examples.iter().take(batch_size).collect();
                let asked = needs(&model, &config, size(&batch, align));
                prop_assert!(asked.adapter_bytes <= planned.adapter_bytes && asked.activation_bytes <= planned.activation_bytes);
                let (mut piece, mut rows) = (Vec::new(), 0);
                for pick in &picks {
                    let example = pick.get(&examples);
                    rows += (example.rows() as u64).next_multiple_of(EVALUATION_ROW_ALIGN);
                    if rows <= EVALUATION_ROWS_MAX {
                        piece.push(example);
                    }
                }
                prop_assert!(evaluation_bytes(&model, &config, size(&piece, align)) <= planned.activation_bytes);
            }
        }
    }

    #[test]
    fn a_longer_batch_and_a_loaded_adapter_need_more() {
        let model = model();
        let small = config(json!({}).as_object().unwrap(), &model).unwrap();
        let of = |rows, config: &LoraConfig| plan(&model, config, &vec![data(&vec![sequence(&model, rows, rows); 9])], 8);
        // Rank 8 on q (576 + 576) and v (576 + 192) of 30 layers, 16 bytes a weight.
        assert_eq!(of(10, &small).adapter_bytes, 8 * (1152 + 768) * 30 * 16);
        assert!(of(4000, &small).activation_bytes > of(2000, &small).activation_bytes);
        let large = LoraConfig { rank: 16, targets: Module::ALL.to_vec(), layers: LayerSelection::All, ..small.clone() };
        assert!(of(10, &large).adapter_bytes > 8 * of(10, &small).adapter_bytes);
    }
}
