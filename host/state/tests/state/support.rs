//! A state in a folder of its own, with tenants and things to submit.

use std::io::Write as _;

use nodus_protocol::Digest;
use nodus_state::{
    Access, Common, EventKind, Finish, HeldOut, Item, ItemKind, JobId, JobSpec, Kept, Lane, Named, NewEvent, NewItem, Outcome, Owner,
    Priority, Quota, State, Submission, TenantId,
};
use serde_json::json;

/// A sweep whose members are these: of what they have in common, the first one's is taken.
pub(crate) fn sweep(specs: &[JobSpec]) -> Submission {
    let mut parts = specs.iter().cloned().map(Submission::from);
    let first = parts.next().unwrap();
    Submission { members: first.members.into_iter().chain(parts.flat_map(|part| part.members)).collect(), ..first }
}

/// Removed when dropped.
pub(crate) struct Fixture {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) state: State,
}

pub(crate) fn open(folder: &tempfile::TempDir, access: Access) -> nodus_state::Result<State> {
    let dir = cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
    State::open(dir, folder.path(), access)
}

pub(crate) fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let state = open(&folder, Access::Whole).unwrap();
    Fixture { folder, state }
}

impl Fixture {
    /// The same folder, as the service finds it when it is started again.
    pub(crate) fn reopened(self) -> Self {
        let Self { folder, state } = self;
        drop(state);
        let state = open(&folder, Access::Whole).unwrap();
        Self { folder, state }
    }

    pub(crate) fn tenant(&self, name: &str) -> TenantId {
        self.state.add_tenant(name, Quota::DEFAULT).unwrap().id
    }

    pub(crate) fn blob(&self, content: &[u8]) -> Kept {
        let mut staged = self.state.stage(1 << 20).unwrap();
        staged.write_all(content).unwrap();
        staged.keep().unwrap()
    }

    /// Where this content is.
    pub(crate) fn blob_path(&self, content: &[u8]) -> std::path::PathBuf {
        self.folder.path().join(nodus_state::blob_path(Digest::of(content)))
    }

    /// What all contents that are there take, nothing of it but what was kept.
    pub(crate) fn disk_bytes(&self) -> u64 {
        let folders = std::fs::read_dir(self.folder.path().join("blobs")).unwrap();
        let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
        files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
    }

    pub(crate) fn item(&self, owner: Owner, kind: ItemKind, name: Option<&str>, content: &[u8]) -> nodus_state::Result<Item> {
        let files = [("content".to_owned(), self.blob(content))];
        let new = NewItem { kind, owner, name, digest: Digest::of(content), about: &json!({"rows": 1}), files: &files };
        self.state.add_item(&new).map(|(item, _)| item)
    }

    /// A component and a data set of this tenant's, and a job of them.
    pub(crate) fn spec(&self, of: TenantId) -> JobSpec {
        let component = self.item(Owner::Tenant(of), ItemKind::Component, None, b"component").unwrap();
        let data = self.item(Owner::Tenant(of), ItemKind::Data, Some("rows"), b"rows").unwrap();
        JobSpec {
            name: String::new(),
            varied: serde_json::Map::new(),
            common: Common {
                component: Named { name: "sft".into(), digest: component.digest },
                model: Named { name: "tiny".into(), digest: Digest::of(b"tiny") },
                data: Named { name: "rows".into(), digest: data.digest },
                held_out: HeldOut::Fraction(0.1),
                parameters: json!({"rank": 8}).as_object().unwrap().clone(),
                seed: u64::MAX,
                limits: [("device-bytes".to_owned(), 10), ("activation-bytes".to_owned(), 20)].into(),
                lane: Lane::Fused,
                priority: Priority::Low,
            },
            init_adapter: None,
        }
    }

    pub(crate) fn job(&self, of: TenantId) -> JobId {
        self.state.submit(of, None, &self.spec(of).into()).unwrap().jobs[0]
    }

    /// A job of this tenant's that ended well, with an artifact.
    pub(crate) fn finished(&self, of: TenantId) -> JobId {
        let job = self.job(of);
        let claim = self.state.claim(&[job], "cpu").unwrap()[0];
        let artifacts = [("adapter/weights".to_owned(), self.blob(format!("weights of {job}").as_bytes()))];
        let events = [event(1)];
        let finish = Finish {
            outcome: Outcome::Succeeded,
            message: None,
            receipt: Some(b"receipt"),
            artifacts: &artifacts,
            events: &events,
            device_ms: 5,
        };
        self.state.finish(&claim, &finish).unwrap();
        job
    }
}

pub(crate) fn event(seq: u64) -> NewEvent {
    NewEvent { seq, ms: 1, kind: EventKind::Step, body: format!("{{\"step\":{seq}}}") }
}

pub(crate) fn ending(outcome: Outcome) -> Finish<'static> {
    let receipt = outcome.has_receipt().then_some(&b"receipt"[..]);
    Finish { outcome, message: None, receipt, artifacts: &[], events: &[], device_ms: 3 }
}
