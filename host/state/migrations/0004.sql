-- A cohort's events of some kinds, whatever else its jobs tell.
CREATE INDEX events_of_cohort_by_kind ON events (cohort, kind, position);
