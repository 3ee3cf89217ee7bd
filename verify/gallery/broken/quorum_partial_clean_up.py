"""The clean-up skips the server that did not reply, although that one granted the lock."""

from lockfast.errors import StoreUnavailable
from verify.gallery.exhibit import TTL_MS, Process, exhibit

SERVERS = 3
RELEASE = """
-- release
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


async def attempt(me: Process) -> None:
    granted = []
    for server in range(SERVERS):
        try:
            if await me.command("SET", "door", me.name, "NX", "PX", TTL_MS, server=server, within=0.05):
                granted.append(server)
        except StoreUnavailable:
            pass  # too late: counts as denied
    for server in granted:
        await me.command("EVAL", RELEASE, 1, "door", me.name, server=server)


async def worker(me: Process) -> None:
    me.holder_ids.append(me.name)
    await attempt(me)
    me.note("returns: not acquired")


EXHIBIT = exhibit(
    "A clean-up that skips the node whose reply was late",
    breaks="CF",
    failure="The reply of one server is too late to count, but its key exists. The clean-up only visits the servers "
    "that replied in time, so that vote is lost for a whole ttl.",
    fix="Clean up on every server that got a request, whatever it replied. No reply means unknown, not denied.",
    clients={"A": worker},
    code=[attempt],
    scripts=[RELEASE],
    servers=SERVERS,
    seconds=1.0,
    slow=1,
)
