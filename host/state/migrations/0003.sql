-- How often the host failed the job, over restarts of the service; that it made room, or the service ended, is no failure.
ALTER TABLE jobs ADD COLUMN failures INTEGER NOT NULL DEFAULT 0;
