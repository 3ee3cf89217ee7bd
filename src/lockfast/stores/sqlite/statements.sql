-- Every statement of the embedded store, each under its name and contract.
--
-- Parameters are positional, in the order of the contract. "Changes n rows" is the cursor's rowcount. Needs only
-- SQLite 3.25: RETURNING would need 3.35.

-- acquire_free: fast path: grant a lock exclusively without reading it first.
-- In: name, fence (wall time), holder, owner, now, expires_at, fences.
-- Changes 1 row if the lock had no grants and no waiters, and the lowest reserved fence exceeds the last one; else none, and
-- `read` finds the reason.
INSERT INTO lock (name, fence, holder, owner, since, expires_at) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET
    fence = excluded.fence, holder = excluded.holder, owner = excluded.owner,
    since = excluded.since, expires_at = excluded.expires_at
WHERE (lock.holder IS NULL OR lock.expires_at <= excluded.since)
    AND lock.fence + ? <= excluded.fence
    AND NOT EXISTS (SELECT 1 FROM waiter WHERE waiter.name = excluded.name)
    AND NOT EXISTS (SELECT 1 FROM shared_grant WHERE shared_grant.name = excluded.name);

-- release_uncontended: fast path: end an exclusive grant of a lock that has no waiters.
-- In: now, name, holder, now, name.
-- Changes 1 row if `holder` had the grant and the lock had no waiters; else none, and `read` finds the reason.
UPDATE lock SET holder = NULL, owner = '', expires_at = ?
WHERE name = ? AND holder = ? AND expires_at > ?
    AND NOT EXISTS (SELECT 1 FROM waiter WHERE waiter.name = ?);

-- renew: extend an exclusive grant; never shorten it, because requests may arrive late and out of order.
-- In: expires_at, name, holder, now. Changes 1 row if the grant was the holder's and had not expired.
UPDATE lock SET expires_at = max(expires_at, ?) WHERE name = ? AND holder = ? AND expires_at > ?;

-- renew_shared: extend the grant of a reader or of permits, as `renew` does.
-- In: expires_at, name, holder, now. Changes 1 row if the grant was the holder's and had not expired.
UPDATE shared_grant SET expires_at = max(expires_at, ?) WHERE name = ? AND holder = ? AND expires_at > ?;

-- set_expiry: set the end of an exclusive grant, earlier or later than before: the holder's final renewal.
-- In: expires_at, name, holder, now. Changes 1 row if the grant was the holder's and had not expired.
UPDATE lock SET expires_at = ? WHERE name = ? AND holder = ? AND expires_at > ?;

-- set_expiry_shared: set the end of the grant of a reader or of permits, as `set_expiry` does.
-- In: expires_at, name, holder, now. Changes 1 row if the grant was the holder's and had not expired.
UPDATE shared_grant SET expires_at = ? WHERE name = ? AND holder = ? AND expires_at > ?;

-- read: read the row of one lock. In: name. Out: fence, holder, owner, since, expires_at, whether it has waiters.
SELECT fence, holder, owner, since, expires_at, EXISTS (SELECT 1 FROM waiter WHERE waiter.name = lock.name)
FROM lock WHERE name = ?;

-- shared_grants: read the shared grants of one lock in the order of their fences.
-- In: name, the latest expiry to leave out, limit. Out: fence, holder, owner, since, expires_at, slots.
SELECT fence, holder, owner, since, expires_at, slots
FROM shared_grant WHERE name = ? AND expires_at > ? ORDER BY fence LIMIT ?;

-- drop_expired: delete the expired shared grants of one lock. In: name, now.
DELETE FROM shared_grant WHERE name = ? AND expires_at <= ?;

-- grant: write the row of a lock unconditionally, after the caller has read it. holder is NULL for a shared grant.
-- In: name, fence, holder, owner, now, expires_at.
REPLACE INTO lock (name, fence, holder, owner, since, expires_at) VALUES (?, ?, ?, ?, ?, ?);

-- grant_shared: add the grant of a reader or of permits, beside `grant`.
-- In: name, fence, holder, owner, now, expires_at, slots.
INSERT INTO shared_grant (name, fence, holder, owner, since, expires_at, slots) VALUES (?, ?, ?, ?, ?, ?, ?);

-- release: end the exclusive grant, if there is one, and set the fence, which may stay the same. In: fence, now, name.
UPDATE lock SET fence = ?, holder = NULL, owner = '', expires_at = ? WHERE name = ?;

-- release_shared: end one shared grant, beside `release`. In: name, holder.
DELETE FROM shared_grant WHERE name = ? AND holder = ?;

-- head: read the first waiter. In: name.
-- Out: holder, address, attempt, ttl, owner, fences, weight, permit_limit, expires_at.
SELECT holder, address, attempt, ttl, owner, fences, weight, permit_limit, expires_at
FROM waiter WHERE name = ? ORDER BY ticket, holder LIMIT 1;

-- enqueue: add a waiter, or refresh it if it is in the queue. Of two tickets the earlier one counts.
-- In: name, ticket, holder, address, attempt, ttl, owner, fences, weight, permit_limit, now, expires_at.
INSERT INTO waiter
    (name, ticket, holder, address, attempt, ttl, owner, fences, weight, permit_limit, since, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (name, holder) DO UPDATE SET
    ticket = min(ticket, excluded.ticket), address = excluded.address, attempt = excluded.attempt,
    ttl = excluded.ttl, owner = excluded.owner, fences = excluded.fences, weight = excluded.weight,
    permit_limit = excluded.permit_limit, expires_at = excluded.expires_at;

-- last_ticket: In: name. Out: the greatest ticket, NULL for an empty queue.
SELECT max(ticket) FROM waiter WHERE name = ?;

-- ticket: In: name, holder. Out: the ticket of that waiter.
SELECT ticket FROM waiter WHERE name = ? AND holder = ?;

-- position: count the waiters before one. In: name, ticket, holder.
-- Out: 0 for the first; at most 1000, because counting a long queue at each request would cost more than the number is
-- worth.
SELECT count(*) FROM (SELECT 1 FROM waiter WHERE name = ? AND (ticket, holder) < (?, ?) LIMIT 1000);

-- remove_waiter: In: name, holder. Changes 1 row if there was one.
DELETE FROM waiter WHERE name = ? AND holder = ?;

-- remove_client: remove all waiters of a dead client. In: name, address.
DELETE FROM waiter WHERE name = ? AND address = ?;

-- waiters: list live waiters in order. In: name, now, limit. Out: holder, owner, weight, permit_limit, since.
SELECT holder, owner, weight, permit_limit, since
FROM waiter WHERE name = ? AND expires_at > ? ORDER BY ticket, holder LIMIT ?;

-- waiting: count live waiters. In: name, now.
SELECT count(*) FROM waiter WHERE name = ? AND expires_at > ?;

-- page: list the next locks in order of their names, with the number of live waiters.
-- In: now, last name of the previous page, limit. Out: name, fence, holder, owner, since, expires_at, waiting.
SELECT name, fence, holder, owner, since, expires_at,
    (SELECT count(*) FROM waiter WHERE waiter.name = lock.name AND waiter.expires_at > ?)
FROM lock WHERE name > ? ORDER BY name LIMIT ?;

-- state: Out: boot, swept.
SELECT boot, swept FROM state;

-- set_boot: In: boot.
UPDATE state SET boot = ?;

-- void_grants: after a boot. The rows keep their fences, as if last used when this boot began.
UPDATE lock SET holder = NULL, owner = '', since = 0, expires_at = 0;

-- void_shared_grants: after a boot.
DELETE FROM shared_grant;

-- void_waiters: after a boot.
DELETE FROM waiter;

-- sweep_end: find the last name of the next sweep. In: swept, limit. Out: a name, NULL if none is left.
SELECT max(name) FROM (SELECT name FROM lock WHERE name > ? ORDER BY name LIMIT ?);

-- sweep_waiters: delete expired waiters between two names. In: from (excluded), to (included), now.
DELETE FROM waiter WHERE name > ? AND name <= ? AND expires_at <= ?;

-- sweep_shared_grants: delete shared grants that expired long ago, between two names.
-- In: from (excluded), to (included), the latest expiry to delete.
DELETE FROM shared_grant WHERE name > ? AND name <= ? AND expires_at < ?;

-- sweep_locks: delete locks without waiters and shared grants that were not used for long, between two names.
-- In: from (excluded), to (included), the latest last use to delete.
DELETE FROM lock WHERE name > ? AND name <= ? AND expires_at < ?
    AND NOT EXISTS (SELECT 1 FROM waiter WHERE waiter.name = lock.name)
    AND NOT EXISTS (SELECT 1 FROM shared_grant WHERE shared_grant.name = lock.name);

-- set_swept: In: name.
UPDATE state SET swept = ?;
