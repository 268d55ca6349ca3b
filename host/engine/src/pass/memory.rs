//! What a pass needs of the device's memory, and which activations it keeps for the backward pass.
//!
//! Knows no device: sizes in, a plan out. Never changes a result: what is not kept is computed again to the same bits.

use nodus_protocol::{ModelConfig, Module};

use crate::rows::{Level, RowMap, Stage, View};

/// What a layer keeps for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Nothing: the backward pass does not come here.
    Nothing,
    /// What it read; the rest is computed again.
    Input,
    /// Everything that its backward pass reads: that of its MLP, and that of its attention where the backward pass comes there.
    Whole {
        /// Whether it does.
        attention: bool,
    },
}

/// Bytes of an element. Where activations are narrower, this is more than is needed.
const ELEMENT_BYTES: u64 = 4;

/// What each layer keeps, so that a pass needs at most `free_bytes` and keeps at most `kept_bytes_max`. `rank` is the largest rank that any
/// member has on a module.
///
/// # Errors
/// The bytes needed, where even keeping the least is too much.
pub(crate) fn plan(
    config: &ModelConfig,
    map: &RowMap,
    rank: impl Fn(usize, Module) -> usize,
    kept_bytes_max: u64,
    free_bytes: u64,
) -> Result<Vec<Keep>, u64> {
    let layers: Vec<Sizes> = (0..config.num_hidden_layers).map(|layer| Sizes::of(config, map, &rank, layer)).collect();
    let lowest = map.lowest_cut();
    let reached = |layer: usize| lowest.is_some_and(|cut| cut <= Stage::of(layer, Module::DownProj));
    let inputs: u64 = layers.iter().enumerate().filter(|(layer, _)| reached(*layer)).map(|(_, sizes)| sizes.input).sum();
    let passing = layers.iter().map(|sizes| sizes.attention + sizes.mlp + sizes.scratch).max().unwrap_or(0);
    let top = 4 * elements(&map.level(map.halves()).0.labelled, config.hidden_size);
    let least = inputs + passing + top;
    if least > free_bytes {
        return Err(least);
    }
    let mut room = kept_bytes_max.min(free_bytes - least);
    let mut keep = Vec::with_capacity(layers.len());
    for (layer, sizes) in layers.iter().enumerate().rev() {
        let attention = lowest.is_some_and(|cut| cut <= Stage::of(layer, Module::OProj));
        let whole = sizes.mlp + if attention { sizes.attention } else { 0 };
        keep.push(match reached(layer) {
            false => Keep::Nothing,
            true if whole <= room => {
                room -= whole;
                Keep::Whole { attention }
            }
            true => Keep::Input,
        });
    }
    keep.reverse();
    Ok(keep)
}

/// Bytes of one layer.
struct Sizes {
    /// What it reads.
    input: u64,
    /// What its attention leaves for the backward pass.
    attention: u64,
    /// What its MLP leaves for the backward pass.
    mlp: u64,
    /// What is let go again, forward and backward, all at once.
    scratch: u64,
}

impl Sizes {
    fn of(config: &ModelConfig, map: &RowMap, rank: impl Fn(usize, Module) -> usize, layer: usize) -> Self {
        let last = layer + 1 == config.num_hidden_layers;
        let (hidden, width, heads) = (config.hidden_size, config.intermediate_size, config.num_attention_heads);
        let (q, kv) = (config.module_out(Module::QProj), config.module_out(Module::KProj));
        let ranks = |modules: &[Module]| -> usize { modules.iter().map(|module| rank(layer, *module)).sum() };
        let attention_ranks = ranks(&[Module::QProj, Module::KProj, Module::VProj, Module::OProj]);
        let mlp_ranks = ranks(&[Module::GateProj, Module::UpProj, Module::DownProj]);

        let (level, below) = map.level(2 * layer);
        let base = below.unwrap_or(level);
        let (queries, keys) = (level.view(last), &level.all);
        let attention = elements(keys, hidden + 3 * kv + attention_ranks) + elements(queries, 3 * q + heads + attention_ranks);
        let projected = fan_out(below, |base| elements(&base.all, hidden + 2 * kv) + elements(base.view(last), hidden + q));
        let attention_forward = elements(keys, hidden) + elements(queries, 3 * hidden) + projected;
        let attention_backward = elements(keys, 3 * hidden + 3 * kv) + elements(queries, 3 * hidden + 3 * q);

        let (level, below) = map.level(2 * layer + 1);
        let view = level.view(last);
        let mlp = elements(view, hidden + 2 * width + mlp_ranks);
        let projected = fan_out(below, |base| elements(base.view(last), hidden + 2 * width));
        let mlp_forward = elements(view, 2 * hidden + width) + projected;
        let mlp_backward = elements(view, 3 * hidden + 4 * width);
        let scratch = attention_forward.max(attention_backward) + mlp_forward.max(mlp_backward);
        Self { input: elements(&base.all, hidden), attention, mlp, scratch }
    }
}

fn elements(view: &View, width: usize) -> u64 {
    ELEMENT_BYTES * view.rows.rows() as u64 * width as u64
}

/// What is computed before a fan-out, where there is one.
fn fan_out(below: Option<&Level>, bytes: impl Fn(&Level) -> u64) -> u64 {
    below.map_or(0, bytes)
}
