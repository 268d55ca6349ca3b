//! `tenant`: who may use the service, and how much.
//!
//! Works on the state's rows alone, beside a running service. A token is shown here and nowhere again.

use std::io::Write;
use std::path::Path;

use anyhow::Context as _;
use nodus_state::{Access, Quota, State, StateError, Tenant};
use serde_json::json;

use crate::cli::{Bound, TenantMode};
use crate::error::{there_are, user};
use crate::name::Name;
use crate::paths::Paths;
use crate::serve::open_state;
use crate::text::{bytes, count};

/// Does what the command line says.
///
/// # Errors
/// The user's: no such tenant, or the name is taken. Ours: the disk.
pub(crate) fn run(paths: Paths, data_dir: &Path, mode: &TenantMode, out: &mut dyn Write) -> anyhow::Result<()> {
    let state = open_state(paths, data_dir, Access::Rows)?;
    let said = match mode {
        TenantMode::Add { name, quotas } => {
            let tenant = state.add_tenant(name.as_str(), with(Quota::DEFAULT, quotas)).map_err(|error| match error {
                StateError::Taken(_) => user(format!(
                    "there is a tenant named `{name}` already: choose another name; `tenant rotate {name}` gives it a new token, `tenant enable {name}` \
                     takes it back where it is disabled"
                )),
                error => error.into(),
            })?;
            vec![state.add_token(Some(tenant.id))?]
        }
        TenantMode::List { json } => list(&state, *json)?,
        TenantMode::Rotate { name, keep, .. } => {
            let tenant = name.as_ref().map(|name| find(&state, name)).transpose()?;
            if let Some(Tenant { name, .. }) = tenant.as_ref().filter(|tenant| tenant.is_disabled) {
                return Err(user(format!(
                    "tenant `{name}` is disabled, and its tokens are refused: `nodus-host tenant enable {name}` first"
                )));
            }
            let of = tenant.map(|tenant| tenant.id);
            vec![if *keep { state.add_token(of)? } else { state.rotate_tokens(of)? }]
        }
        TenantMode::Disable { name } => {
            state.set_disabled(find(&state, name)?.id, true)?;
            vec![format!("tenant `{name}` is disabled")]
        }
        TenantMode::Enable { name } => {
            state.set_disabled(find(&state, name)?.id, false)?;
            vec![format!("tenant `{name}` is enabled")]
        }
        TenantMode::Quota { name, quotas } => {
            let tenant = find(&state, name)?;
            let quota = with(tenant.quota, quotas);
            state.set_quota(tenant.id, &quota)?;
            quota.entries().map(|(name, bound)| format!("{name}={}", bound.map_or("none".to_owned(), |bound| bound.to_string()))).into()
        }
    };
    said.iter().try_for_each(|line| writeln!(out, "{line}")).context("writing to standard output")
}

fn with(mut quota: Quota, bounds: &[Bound]) -> Quota {
    for bound in bounds {
        quota.set(bound.name, bound.value);
    }
    quota
}

fn find(state: &State, name: &Name) -> anyhow::Result<Tenant> {
    match state.tenant_named(name.as_str()) {
        Err(StateError::NotFound(_)) => {
            let names: Vec<String> = state.tenants()?.into_iter().map(|tenant| tenant.name).collect();
            Err(user(format!("no tenant named `{name}`{}", there_are(name.as_str(), &names, "`nodus-host tenant add NAME` adds one"))))
        }
        found => Ok(found?),
    }
}

fn list(state: &State, as_json: bool) -> anyhow::Result<Vec<String>> {
    let line = |tenant: Tenant| {
        let usage = state.usage(tenant.id)?;
        let tokens = state.tokens(Some(tenant.id))?.iter().filter(|token| token.revoked_ms.is_none()).count();
        Ok(if as_json {
            json!({
                "name": tenant.name, "disabled": tenant.is_disabled, "tokens": tokens, "quota": tenant.quota,
                "queued_jobs": usage.queued_jobs, "running_jobs": usage.running_jobs,
                "stored_bytes": usage.stored_bytes, "device_ms": usage.device_ms,
            })
            .to_string()
        } else {
            let tokens = count(tokens as u64, "token");
            let tokens = if tenant.is_disabled { format!("disabled ({tokens} refused)") } else { format!("{tokens} valid") };
            format!(
                "{}  {} queued, {} running, {} stored, {:.1} device seconds, {tokens}",
                tenant.name,
                usage.queued_jobs,
                usage.running_jobs,
                bytes(usage.stored_bytes),
                std::time::Duration::from_millis(usage.device_ms).as_secs_f64(),
            )
        })
    };
    state.tenants()?.into_iter().map(line).collect()
}
