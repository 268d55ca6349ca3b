//! The process that compiles: one component in, its machine code out, and nothing else, ever.
//!
//! A compiler is not made for strangers' input (it may take minutes, gigabytes, or fall over), so it has a process to itself.

use std::io::{self, Read as _, Write};

use anyhow::Context as _;
use nodus_protocol::frame::encode;
use nodus_sandbox::{ComponentRefusal, Limits, Sandbox, SandboxOptions};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::lockdown::{Ration, close_the_door, give_up};
use crate::cli::CompileArgs;

/// What the process says, once.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Compiled {
    /// What the kernel did not grant of its lockdown.
    pub(super) missing: Vec<String>,
    /// The machine code, or why the component is none.
    pub(super) code: Result<ByteBuf, ComponentRefusal>,
}

/// Compiles the component at standard input.
///
/// # Errors
/// Ours: the process cannot be set up.
pub(crate) fn serve(args: &CompileArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let upload: Limits = serde_json::from_str(&args.limits).context("reading the limits")?;
    let ration =
        Ration { data_bytes: None, address_bytes: Some(upload.compile_memory_bytes), cpu_seconds: upload.compile_ms.div_ceil(1000) };
    let mut missing = give_up(ration);
    let sandbox = Sandbox::new(SandboxOptions { upload })?;
    missing.extend(close_the_door());
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).context("reading the component")?;
    let code = sandbox.compile(&bytes)?.map(ByteBuf::from);
    let words = encode(&Compiled { missing, code })?;
    out.write_all(&words).and_then(|()| out.flush()).context("writing the machine code")
}
