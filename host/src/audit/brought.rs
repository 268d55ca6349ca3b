//! What somebody else sent of a job's inputs.
//!
//! Believed by their digests alone.

use std::io::{self, BufReader};

use anyhow::Context as _;
use cap_std::fs::{Dir, File};
use nodus_formats::{data, peft};
use nodus_protocol::Digest;

use crate::import::fault;
use crate::store::digest_of;

/// The folder that they are in, beside the results.
pub(crate) const INPUTS: &str = "inputs";
const COMPONENT: &str = "component.wasm";
const DATA: [&str; 2] = ["data.jsonl", "held_out.jsonl"];
const ADAPTER: &str = "init_adapter";

/// A folder of inputs.
pub(crate) struct Brought {
    /// `component.wasm`, `data.jsonl`, `held_out.jsonl` and `init_adapter/`, as far as they were sent.
    pub(crate) inputs: Dir,
    /// A component from elsewhere.
    pub(crate) component: Option<Vec<u8>>,
}

impl Brought {
    /// The component of this digest, if it is there.
    ///
    /// # Errors
    /// Ours: it cannot be read.
    pub(super) fn component(&self, digest: Digest) -> anyhow::Result<Option<Vec<u8>>> {
        let is_it = |bytes: &Vec<u8>| Digest::of(bytes) == digest;
        if self.component.is_some() || !self.inputs.is_file(COMPONENT) {
            return Ok(self.component.clone().filter(is_it));
        }
        Ok(Some(self.inputs.read(COMPONENT).context("reading a component that was sent")?).filter(is_it))
    }

    /// The data set of this digest, and how many rows it has, if it is there.
    ///
    /// # Errors
    /// The user's: it is none. Ours: it cannot be read.
    pub(super) fn data(&self, digest: Digest) -> anyhow::Result<Option<(File, u64)>> {
        for name in DATA.into_iter().filter(|name| self.inputs.is_file(name)) {
            let open = || self.inputs.open(name).with_context(|| format!("opening {name}, which was sent"));
            if digest_of(open()?)?.0 == digest {
                let rows = data::check(BufReader::new(open()?), name).map_err(fault)?.rows;
                return Ok(Some((open()?, rows)));
            }
        }
        Ok(None)
    }

    /// The adapter of this digest, if it is there.
    ///
    /// # Errors
    /// Ours: it cannot be read.
    pub(super) fn adapter(&self, digest: Digest) -> anyhow::Result<Option<Dir>> {
        if !self.inputs.is_dir(ADAPTER) {
            return Ok(None);
        }
        let read = || -> io::Result<_> {
            let dir = self.inputs.open_dir(ADAPTER)?;
            let mut files = Vec::new();
            for entry in dir.entries()? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                files.push((name.clone(), dir.read(&name)?));
            }
            Ok((peft::digest(&files) == digest).then_some(dir))
        };
        read().context("reading an adapter that was sent")
    }
}
