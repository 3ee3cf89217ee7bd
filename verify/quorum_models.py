"""The quorum's voting and fences as a model: the shipped script on every server, the shipped rules in every client.

A client asks one server after the other, A from the first and B from the last, so that their majorities differ wherever
that is possible; the order of requests to different servers means nothing to servers that know nothing of each other.
What is left out is what cannot break a rule of the servers': queues, floors and nodes that are not asked.
"""

from typing import Any

from lockfast.core.quorum import rules
from lockfast.core.validity import valid_until
from lockfast.errors import StoreUnavailable
from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.lua.scripts import ACQUIRE, RELEASE
from verify.gallery.exhibit import TTL, TTL_MS
from verify.process import Process, Program
from verify.world import Client, Model

SERVERS = 3
ENOUGH = rules.majority(SERVERS)
KEYS = [key.decode() for key in keys_of("door")[:4]]


async def request(me: Process, server: int, floor: int = 0) -> int | None:
    """The fence that a server gave, None when it did not or nothing was heard of it."""
    floors = [floor] if floor else []
    try:
        answer: Any = await me.command(
            "EVAL", ACQUIRE.text, 4, *KEYS, me.name, TTL_MS, "host:1:", "", 0, "", 1, *floors, server=server
        )
    except StoreUnavailable:
        return None
    return answer if isinstance(answer, int) else None


async def vote(me: Process, *, raises: bool) -> tuple[dict[int, int], int]:
    """The nodes that are ours with the fence of each, and the fence to use; too few nodes mean none."""
    fences: dict[int, int] = {}
    for server in range(SERVERS) if me.name == "A" else reversed(range(SERVERS)):
        fence = await request(me, server)
        if fence is not None:
            fences[server] = fence
        if len(fences) >= ENOUGH:
            break
    if len(fences) < ENOUGH:
        return fences, 0
    most, behind = rules.choose_fence(fences, SERVERS)
    for server in behind if raises else []:
        raised = await request(me, server, floor=most)
        if raised is None:
            del fences[server]
        else:
            fences[server] = raised
    return fences, most if len(fences) >= ENOUGH else 0


async def attempt(me: Process, *, raises: bool) -> bool:
    sent_at = me.now()
    _, fence = await vote(me, raises=raises)
    held = bool(fence) and rules.has_enough_validity(me.now(), sent_at, TTL)
    if held:
        me.enters(until=valid_until(sent_at, TTL), fence=fence)
        await me.work()
        me.leaves()
    for server in range(SERVERS):
        try:
            await me.command("EVAL", RELEASE.text, 4, *KEYS, me.name, server=server)
        except StoreUnavailable:
            continue  # the ttl frees it
    return held


def program(*, raises: bool, waits: bool) -> Program:
    async def run(me: Process) -> None:
        if waits:
            await me.work()  # until the other signals
        for _ in range(2):
            if await attempt(me, raises=raises):
                break
        me.signal()

    return run


def model(name: str, checked: str, *, raises: bool = True, in_turn: bool = True, **faults: int) -> Model:
    """A and then B, or both at the same time."""
    clients = [
        Client("A", program(raises=raises, waits=False)),
        Client("B", program(raises=raises, waits=in_turn), after="A" if in_turn else None),
    ]
    return Model(name, clients, faults, 1.0, servers=SERVERS, rules=frozenset({*checked.split(), "ER"}))


def models() -> list[Model]:
    """A server that forgets may let two in at the same time, so there it is only asked that fences grow in turn."""
    return [
        model("fences, lost requests", "ME FT", lose_request=3),
        model("fences, lost replies", "ME FT", lose_reply=2),
        model("fences, a restart that forgets", "FT", restart=1, lose_request=1),
        model("two at once, slow messages", "ME FT", in_turn=False, slow=1),
        model("two at once, a lost reply", "ME FT", in_turn=False, lose_reply=1),
    ]


def thorough() -> list[Model]:
    return [
        model("fences, a restart and more losses", "FT", restart=1, lose_request=2),
        model("two at once, lost messages", "ME FT", in_turn=False, lose_request=1, lose_reply=1),
    ]


def broken() -> Model:
    """The same without writing the largest fence back."""
    return model("fences not raised", "FT", raises=False, lose_request=2)
