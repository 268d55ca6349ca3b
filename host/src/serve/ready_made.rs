//! Components that the operator registers for all tenants.
//!
//! Checked and compiled like anybody's.

use std::io::Write as _;

use nodus_state::{ItemKind, NewItem, Owner, Reference};
use serde_json::json;

use super::service::App;
use crate::cli::ReadyMade;
use crate::error::user;
use crate::paths::{Paths, shown};

/// Registers them; one of the same name and other content takes the place of what was there.
pub(super) fn register(app: &App, paths: Paths, components: &[ReadyMade]) -> anyhow::Result<()> {
    for ReadyMade { name, path } in components {
        let bytes = paths.read(path, app.upload.component_bytes)?;
        let code = app.workshop.compiled(&bytes)?.map_err(|refusal| user(format!("{}: {refusal}", shown(path))))?;
        let mut staged = app.state.stage(app.upload.component_bytes)?;
        staged.write_all(&bytes)?;
        let files = [(super::routes::COMPONENT_FILE.to_owned(), staged.keep()?)];
        let about = json!({});
        let new = NewItem {
            kind: ItemKind::Component,
            owner: Owner::Shared,
            name: Some(name.as_str()),
            digest: code.digest(),
            about: &about,
            files: &files,
        };
        if let Err(nodus_state::StateError::Taken(_)) = app.state.add_item(&new) {
            app.state.remove_item(Owner::Shared, ItemKind::Component, &Reference::Name(name.to_string()))?;
            app.state.add_item(&new)?;
        }
    }
    Ok(())
}
