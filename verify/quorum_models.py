"""Models of the quorum's votes and fences: the shipped script on every server, the shipped rules in every client.

A client sends its requests to one server after the other: A starts with the first server and B with the last, so that
their majorities differ wherever possible. The servers are independent, so the order of requests to different servers
does not matter. Left out, because they cannot break these rules: queues, floors, and nodes without a request.
"""

from typing import Any

from lockfast.core.lease_state import valid_until
from lockfast.core.quorum import rules
from lockfast.errors import StoreUnavailable
from lockfast.stores.redis.keys import keys_of
from lockfast.stores.redis.lua.scripts import ACQUIRE, RELEASE
from verify.gallery.exhibit import TTL, TTL_MS
from verify.process import Process, Program
from verify.world import Client, Model

SERVERS = 3
ENOUGH = rules.majority(SERVERS)
KEYS = [key.decode() for key in keys_of("door")[:7]]


async def request(me: Process, server: int, weight: int, floor: int = 0) -> int | None:
    """Return the fence that a server granted; None if it denied the claim or did not reply."""
    floors = [floor] if floor else []
    try:
        answer: Any = await me.command(
            "EVAL", ACQUIRE.text, 7, *KEYS, me.name, TTL_MS, "host:1:", "", 0, "", 1, weight, 0, *floors, server=server
        )
    except StoreUnavailable:
        return None
    return answer if isinstance(answer, int) else None


async def vote(me: Process, weight: int, *, raises: bool) -> tuple[dict[int, int], int]:
    """Return the fence of each node that granted the lock, and the fence to use: 0 without a majority."""
    fences: dict[int, int] = {}
    for server in range(SERVERS) if me.name == "A" else reversed(range(SERVERS)):
        fence = await request(me, server, weight)
        if fence is not None:
            fences[server] = fence
        if len(fences) >= ENOUGH:
            break
    if len(fences) < ENOUGH:
        return fences, 0
    highest, behind = rules.choose_fence(fences, SERVERS)
    for server in behind if raises else []:
        raised = await request(me, server, weight, floor=highest)
        if raised is None:
            del fences[server]
        else:
            fences[server] = raised
    return fences, highest if len(fences) >= ENOUGH else 0


async def attempt(me: Process, weight: int, *, raises: bool) -> bool:
    sent_at = me.now()
    _, fence = await vote(me, weight, raises=raises)
    held = bool(fence) and rules.has_enough_validity(me.now(), sent_at, TTL)
    if held:
        me.enter(until=valid_until(sent_at, TTL), fence=fence)
        await me.work()
        me.leave()
    for server in range(SERVERS):
        try:
            await me.command("EVAL", RELEASE.text, 7, *KEYS, me.name, server=server)
        except StoreUnavailable:
            continue  # the grant expires
    return held


def program(weight: int, *, raises: bool, waits: bool) -> Program:
    async def run(me: Process) -> None:
        if waits:
            await me.work()  # until the other client signals
        for _ in range(2):
            if await attempt(me, weight, raises=raises):
                break
        me.signal()

    return run


def model(
    name: str, checked: str, *, raises: bool = True, in_sequence: bool = True, reader: str = "", **faults: int
) -> Model:
    """B runs after A, or both run at the same time. One of them may be a reader."""
    clients = [
        Client("A", program(int(reader == "A"), raises=raises, waits=False)),
        Client("B", program(int(reader == "B"), raises=raises, waits=in_sequence), after="A" if in_sequence else None),
    ]
    return Model(name, clients, faults, 1.0, servers=SERVERS, rules=frozenset({*checked.split(), "ER"}))


def models() -> list[Model]:
    """Small versions. A server that lost its data may grant twice, so those models check only the order of fences."""
    return [
        model("fences, lost requests", "ME FT", lose_request=3),
        model("fences, lost replies", "ME FT", lose_reply=2),
        model("fences, a restart without data", "FT", restart=1, lose_request=1),
        model("concurrent, slow network", "ME FT", in_sequence=False, slow=1),
        model("concurrent, a lost reply", "ME FT", in_sequence=False, lose_reply=1),
        model("a reader, then a writer, lost requests", "ME FT", reader="A", lose_request=3),
        model("a writer, then a reader, lost replies", "ME FT", reader="B", lose_reply=2),
        model("a reader, then a writer, a restart without data", "FT", reader="A", restart=1, lose_request=1),
        model("a reader beside a writer, slow network", "ME FT", reader="A", in_sequence=False, slow=1),
        model("a reader beside a writer, a lost reply", "ME FT", reader="A", in_sequence=False, lose_reply=1),
    ]


def thorough() -> list[Model]:
    return [
        model("fences, a restart and lost requests", "FT", restart=1, lose_request=2),
        model("concurrent, lost messages", "ME FT", in_sequence=False, lose_request=1, lose_reply=1),
    ]


def broken(reader: str = "") -> Model:
    """A quorum that does not write the highest fence back to the other nodes."""
    return model("fences not raised", "FT", raises=False, reader=reader, lose_request=2)
