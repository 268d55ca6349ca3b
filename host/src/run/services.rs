//! What a local run gives its job: one model, its data, the adapters it was given and those it saved.
//!
//! Never tells the guest a path or anything that the run was not given.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use cap_std::fs::Dir;
use nodus_formats::{FormatError, TextError, TextFiles, TextModel, peft};
use nodus_protocol::{AdapterWeights, Digest};
use nodus_sandbox::services::{Dataset, Event, Refusal, Services, Text, Trunk};

use super::alarm::Alarm;
use super::inputs::{Job, OpenModel};
use super::recorder::Listener;
use super::rows::{Rows, tokenise};
use crate::name::Name;
use crate::store::write_synced;

/// The names a job knows its inputs by.
const MODEL: &str = "model";
const TRAIN: &str = "train";
const HELD_OUT_DATA: &str = "held-out";
/// Where an adapter is written before it takes its name; no adapter may be called so, since it begins with a dot.
const SCRATCH: &str = ".saving";

/// The services of one local run.
pub(crate) struct RunServices {
    trunk: Trunk,
    model: Arc<OpenModel>,
    /// What others know the model by.
    base: String,
    train: Arc<Rows>,
    held_out: Option<Arc<Rows>>,
    given: BTreeMap<Digest, Arc<AdapterWeights>>,
    /// The folder of the job's results.
    output: Dir,
    /// Adapters in it: digest by name.
    saved: BTreeMap<String, Digest>,
    listener: Listener,
    note: Note,
    alarm: Alarm,
}

/// Takes note of the question at which a job learns that it is to stop.
pub(crate) type Note = Box<dyn Fn(u64) -> anyhow::Result<()> + Send + Sync>;

impl RunServices {
    /// What `job` is given, its model being `trunk` of an engine.
    pub(crate) fn new(job: &Job, trunk: Trunk, output: Dir, (listener, note, alarm): (Listener, Note, Alarm)) -> Self {
        Self {
            trunk,
            model: job.model.clone(),
            base: job.base.clone(),
            train: job.train.clone(),
            held_out: job.held_out.clone(),
            given: job.adapters.iter().cloned().collect(),
            output,
            saved: BTreeMap::new(),
            listener,
            note,
            alarm,
        }
    }

    /// A data set by the job's name for it.
    pub(crate) fn rows(&self, name: &str) -> Result<&Arc<Rows>, Refusal> {
        match (name, &self.held_out) {
            (TRAIN, _) => Ok(&self.train),
            (HELD_OUT_DATA, Some(rows)) => Ok(rows),
            (HELD_OUT_DATA, None) => Err(Refusal::NotFound("the job was given no held-out data".into())),
            _ => Err(Refusal::NotFound(format!("no data set named `{name}`, expected `{TRAIN}` or `{HELD_OUT_DATA}`"))),
        }
    }

    /// The job's data sets.
    pub(crate) fn all_rows(&self) -> impl Iterator<Item = &Arc<Rows>> {
        std::iter::once(&self.train).chain(&self.held_out)
    }

    /// The host cannot write: the job is cut off, whatever it makes of this.
    fn unwritten(&self, what: &'static str, error: anyhow::Error) -> Refusal {
        let refusal = ours(what, &format!("{error:#}"));
        self.alarm.raise(error.context(what));
        refusal
    }

    /// The files of the job's model that say something about text.
    pub(crate) fn text_files(&self) -> &Arc<TextFiles> {
        &self.model.text_files
    }

    /// The job's trunk.
    pub(crate) fn trunk(&self) -> &Trunk {
        &self.trunk
    }
}

#[async_trait]
impl Services for RunServices {
    async fn open_trunk(&mut self, name: &str) -> Result<Trunk, Refusal> {
        if name == MODEL { Ok(self.trunk.clone()) } else { Err(Refusal::NotFound(format!("no trunk named `{name}`, expected `{MODEL}`"))) }
    }

    async fn open_dataset(&mut self, name: &str, _: &Trunk, max_length: usize) -> Result<Dataset, Refusal> {
        tokenise(self.rows(name)?.clone(), self.model.clone(), max_length).await
    }

    async fn load_artifact(&mut self, trunk: &Trunk, digest: Digest) -> Result<Arc<AdapterWeights>, Refusal> {
        if let Some(weights) = self.given.get(&digest) {
            return Ok(weights.clone());
        }
        let Some((name, _)) = self.saved.iter().find(|(_, saved)| **saved == digest) else {
            return Err(Refusal::NotFound(format!("no adapter {digest} was saved by this job or given to it")));
        };
        let dir = self.output.open_dir(name).map_err(|error| ours("opening a saved adapter", &error))?;
        peft::read(&dir, &trunk.config).map(Arc::new).map_err(|error| refusal(&error))
    }

    async fn save_artifact(&mut self, _: &Trunk, name: &str, weights: &AdapterWeights) -> Result<Digest, Refusal> {
        check_name(name)?;
        let files = peft::write(weights, &self.base).map_err(|error| refusal(&error))?;
        replace(&self.output, name, &files).map_err(|error| self.unwritten("saving an adapter", error))?;
        let digest = peft::digest(&files);
        self.saved.insert(name.to_owned(), digest);
        Ok(digest)
    }

    async fn stopping(&mut self, question: u64) -> Result<(), Refusal> {
        tokio::task::block_in_place(|| (self.note)(question)).map_err(|error| self.unwritten("noting a stop", error))
    }

    fn event(&mut self, event: Event) {
        self.listener.event(event);
    }
}

/// A saved adapter is a folder beside the run's own files, so it must not be called like one of them.
fn check_name(name: &str) -> Result<(), Refusal> {
    name.parse::<Name>().map(drop).map_err(|error| Refusal::InvalidArgument(error.to_string()))
}

/// Writes an adapter's folder beside the old one and puts it in its place.
fn replace(output: &Dir, name: &str, files: &[peft::AdapterFile]) -> anyhow::Result<()> {
    if output.exists(SCRATCH) {
        output.remove_dir_all(SCRATCH)?;
    }
    output.create_dir(SCRATCH)?;
    let scratch = output.open_dir(SCRATCH)?;
    files.iter().try_for_each(|(file, content)| write_synced(&scratch, file, content))?;
    if output.exists(name) {
        output.remove_dir_all(name)?;
    }
    output.rename(SCRATCH, output, name)?;
    Ok(())
}

/// What a format's refusal is to the guest.
pub(crate) fn refusal(error: &FormatError) -> Refusal {
    match error {
        FormatError::Unsupported { .. } => Refusal::Unsupported(error.to_string()),
        FormatError::Missing { .. } | FormatError::Invalid { .. } => Refusal::InvalidArgument(error.to_string()),
        FormatError::Read { .. } | FormatError::Write { .. } => ours("a file of the host", error),
    }
}

/// Something failed that is not the guest's business: it ends the job, and is told to whoever runs the host.
pub(crate) fn ours(what: &str, error: &dyn std::fmt::Display) -> Refusal {
    Refusal::Internal(format!("{what} failed: {error}"))
}

/// A model's tokenizer as the sandbox wants it.
pub(crate) struct HostText(pub(crate) Arc<TextModel>);

impl Text for HostText {
    fn encode(&self, text: &str) -> Result<Vec<u32>, Refusal> {
        self.0.encode(text).map_err(|error| text_refusal(&error))
    }

    fn decode(&self, tokens: &[u32]) -> Result<String, Refusal> {
        self.0.decode(tokens).map_err(|error| text_refusal(&error))
    }

    fn apply_chat_template(&self, messages: &[(String, String)], add_generation_prompt: bool) -> Result<String, Refusal> {
        self.0.apply_chat_template(messages, add_generation_prompt).map_err(|error| text_refusal(&error))
    }
}

fn text_refusal(error: &TextError) -> Refusal {
    match error {
        TextError::NoTemplate => Refusal::Unsupported(error.to_string()),
        _ => Refusal::InvalidArgument(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use nodus_formats::peft;
    use nodus_protocol::{AdapterWeights, Digest, LayerSelection, LoraConfig, Module, ModuleWeights, TrunkSlot, channel};
    use nodus_sandbox::services::{Refusal, Services as _, Trunk};

    use super::super::alarm::Alarm;
    use super::super::content::Content;
    use super::super::inputs::{OpenModel, Weights};
    use super::super::recorder::Listener;
    use super::super::rows::Rows;
    use super::{RunServices, check_name, replace};
    use crate::cli::Dtype;
    use crate::random::{Recipe, Shape};

    /// A job's services in a folder of their own.
    fn services(output: cap_std::fs::Dir) -> RunServices {
        let recipe = Recipe::new(Shape::SmolLm2_135m, 0, Dtype::F32);
        let config = Arc::new(recipe.config);
        let digest = Digest::of(b"model");
        let weights = Weights::Random { dtype: nodus_kernels::DType::F32, seed: 0 };
        let (name, text_files) = ("theirs".parse().unwrap(), Arc::default());
        let model = Arc::new(OpenModel { name, config: config.clone(), digest, text: None, text_files, weights });
        output.write("data", "{\"tokens\":[1,2]}\n").unwrap();
        let train = Rows::whole("theirdata".parse().unwrap(), Digest::of(b"data"), Content::unseen(output.open("data").unwrap()));
        let trunk = Trunk { config, digest, engine: channel(1).0, slot: TrunkSlot(0), text: None };
        let (given, saved, listener) = (BTreeMap::new(), BTreeMap::new(), Listener::to_nobody());
        let (note, alarm): (super::Note, _) = (Box::new(|_| Ok(())), Alarm::new().0);
        RunServices { trunk, model, base: "theirs".into(), train, held_out: None, given, output, saved, listener, note, alarm }
    }

    /// 47: whether somebody else has it shows neither in the answer nor in the time that it takes.
    #[tokio::test]
    async fn what_another_job_has_is_not_found_as_what_nobody_has() {
        let roots = [(); 2].map(|()| cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap());
        let [mut theirs, mut ours] = roots.each_ref().map(|root| services(root.try_clone().unwrap()));
        let trunk = theirs.trunk().clone();
        let (rank, layer, module) = (1, 29, Module::QProj);
        let config = LoraConfig {
            rank: 1,
            alpha: 1.0,
            rslora: false,
            dropout: 0.0,
            targets: vec![module],
            layers: LayerSelection::Last(1),
            overrides: Vec::new(),
        };
        let (a, b) = (vec![0.5; trunk.config.module_in(module)], vec![0.5; trunk.config.module_out(module)]);
        let weights = AdapterWeights { config, modules: vec![ModuleWeights { layer, module, rank, a, b }] };
        let saved = theirs.save_artifact(&trunk, "adapter", &weights).await.unwrap();
        assert_eq!(saved, peft::digest(&peft::write(&weights, "theirs").unwrap()));
        assert_eq!(*theirs.load_artifact(&trunk, saved).await.unwrap(), weights);

        let mut asked = async |digest: Digest| {
            let mut best = Duration::MAX;
            for _ in 0..300 {
                let began = Instant::now();
                let Err(Refusal::NotFound(text)) = ours.load_artifact(&trunk, digest).await else { panic!("{digest} was found") };
                best = best.min(began.elapsed());
                assert_eq!(text, format!("no adapter {digest} was saved by this job or given to it"));
            }
            best
        };
        let (there, not) = (asked(saved).await, asked(Digest::of(b"nothing")).await);
        assert!(there < not * 4 + Duration::from_micros(20) && not < there * 4 + Duration::from_micros(20), "{there:?} and {not:?}");
        for (there, not) in [("theirs", "nobodys"), ("theirdata", "nodata"), ("/etc/passwd", "/etc/nothing")] {
            let mut answers = Vec::new();
            for word in [there, not] {
                let Err(Refusal::NotFound(trunk)) = ours.open_trunk(word).await else { panic!("{word} was opened") };
                let Err(Refusal::NotFound(data)) = ours.rows(word).map(drop) else { panic!("{word} was opened") };
                answers.push((trunk.replace(word, "WORD"), data.replace(word, "WORD")));
            }
            assert_eq!(answers[0], answers[1]);
        }
    }

    #[test]
    fn adapters_cannot_take_the_names_of_the_runs_own_files() {
        for bad in ["receipt.json", "losses.jsonl", "LOSSES.JSONL", "log.txt", ".", "..", ".saving", "-rf", "README.md"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert!(check_name("adapter").is_ok() && check_name("best-1.0").is_ok());
    }

    #[test]
    fn a_name_is_replaced_whole() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let file = |name: &str, content: &str| (name.to_owned(), content.as_bytes().to_vec());
        replace(&root, "best", &[file("a", "1"), file("b", "1")]).unwrap();
        root.create_dir_all(".saving/left").unwrap();
        replace(&root, "best", &[file("a", "2")]).unwrap();
        assert_eq!(root.read_to_string("best/a").unwrap(), "2");
        assert!(!root.exists("best/b") && !root.exists(".saving"));
    }
}
