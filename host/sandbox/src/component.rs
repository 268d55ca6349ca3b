//! From a stranger's bytes to a component that may run.
//!
//! Nothing downstream checks again: a [`ValidComponent`] is made here, of bytes that are checked or of what was made of such.

use nodus_protocol::Digest;
use wasmtime::Engine;
use wasmtime::component::types::{ComponentFunc, ComponentItem};
use wasmtime::component::{Component, Type};

use crate::anatomy;
use crate::bindings::TrainingJobPre;
use crate::failure::one_line;
use crate::limits::Limits;
use crate::precompiled::Precompiled;
use crate::refusal::ComponentRefusal as Refusal;
use crate::sandbox::Sandbox;
use crate::state::State;

/// A component that is a training job, compiled and linked.
#[derive(Clone)]
pub struct ValidComponent {
    digest: Digest,
    pre: TrainingJobPre<State>,
}

impl ValidComponent {
    pub(crate) fn new(sandbox: &Sandbox, bytes: &[u8], limits: &Limits) -> Result<Self, Refusal> {
        let (pre, _) = compile(sandbox, bytes, limits)?;
        Ok(Self { digest: Digest::of(bytes), pre })
    }

    /// What this host compiled and checked before.
    pub(crate) fn load(sandbox: &Sandbox, precompiled: &Precompiled) -> wasmtime::Result<Self> {
        let component = precompiled.component(&sandbox.engine)?;
        let pre = TrainingJobPre::new(sandbox.linker.instantiate_pre(&component)?)?;
        Ok(Self { digest: precompiled.digest(), pre })
    }

    /// Digest of the bytes that were uploaded.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    pub(crate) fn pre(&self) -> &TrainingJobPre<State> {
        &self.pre
    }
}

impl std::fmt::Debug for ValidComponent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ValidComponent").field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// Everything that makes bytes a training job, the cheap checks first.
pub(crate) fn compile(sandbox: &Sandbox, bytes: &[u8], limits: &Limits) -> Result<(TrainingJobPre<State>, Component), Refusal> {
    check_form(bytes, limits)?;
    anatomy::check(bytes, limits)?;
    let component = Component::from_binary(&sandbox.engine, bytes).map_err(|error| Refusal::Invalid { reason: reason(&error) })?;
    check_imports(&component, &sandbox.engine)?;
    check_run(&component, &sandbox.engine)?;
    check_needs(&component, limits)?;
    let pre = sandbox.linker.instantiate_pre(&component).map_err(|error| Refusal::WrongImport { reason: reason(&error) })?;
    let pre = TrainingJobPre::new(pre).map_err(|error| Refusal::WrongRun { found: reason(&error) })?;
    Ok((pre, component))
}

/// The chain of what wasmtime says, in one line.
fn reason(error: &wasmtime::Error) -> String {
    one_line(&format!("{error:#}"))
}

/// Length and first bytes, before anything is parsed.
fn check_form(bytes: &[u8], limits: &Limits) -> Result<(), Refusal> {
    const MAGIC: &[u8] = b"\0asm";
    const CORE: &[u8] = &[1, 0, 0, 0];
    const COMPONENT: &[u8] = &[0x0d, 0, 1, 0];
    if bytes.len() as u64 > limits.component_bytes {
        return Err(Refusal::TooLarge { bytes: bytes.len() as u64, allowed: limits.component_bytes });
    }
    if bytes.starts_with(b"\x7fELF") || Engine::detect_precompiled(bytes).is_some() {
        return Err(Refusal::Precompiled);
    }
    match bytes.split_at_checked(MAGIC.len()) {
        Some((MAGIC, rest)) if rest.starts_with(COMPONENT) => Ok(()),
        Some((MAGIC, rest)) if rest.starts_with(CORE) => Err(Refusal::CoreModule),
        _ if is_text(bytes) => Err(Refusal::Text),
        _ => Err(Refusal::NotWasm { begin: begin(bytes) }),
    }
}

fn begin(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "nothing, being empty".into();
    }
    bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

/// The text format begins with a parenthesis or a comment.
fn is_text(bytes: &[u8]) -> bool {
    let text = bytes.trim_ascii_start();
    text.starts_with(b"(") || text.starts_with(b";;")
}

/// What a guest may import: packages, versions that fit, interfaces. What is in them is the linker's to check.
const OFFERED: [(&str, &str, &[&str]); 7] = [
    ("nodus:gpu", "0.1.", &["types", "trunk", "data", "training", "job"]),
    ("wasi:cli", "0.2.", &CLI),
    ("wasi:clocks", "0.2.", &["monotonic-clock", "wall-clock"]),
    ("wasi:filesystem", "0.2.", &["types", "preopens"]),
    ("wasi:io", "0.2.", &["error", "poll", "streams"]),
    ("wasi:random", "0.2.", &["random", "insecure", "insecure-seed"]),
    ("wasi:sockets", "0.2.", &SOCKETS),
];
const CLI: [&str; 10] = [
    "environment",
    "exit",
    "stdin",
    "stdout",
    "stderr",
    "terminal-input",
    "terminal-output",
    "terminal-stdin",
    "terminal-stdout",
    "terminal-stderr",
];
const SOCKETS: [&str; 7] = ["network", "instance-network", "ip-name-lookup", "tcp", "tcp-create-socket", "udp", "udp-create-socket"];

/// Whether a name such as `wasi:io/streams@0.2.6` is offered.
fn is_offered(name: &str) -> bool {
    let parts = name.split_once('/').and_then(|(package, rest)| Some((package, rest.split_once('@')?)));
    parts.is_some_and(|(package, (interface, version))| {
        let fits = |(offered, versions, interfaces): &(&str, &str, &[&str])| {
            package == *offered && version.starts_with(versions) && interfaces.contains(&interface)
        };
        OFFERED.iter().any(fits)
    })
}

fn check_imports(component: &Component, engine: &Engine) -> Result<(), Refusal> {
    let ty = component.component_type();
    let imports: Vec<_> = ty.imports(engine).map(|(name, _)| name).filter(|name| !is_offered(name)).map(one_line).collect();
    if imports.is_empty() { Ok(()) } else { Err(Refusal::ForeignImports { imports }) }
}

fn check_run(component: &Component, engine: &Engine) -> Result<(), Refusal> {
    let wrong = |found: &str| Err(Refusal::WrongRun { found: found.into() });
    match component.component_type().get_export(engine, "run").map(|export| export.ty) {
        None => Err(Refusal::NoRun),
        Some(ComponentItem::ComponentFunc(run)) if run.async_() => wrong("an async function"),
        Some(ComponentItem::ComponentFunc(run)) if run.params().len() > 0 => wrong("a function with parameters"),
        Some(ComponentItem::ComponentFunc(run)) if !answers_result(&run) => wrong("a function with another result"),
        Some(ComponentItem::ComponentFunc(_)) => Ok(()),
        Some(_) => wrong("no function"),
    }
}

fn answers_result(run: &ComponentFunc) -> bool {
    let results: Vec<_> = run.results().collect();
    matches!(results.as_slice(), [Type::Result(result)] if result.ok().is_none() && result.err() == Some(Type::String))
}

fn check_needs(component: &Component, limits: &Limits) -> Result<(), Refusal> {
    const PAGE_BYTES: u64 = 64 << 10;
    let needs = component.resources_required().ok_or(Refusal::UnknownNeeds)?;
    let checks = [
        ("memories", u64::from(needs.num_memories), limits.memories),
        ("tables", u64::from(needs.num_tables), limits.tables),
        ("guest-memory-bytes", needs.max_initial_memory_size.unwrap_or(0).saturating_mul(PAGE_BYTES), limits.guest_memory_bytes),
        ("table-elements", needs.max_initial_table_size.unwrap_or(0), limits.table_elements),
    ];
    match checks.into_iter().find(|(_, needed, allowed)| needed > allowed) {
        Some((limit, needed, allowed)) => Err(Refusal::NeedsTooMuch { limit, needed, allowed }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::SandboxOptions;

    #[test]
    fn what_wasmtime_itself_precompiled_is_refused() {
        let sandbox = Sandbox::new(SandboxOptions::default()).unwrap();
        let code = sandbox.engine.precompile_component(&wat::parse_str("(component)").unwrap()).unwrap();
        assert_eq!(sandbox.validate(&code).unwrap_err(), Refusal::Precompiled);
    }
}
