//! Decides where the jobs of many tenants run: numbers in, a plan out.
//!
//! Knows no clock, no file, no process and no name; it is told what there is, and whoever asked carries the plan out and asks again.

mod decide;
mod plan;
mod reason;
mod room;
mod scene;
mod share;
mod turns;
mod waits;

pub use decide::decide;
pub use plan::{Keep, NewEngine, Placement, Plan, Seat, Wait};
pub use reason::Reason;
pub use scene::{
    Bar, CohortId, Device, DeviceId, Engine, EngineId, Foreign, Job, JobId, Kept, Lane, Priority, Quota, Rules, Scene, State, Tenant,
    TenantId, Trunk, TrunkId,
};
pub use share::Shares;
pub use waits::{Clock, Waits};
