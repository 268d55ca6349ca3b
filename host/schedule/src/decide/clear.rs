//! Room is made for a job: engines stop, others leave, and what becomes free is the job's.
//!
//! Nobody has others leave twice for one place, nor leaves for somebody who does not get it.

use std::cmp::Reverse;

use super::{Desk, aged_ms};
use crate::reason::Reason;
use crate::room::{Needs, Room, alone};
use crate::scene::{DeviceId, Job, JobId, Kept};

/// After so many patiences whom room was made for waits like everybody else: a device is never held for nobody.
const KEPT_PATIENCES: u64 = 10;

impl Desk<'_> {
    /// Room that was made before goes to whom it was made for, before anybody else is looked at.
    pub(super) fn keep_promises(&mut self, kept: &[Kept]) {
        let until_ms = self.rules.patience_ms.saturating_mul(KEPT_PATIENCES);
        let mut kept: Vec<&Kept> = kept.iter().filter(|kept| kept.kept_ms < until_ms).collect();
        kept.sort_by_key(|kept| (Reverse(kept.kept_ms), kept.device, kept.job));
        kept.iter().for_each(|kept| self.keep_promise(kept.device, kept.job));
    }

    /// A promise lasts while the job waits, is within its tenant's quota, and gets in once those have gone that leave.
    fn keep_promise(&mut self, device: DeviceId, id: JobId) {
        let Some(job) = self.lines.values().find_map(|line| line.find(id)) else { return };
        let needs = self.needs(job);
        let is_open = self.rooms.get(&device).is_some_and(|room| !room.is_kept() && room.is_open_to(job));
        if !is_open || self.is_promised(id) || self.is_in_quota(job).is_err() {
            return;
        }
        if self.put(device, job) {
            self.lines.get_mut(&job.tenant).into_iter().for_each(|line| line.leave(id));
            return;
        }
        let Some(room) = self.rooms.get_mut(&device) else { return };
        let Some(engines) = room.evict(job, needs) else { return };
        engines.iter().for_each(|engine| room.stop(*engine));
        room.keep(job, needs, true);
        self.plan.stop.extend(engines);
    }

    pub(super) fn is_promised(&self, job: JobId) -> bool {
        self.rooms.values().any(|room| room.promised() == Some(job))
    }

    /// What can be done for a job that fits nowhere, and what it is told.
    pub(super) fn make_room(&mut self, job: &Job) -> Reason {
        let needs = self.needs(job);
        let needed = alone(job, needs);
        if self.rooms.values().all(|room| room.memory_bytes() < needed) {
            return self.why(job, needs);
        }
        if self.is_promised(job.id) {
            return Reason::MakingRoom;
        }
        let is_head = self.lines.get(&job.tenant).is_some_and(|line| !line.has_head);
        if self.evict(job, needs) || self.displace(job, needs) || (is_head && self.take_turn(job, needs)) {
            self.pass_over();
            return Reason::MakingRoom;
        }
        let reason = self.why(job, needs);
        if is_head && aged_ms(job) >= self.rules.patience_ms {
            let large = self.rooms.values_mut().filter(|room| !room.is_kept() && room.memory_bytes() >= needed && room.is_open_to(job));
            large.min_by_key(|room| room.jobs()).into_iter().for_each(|room| room.keep(job, needs, false));
        }
        reason
    }

    /// Stops idle engines where that lets the job in. What becomes free is kept for it.
    fn evict(&mut self, job: &Job, needs: Needs) -> bool {
        let open = self.rooms.values_mut().filter(|room| !room.is_kept());
        let found = open.filter_map(|room| room.evict(job, needs).map(|engines| (engines.len(), engines, room)));
        let Some((_, engines, room)) = found.min_by_key(|(count, ..)| *count) else { return false };
        engines.iter().for_each(|engine| room.stop(*engine));
        // Where those only leave that were about to, nobody made room for this job.
        room.keep(job, needs, !engines.is_empty());
        self.plan.stop.extend(engines);
        true
    }

    /// Has jobs of low priority make room for one of high priority, where that lets it in.
    fn displace(&mut self, job: &Job, needs: Needs) -> bool {
        let lower = self.turns.lower(job);
        if lower.is_empty() {
            return false;
        }
        let open = self.rooms.values_mut().filter(|room| !room.is_kept());
        let found = open.filter_map(|room| room.displace(job, needs, &lower).map(|jobs| (jobs.len(), jobs, room)));
        let Some((_, jobs, room)) = found.min_by_key(|(count, ..)| *count) else { return false };
        room.keep(job, needs, true);
        self.turns.leave(&jobs);
        self.plan.pause.extend(jobs);
        true
    }

    /// Has jobs of others who have more make room, where the first of a tenant that has waited for its patience gets in by that.
    fn take_turn(&mut self, job: &Job, needs: Needs) -> bool {
        let (turns, aged_ms) = (&self.turns, aged_ms(job));
        let of_room = |room: &Room| {
            let jobs = room.displace(job, needs, &turns.yielding(job, aged_ms, |id| room.holds(id)))?;
            Some((turns.bears(job, aged_ms, &jobs)?, jobs))
        };
        let open = self.rooms.values_mut().filter(|room| !room.is_kept());
        let found = open.filter_map(|room| of_room(room).map(|(emptied, jobs)| ((emptied, jobs.len()), jobs, room)));
        let Some((_, jobs, room)) = found.min_by_key(|(cost, ..)| *cost) else { return false };
        room.keep(job, needs, true);
        self.turns.leave(&jobs);
        self.plan.pause.extend(jobs);
        true
    }
}
