-- The question at which a job learnt that it is to stop, before it was answered; run again, it learns it at the same one.
ALTER TABLE jobs ADD COLUMN stop_question INTEGER;
