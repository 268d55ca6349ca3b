//! What a job will need of the device's memory, before it runs.
//!
//! Knows no device and no neighbour: the sizes of one job in, bytes out.

use nodus_kernels::AttentionShape;
use nodus_protocol::{Batch, LoraConfig, ModelConfig, Module, Sequence};

use crate::adapter::Sites;
use crate::pass::memory::{HalfRows, Sizes, Streams};
use crate::rows::Stage;

/// The size of a batch as a device places it: each sequence begins at a multiple of the device's
/// [`nodus_kernels::Device::row_align`] (1 on a CPU), and so do the labelled rows of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchSize {
    /// Rows.
    pub rows: usize,
    /// Rows with a weight above 0.
    pub labelled: usize,
}

impl BatchSize {
    /// Of one sequence.
    #[must_use]
    pub fn of(sequence: &Sequence, row_align: usize) -> Self {
        let labelled = sequence.weights().iter().filter(|weight| **weight > 0.0).count();
        Self { rows: sequence.rows().next_multiple_of(row_align), labelled: labelled.next_multiple_of(row_align) }
    }

    /// Of a batch.
    pub(crate) fn of_all(batch: &Batch, row_align: usize) -> Self {
        batch.sequences.iter().map(|sequence| Self::of(sequence, row_align)).sum()
    }

    /// The rows of a batch alone.
    pub(crate) fn rows_of(batch: &Batch, row_align: usize) -> usize {
        batch.sequences.iter().map(|sequence| sequence.rows().next_multiple_of(row_align)).sum()
    }
}

impl std::iter::Sum for BatchSize {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::default(), |all, one| Self { rows: all.rows + one.rows, labelled: all.labelled + one.labelled })
    }
}

/// Bytes that a job needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// An adapter's weights, gradient and moments, from its creation to its end.
    pub adapter_bytes: u64,
    /// The activations of one training step on a batch of this size, alone in its pass. With more a step is faster, never different.
    pub activation_bytes: u64,
}

/// What a trunk holds beside its weights: cosines and sines of every position, float32.
#[must_use]
pub fn table_bytes(model: &ModelConfig) -> u64 {
    (model.max_position_embeddings * model.head_dim * size_of::<f32>()) as u64
}

/// What an adapter of this configuration, which [`LoraConfig::validate`] has passed, needs to train on batches of at most this size.
#[must_use]
pub fn needs(model: &ModelConfig, config: &LoraConfig, batch: BatchSize) -> Needs {
    let sites = Sites::new(config, model);
    Needs { adapter_bytes: sites.state_bytes(), activation_bytes: activation_bytes(model, &sites, batch, true) }
}

/// The activations of an evaluation of such a batch by such an adapter, alone in its pass; see [`needs`].
#[must_use]
pub fn evaluation_bytes(model: &ModelConfig, config: &LoraConfig, batch: BatchSize) -> u64 {
    activation_bytes(model, &Sites::new(config, model), batch, false)
}

/// The sizes of the matrices that a model's rows are multiplied with, outputs and inputs; each once. Those of modules that read the same x are one.
#[must_use]
pub fn matrices(model: &ModelConfig) -> Vec<(usize, usize)> {
    use Module::{DownProj, GateProj, KProj, OProj, QProj, UpProj, VProj};
    let mut together: Vec<&[Module]> = vec![&[KProj, VProj], &[QProj], &[OProj], &[GateProj, UpProj], &[DownProj]];
    if model.num_hidden_layers > 1 {
        together.push(&[KProj, VProj, QProj]);
    }
    let size = |modules: &[Module]| {
        (modules.iter().map(|module| model.module_out(*module)).sum(), modules.first().map_or(0, |module| model.module_in(*module)))
    };
    let mut sizes: Vec<_> = together.into_iter().map(size).collect();
    sizes.push((model.vocab_size, model.hidden_size));
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Columns of the widest activation of a pass through a model. The logits are not among them: they exist in pieces.
#[must_use]
pub fn widest(model: &ModelConfig) -> usize {
    let projected = [Module::QProj, Module::KProj, Module::VProj].into_iter().map(|module| model.module_out(module)).sum();
    model.hidden_size.max(2 * model.intermediate_size).max(projected)
}

/// The sizes of a model's attention.
#[must_use]
pub fn attention_shape(model: &ModelConfig) -> AttentionShape {
    AttentionShape {
        heads: model.num_attention_heads,
        kv_heads: model.num_key_value_heads,
        head_dim: model.head_dim,
        window: model.sliding_window,
    }
}

/// The same for an adapter that is there, in a pass that trains or one that does not.
pub(crate) fn activation_bytes(model: &ModelConfig, sites: &Sites, batch: BatchSize, trains: bool) -> u64 {
    let own = Streams { all: batch.rows, labelled: batch.labelled };
    let rank = |layer, module| sites.get(layer, module).map_or(0, |site| site.rank);
    let lowest_cut: Option<Stage> = trains.then_some(sites.cut);
    Sizes::new(model, lowest_cut, rank, |_| HalfRows { own, ..HalfRows::default() }).least()
}
