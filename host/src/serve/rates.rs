//! How many requests a tenant may make: a bucket of tokens each, refilled steadily.
//!
//! Knows no request; numbers in, a wait out.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nodus_state::TenantId;

/// Seconds of its rate that a tenant may use at once.
const BURST_S: f64 = 2.0;

/// All tenants' buckets.
#[derive(Default)]
pub(super) struct Rates(Mutex<HashMap<TenantId, Bucket>>);

struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl Rates {
    /// Takes a token; else how long until there is one.
    pub(super) fn take(&self, of: TenantId, per_second: Option<u64>, now: Instant) -> Result<(), Duration> {
        #[expect(clippy::cast_precision_loss, reason = "a rate of 2^53 requests a second is none")]
        let Some(rate) = per_second.map(|rate| rate as f64) else { return Ok(()) };
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let full = (rate * BURST_S).max(1.0);
        let bucket = buckets.entry(of).or_insert(Bucket { tokens: full, filled: now });
        let gained = now.saturating_duration_since(bucket.filled).as_secs_f64() * rate;
        (bucket.tokens, bucket.filled) = ((bucket.tokens + gained).min(full), now);
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        // A tenant that may make none at all is told to come again in an hour.
        Err(Duration::try_from_secs_f64((1.0 - bucket.tokens) / rate).unwrap_or(Duration::from_secs(3600)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use nodus_state::{Access, Quota, State};

    use super::Rates;

    #[test]
    fn a_burst_is_taken_then_the_rate_and_each_tenant_has_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let dir = cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        let state = State::open(dir, folder.path(), Access::Whole).unwrap();
        let [a, b] = ["a", "b"].map(|name| state.add_tenant(name, Quota::DEFAULT).unwrap().id);
        let (rates, start) = (Rates::default(), Instant::now());
        let at = |of, ms: u64| rates.take(of, Some(5), start + Duration::from_millis(ms));
        assert_eq!((0..20).filter(|_| at(a, 0).is_ok()).count(), 10);
        assert_eq!(at(a, 0).unwrap_err(), Duration::from_millis(200));
        assert!(at(b, 0).is_ok());
        assert!(at(a, 199).is_err() && at(a, 200).is_ok() && at(a, 200).is_err());
        assert_eq!((0..20).filter(|_| at(a, 60_000).is_ok()).count(), 10, "never more than a burst");
        assert!((0..1000).all(|_| rates.take(a, None, start).is_ok()));
        let none = || rates.take(b, Some(0), start + Duration::from_secs(9));
        assert!(none().is_ok() && none().unwrap_err() == Duration::from_secs(3600));
    }
}
