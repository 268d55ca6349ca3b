-- Times are Unix milliseconds, digests the 32 bytes of a SHA-256, ids of jobs and cohorts the 16 bytes of a UUID v7.

CREATE TABLE tenants (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  name TEXT NOT NULL UNIQUE,
  disabled INTEGER NOT NULL DEFAULT 0 CHECK (disabled IN (0, 1)),
  -- NULL: no bound.
  queued_jobs_max INTEGER,
  running_jobs_max INTEGER,
  stored_bytes_max INTEGER,
  device_bytes_max INTEGER,
  device_ms_max INTEGER,
  requests_per_second_max INTEGER,
  device_ms INTEGER NOT NULL DEFAULT 0,
  created_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE tokens (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  digest BLOB NOT NULL UNIQUE CHECK (length(digest) = 32),
  tenant INTEGER REFERENCES tenants (id), -- NULL: the operator's
  created_ms INTEGER NOT NULL,
  revoked_ms INTEGER
) STRICT;
CREATE INDEX tokens_of_tenant ON tokens (tenant);

CREATE TABLE blobs (
  digest BLOB PRIMARY KEY CHECK (length(digest) = 32),
  bytes INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Components, data sets and adapters that somebody brought.
CREATE TABLE items (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL CHECK (kind IN ('component', 'data', 'adapter')),
  tenant INTEGER REFERENCES tenants (id), -- NULL: the operator's, for all tenants
  name TEXT, -- NULL: known by its digest alone
  digest BLOB NOT NULL,
  about TEXT NOT NULL,
  created_ms INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX items_by_name ON items (kind, ifnull(tenant, 0), ifnull(name, digest));
CREATE INDEX items_by_digest ON items (kind, digest);
CREATE INDEX items_of_tenant ON items (tenant);

CREATE TABLE item_files (
  item INTEGER NOT NULL REFERENCES items (id) ON DELETE CASCADE,
  path TEXT NOT NULL,
  digest BLOB NOT NULL REFERENCES blobs (digest),
  PRIMARY KEY (item, path)
) STRICT, WITHOUT ROWID;
CREATE INDEX item_files_by_digest ON item_files (digest);

CREATE TABLE cohorts (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id BLOB NOT NULL UNIQUE CHECK (length(id) = 16),
  tenant INTEGER NOT NULL REFERENCES tenants (id),
  key TEXT, -- of idempotency
  request BLOB, -- digest of the request that came with the key
  events INTEGER NOT NULL DEFAULT 0, -- position of the last one
  submitted_ms INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX cohorts_by_key ON cohorts (tenant, key);

CREATE TABLE jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of the queue
  id BLOB NOT NULL UNIQUE CHECK (length(id) = 16),
  tenant INTEGER NOT NULL REFERENCES tenants (id),
  cohort INTEGER NOT NULL REFERENCES cohorts (number),
  member INTEGER NOT NULL,
  spec TEXT NOT NULL,
  priority TEXT NOT NULL CHECK (priority IN ('high', 'low')),
  model TEXT NOT NULL,
  device_bytes INTEGER NOT NULL, -- planned, for adapters
  activation_bytes INTEGER NOT NULL, -- planned, for one pass
  state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'succeeded', 'stopped', 'failed', 'cancelled', 'broken')),
  attempts INTEGER NOT NULL DEFAULT 0,
  reason TEXT, -- why it waits
  placed TEXT, -- where it runs or ran last
  stop TEXT CHECK (stop IN ('stop', 'cancel')),
  message TEXT, -- how it ended, for its owner
  receipt BLOB,
  device_ms INTEGER NOT NULL DEFAULT 0,
  submitted_ms INTEGER NOT NULL,
  started_ms INTEGER,
  ended_ms INTEGER,
  UNIQUE (cohort, member),
  CHECK ((state IN ('queued', 'running')) = (ended_ms IS NULL)),
  CHECK (state != 'running' OR (placed IS NOT NULL AND attempts > 0)),
  CHECK ((state IN ('succeeded', 'stopped')) = (receipt IS NOT NULL)) -- no receipt, no adapter
) STRICT;
CREATE INDEX jobs_of_tenant ON jobs (tenant, state);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_waiting ON jobs (number) WHERE state = 'queued';
CREATE INDEX jobs_running ON jobs (number) WHERE state = 'running';

-- What a job was given. It keeps its inputs as long as it is there, whatever becomes of the item.
CREATE TABLE inputs (
  job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
  role TEXT NOT NULL CHECK (role IN ('component', 'data', 'held_out', 'init_adapter')),
  path TEXT NOT NULL,
  digest BLOB NOT NULL REFERENCES blobs (digest),
  PRIMARY KEY (job, role, path)
) STRICT, WITHOUT ROWID;
CREATE INDEX inputs_by_digest ON inputs (digest);

CREATE TABLE artifacts (
  job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
  path TEXT NOT NULL,
  digest BLOB NOT NULL REFERENCES blobs (digest),
  PRIMARY KEY (job, path)
) STRICT, WITHOUT ROWID;
CREATE INDEX artifacts_by_digest ON artifacts (digest);

CREATE TABLE events (
  cohort INTEGER NOT NULL REFERENCES cohorts (number) ON DELETE CASCADE,
  position INTEGER NOT NULL, -- within the cohort, from 1
  job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
  seq INTEGER, -- the job's own count, from 1; NULL: the service's word
  ms INTEGER NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('state', 'step', 'evaluation', 'metric', 'progress', 'log', 'artifact')),
  body TEXT NOT NULL,
  PRIMARY KEY (cohort, position)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX events_by_seq ON events (job, seq) WHERE seq IS NOT NULL;
CREATE INDEX events_of_job ON events (job, position);
CREATE INDEX events_by_kind ON events (job, kind, position);
