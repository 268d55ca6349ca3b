-- A job that its owner deleted, and of which events are still to go. Nobody sees it any more.
ALTER TABLE jobs ADD COLUMN leaving INTEGER NOT NULL DEFAULT 0 CHECK (leaving IN (0, 1));
CREATE INDEX jobs_leaving ON jobs (number) WHERE leaving = 1;
-- Whether a member was deleted, so that events may be missing.
ALTER TABLE cohorts ADD COLUMN thinned INTEGER NOT NULL DEFAULT 0 CHECK (thinned IN (0, 1));
UPDATE cohorts SET thinned = 1 WHERE events != ifnull((SELECT max(position) FROM events WHERE cohort = number), 0);
