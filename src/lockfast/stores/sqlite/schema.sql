-- The whole state of the embedded store. Run once, in one transaction, on an empty file.
--
-- Times named since, expires_at and dead_at are seconds on the machine's boot-time clock, which no change of the
-- wall clock moves; they mean something only together with `state.boot`. Fences and tickets are microseconds of
-- wall time, or more when the clock stands behind the last one.

-- Exactly one row. `boot` names the boot of the machine that the times belong to; when the machine has booted
-- since, every grant and place is void, and only the fences stay. `swept` is the last name that was looked at for
-- rows to forget.
CREATE TABLE state (
    boot TEXT NOT NULL,
    swept TEXT NOT NULL
);
INSERT INTO state (boot, swept) VALUES ('', '');

-- One row for each lock that was granted within about a day. It is free when `holder` is NULL or `expires_at` has
-- come. A free row is kept only for its fence; `expires_at` then says when it was last in use.
CREATE TABLE lock (
    name TEXT PRIMARY KEY,
    fence INTEGER NOT NULL,
    holder TEXT,
    owner TEXT NOT NULL,
    since REAL NOT NULL,
    expires_at REAL NOT NULL
) WITHOUT ROWID;

-- The queue of each lock, first ticket first. `address` is the waiter's inbox, `turn` the number of its last
-- request, `dead_at` the moment until which that request keeps the place, `fences` how many its grant reserves. Nobody
-- waits for a lock it holds, and no name has waiters without a row in `lock`.
CREATE TABLE waiter (
    name TEXT NOT NULL,
    ticket INTEGER NOT NULL,
    holder TEXT NOT NULL,
    address TEXT NOT NULL,
    turn INTEGER NOT NULL,
    ttl REAL NOT NULL,
    owner TEXT NOT NULL,
    fences INTEGER NOT NULL,
    since REAL NOT NULL,
    dead_at REAL NOT NULL,
    PRIMARY KEY (name, ticket, holder)
) WITHOUT ROWID;
CREATE UNIQUE INDEX waiter_by_holder ON waiter (name, holder);
