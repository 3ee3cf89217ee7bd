"""Each server counts for itself, and the maximum of a majority can repeat."""

from lockfast.errors import StoreUnavailable
from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit

SERVERS = 3
ENOUGH = SERVERS // 2 + 1

ACQUIRE = """
-- acquire and count
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
return redis.call('INCR', KEYS[2])
"""
RELEASE = """
-- release
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


async def attempt(me: Process) -> bool:
    sent_at = me.now()
    fences = []
    for server in range(SERVERS) if me.name == "A" else reversed(range(SERVERS)):
        try:
            fences.append(await me.command("EVAL", ACQUIRE, 2, "door", "fence", me.name, TTL_MS, server=server))
        except StoreUnavailable:
            fences.append(0)
        if sum(fence > 0 for fence in fences) >= ENOUGH:
            me.enter(until=sent_at + TTL, fence=max(fences))
            await me.work()
            break
    held = bool(me.declared)
    me.leave()
    for server in range(SERVERS):
        await me.command("EVAL", RELEASE, 1, "door", me.name, server=server)
    return held


async def first(me: Process) -> None:
    while not await attempt(me):
        pass
    me.signal()


async def second(me: Process) -> None:
    await me.work()
    await attempt(me)


EXHIBIT = exhibit(
    "A quorum's fence as the maximum of its nodes",
    breaks="FT",
    failure="A's first attempt reaches only one server, which still counts it. So A's lease has fence 2, from that "
    "server alone. B's majority consists of the other two, whose counters are below 2: their maximum is 2 again.",
    fix="Write the chosen fence back to a majority before using it: then every later majority knows it.",
    clients={"A": first, "B": second},
    after={"B": "A"},
    code=[attempt],
    scripts=[ACQUIRE, RELEASE],
    servers=SERVERS,
    seconds=1.0,
    lose_request=2,
)
