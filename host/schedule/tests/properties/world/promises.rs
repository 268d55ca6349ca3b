//! What was promised is kept: whoever room was made for gets it, soon, and has nobody leave twice.

use nodus_schedule::{Engine, JobId, Keep, Kept, Plan, Reason, Scene, State};

use super::{TICK_MS, World};

/// For so many patiences a promise holds at most.
const KEPT_PATIENCES: u64 = 10;

impl World {
    /// Before the plan is obeyed.
    pub(super) fn check_promises(&self, plan: &Plan) {
        let is_waiting = |id: JobId| self.scene.jobs.iter().any(|job| job.id == id && matches!(job.state, State::Waiting { .. }));
        let is_placed = |id: JobId| plan.place.iter().any(|placed| placed.job == id);
        let is_promised = |id: JobId| self.scene.kept.iter().any(|kept| kept.job == id);
        let is_over_quota = |id: JobId| {
            plan.wait.iter().any(|wait| wait.job == id && matches!(wait.reason, Reason::RunningJobs { .. } | Reason::TenantMemory { .. }))
        };
        for Keep { device, job } in &plan.keep {
            assert!(is_waiting(*job) && !is_placed(*job), "kept for nobody: {job:?}");
            assert_eq!(
                plan.keep.iter().filter(|other| other.device == *device || other.job == *job).count(),
                1,
                "promised twice: {plan:?}"
            );
            let is_old = self.scene.kept.iter().any(|kept| (kept.device, kept.job) == (*device, *job));
            assert!(is_old || !is_promised(*job), "room is made twice for one: {job:?}");
            assert!(is_old || !plan.pause.is_empty() || !plan.stop.is_empty(), "nobody made room: {job:?}");
        }
        let is_new = |keep: &&Keep| !is_promised(keep.job);
        assert!(plan.pause.is_empty() || plan.keep.iter().any(|keep| is_new(&keep)), "for whom? {plan:?}");
        for Kept { device, job, kept_ms } in &self.scene.kept {
            let stands = plan.keep.contains(&Keep { device: *device, job: *job });
            let is_over = *kept_ms >= KEPT_PATIENCES * self.scene.rules.patience_ms;
            let may_end = is_placed(*job) || !is_waiting(*job) || is_over_quota(*job) || is_over;
            assert!(!(stands && is_over) && (stands || may_end), "broken, or held too long: {device:?} {job:?} {plan:?}");
            // Those told to leave do, then their engines end, or the other way round.
            assert!(!stands || *kept_ms <= (self.linger + 3) * TICK_MS, "it is not let in: {job:?}");
        }
    }

    /// Remembers what is promised, after the plan was obeyed: nobody was placed where that leaves too little.
    pub(super) fn keep(&mut self, plan: &Plan) {
        let since = |keep: &Keep| self.scene.kept.iter().find(|kept| (kept.device, kept.job) == (keep.device, keep.job));
        let kept = |keep: &Keep| Kept { device: keep.device, job: keep.job, kept_ms: since(keep).map_or(0, |kept| kept.kept_ms) };
        self.scene.kept = plan.keep.iter().map(kept).collect();
        let then = self.once_all_have_left();
        for Kept { device, job, .. } in &self.scene.kept {
            let device = then.scene.devices.iter().find(|one| one.id == *device).unwrap();
            let job = then.scene.jobs.iter().find(|one| one.id == *job).unwrap();
            assert!(then.would_fit(job, device), "{job:?} lost its place on {device:?}");
        }
    }

    /// When jobs that make room and engines that nobody needs are gone.
    fn once_all_have_left(&self) -> Self {
        let is_leaving = |state: State| matches!(state, State::Running { is_pausing: true, .. });
        let mut scene = self.scene.clone();
        scene.jobs.retain(|job| !is_leaving(job.state));
        let Scene { jobs, engines, .. } = &mut scene;
        let is_used = |engine: &Engine| jobs.iter().any(|job| matches!(job.state, State::Running { engine: id, .. } if id == engine.id));
        engines.retain(|engine| !engine.is_stopping && is_used(engine));
        Self { scene, ..World::new(&[], &[], 0) }
    }
}
