//! Each kind of disagreement is found, and named; what agrees is left in peace.

use std::io::Write as _;
use std::path::Path;

use nodus_protocol::Digest;
use nodus_receipts::ledger::{BytesEvent, LEDGER_FILE};
use nodus_receipts::statement::DigestSet;
use nodus_state::{
    Access, Claim, Common, Finish, HeldOut, ItemKind, JobSpec, Lane, Named, NewItem, Outcome, Owner, Priority, Quota, State,
};
use serde_json::{Map, Value, json};

use super::disagreements;
use crate::books::{Account, Again, Books};

const FILE: &str = "adapter/adapter_model.safetensors";

/// A data folder with a tenant, the service's state and the host's books.
struct Scene {
    folder: tempfile::TempDir,
    state: State,
    books: Books,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        dir(folder.path()).create_dir("service").unwrap();
        let place = folder.path().join("service");
        let state = State::open(dir(&place), &place, Access::Whole).unwrap();
        let tenant = state.add_tenant("acme", Quota::DEFAULT).unwrap().id;
        for kind in [ItemKind::Component, ItemKind::Data] {
            let (owner, files) = (Owner::Tenant(tenant), [("content".to_owned(), kept(&state, b"content"))]);
            let (name, digest, about) = (Some("thing"), Digest::of(b"content"), &Value::Null);
            state.add_item(&NewItem { kind, owner, name, digest, about, files: &files }).unwrap();
        }
        let books = Books::open(dir(folder.path())).unwrap();
        Self { state, books, folder }
    }

    /// A job that runs.
    fn claimed(&self) -> Claim {
        let thing = || Named { name: "thing".to_owned(), digest: Digest::of(b"content") };
        let spec = JobSpec {
            name: String::new(),
            varied: Map::new(),
            common: Common {
                component: thing(),
                model: Named { name: "tiny".to_owned(), digest: Digest::of(b"tiny") },
                data: thing(),
                held_out: HeldOut::Nothing,
                parameters: Map::new(),
                seed: 0,
                limits: std::collections::BTreeMap::new(),
                lane: Lane::Fused,
                priority: Priority::Low,
            },
            init_adapter: None,
        };
        let tenant = self.state.tenant_named("acme").unwrap().id;
        let job = self.state.submit(tenant, None, &spec.into()).unwrap().jobs[0];
        self.state.claim(&[job], "cpu").unwrap()[0]
    }

    /// Enters a receipt of this job that speaks of one file.
    fn sealed(&mut self, claim: Claim, tenant: &str) -> Vec<u8> {
        let account = Account { again: Again::Never, ..account(claim, tenant) };
        let statement = |previous: Option<Digest>| {
            serde_json::to_vec(&json!({
                "_type": "https://in-toto.io/Statement/v1",
                "subject": [{"name": FILE, "digest": DigestSet(Digest::of(b"weights"))}],
                "predicateType": "https://nodus.dev/receipt/v1",
                "predicate": {"job": claim.job, "previous_receipt": previous.map(DigestSet)},
            }))
        };
        self.books.seal(&account, statement).unwrap().envelope
    }

    fn finish(&self, claim: Claim, outcome: Outcome, receipt: Option<&[u8]>, content: &[u8]) {
        let artifacts = [(FILE.to_owned(), kept(&self.state, content))];
        let artifacts = if receipt.is_some() { &artifacts[..] } else { &[] };
        let finish = Finish { outcome, message: None, receipt, artifacts, events: &[], device_ms: 1 };
        self.state.finish(&claim, &finish).unwrap();
    }

    fn found(&self) -> Vec<String> {
        disagreements(&self.state, dir(self.folder.path())).unwrap()
    }
}

fn dir(path: &Path) -> cap_std::fs::Dir {
    cap_std::fs::Dir::open_ambient_dir(path, cap_std::ambient_authority()).unwrap()
}

fn kept(state: &State, content: &[u8]) -> nodus_state::Kept {
    let mut staged = state.stage(1 << 10).unwrap();
    staged.write_all(content).unwrap();
    staged.keep().unwrap()
}

fn account(claim: Claim, tenant: &str) -> Account {
    Account { job: claim.job.to_string(), tenant: tenant.to_owned(), again: Again::Attempt }
}

#[test]
fn what_agrees_is_no_fault() {
    let mut scene = Scene::new();
    let claim = scene.claimed();
    let receipt = scene.sealed(claim, "acme");
    scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"weights");
    let claim = scene.claimed();
    scene.books.fail(&account(claim, "acme"), "trapped").unwrap();
    let bytes = [(0, BytesEvent::Allocated, 7), (0, BytesEvent::Written, 9), (0, BytesEvent::Zeroed, 7)];
    scene.books.enter(&account(claim, "acme"), bytes.into_iter()).unwrap();
    scene.finish(claim, Outcome::Failed, None, b"");
    // One that runs has lines already, and one that was cut off may have a receipt that nobody got.
    let claim = scene.claimed();
    scene.sealed(claim, "acme");
    let claim = scene.claimed();
    scene.sealed(claim, "acme");
    scene.finish(claim, Outcome::Cancelled, None, b"");
    assert_eq!(scene.found(), Vec::<String>::new());
}

#[test]
fn each_kind_of_disagreement_is_found() {
    type Story = fn(&mut Scene, Claim);
    let stories: [(&str, Story); 11] = [
        ("the ledger does not have its receipt", |scene, claim| {
            let receipt = Scene::new().sealed(claim, "acme");
            scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"weights");
        }),
        ("signature", |scene, claim| {
            let receipt = Scene::new().sealed(claim, "acme");
            scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"weights");
        }),
        ("the ledger has sha256:", |scene, claim| {
            let other = scene.claimed();
            let receipt = scene.sealed(other, "acme");
            scene.sealed(claim, "acme");
            scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"weights");
        }),
        ("the ledger has 2 receipts of it", |scene, claim| {
            let receipt = scene.sealed(claim, "acme");
            scene.sealed(claim, "acme");
            scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"weights");
        }),
        ("it is of tenant `acme`, the ledger says `local`", |scene, claim| {
            let receipt = scene.sealed(claim, "local");
            scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"weights");
        }),
        ("its receipt says sha256:", |scene, claim| {
            let receipt = scene.sealed(claim, "acme");
            scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"other weights");
        }),
        ("fails the check of its envelope", |scene, claim| {
            scene.finish(claim, Outcome::Stopped, Some(b"{}"), b"weights");
        }),
        ("it is failed, and the ledger says 0 times", |scene, claim| scene.finish(claim, Outcome::Failed, None, b"")),
        ("it is broken and has no receipt, the ledger has one", |scene, claim| {
            scene.sealed(claim, "acme");
            scene.books.fail(&account(claim, "acme"), "internal").unwrap();
            scene.finish(claim, Outcome::Broken, None, b"");
        }),
        ("7 bytes of its adapter 3 that were allocated and not zeroed", |scene, claim| {
            let receipt = scene.sealed(claim, "acme");
            scene.books.enter(&account(claim, "acme"), [(3, BytesEvent::Allocated, 7)].into_iter()).unwrap();
            scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"weights");
        }),
        ("ledger: line 2 of the ledger", |scene, claim| {
            let receipt = scene.sealed(claim, "acme");
            scene.sealed(claim, "acme");
            scene.finish(claim, Outcome::Succeeded, Some(&receipt), b"weights");
            let folder = dir(scene.folder.path());
            let text = folder.read_to_string(LEDGER_FILE).unwrap().replacen("acme", "acmf", 1);
            folder.write(LEDGER_FILE, text).unwrap();
        }),
    ];
    for (expected, story) in stories {
        let mut scene = Scene::new();
        let claim = scene.claimed();
        story(&mut scene, claim);
        let found = scene.found();
        assert!(found.iter().any(|fault| fault.contains(expected)), "{expected}: {found:?}");
    }
}

#[test]
fn a_job_that_fails_again_after_a_crash_has_one_line() {
    let mut scene = Scene::new();
    let first = scene.claimed();
    scene.books.fail(&account(first, "acme"), "trapped").unwrap();
    let second = scene.state.reclaim(first.job, "cpu").unwrap();
    scene.books.fail(&account(second, "acme"), "trapped").unwrap();
    scene.finish(second, Outcome::Failed, None, b"");
    assert_eq!(scene.found(), Vec::<String>::new());
}
