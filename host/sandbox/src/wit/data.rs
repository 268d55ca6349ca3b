//! `nodus:gpu/data`: data sets and batches. Copies no example: a batch points at the sequences of its data set.

use std::sync::Arc;

use nodus_protocol::{Batch, Digest, Sequence};
use wasmtime::component::Resource;

use super::Fault;
use super::handles::{BatchHandle, DatasetHandle, TrunkHandle};
use crate::bindings::nodus::gpu::data::{DatasetInfo, Example, Host, HostBatch, HostDataset};
use crate::services::{Dataset, Source};
use crate::state::State;

impl Host for State {}

impl HostDataset for State {
    async fn open(
        &mut self,
        name: String,
        trunk: Resource<TrunkHandle>,
        max_length: Option<u32>,
    ) -> Result<Resource<DatasetHandle>, Fault> {
        let trunk = self.table.get(&trunk)?.0.clone();
        let context = trunk.config.max_position_embeddings;
        // An example of n tokens has n-1 rows.
        let longest = usize::try_from(self.limits.sequence_tokens).unwrap_or(usize::MAX).saturating_add(1);
        let max_length = max_length.map_or(context.min(longest), |length| length as usize);
        if !(2..=context).contains(&max_length) {
            return Err(Fault::invalid(format!("max-length is {max_length}, expected 2 to {context}, the trunk's context")));
        }
        if max_length > longest {
            return Err(Fault::quota("sequence-tokens", max_length as u64 - 1, self.limits.sequence_tokens));
        }
        if self.counts.datasets >= self.limits.datasets {
            return Err(Fault::quota("datasets", self.counts.datasets + 1, self.limits.datasets));
        }
        let data = self.services.open_dataset(&name, &trunk, max_length).await?;
        self.meter.answered();
        let info = info(&data);
        let source = if name == Source::HeldOut.name() { Source::HeldOut } else { Source::Train };
        let handle = self.push(DatasetHandle { data, trunk: trunk.digest, info, source })?;
        self.counts.datasets += 1;
        Ok(handle)
    }

    fn info(&mut self, dataset: Resource<DatasetHandle>) -> wasmtime::Result<DatasetInfo> {
        Ok(self.table.get(&dataset)?.info.clone())
    }

    fn batch(&mut self, dataset: Resource<DatasetHandle>, indices: Vec<u64>) -> Result<Resource<BatchHandle>, Fault> {
        let dataset = self.table.get(&dataset)?;
        self.check_sequences("indices", indices.len())?;
        let sequences = indices.iter().enumerate().map(|(i, index)| find(&dataset.data, &format_args!("indices[{i}]"), *index));
        let sequences = sequences.collect::<Result<Vec<_>, _>>()?;
        let (trunk, source) = (dataset.trunk, dataset.source);
        self.push_batch(sequences, trunk, source, 0)
    }

    fn example(&mut self, dataset: Resource<DatasetHandle>, index: u64) -> Result<Example, Fault> {
        let sequence = find(&self.table.get(&dataset)?.data, &format_args!("index"), index)?;
        Ok(Example { tokens: sequence.tokens().to_vec(), targets: sequence.targets().to_vec(), weights: sequence.weights().to_vec() })
    }

    fn drop(&mut self, dataset: Resource<DatasetHandle>) -> wasmtime::Result<()> {
        self.table.delete(dataset)?;
        self.counts.datasets -= 1;
        Ok(())
    }
}

impl HostBatch for State {
    fn from_examples(&mut self, trunk: Resource<TrunkHandle>, examples: Vec<Example>) -> Result<Resource<BatchHandle>, Fault> {
        let trunk = self.table.get(&trunk)?.0.clone();
        self.check_sequences("examples", examples.len())?;
        let mut sequences = Vec::with_capacity(examples.len());
        let mut bytes = 0;
        for (i, example) in examples.into_iter().enumerate() {
            let sequence = Sequence::new(&trunk.config, example.tokens, example.targets, example.weights)
                .map_err(|error| Fault::invalid(format!("examples[{i}]: {error}")))?;
            if sequence.rows() as u64 > self.limits.sequence_tokens {
                return Err(Fault::quota("sequence-tokens", sequence.rows() as u64, self.limits.sequence_tokens));
            }
            bytes += BYTES_PER_ROW * sequence.rows() as u64 + BYTES_PER_SEQUENCE;
            sequences.push(Arc::new(sequence));
        }
        self.push_batch(sequences, trunk.digest, Source::Own, bytes)
    }

    fn sequences(&mut self, batch: Resource<BatchHandle>) -> wasmtime::Result<u32> {
        Ok(u32::try_from(self.table.get(&batch)?.batch.sequences.len()).unwrap_or(u32::MAX))
    }

    fn tokens(&mut self, batch: Resource<BatchHandle>) -> wasmtime::Result<u64> {
        Ok(self.table.get(&batch)?.rows)
    }

    fn labelled_tokens(&mut self, batch: Resource<BatchHandle>) -> wasmtime::Result<u64> {
        Ok(self.table.get(&batch)?.labelled)
    }

    fn drop(&mut self, batch: Resource<BatchHandle>) -> wasmtime::Result<()> {
        self.table.delete(batch)?;
        Ok(())
    }
}

/// A token, a target and a weight.
const BYTES_PER_ROW: u64 = 12;
/// A sequence without its rows: three lists and a count of its users.
const BYTES_PER_SEQUENCE: u64 = 88;
/// A pointer to a sequence.
const BYTES_PER_POINTER: u64 = 8;

impl State {
    fn check_sequences(&self, argument: &str, count: usize) -> Result<(), Fault> {
        if count == 0 {
            return Err(Fault::invalid(format!("{argument} is empty, expected at least one")));
        }
        if count as u64 > self.limits.batch_sequences {
            return Err(Fault::quota("batch-sequences", count as u64, self.limits.batch_sequences));
        }
        Ok(())
    }

    /// Gives the guest a batch; `own_bytes` is what its sequences hold beyond what the data set holds anyway.
    fn push_batch(
        &mut self,
        sequences: Vec<Arc<Sequence>>,
        trunk: Digest,
        source: Source,
        own_bytes: u64,
    ) -> Result<Resource<BatchHandle>, Fault> {
        let bytes = own_bytes + BYTES_PER_POINTER * sequences.len() as u64;
        let needed = self.counts.batches.with(bytes);
        if needed > self.limits.batch_bytes {
            return Err(Fault::quota("batch-bytes", needed, self.limits.batch_bytes));
        }
        let batch = Batch { sequences };
        let (rows, labelled) = (batch.rows() as u64, batch.labelled() as u64);
        let charge = self.counts.batches.charge(bytes);
        self.push(BatchHandle { batch, trunk, source, rows, labelled, charge })
    }
}

fn find(data: &Dataset, argument: &std::fmt::Arguments<'_>, index: u64) -> Result<Arc<Sequence>, Fault> {
    let found = usize::try_from(index).ok().and_then(|index| data.examples.get(index)).cloned();
    found.ok_or_else(|| Fault::invalid(format!("{argument} is {index}, expected below {}, the number of examples", data.examples.len())))
}

fn info(data: &Dataset) -> DatasetInfo {
    let rows = || data.examples.iter().map(|sequence| sequence.rows());
    DatasetInfo {
        examples: data.examples.len() as u64,
        tokens: rows().sum::<usize>() as u64,
        labelled_tokens: data.examples.iter().map(|sequence| sequence.labelled() as u64).sum(),
        longest: u32::try_from(rows().max().unwrap_or(0)).unwrap_or(u32::MAX),
        truncated: data.truncated,
        digest: data.digest.to_string(),
    }
}
