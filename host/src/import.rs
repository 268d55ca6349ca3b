//! From what the user names to what the store keeps: models, data sets, adapters.
//!
//! Reads only the files that a model needs; never leaves anything half-imported (the store sees to it).

use std::collections::BTreeSet;
use std::io::{self, BufReader};
use std::path::Path;

use anyhow::Context as _;
use cap_std::fs::{Dir, File};
use indicatif::{ProgressBar, ProgressStyle};
use nodus_formats::gguf::{self, TokenizerChoice};
use nodus_formats::{CONFIG_BYTES_MAX, FormatError, TOKENIZER_BYTES_MAX, data, hf, peft};
use nodus_protocol::{AdapterWeights, Digest, ModelConfig};

use crate::error::{exit_code, user};
use crate::name::Name;
use crate::paths::{Paths, cannot, shown};
use crate::random::{self, Recipe};
use crate::store::{DatasetManifest, ModelManifest, ModelSummary, Store, copy, write_synced};
use crate::text::escape;

/// Files of a model folder, besides its weights, that say something about it, and how many bytes each may have.
const SMALL_FILES: [(&str, u64); 8] = [
    ("config.json", CONFIG_BYTES_MAX),
    ("generation_config.json", CONFIG_BYTES_MAX),
    ("tokenizer.json", TOKENIZER_BYTES_MAX),
    ("tokenizer_config.json", CONFIG_BYTES_MAX),
    ("special_tokens_map.json", CONFIG_BYTES_MAX),
    ("added_tokens.json", CONFIG_BYTES_MAX),
    ("chat_template.jinja", CONFIG_BYTES_MAX),
    ("chat_template.json", CONFIG_BYTES_MAX),
];
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Characters of a name from a file that are shown.
const NAME_CHARS_SHOWN: usize = 100;
/// Largest index file.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// Whose fault a file's refusal is: ours only where it could not be written.
pub(crate) fn fault(error: FormatError) -> anyhow::Error {
    match &error {
        FormatError::Write { .. } => error.into(),
        FormatError::Read { source, .. } => user(format!("{error}: {source}")),
        _ => user(error.to_string()),
    }
}

/// The user's error with the path that they named in front; ours as it is.
fn within(path: &Path, error: anyhow::Error) -> anyhow::Error {
    if exit_code(&error) == 2 { user(format!("{}: {error}", shown(path))) } else { error }
}

/// Imports a Hugging Face folder or a GGUF file under a name.
///
/// # Errors
/// The user's: what is wrong with the files, or the name is taken; ours: the disk refuses.
pub(crate) fn model(store: &Store, paths: Paths, path: &Path, name: &Name, no_tokenizer: bool) -> anyhow::Result<ModelManifest> {
    let tokenizer = if no_tokenizer { TokenizerChoice::LeaveOut } else { TokenizerChoice::Import };
    if paths.is_dir(path)? {
        return store.add_model(name, |dir| {
            copy_folder(paths, path, dir, tokenizer)?;
            summary(dir, "hugging-face").map_err(|error| within(path, error))
        });
    }
    if path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("gguf")) {
        return Err(user(format!("{} is not a model: expected a Hugging Face folder or a .gguf file", shown(path))));
    }
    let file = paths.open(path)?.into_std();
    store.add_model(name, |dir| {
        let bar = ProgressBar::no_length();
        bar.set_style(ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes}").unwrap_or_else(|_| ProgressStyle::default_bar()));
        let mut progress = |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        };
        let report = gguf::import(&file, &file_name(path), dir, tokenizer, &mut progress);
        bar.finish_and_clear();
        report.map_err(fault)?;
        summary(dir, "gguf")
    })
}

/// What a model's manifest names as its source where its weights are random.
pub(crate) const RANDOM: &str = "random";

/// Keeps a recipe of random weights under a name.
///
/// # Errors
/// The user's: the name is taken; ours: the disk refuses.
pub(crate) fn random(store: &Store, recipe: &Recipe, name: &Name) -> anyhow::Result<ModelManifest> {
    let text = recipe.text()?;
    store.add_model(name, |dir| {
        write_synced(dir, random::FILE, text.as_bytes())?;
        Ok(ModelSummary {
            digest: Digest::of(text.as_bytes()),
            source: RANDOM.to_owned(),
            architecture: recipe.config.architecture.name().to_owned(),
            parameters: recipe.parameters(),
            tokenizer: false,
        })
    })
}

/// What a filled folder holds; refuses it where it is no model.
fn summary(dir: &Dir, source: &str) -> anyhow::Result<ModelSummary> {
    let model = hf::open(dir).map_err(fault)?;
    let parameters = model.tensors.values().map(|tensor| tensor.shape().iter().product::<usize>() as u64).sum();
    Ok(ModelSummary {
        digest: model.digest,
        source: source.to_owned(),
        architecture: model.config.architecture.name().to_owned(),
        parameters,
        tokenizer: model.text.is_some(),
    })
}

/// Copies what a model needs. File by file, since a folder of the Hugging Face cache holds links to elsewhere.
fn copy_folder(paths: Paths, from: &Path, to: &Dir, tokenizer: TokenizerChoice) -> anyhow::Result<()> {
    let listing = paths.open_dir(from)?;
    let is_there = |name: &str| listing.symlink_metadata(name).is_ok();
    let is_wanted = |name: &str| tokenizer == TokenizerChoice::Import || !(name.contains("token") || name.contains("template"));
    let small = SMALL_FILES.into_iter().filter(|(name, _)| is_wanted(name) && is_there(name));
    let mut names: Vec<(String, u64)> = small.map(|(name, bytes_max)| (name.to_owned(), bytes_max)).collect();
    if is_there(SINGLE) {
        names.push((SINGLE.to_owned(), u64::MAX));
    } else if is_there(INDEX) {
        names.push((INDEX.to_owned(), INDEX_BYTES_MAX));
        let shards = shards(&paths.read(&from.join(INDEX), INDEX_BYTES_MAX)?);
        names.extend(shards.into_iter().filter(|name| is_there(name)).map(|name| (name, u64::MAX)));
    }
    // All are looked at before any is copied.
    let open = |(name, bytes_max): (String, u64)| Ok((paths.open_within(&from.join(&name), bytes_max)?, name));
    let sources = names.into_iter().map(open).collect::<anyhow::Result<Vec<_>>>()?;
    for (mut source, name) in sources {
        let mut keep = || -> io::Result<()> { copy(&mut source, &mut to.create(&name)?) };
        keep().with_context(|| format!("copying {name} into the data folder"))?;
    }
    Ok(())
}

/// The weight files that an index names. What is wrong with it is said when the copied folder is opened.
fn shards(index: &[u8]) -> BTreeSet<String> {
    let index: serde_json::Value = serde_json::from_slice(index).unwrap_or_default();
    let files = index.get("weight_map").and_then(serde_json::Value::as_object).into_iter().flat_map(serde_json::Map::values);
    let names = files.filter_map(serde_json::Value::as_str).filter(|name| name.ends_with(".safetensors") && !name.contains(['/', '\\']));
    names.map(str::to_owned).collect()
}

/// Checks a JSON Lines file and keeps it under a name.
///
/// # Errors
/// The user's: the first bad line, or the name is taken; ours: the disk refuses.
pub(crate) fn dataset(store: &Store, paths: Paths, path: &Path, name: &Name) -> anyhow::Result<DatasetManifest> {
    let content = paths.open(path)?;
    if content.metadata().map_err(|error| cannot("read", path, &error))?.len() == 0 {
        return Err(user(format!("{} is empty, expected one JSON object a line", shown(path))));
    }
    store.add_dataset(name, content, |file: File| {
        let summary = data::check(BufReader::new(file), &file_name(path)).map_err(fault)?;
        Ok((summary.rows, summary.form.to_string()))
    })
}

/// Reads a PEFT folder of the user's for a model, and keeps it.
///
/// # Errors
/// The user's: what is wrong with it, or how it does not fit the model.
pub(crate) fn adapter(
    store: &Store,
    paths: Paths,
    path: &Path,
    model: &ModelConfig,
    base: &str,
) -> anyhow::Result<(Digest, AdapterWeights)> {
    let refuse = |error: FormatError| within(path, fault(error));
    let dir = paths.open_dir(path)?;
    let weights = peft::read(&dir, model).map_err(refuse)?;
    if let Some(other) = peft::base(&dir).map_err(refuse)?.filter(|other| other != base) {
        let other = escape(&other.chars().take(NAME_CHARS_SHOWN).collect::<String>());
        tracing::warn!(
            "{} says that it was made for the model `{other}`, and is used on `{base}`: make sure that they are the same",
            shown(path)
        );
    }
    let files = peft::write(&weights, base).map_err(refuse)?;
    let digest = store.add_adapter(|dir| {
        files.iter().try_for_each(|(name, content)| write_synced(dir, name, content))?;
        Ok(peft::digest(&files))
    })?;
    Ok((digest, weights))
}

/// The last part of a path, as messages name it.
fn file_name(path: &Path) -> String {
    escape(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy())
}
