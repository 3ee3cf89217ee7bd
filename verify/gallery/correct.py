"""Correct locks: the explorer must find no violation, with crashes, pauses and lost messages."""

from lockfast.errors import StoreUnavailable
from verify.gallery.exhibit import TTL, TTL_MS, Process
from verify.world import Client, Model

RULES = frozenset({"ME", "SG", "OW", "NL", "ST", "ER"})

RELEASE = """
-- release my own lock
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


async def plain(me: Process) -> None:
    """`SET NX PX`, validity from before the request, compare-and-delete."""
    while True:
        sent_at = me.now()
        try:
            acquired = await me.command("SET", "door", me.name, "NX", "PX", TTL_MS)
        except StoreUnavailable:
            return  # unknown: this simple lock waits for the expiry
        if acquired:
            break
        await me.sleep(1)
    me.enter(until=sent_at + TTL)
    await me.work()
    me.leave()
    await me.command("EVAL", RELEASE, 1, "door", me.name)


def models() -> list[Model]:
    def model(name: str, seconds: float, **faults: int) -> Model:
        return Model(name, [Client(x, plain) for x in "AB"], faults, seconds, rules=RULES)

    return [
        model("plain, crash and pause", 5.0, crash=1, pause=1),
        model("plain, slow network", 4.5, slow=2),
        model("plain, lost messages", 4.5, lose_request=1, lose_reply=1),
    ]


SERVERS = 3
ENOUGH = SERVERS // 2 + 1


async def majority(me: Process) -> None:
    """A majority of the servers, validity from before the first request, clean-up on every server."""
    sent_at = me.now()
    votes = 0
    for server in range(SERVERS) if me.name == "A" else reversed(range(SERVERS)):
        votes += await me.command("SET", "door", me.name, "NX", "PX", TTL_MS, server=server) is not None
    if votes >= ENOUGH and me.now() < sent_at + TTL:
        me.enter(until=sent_at + TTL)
        await me.work()
        me.leave()
    for server in range(SERVERS):
        await me.command("EVAL", RELEASE, 1, "door", me.name, server=server)


def quorum() -> Model:
    clients = [Client(x, majority) for x in "AB"]
    return Model("majority, slow network", clients, {"slow": 1}, 3.5, servers=SERVERS, rules=frozenset({"ME", "ER"}))
