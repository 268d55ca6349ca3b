//! Fair share between tenants by device time: start-time fair queueing (Goyal, Vin and Cheng, 1996).
//!
//! A tenant that was away saves nothing up: it comes back where the least served of the others is.

use std::collections::{BTreeMap, BTreeSet};

use crate::scene::TenantId;

/// Each tenant's virtual time: the device time that it used, and what it missed while it had no jobs.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    used_ns: BTreeMap<TenantId, u128>,
    present: BTreeSet<TenantId>,
    /// Never falls.
    least_ns: u128,
}

impl Shares {
    /// Counts device time.
    pub fn charge(&mut self, tenant: TenantId, device_ns: u64) {
        *self.used_ns.entry(tenant).or_insert(self.least_ns) += u128::from(device_ns);
    }

    /// Says who has jobs, waiting or running. Whoever had none before starts level with the least served of the others.
    pub fn present(&mut self, tenants: &BTreeSet<TenantId>) {
        let stayed = tenants.intersection(&self.present).filter_map(|tenant| self.used_ns.get(tenant)).min().copied();
        self.least_ns = self.least_ns.max(stayed.unwrap_or(0));
        for tenant in tenants {
            let used = self.used_ns.entry(*tenant).or_insert(self.least_ns);
            if !self.present.contains(tenant) {
                *used = (*used).max(self.least_ns);
            }
        }
        // What somebody who is gone is ahead of the others counts when he comes back; what he is behind does not.
        let least_ns = self.least_ns;
        self.used_ns.retain(|tenant, used| tenants.contains(tenant) || *used > least_ns);
        self.present.clone_from(tenants);
    }

    /// A tenant's virtual time.
    #[must_use]
    pub fn of(&self, tenant: TenantId) -> u128 {
        self.used_ns.get(&tenant).copied().unwrap_or(self.least_ns)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Shares, TenantId};

    #[test]
    fn who_was_away_saves_nothing_up_and_owes_what_it_owed() {
        let (a, b, c) = (TenantId(1), TenantId(2), TenantId(3));
        let mut shares = Shares::default();
        shares.present(&BTreeSet::from([a, b]));
        shares.charge(a, 100);
        shares.charge(b, 40);
        shares.present(&BTreeSet::from([a, b, c]));
        assert_eq!([a, b, c].map(|tenant| shares.of(tenant)), [100, 40, 40]);
        shares.charge(c, 10);
        shares.present(&BTreeSet::from([c]));
        shares.present(&BTreeSet::from([a, b, c]));
        assert_eq!([a, b, c].map(|tenant| shares.of(tenant)), [100, 50, 50]);
    }
}
