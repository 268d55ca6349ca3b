//! `audit ledger`: the entries that are wanted, and adapter bytes summed up per tenant.
//!
//! Checks the whole chain on the way, and says where it breaks.

use std::io::Write;

use anyhow::Context as _;
use nodus_receipts::ledger::{Entry, Event, Filter, LedgerError, Summary};
use serde_json::json;

use crate::books::{LOCAL, reader};
use crate::cli::LedgerArgs;
use crate::error::{Ending, user};
use crate::store::Store;
use crate::text::{count, escape};

/// Lists and sums up.
///
/// # Errors
/// The user's: the ledger is corrupt. Ours: it cannot be read.
pub(crate) fn ledger(store: &Store, args: &LedgerArgs, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let reader = reader(store.dir()?).ok_or_else(|| user("the data folder has no ledger: the first import or run makes it"))?;
    let filter = Filter { tenant: args.tenant.clone(), job: args.job.clone(), kind: args.kind, from: None, to: None };
    for entry in reader.select(filter.clone()).map_err(fault)? {
        let entry = entry.map_err(fault)?;
        let line = if args.json { json_line(&entry)? } else { line(&entry) };
        writeln!(out, "{line}").context("writing to standard output")?;
    }
    let summary = reader.summary(&filter).map_err(fault)?;
    let mut lines = if args.json { vec![json_summary(&summary)?] } else { sums(&summary) };
    if let (false, 0, Some(tenant)) = (args.json, summary.entries, &args.tenant) {
        lines.push(format!("nothing was entered for tenant `{}`; what `run` does belongs to `{LOCAL}`", escape(tenant)));
    }
    lines.iter().try_for_each(|line| writeln!(out, "{line}")).context("writing to standard output")?;
    Ok(Ending::Done)
}

fn fault(error: LedgerError) -> anyhow::Error {
    match error {
        LedgerError::Corrupt { .. } | LedgerError::Shortened { .. } => user(format!("the ledger does not hold: {error}")),
        _ => anyhow::Error::from(error).context("reading the host's ledger"),
    }
}

fn line(entry: &Entry) -> String {
    let what = match &entry.event {
        Event::KeyCreated { keyid } => format!("key {keyid}"),
        Event::Receipt { job, tenant, receipt, subjects } => {
            format!("tenant {} job {} receipt {receipt} over {}", escape(tenant), escape(job), count(subjects.len() as u64, "file"))
        }
        Event::AdapterBytes { job, tenant, adapter, event, bytes } => {
            let event = format!("{event:?}").to_lowercase();
            format!("tenant {} job {} adapter {adapter} {event} {bytes}", escape(tenant), escape(job))
        }
        Event::JobFailed { job, tenant, code } => format!("tenant {} job {} {}", escape(tenant), escape(job), escape(code)),
    };
    format!("{:>6}  {}  {:<13}  {what}", entry.at.sequence, entry.unix_ms, entry.event.kind())
}

fn json_line(entry: &Entry) -> serde_json::Result<String> {
    let mut value = json!({
        "sequence": entry.at.sequence,
        "digest": entry.at.digest,
        "previous": entry.previous,
        "unix_ms": entry.unix_ms,
    });
    if let (Some(object), serde_json::Value::Object(event)) = (value.as_object_mut(), serde_json::to_value(&entry.event)?) {
        object.extend(event);
    }
    serde_json::to_string(&value)
}

fn sums(summary: &Summary) -> Vec<String> {
    let mut lines = vec![format!(
        "{}, {} and {} among them",
        count(summary.entries, "entry").replace("entrys", "entries"),
        count(summary.receipts, "receipt"),
        count(summary.jobs_failed, "failed job")
    )];
    for (tenant, bytes) in &summary.adapter_bytes {
        lines.push(format!(
            "adapter bytes of {}: allocated {}, written {}, exported {}, zeroed {}",
            escape(tenant),
            bytes.allocated,
            bytes.written,
            bytes.exported,
            bytes.zeroed
        ));
    }
    if let Some(head) = summary.head {
        lines.push(format!("the chain holds; its head is entry {}, {}", head.sequence, head.digest));
    }
    lines.extend(summary.torn.iter().map(|torn| format!("line {} is torn ({}): the next writer cuts it off", torn.line, torn.fault)));
    lines
}

fn json_summary(summary: &Summary) -> serde_json::Result<String> {
    #[derive(serde::Serialize)]
    struct Sums<'a> {
        entries: u64,
        receipts: u64,
        jobs_failed: u64,
        adapter_bytes: &'a std::collections::BTreeMap<String, nodus_receipts::ledger::AdapterBytes>,
        head: Option<nodus_protocol::Digest>,
        torn_line: Option<u64>,
    }
    serde_json::to_string(&Sums {
        entries: summary.entries,
        receipts: summary.receipts,
        jobs_failed: summary.jobs_failed,
        adapter_bytes: &summary.adapter_bytes,
        head: summary.head.map(|head| head.digest),
        torn_line: summary.torn.as_ref().map(|torn| torn.line),
    })
}
