//! `cargo xtask audit`: known weaknesses, licences, bans and sources of every crate that any of the workspaces builds.
//!
//! Never passes over an advisory, but for those that `.cargo/audit.toml` excepts, each with its date and its reason.

use anyhow::{Context as _, ensure};

use crate::steps::{cargo, has_cargo_command, root, run, step};

/// Every workspace, by its folder.
pub(crate) const WORKSPACES: [&str; 4] = [".", "tenants", "fuzz", "host/sandbox/tests/guest"];
const EXCEPTIONS: &str = ".cargo/audit.toml";

/// Runs both tools over all workspaces. The database is the folder that `ADVISORY_DB` names, else that of the network.
pub(crate) fn run_audit() -> anyhow::Result<()> {
    let text = std::fs::read_to_string(root().join(EXCEPTIONS)).with_context(|| format!("reading {EXCEPTIONS}"))?;
    check_exceptions(&text)?;
    let database = std::env::var_os("ADVISORY_DB").filter(|folder| !folder.is_empty()).map(std::path::absolute).transpose()?;
    install("audit")?;
    step("known weaknesses", || {
        for workspace in WORKSPACES {
            let lock = format!("{workspace}/Cargo.lock");
            let mut audit = cargo(&["audit", "--deny", "warnings", "--file", &lock]);
            if let Some(folder) = &database {
                audit.args(["--no-fetch", "--stale", "--db"]).arg(folder);
            }
            run(&mut audit)?;
        }
        Ok(())
    })?;
    install("deny")?;
    check_licences()
}

/// Licences, bans and sources of all workspaces; cargo-deny must be there.
pub(crate) fn check_licences() -> anyhow::Result<()> {
    step("licences, bans, sources", || {
        for workspace in WORKSPACES {
            let manifest = format!("{workspace}/Cargo.toml");
            let mut deny = cargo(&["deny", "--manifest-path", &manifest, "--config", "deny.toml", "check"]);
            // One list for all: what only another workspace needs is no fault of this one.
            deny.args(["--allow", "license-exception-not-encountered"]);
            if workspace != "." {
                deny.args(["--allow", "license-not-encountered"]);
            }
            run(deny.args(["licenses", "bans", "sources"]))?;
        }
        Ok(())
    })
}

fn install(tool: &str) -> anyhow::Result<()> {
    if has_cargo_command(tool) {
        return Ok(());
    }
    let package = format!("cargo-{tool}");
    step(&format!("install {package}"), || run(&mut cargo(&["install", "--locked", &package])))
}

/// Every advisory that is excepted stands below a line with a date and a reason.
fn check_exceptions(text: &str) -> anyhow::Result<()> {
    let mut before = "";
    for line in text.lines().map(str::trim) {
        if line.starts_with("\"RUSTSEC-") {
            let said = before.strip_prefix("# ").and_then(|said| said.split_once(": "));
            let is_date = |date: &str| date.len() == 10 && date.chars().all(|c| c.is_ascii_digit() || c == '-');
            let is_good = said.is_some_and(|(date, reason)| is_date(date) && reason.len() > 20);
            ensure!(is_good, "{EXCEPTIONS}: {line} has no line `# YYYY-MM-DD: why it does no harm` above it");
        }
        before = line;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check_exceptions;

    #[test]
    fn an_exception_needs_a_date_and_a_reason() {
        let with = |line: &str| check_exceptions(&format!("ignore = [\n    {line}\n    \"RUSTSEC-2024-0436\",\n]\n"));
        assert!(with("# 2026-11-29: a macro at build time, without any known weakness").is_ok());
        for bad in
            ["", "# a macro at build time, without any known weakness", "# 2026-11-29: harmless", "# lately: a macro at build time only"]
        {
            assert!(with(bad).is_err(), "{bad}");
        }
    }
}
