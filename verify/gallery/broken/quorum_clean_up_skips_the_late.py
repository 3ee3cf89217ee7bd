"""The clean-up leaves out the server that did not answer, and that one had said yes."""

from lockfast.errors import StoreUnavailable
from verify.gallery.exhibit import TTL_MS, Process, exhibit

SERVERS = 3
GIVE = """
-- give back
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


async def attempt(me: Process) -> None:
    said_yes = []
    for server in range(SERVERS):
        try:
            if await me.command("SET", "door", me.name, "NX", "PX", TTL_MS, server=server, within=0.05):
                said_yes.append(server)
        except StoreUnavailable:
            pass  # too late: counts as no
    for server in said_yes:
        await me.command("EVAL", GIVE, 1, "door", me.name, server=server)


async def worker(me: Process) -> None:
    me.holders.append(me.name)
    await attempt(me)
    me.note("is told: not acquired")


EXHIBIT = exhibit(
    "A clean-up that skips the node that answered late",
    breaks="CF",
    wrong="The answer of one server is too late to count, but its key is there. The clean-up visits only those "
    "that said yes in time, so that vote stays taken for a whole ttl.",
    cure="Clean up everywhere a request was sent to, whatever was answered: no answer means unknown, not no.",
    clients={"A": worker},
    code=[attempt],
    servers=SERVERS,
    seconds=1.0,
    slow=1,
)
SCRIPTS = {"GIVE": GIVE}
