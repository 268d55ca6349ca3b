//! Rows of a data set in the store, and their tokens: read once for all jobs that have them open at the same time.
//!
//! Keeps nothing that no job has open.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufReader, Read};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cap_std::fs::{File, FileExt as _};
use nodus_formats::{FormatError, TextModel, data};
use nodus_protocol::{Digest, ModelConfig, Sequence};
use nodus_sandbox::services::{Dataset, Refusal};

use super::inputs::OpenModel;
use super::services::{ours, refusal};
use crate::error::user;
use crate::name::Name;

/// Decides, with the number of rows alone, which rows are held out: runs of other seeds stay comparable.
const SPLIT_SEED: u64 = 0;

/// Rows of a data set in the store.
#[derive(Debug)]
pub(crate) struct Rows {
    name: Name,
    digest: Digest,
    file: File,
    /// Line numbers, from 1; absent: all.
    lines: Option<BTreeSet<u64>>,
    tokenised: Mutex<BTreeMap<Key, Arc<Mutex<Kept>>>>,
}

/// A model's digest and a maximum length.
type Key = (Digest, usize);

/// Tokens that some job may still have open, and how many examples were cut.
#[derive(Debug, Default)]
struct Kept {
    examples: Weak<Vec<Arc<Sequence>>>,
    truncated: u64,
}

impl Rows {
    /// All rows of a data set.
    pub(crate) fn whole(name: Name, digest: Digest, file: File) -> Arc<Self> {
        Arc::new(Self { name, digest, file, lines: None, tokenised: Mutex::default() })
    }

    /// The rows that are left to train on, and those held out.
    ///
    /// # Errors
    /// The user's: one of the parts would be empty.
    pub(crate) fn parts(
        name: &Name,
        digest: Digest,
        file: File,
        count: u64,
        share: data::HeldOut,
    ) -> anyhow::Result<(Arc<Self>, Arc<Self>)> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let split = data::split(count, share, SPLIT_SEED).map_err(|error| user(format!("data set `{name}`: {error}")))?;
        let part = |file, rows: Vec<usize>| {
            let lines = Some(rows.into_iter().map(|row| row as u64 + 1).collect());
            Arc::new(Self { name: name.clone(), digest, file, lines, tokenised: Mutex::default() })
        };
        let second = file.try_clone()?;
        Ok((part(file, split.train), part(second, split.held_out)))
    }

    /// What the user calls the data set.
    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// Over the whole data set's bytes.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// How many, where these are a part.
    pub(crate) fn part_len(&self) -> Option<u64> {
        self.lines.as_ref().map(|lines| lines.len() as u64)
    }

    /// The rows as tokens of a model, cut at a length. Who asks while another reads waits for it and gets the same.
    ///
    /// # Errors
    /// The format's, as the guest sees it.
    pub(crate) fn tokenise(&self, model: &OpenModel, max_length: usize) -> Result<Dataset, Refusal> {
        self.tokenise_for(model.digest, &model.config, model.text.as_deref(), max_length)
    }

    fn tokenise_for(&self, model: Digest, config: &ModelConfig, text: Option<&TextModel>, max_length: usize) -> Result<Dataset, Refusal> {
        let slot = {
            let mut slots = self.tokenised.lock().unwrap_or_else(PoisonError::into_inner);
            slots.entry((model, max_length)).or_default().clone()
        };
        let mut kept = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(examples) = kept.examples.upgrade() {
            return Ok(Dataset { examples, truncated: kept.truncated, digest: self.digest });
        }
        let (examples, truncated) = self.read(config, text, max_length)?;
        let examples = Arc::new(examples);
        *kept = Kept { examples: Arc::downgrade(&examples), truncated };
        Ok(Dataset { examples, truncated, digest: self.digest })
    }

    fn read(&self, config: &ModelConfig, text: Option<&TextModel>, max_length: usize) -> Result<(Vec<Arc<Sequence>>, u64), Refusal> {
        let name = format!("data set `{}`", self.name);
        let file = BufReader::new(FromStart { file: &self.file, at: 0 });
        let all = data::tokenise(file, &name, config, text, max_length).map_err(|error: FormatError| refusal(&error))?;
        let Some(lines) = &self.lines else { return Ok((all.examples, all.truncated)) };
        let numbered = all.examples.into_iter().zip(&all.lines);
        let examples: Vec<_> = numbered.filter(|(_, line)| lines.contains(line)).map(|(example, _)| example).collect();
        if examples.is_empty() {
            let text = format!("{name}: no label within the first {max_length} tokens of any line of this part, expected at least one");
            return Err(Refusal::InvalidArgument(text));
        }
        Ok((examples, all.cut_lines.iter().filter(|line| lines.contains(line)).count() as u64))
    }
}

/// [`Rows::tokenise`] away from the threads that run guests.
pub(super) async fn tokenise(rows: Arc<Rows>, model: Arc<OpenModel>, max_length: usize) -> Result<Dataset, Refusal> {
    let work = move || rows.tokenise(&model, max_length);
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(ours("tokenising the data", &error)))
}

/// A file read from its start at an offset of its own: several jobs read one file at the same time.
struct FromStart<'a> {
    file: &'a File,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex};

    use nodus_formats::data::HeldOut;
    use nodus_protocol::{Architecture, Digest, ModelConfig};
    use nodus_sandbox::services::{Dataset, Refusal};

    use super::Rows;

    fn config() -> ModelConfig {
        ModelConfig {
            architecture: Architecture::Llama,
            hidden_size: 8,
            intermediate_size: 16,
            num_hidden_layers: 1,
            num_attention_heads: 1,
            num_key_value_heads: 1,
            head_dim: 8,
            vocab_size: 32,
            max_position_embeddings: 16,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: None,
            sliding_window: None,
            qkv_bias: false,
            tie_word_embeddings: true,
            eos_token_id: None,
            bos_token_id: None,
        }
    }

    fn tokenise(rows: &Rows, max_length: usize) -> Result<Dataset, Refusal> {
        rows.tokenise_for(Digest::of(b"model"), &config(), None, max_length)
    }

    #[test]
    fn a_part_holds_its_own_lines_and_counts_its_own_cuts() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        // Line 2 loses its only label to the cut; lines 2 and 3 are cut.
        let lines = "{\"tokens\": [1, 2]}\n{\"tokens\": [2, 2, 2, 2], \"weights\": [0, 0, 0, 1]}\n{\"tokens\": [3, 3, 3, 3]}\n{\"tokens\": [4, 4]}\n";
        root.write("lines", lines).unwrap();
        let part = |lines: Option<&[u64]>| {
            let lines = lines.map(|lines| lines.iter().copied().collect::<BTreeSet<_>>());
            let (name, digest, file) = ("d".parse().unwrap(), Digest::of(b"d"), root.open("lines").unwrap());
            Rows { name, digest, file, lines, tokenised: Mutex::default() }
        };
        let first_tokens = |rows: &Rows| {
            let data = tokenise(rows, 3).unwrap();
            (data.examples.iter().map(|example| example.tokens()[0]).collect::<Vec<_>>(), data.truncated)
        };
        assert_eq!(first_tokens(&part(None)), (vec![1, 3, 4], 2));
        assert_eq!(first_tokens(&part(Some(&[1, 2]))), (vec![1], 1));
        let held_out = part(Some(&[3, 4]));
        assert_eq!(first_tokens(&held_out), (vec![3, 4], 1));
        assert_eq!(first_tokens(&held_out), (vec![3, 4], 1), "a second opening reads from the start");
        let error = tokenise(&part(Some(&[2])), 3).err().unwrap();
        assert!(error.to_string().contains("no label"), "{error}");
    }

    #[test]
    fn tokens_are_shared_while_somebody_has_them_and_read_by_many_at_once() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let lines: String = (0..5000).map(|n| format!("{{\"tokens\": [{}, 7, 8]}}\n", n % 30)).collect();
        root.write("lines", &lines).unwrap();
        let (train, held_out) =
            Rows::parts(&"d".parse().unwrap(), Digest::of(b"d"), root.open("lines").unwrap(), 5000, HeldOut::Count(10)).unwrap();
        let lengths: Vec<usize> = std::thread::scope(|scope| {
            let reads = [(&train, 3), (&train, 3), (&train, 2), (&held_out, 3), (&held_out, 2)];
            let threads = reads.map(|(rows, length)| scope.spawn(move || tokenise(rows, length).unwrap().examples.len()));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(lengths, [4990, 4990, 4990, 10, 10]);
        let first = tokenise(&train, 3).unwrap();
        assert!(Arc::ptr_eq(&first.examples, &tokenise(&train, 3).unwrap().examples));
        let weak = Arc::downgrade(&first.examples);
        drop(first);
        assert!(weak.upgrade().is_none(), "kept though nobody has it open");
    }
}
