-- What jobs are made of stands apart from their rows, which the schedule reads again and again: those hold numbers.
CREATE TABLE specs (
  job INTEGER PRIMARY KEY REFERENCES jobs (number) ON DELETE CASCADE,
  spec TEXT NOT NULL -- what the job has of its own; all of it where its cohort has none in common
) STRICT;
-- What all members of a cohort have in common, once.
CREATE TABLE common_specs (
  cohort INTEGER PRIMARY KEY REFERENCES cohorts (number) ON DELETE CASCADE,
  spec TEXT NOT NULL
) STRICT;
INSERT INTO specs (job, spec) SELECT number, spec FROM jobs;
ALTER TABLE jobs ADD COLUMN model_digest BLOB NOT NULL DEFAULT x'';
ALTER TABLE jobs ADD COLUMN lane TEXT NOT NULL DEFAULT 'fused' CHECK (lane IN ('fused', 'mps', 'solo'));
UPDATE jobs SET lane = spec ->> '$.lane', model_digest = unhex(substr(spec ->> '$.model.digest', length('sha256:') + 1));
ALTER TABLE jobs DROP COLUMN spec;
