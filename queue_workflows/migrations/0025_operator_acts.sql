-- Who did what on request: a row for each object of an act, from the act's own transaction. Without foreign keys, as an act
-- outlives its object. Deleted by age.
CREATE TABLE operator_acts (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      queue_workflows_time NOT NULL DEFAULT now(),
    -- Who did it, as the caller says.
    actor   text NOT NULL CHECK (octet_length(actor) BETWEEN 1 AND 800),
    -- The role that logged in to the database, which a caller cannot choose.
    login   text NOT NULL DEFAULT session_user CHECK (octet_length(login) <= 200),
    via     text NOT NULL DEFAULT 'sql' CHECK (via IN ('sql', 'python', 'cli', 'http')),
    action  text NOT NULL CHECK (octet_length(action) BETWEEN 1 AND 100),
    -- The kind of object, as `run` or `queue`, and its id or name.
    kind    text NOT NULL CHECK (octet_length(kind) BETWEEN 1 AND 100),
    subject text NOT NULL CHECK (octet_length(subject) <= 1000),
    reason  text CHECK (octet_length(reason) <= 8000),
    detail  jsonb NOT NULL DEFAULT '{}' CONSTRAINT operator_acts_detail_bound CHECK (octet_length(detail::text) <= 65536)
);
CREATE INDEX operator_acts_subject_idx ON operator_acts (kind, subject, id);
CREATE INDEX operator_acts_at_idx ON operator_acts USING brin (at);
