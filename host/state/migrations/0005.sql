-- A tenant's jobs in the order of their queue. It begins with what the index did that it takes the place of.
CREATE INDEX jobs_in_line ON jobs (tenant, state, priority, number);
DROP INDEX jobs_of_tenant;
-- A tenant's jobs by age: a page of a list reads no more than it shows.
CREATE INDEX jobs_by_age ON jobs (tenant, number);
