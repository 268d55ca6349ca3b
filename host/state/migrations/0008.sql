-- What a job told takes, which counts among what its tenant stores: the text of each event and what its row costs beside it.
ALTER TABLE jobs ADD COLUMN told_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE jobs SET told_bytes = (SELECT ifnull(sum(octet_length(body) + 256), 0) FROM events WHERE job = number AND seq IS NOT NULL);
-- NULL: no bound.
ALTER TABLE tenants ADD COLUMN high_jobs_max INTEGER;
