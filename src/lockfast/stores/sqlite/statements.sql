-- Every statement of the embedded store, each under its name and its contract.
--
-- The parameters are given by position, in the order that the contract lists. "Changes n rows" is what the caller
-- reads from the cursor's rowcount. Nothing newer than SQLite 3.24 is used: `RETURNING` would need 3.35.

-- take: grant a lock in one statement, without a look before: the common case.
-- In: name, fence (wall time), holder, owner, now, expires_at, fences.
-- Changes 1 row when the lock was free, nobody waits for it and all `fences` up to `fence` are greater than the last; else none,
-- and `read` has to tell which of the three it was.
INSERT INTO lock (name, fence, holder, owner, since, expires_at) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET
    fence = excluded.fence, holder = excluded.holder, owner = excluded.owner,
    since = excluded.since, expires_at = excluded.expires_at
WHERE (lock.holder IS NULL OR lock.expires_at <= excluded.since)
    AND lock.fence + ? <= excluded.fence
    AND NOT EXISTS (SELECT 1 FROM waiter WHERE waiter.name = excluded.name);

-- give: free a lock that nobody waits for, in one statement: the common case.
-- In: now, name, holder, now, name.
-- Changes 1 row when the grant was the holder's and nobody waits; else none, and `read` has to tell which.
UPDATE lock SET holder = NULL, owner = '', expires_at = ?
WHERE name = ? AND holder = ? AND expires_at > ?
    AND NOT EXISTS (SELECT 1 FROM waiter WHERE waiter.name = ?);

-- renew: prolong a grant; never shorten it, for requests may come late and out of order.
-- In: expires_at, name, holder, now. Changes 1 row when the grant was the holder's and had not expired.
UPDATE lock SET expires_at = max(expires_at, ?) WHERE name = ? AND holder = ? AND expires_at > ?;

-- end_at: set when a grant ends, sooner or later than before: its holder's last word.
-- In: expires_at, name, holder, now. Changes 1 row when the grant was the holder's and had not expired.
UPDATE lock SET expires_at = ? WHERE name = ? AND holder = ? AND expires_at > ?;

-- read: one lock. In: name. Out: fence, holder, expires_at, owner, since.
SELECT fence, holder, expires_at, owner, since FROM lock WHERE name = ?;

-- grant: write a grant over whatever is there; the caller has looked.
-- In: name, fence, holder, owner, now, expires_at.
REPLACE INTO lock (name, fence, holder, owner, since, expires_at) VALUES (?, ?, ?, ?, ?, ?);

-- free: end a grant, and keep its fence. In: now, name.
UPDATE lock SET holder = NULL, owner = '', expires_at = ? WHERE name = ?;

-- head: who is first in the queue. In: name. Out: holder, address, turn, ttl, owner, fences, dead_at.
SELECT holder, address, turn, ttl, owner, fences, dead_at FROM waiter WHERE name = ? ORDER BY ticket, holder LIMIT 1;

-- keep_place: a waiter asks again. In: address, turn, dead_at, name, holder. Changes 1 row if it has a place.
UPDATE waiter SET address = ?, turn = ?, dead_at = ? WHERE name = ? AND holder = ?;

-- move_up: a waiter comes back with an older ticket than it has. In: ticket, name, holder.
UPDATE waiter SET ticket = ? WHERE name = ? AND holder = ?;

-- join: take a place. In: name, ticket, holder, address, turn, ttl, owner, fences, now, dead_at.
INSERT INTO waiter (name, ticket, holder, address, turn, ttl, owner, fences, since, dead_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- last_ticket: In: name. Out: the greatest ticket, NULL when nobody waits.
SELECT max(ticket) FROM waiter WHERE name = ?;

-- ticket: In: name, holder. Out: the ticket of that waiter.
SELECT ticket FROM waiter WHERE name = ? AND holder = ?;

-- position: how many wait before a ticket. In: name, ticket.
-- Out: 0 for the first, and 1000 for all from there on: counting a queue to its end each time would cost more
-- than anybody gains from the number.
SELECT count(*) FROM (SELECT 1 FROM waiter WHERE name = ? AND ticket < ? LIMIT 1000);

-- leave: give up one place. In: name, holder. Changes 1 row if there was one.
DELETE FROM waiter WHERE name = ? AND holder = ?;

-- leave_all: give up all places of a process that has gone. In: name, address.
DELETE FROM waiter WHERE name = ? AND address = ?;

-- waiters: the first living ones, in order. In: name, now, the most rows. Out: holder, owner, since.
SELECT holder, owner, since FROM waiter WHERE name = ? AND dead_at > ? ORDER BY ticket, holder LIMIT ?;

-- waiting: how many living waiters there are. In: name, now.
SELECT count(*) FROM waiter WHERE name = ? AND dead_at > ?;

-- page: the next names in order, each as `read` gives it, with how many wait.
-- In: now, the last name before, the most rows. Out: name, fence, holder, expires_at, owner, since, waiting.
SELECT name, fence, holder, expires_at, owner, since,
    (SELECT count(*) FROM waiter WHERE waiter.name = lock.name AND waiter.dead_at > ?)
FROM lock WHERE name > ? ORDER BY name LIMIT ?;

-- move_on: end a grant and raise the fence, so that it is not its holder's any more. In: fence, now, name.
UPDATE lock SET fence = ?, holder = NULL, owner = '', expires_at = ? WHERE name = ?;

-- state: Out: boot, swept.
SELECT boot, swept FROM state;

-- new_boot: In: boot.
UPDATE state SET boot = ?;

-- void_grants: after a boot. The rows stay for their fences, as if last used when this boot began.
UPDATE lock SET holder = NULL, owner = '', since = 0, expires_at = 0;

-- void_places: after a boot.
DELETE FROM waiter;

-- slice_end: the last of the names to look at in one sweep. In: swept, how many. Out: a name, NULL for none left.
SELECT max(name) FROM (SELECT name FROM lock WHERE name > ? ORDER BY name LIMIT ?);

-- forget_waiters: remove dead waiters between two names. In: from (excluded), to (included), now.
DELETE FROM waiter WHERE name > ? AND name <= ? AND dead_at <= ?;

-- forget_locks: remove what has not been in use for long, and nobody waits for, between two names.
-- In: from (excluded), to (included), the latest last use to forget.
DELETE FROM lock WHERE name > ? AND name <= ? AND expires_at < ?
    AND NOT EXISTS (SELECT 1 FROM waiter WHERE waiter.name = lock.name);

-- swept: In: name.
UPDATE state SET swept = ?;
