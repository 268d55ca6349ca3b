//! What a pass needs of the device's memory, and which activations it keeps for the backward pass.
//!
//! Knows no device: sizes in, a plan out. Never changes a result: what is not kept is computed again to the same bits.

use nodus_protocol::{ModelConfig, Module};

use crate::rows::{RowMap, Stage};

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
const ELEMENT_BYTES: usize = 4;

/// Buffer rows of the streams at a half layer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Streams {
    pub(crate) all: usize,
    pub(crate) labelled: usize,
}

/// Buffer rows of a half layer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HalfRows {
    /// Of its own streams.
    pub(crate) own: Streams,
    /// Of those that fan out into them, if any do.
    pub(crate) fanned_out: Option<Streams>,
    /// Of those before others came in that were at hand.
    pub(crate) before: Streams,
}

/// Everything that the memory of a pass is a function of.
#[derive(Debug)]
pub(crate) struct Sizes {
    layers: Vec<Layer>,
    lowest_cut: Option<Stage>,
    top: u64,
}

/// Bytes of one layer.
#[derive(Debug)]
struct Layer {
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
    /// The sizes of a pass. `rank` is the largest rank that any member has on a module; `lowest_cut` is where the backward pass ends.
    pub(crate) fn new(
        config: &ModelConfig,
        lowest_cut: Option<Stage>,
        rank: impl Fn(usize, Module) -> usize,
        rows: impl Fn(usize) -> HalfRows,
    ) -> Self {
        let layers = (0..config.num_hidden_layers).map(|layer| Layer::new(config, layer, &rank, rows(2 * layer), rows(2 * layer + 1)));
        let top = bytes(4 * rows(2 * config.num_hidden_layers).own.labelled, config.hidden_size);
        Self { layers: layers.collect(), lowest_cut, top }
    }

    /// The sizes of the pass that a row map plans.
    pub(crate) fn of(config: &ModelConfig, map: &RowMap, rank: impl Fn(usize, Module) -> usize) -> Self {
        let streams = |level: &crate::rows::Level| Streams { all: level.all.rows.rows(), labelled: level.labelled.rows.rows() };
        let rows = |half| {
            let (own, fanned_out) = map.level(half);
            let before = map.entry(half).map_or(Streams::default(), |(below, _)| streams(below));
            HalfRows { own: streams(own), fanned_out: fanned_out.map(streams), before }
        };
        Self::new(config, map.lowest_cut(), rank, rows)
    }

    /// Bytes without which the pass cannot run: what each layer read is kept, and one layer at a time is computed.
    pub(crate) fn least(&self) -> u64 {
        let inputs: u64 = self.layers.iter().enumerate().filter(|(layer, _)| self.reached(*layer)).map(|(_, sizes)| sizes.input).sum();
        let passing = self.layers.iter().map(|sizes| sizes.attention + sizes.mlp + sizes.scratch).max().unwrap_or(0);
        inputs + passing + self.top
    }

    fn reached(&self, layer: usize) -> bool {
        self.lowest_cut.is_some_and(|cut| cut <= Stage::of(layer, Module::DownProj))
    }

    /// What each layer keeps, so that the pass needs at most `free_bytes` and keeps at most `kept_bytes_max`.
    ///
    /// # Errors
    /// The bytes needed, where even keeping the least is too much.
    pub(crate) fn plan(&self, kept_bytes_max: u64, free_bytes: u64) -> Result<Vec<Keep>, u64> {
        let least = self.least();
        if least > free_bytes {
            return Err(least);
        }
        let mut room = kept_bytes_max.min(free_bytes - least);
        let mut keep = Vec::with_capacity(self.layers.len());
        for (layer, sizes) in self.layers.iter().enumerate().rev() {
            let attention = self.lowest_cut.is_some_and(|cut| cut <= Stage::of(layer, Module::OProj));
            let whole = sizes.mlp + if attention { sizes.attention } else { 0 };
            keep.push(match self.reached(layer) {
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
}

impl Layer {
    fn new(config: &ModelConfig, layer: usize, rank: impl Fn(usize, Module) -> usize, attention: HalfRows, mlp: HalfRows) -> Self {
        let last = layer + 1 == config.num_hidden_layers;
        let (hidden, width, heads) = (config.hidden_size, config.intermediate_size, config.num_attention_heads);
        let (q, kv) = (config.module_out(Module::QProj), config.module_out(Module::KProj));
        let ranks = |modules: &[Module]| -> usize { modules.iter().map(|module| rank(layer, *module)).sum() };
        let attention_ranks = ranks(&[Module::QProj, Module::KProj, Module::VProj, Module::OProj]);
        let mlp_ranks = ranks(&[Module::GateProj, Module::UpProj, Module::DownProj]);
        let view = |streams: Streams| if last { streams.labelled } else { streams.all };

        let (queries, keys) = (view(attention.own), attention.own.all);
        let projected = attention.fanned_out.map_or(0, |base| bytes(base.all, hidden + 2 * kv) + bytes(view(base), hidden + q));
        let kept = bytes(keys, 2 * hidden + 3 * kv + attention_ranks) + bytes(queries, hidden + 3 * q + heads + attention_ranks);
        let forward = bytes(queries, 2 * hidden) + projected + bytes(attention.before.all, hidden);
        let backward = bytes(keys, 2 * hidden + 3 * kv) + bytes(queries, 2 * hidden + 3 * q);
        let input = bytes(attention.fanned_out.unwrap_or(attention.own).all, hidden);
        let attention_scratch = forward.max(backward);

        let rows = view(mlp.own);
        let projected = mlp.fanned_out.map_or(0, |base| bytes(view(base), hidden + 2 * width));
        let forward = bytes(rows, hidden) + projected + bytes(view(mlp.before), hidden);
        let backward = bytes(rows, 2 * hidden + 3 * width);
        let scratch = attention_scratch + forward.max(backward);
        Self { input, attention: kept, mlp: bytes(rows, 2 * hidden + 3 * width + mlp_ranks), scratch }
    }
}

fn bytes(rows: usize, width: usize) -> u64 {
    (ELEMENT_BYTES * rows * width) as u64
}
