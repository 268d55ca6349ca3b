-- What a tenant keeps, summed up as it changes: each content once, as if nobody else had it, what its jobs told and their receipts, and what they are
-- made of.
ALTER TABLE tenants ADD COLUMN stored_bytes INTEGER NOT NULL DEFAULT 0;
-- By how many rows a tenant refers to a content.
CREATE TABLE holdings (
  tenant INTEGER NOT NULL REFERENCES tenants (id),
  digest BLOB NOT NULL,
  times INTEGER NOT NULL,
  PRIMARY KEY (tenant, digest)
) STRICT, WITHOUT ROWID;
INSERT INTO holdings (tenant, digest, times) SELECT tenant, digest, count(*) FROM (
    SELECT tenant, item_files.digest FROM items JOIN item_files ON item = items.id WHERE tenant IS NOT NULL
    UNION ALL SELECT tenant, digest FROM jobs JOIN inputs ON job = number
    UNION ALL SELECT tenant, digest FROM jobs JOIN artifacts ON job = number)
  GROUP BY tenant, digest;
UPDATE tenants SET stored_bytes = (SELECT ifnull(sum(bytes), 0) FROM holdings JOIN blobs USING (digest) WHERE tenant = tenants.id)
  + (SELECT ifnull(sum(octet_length(spec)), 0) FROM jobs JOIN specs ON job = number WHERE tenant = tenants.id)
  + (SELECT ifnull(sum(octet_length(spec)), 0) FROM cohorts JOIN common_specs ON cohort = number WHERE tenant = tenants.id)
  + (SELECT ifnull(sum(told_bytes + ifnull(octet_length(receipt), 0)), 0) FROM jobs WHERE tenant = tenants.id AND leaving = 0);

-- A content comes with the first row of its tenant's that refers to it, and goes with the last.
CREATE TRIGGER holdings_come AFTER INSERT ON holdings BEGIN
  UPDATE tenants SET stored_bytes = stored_bytes + (SELECT bytes FROM blobs WHERE digest = new.digest) WHERE id = new.tenant;
END;
CREATE TRIGGER holdings_go AFTER UPDATE OF times ON holdings WHEN new.times = 0 BEGIN
  UPDATE tenants SET stored_bytes = stored_bytes - (SELECT bytes FROM blobs WHERE digest = new.digest) WHERE id = new.tenant;
  DELETE FROM holdings WHERE tenant = new.tenant AND digest = new.digest;
END;
CREATE TRIGGER item_files_come AFTER INSERT ON item_files BEGIN
  INSERT INTO holdings (tenant, digest, times) SELECT tenant, new.digest, 1 FROM items WHERE id = new.item AND tenant IS NOT NULL
    ON CONFLICT DO UPDATE SET times = times + 1;
END;
CREATE TRIGGER item_files_go AFTER DELETE ON item_files BEGIN
  UPDATE holdings SET times = times - 1 WHERE tenant = (SELECT tenant FROM items WHERE id = old.item) AND digest = old.digest;
END;
CREATE TRIGGER inputs_come AFTER INSERT ON inputs BEGIN
  INSERT INTO holdings (tenant, digest, times) SELECT tenant, new.digest, 1 FROM jobs WHERE number = new.job
    ON CONFLICT DO UPDATE SET times = times + 1;
END;
CREATE TRIGGER inputs_go AFTER DELETE ON inputs BEGIN
  UPDATE holdings SET times = times - 1 WHERE tenant = (SELECT tenant FROM jobs WHERE number = old.job) AND digest = old.digest;
END;
CREATE TRIGGER artifacts_come AFTER INSERT ON artifacts BEGIN
  INSERT INTO holdings (tenant, digest, times) SELECT tenant, new.digest, 1 FROM jobs WHERE number = new.job
    ON CONFLICT DO UPDATE SET times = times + 1;
END;
CREATE TRIGGER artifacts_go AFTER DELETE ON artifacts BEGIN
  UPDATE holdings SET times = times - 1 WHERE tenant = (SELECT tenant FROM jobs WHERE number = old.job) AND digest = old.digest;
END;
CREATE TRIGGER specs_come AFTER INSERT ON specs BEGIN
  UPDATE tenants SET stored_bytes = stored_bytes + octet_length(new.spec) WHERE id = (SELECT tenant FROM jobs WHERE number = new.job);
END;
CREATE TRIGGER specs_go AFTER DELETE ON specs BEGIN
  UPDATE tenants SET stored_bytes = stored_bytes - octet_length(old.spec) WHERE id = (SELECT tenant FROM jobs WHERE number = old.job);
END;
CREATE TRIGGER common_specs_come AFTER INSERT ON common_specs BEGIN
  UPDATE tenants SET stored_bytes = stored_bytes + octet_length(new.spec) WHERE id = (SELECT tenant FROM cohorts WHERE number = new.cohort);
END;
CREATE TRIGGER common_specs_go AFTER DELETE ON common_specs BEGIN
  UPDATE tenants SET stored_bytes = stored_bytes - octet_length(old.spec) WHERE id = (SELECT tenant FROM cohorts WHERE number = old.cohort);
END;
CREATE TRIGGER jobs_tell AFTER UPDATE OF told_bytes, receipt, leaving ON jobs BEGIN
  UPDATE tenants SET stored_bytes = stored_bytes
    + iif(new.leaving, 0, new.told_bytes + ifnull(octet_length(new.receipt), 0))
    - iif(old.leaving, 0, old.told_bytes + ifnull(octet_length(old.receipt), 0)) WHERE id = new.tenant;
END;
-- What goes with something goes before it: whose it was is asked there.
CREATE TRIGGER items_go BEFORE DELETE ON items BEGIN
  DELETE FROM item_files WHERE item = old.id;
END;
CREATE TRIGGER jobs_go BEFORE DELETE ON jobs BEGIN
  DELETE FROM specs WHERE job = old.number;
  DELETE FROM inputs WHERE job = old.number;
  DELETE FROM artifacts WHERE job = old.number;
END;
CREATE TRIGGER cohorts_go BEFORE DELETE ON cohorts BEGIN
  DELETE FROM common_specs WHERE cohort = old.number;
END;
