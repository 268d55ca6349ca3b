//! Rows of a data set in the store, and their tokens: read once for all jobs that have them open at the same time.
//!
//! Keeps nothing that no job has open.

use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use nodus_formats::{TextModel, data};
use nodus_protocol::{Digest, ModelConfig};
use nodus_sandbox::services::{Dataset, Refusal};

use super::content::Content;
use super::inputs::OpenModel;
use super::services::{ours, refusal};
use super::tokens::{Part, Tokens};
use crate::error::user;
use crate::name::Name;

/// Decides, with the number of rows alone, which rows are held out: runs of other seeds stay comparable.
const SPLIT_SEED: u64 = 0;

/// What is read of a file at a time where somebody is asked between.
const PIECE_BYTES: usize = 64 << 10;

/// Asks before each piece is read.
struct Paced<R, F>(R, F);

impl<R: Read, F: FnMut() -> io::Result<()>> Read for Paced<R, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.1()?;
        self.0.read(buffer)
    }
}

/// Rows of a data set in the store.
#[derive(Debug)]
pub(crate) struct Rows {
    /// No two of a process have the same.
    id: u64,
    part: Part,
    content: Content,
    tokens: Tokens,
}

impl Rows {
    fn new(part: Part, content: Content) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { id: NEXT.fetch_add(1, Relaxed), part, content, tokens: Tokens::default() }
    }

    /// All rows of a data set.
    pub(crate) fn whole(name: Name, digest: Digest, content: Content) -> Arc<Self> {
        Arc::new(Self::new(Part { name, digest, rows: None }, content))
    }

    /// The rows that are left to train on, and those held out.
    ///
    /// # Errors
    /// The user's: one of the parts would be empty.
    pub(crate) fn parts(
        name: &Name,
        digest: Digest,
        content: Content,
        count: u64,
        share: data::HeldOut,
    ) -> anyhow::Result<(Arc<Self>, Arc<Self>)> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let split = data::split(count, share, SPLIT_SEED).map_err(|error| user(format!("data set `{name}`: {error}")))?;
        let part = |content, rows| Arc::new(Self::new(Part { name: name.clone(), digest, rows: Some(rows) }, content));
        Ok((part(content.clone(), split.train), part(content, split.held_out)))
    }

    /// What the user calls the data set.
    pub(crate) fn name(&self) -> &Name {
        &self.part.name
    }

    /// Over the whole data set's bytes.
    pub(crate) fn digest(&self) -> Digest {
        self.part.digest
    }

    /// How many, where these are a part.
    pub(crate) fn part_len(&self) -> Option<u64> {
        self.part.rows.as_ref().map(|rows| rows.len() as u64)
    }

    /// The rows as tokens of a model, cut at a length. Who asks while another reads waits for it and gets the same.
    ///
    /// # Errors
    /// The format's, as the guest sees it.
    pub(crate) fn tokenise(&self, model: &OpenModel, max_length: usize) -> Result<Dataset, Refusal> {
        self.tokenise_for(model.digest, &model.config, model.text.as_deref(), max_length)
    }

    /// Of each line of the whole data set, by its number, how its targets weigh before any cut, as [`data::targets`] has it. `between` is asked before
    /// each piece of the file is read.
    ///
    /// # Errors
    /// The format's, as the guest sees it; what `between` says, as ours.
    pub(crate) fn targets(
        &self,
        model: &OpenModel,
        between: impl FnMut() -> io::Result<()>,
        take: impl FnMut(u64, &[f32]),
    ) -> Result<(), Refusal> {
        let whole = BufReader::with_capacity(PIECE_BYTES, Paced(self.content.from(0), between));
        data::targets(whole, &self.part.called(), &model.config, model.text.as_deref(), take).map_err(|error| refusal(&error))?;
        self.content.unchanged().map_err(|error| ours("reading the data", &error))
    }

    fn tokenise_for(&self, model: Digest, config: &ModelConfig, text: Option<&TextModel>, max_length: usize) -> Result<Dataset, Refusal> {
        self.tokens.get((model, max_length), self.part.digest, || {
            let examples = self.part.read(BufReader::new(self.content.from(0)), config, text, max_length)?;
            self.content.unchanged().map_err(|error| ours("reading the data", &error))?;
            Ok(examples)
        })
    }

    /// Tells these rows from all others.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Which rows of which data set.
    pub(crate) fn part(&self) -> &Part {
        &self.part
    }

    /// Length of the whole data set; 0 where the system does not say.
    pub(crate) fn whole_bytes(&self) -> u64 {
        self.content.bytes()
    }

    /// Bytes of the whole data set from a place on, at most so many; none at its end.
    ///
    /// # Errors
    /// What the operating system says; it was changed after it was hashed.
    pub(crate) fn bytes_at(&self, offset: u64, bytes_max: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.content.from(offset).take(bytes_max as u64).read_to_end(&mut bytes)?;
        self.content.unchanged()?;
        Ok(bytes)
    }
}

/// [`Rows::tokenise`] away from the threads that run guests.
pub(super) async fn tokenise(rows: Arc<Rows>, model: Arc<OpenModel>, max_length: usize) -> Result<Dataset, Refusal> {
    let work = move || rows.tokenise(&model, max_length);
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(ours("tokenising the data", &error)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nodus_formats::data::{self, HeldOut};
    use nodus_protocol::{Architecture, Digest, ModelConfig};
    use nodus_sandbox::services::{Dataset, Refusal};

    use super::{Content, Part, Rows};

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
        // Those that hold out the lines at these indices.
        let split = |held_out: &[usize]| {
            let mut splits = (0..).map(|seed| data::split(4, HeldOut::Count(held_out.len()), seed).unwrap());
            splits.find(|split| held_out.iter().all(|index| split.held_out.has(*index))).unwrap()
        };
        let part = |rows: Option<data::Part>| {
            let (name, digest, content) = ("d".parse().unwrap(), Digest::of(b"d"), Content::unseen(root.open("lines").unwrap()));
            Rows::new(Part { name, digest, rows }, content)
        };
        let first_tokens = |rows: &Rows| {
            let data = tokenise(rows, 3).unwrap();
            (data.examples.iter().map(|example| example.tokens()[0]).collect::<Vec<_>>(), data.truncated)
        };
        assert_eq!(first_tokens(&part(None)), (vec![1, 3, 4], 2));
        let halves = split(&[2, 3]);
        assert_eq!(first_tokens(&part(Some(halves.train))), (vec![1], 1));
        let held_out = part(Some(halves.held_out));
        assert_eq!(first_tokens(&held_out), (vec![3, 4], 1));
        assert_eq!(first_tokens(&held_out), (vec![3, 4], 1), "a second opening reads from the start");
        let error = tokenise(&part(Some(split(&[1]).held_out)), 3).err().unwrap();
        assert!(error.to_string().contains("no label"), "{error}");
    }

    #[test]
    fn tokens_are_shared_while_somebody_has_them_and_read_by_many_at_once() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let lines: String = (0..5000).map(|n| format!("{{\"tokens\": [{}, 7, 8]}}\n", n % 30)).collect();
        root.write("lines", &lines).unwrap();
        let (train, held_out) =
            Rows::parts(&"d".parse().unwrap(), Digest::of(b"d"), Content::unseen(root.open("lines").unwrap()), 5000, HeldOut::Count(10))
                .unwrap();
        let lengths: Vec<usize> = std::thread::scope(|scope| {
            let reads = [(&train, 3), (&train, 3), (&train, 2), (&held_out, 3), (&held_out, 2)];
            let threads = reads.map(|(rows, length)| scope.spawn(move || tokenise(rows, length).unwrap().examples.len()));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(lengths, [4990, 4990, 4990, 10, 10]);
        let first = tokenise(&train, 3).unwrap();
        assert!(Arc::ptr_eq(&first.examples, &tokenise(&train, 3).unwrap().examples));
        let (mut weights, part) = (Vec::new(), train.part());
        let whole = std::io::BufReader::new(root.open("lines").unwrap());
        let of_it = |line, row: &[f32]| weights.extend(part.has(line).then(|| row.to_vec()));
        data::targets(whole, "d", &config(), None, of_it).unwrap();
        assert!(first.examples.iter().map(|example| example.weights()).eq(&weights), "one after the other they are the same");
        let weak = Arc::downgrade(&first.examples);
        drop(first);
        assert!(weak.upgrade().is_none(), "kept though nobody has it open");
    }

    /// Whoever replaces the file takes nothing from those that have it open, and whoever writes into it is noticed by all of them.
    #[test]
    fn what_is_read_is_what_was_hashed_or_an_error() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let (name, lines) = ("d".parse().unwrap(), b"{\"tokens\": [1, 2]}\n{\"tokens\": [3, 4]}\n");
        root.write("lines", lines).unwrap();
        let open = || root.open("lines").unwrap();
        let digest = Digest::of(lines);
        let error = Content::counted(&name, Digest::of(b"other"), open()).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
        let (content, count) = Content::counted(&name, digest, open()).unwrap();
        assert_eq!(count, 2);
        let whole = Rows::whole(name.clone(), digest, Content::hashed(&name, digest, open()).unwrap());
        let (train, held_out) = Rows::parts(&name, digest, content, count, HeldOut::Count(1)).unwrap();
        root.write("new", "{\"tokens\": [5, 6]}\n").unwrap();
        root.rename("lines", &root, "old").unwrap();
        root.rename("new", &root, "lines").unwrap();
        let firsts = [&train, &held_out].map(|rows| tokenise(rows, 4).unwrap().examples[0].tokens()[0]);
        assert!(firsts == [1, 3] || firsts == [3, 1], "{firsts:?}");
        // Of the same length, a while later.
        std::thread::sleep(std::time::Duration::from_millis(20));
        root.write("old", lines.map(|byte| if byte == b'4' { b'9' } else { byte })).unwrap();
        assert!(tokenise(&whole, 4).is_err() && tokenise(&train, 3).is_err() && tokenise(&held_out, 3).is_err());
        assert!(whole.bytes_at(0, 10).unwrap_err().to_string().contains("changed"));
    }
}
