"""Half of the servers is not a majority: there are two halves."""

from verify.gallery.exhibit import TTL, TTL_MS, Process, exhibit

SERVERS = 2
ENOUGH = SERVERS // 2


async def lock(me: Process) -> None:
    sent_at = me.now()
    votes = 0
    for server in range(SERVERS) if me.name == "A" else reversed(range(SERVERS)):
        votes += await me.command("SET", "door", me.name, "NX", "PX", TTL_MS, server=server) is not None
        if votes >= ENOUGH:
            me.enter(until=sent_at + TTL)
            await me.work()
            me.leave()
            return


EXHIBIT = exhibit(
    "A quorum of n/2",
    breaks="ME",
    failure="With an even number of servers, each client gets one half, and both believe that they hold the lock.",
    fix="Require more than half: n // 2 + 1. Use an odd number of servers.",
    clients={"A": lock, "B": lock},
    code=[lock],
    servers=SERVERS,
    seconds=1.0,
)
