-- Tables of the embedded store. Run once, in one transaction, on an empty file.
--
-- since and expires_at are seconds on the machine's boot-time clock. Setting the wall clock does not change them; they
-- are meaningful only within the boot that state.boot names. Fences and tickets are microseconds of wall time, or one
-- more than the last one if the wall clock is behind it.

-- Exactly one row. boot is the id of the boot that the times belong to: a later boot voids all grants and tickets and
-- keeps only the fences. swept is the last name that was checked for rows to delete.
CREATE TABLE state (
    boot TEXT NOT NULL,
    swept TEXT NOT NULL
);
INSERT INTO state (boot, swept) VALUES ('', '');

-- One row for each lock granted within about a day: its last fence, and its exclusive grant. The grant has ended if
-- holder is NULL or expires_at has passed. If holder is NULL, expires_at is about the time of the last use.
CREATE TABLE lock (
    name TEXT PRIMARY KEY,
    fence INTEGER NOT NULL,
    holder TEXT,
    owner TEXT NOT NULL,
    since REAL NOT NULL,
    expires_at REAL NOT NULL
) WITHOUT ROWID;

-- The grants of readers and of permits, one row each. slots has the indexes of the permits, separated by commas; it is
-- empty for a reader. Live grants of one lock have the same mode. While a lock has rows here, its holder is NULL.
CREATE TABLE shared_grant (
    name TEXT NOT NULL,
    holder TEXT NOT NULL,
    fence INTEGER NOT NULL,
    slots TEXT NOT NULL,
    owner TEXT NOT NULL,
    since REAL NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (name, holder)
) WITHOUT ROWID;

-- The queue of each lock, ordered by ticket. address names the waiter's inbox and attempt its last request. That
-- request keeps the ticket until expires_at. fences is the number of fences that the grant reserves. weight and
-- permit_limit are those of the claim. No holder waits for its own lock, and each name with waiters has a row in lock.
CREATE TABLE waiter (
    name TEXT NOT NULL,
    ticket INTEGER NOT NULL,
    holder TEXT NOT NULL,
    address TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    ttl REAL NOT NULL,
    owner TEXT NOT NULL,
    fences INTEGER NOT NULL,
    weight INTEGER NOT NULL,
    permit_limit INTEGER NOT NULL,
    since REAL NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (name, ticket, holder)
) WITHOUT ROWID;
CREATE UNIQUE INDEX waiter_by_holder ON waiter (name, holder);
