"""The store itself, once for both colours: each operation is one request over a `Wire`.

Rules kept here: a request is idempotent, so it may be repeated by whoever got no answer; scripts that the server has
forgotten are sent again in full, once; every error reply has a decided meaning (`replies.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, Protocol

from holdfast.errors import StoreError, StoreProtocolError
from holdfast.ports import Mailbox
from holdfast.stores.redis import scripts
from holdfast.stores.redis.keys import keys_of
from holdfast.stores.redis.replies import MOVES_AWAY, code_of, error_of
from holdfast.stores.redis.resp import ReplyError
from holdfast.stores.redis.scripts import Script
from holdfast.values import (
    Answer,
    Ask,
    Granted,
    LockInfo,
    Owner,
    Place,
    Queued,
    Renewal,
    Taken,
    WaiterInfo,
    clean,
    shown,
)

MOST_SHOWN = 1000


class Wire(Protocol):
    """One connection that carries the requests of many callers, in order."""

    @property
    def grace(self) -> float:
        """Seconds that an answer may take on this link, generously."""

    async def ask(self, request: bytes, until: float) -> Any:
        """The reply (an error reply as a `ReplyError` value); `StoreUnavailable` when none came in time."""

    def drop(self) -> None:
        """Close the connection; the next request dials anew."""

    async def close(self) -> None: ...

    def forget(self) -> None: ...


class Inbox(Protocol):
    """One subscribed connection that receives the pushes for all acquisitions of a client."""

    @property
    def listening(self) -> bool: ...

    def mailbox(self, holder: str) -> Mailbox: ...

    async def close(self) -> None: ...

    def forget(self) -> None: ...


class RedisStore:
    """`ports.Store` on Redis or Valkey."""

    def __init__(self, wire: Wire, inbox: Inbox) -> None:
        self._wire = wire
        self._inbox = inbox

    @property
    def grace(self) -> float:
        return self._wire.grace

    @property
    def listening(self) -> bool:
        return self._inbox.listening

    def mailbox(self, holder: str) -> Mailbox:
        return self._inbox.mailbox(holder)

    async def _run(
        self, script: Script, name: str, until: float, key_count: int, packed_keys: bytes, *args: bytes
    ) -> Any:
        reply = await self._wire.ask(script.request(key_count, packed_keys, *args), until)
        if not isinstance(reply, ReplyError):
            return reply
        code = code_of(str(reply))
        if code == "NOSCRIPT":
            in_full = script.request(key_count, packed_keys, *args, in_full=True)
            reply = await self._wire.ask(in_full, until)
            if not isinstance(reply, ReplyError):
                return reply
            code = code_of(str(reply))
        if code in MOVES_AWAY:
            self._wire.drop()
        raise error_of(str(reply), shown(name))

    async def acquire(self, ask: Ask, place: Place | None, until: float) -> Answer:
        name, holder, ttl, owner = ask
        inbox, turn, ticket = (b"", b"0", b"") if place is None else _packed_place(place)
        reply = await self._run(
            scripts.ACQUIRE,
            name,
            until,
            4,
            keys_of(name).packed,
            holder.encode(),
            b"%d" % ceil(ttl * 1000),
            owner.encode(),
            inbox,
            turn,
            ticket,
        )
        try:
            kind, value = reply[0], reply[1]
            if kind == 1:
                return Granted(value)
            left = None if value < 0 else value / 1000
            return Taken(left) if kind == 0 else Queued(reply[2], reply[3], left)
        except (TypeError, IndexError, KeyError):
            raise _nonsense(name, reply) from None

    async def renew(self, renewals: Sequence[Renewal], until: float) -> list[bool]:
        packed_keys = b"".join([keys_of(line.name).packed_pair for line in renewals])
        args = [arg for line in renewals for arg in (line.holder.encode(), b"%d" % ceil(line.ttl * 1000))]
        reply = await self._run(scripts.RENEW, renewals[0].name, until, 2 * len(renewals), packed_keys, *args)
        if not isinstance(reply, list) or len(reply) != len(renewals):
            raise _nonsense(renewals[0].name, reply)
        return [answer == 1 for answer in reply]

    async def release(self, name: str, holder: str, until: float) -> bool:
        reply = await self._run(scripts.RELEASE, name, until, 4, keys_of(name).packed, holder.encode())
        return bool(reply == 1)

    async def adopt(self, ask: Ask, old_holder: str, until: float) -> Granted | None:
        reply = await self._run(
            scripts.ADOPT,
            ask.name,
            until,
            2,
            keys_of(ask.name).packed_pair,
            ask.holder.encode(),
            b"%d" % ceil(ask.ttl * 1000),
            ask.owner.encode(),
            old_holder.encode(),
        )
        return Granted(reply) if reply else None

    async def inspect(self, name: str, until: float) -> LockInfo:
        reply = await self._run(scripts.INSPECT, name, until, 4, keys_of(name).packed, b"%d" % MOST_SHOWN)
        try:
            return _info(name, reply)
        except (TypeError, ValueError, IndexError):
            raise _nonsense(name, reply) from None

    async def close(self) -> None:
        await self._inbox.close()
        await self._wire.close()

    def forget(self) -> None:
        self._inbox.forget()
        self._wire.forget()


def _packed_place(place: Place) -> tuple[bytes, bytes, bytes]:
    ticket = b"" if place.ticket is None else b"%d" % place.ticket
    return place.address.encode(), b"%d" % place.turn, ticket


def _nonsense(name: str, reply: object) -> StoreError:
    return StoreProtocolError(
        f"The server's answer about the lock {shown(name)} makes no sense ({shown(reply)}): is it Redis 6.2 or later?"
    )


def _info(name: str, reply: list[Any]) -> LockInfo:
    exists, holder, pttl, meta, now_us, waiting = reply[:6]
    fence, since_ms, holder_start, owner = _meta(meta)
    waiters = [_waiter(*reply[at : at + 3], now_us=now_us) for at in range(6, len(reply), 3)]
    common = {"fence": fence, "waiters": tuple(waiters), "waiting": waiting}
    if not exists:
        return LockInfo(name, **common)
    who = clean(holder.decode("utf-8", "replace"))
    by_us = holder_start is not None and holder[:6] == holder_start
    return LockInfo(
        name,
        holder=who,
        owner=owner if by_us else None,
        held_for=max(0.0, now_us / 1e6 - since_ms / 1e3) if by_us else None,
        ttl_left=None if pttl < 0 else pttl / 1000,
        **common,
    )


def _meta(value: bytes) -> tuple[int | None, int, bytes | None, Owner | None]:
    """The parts of `meta`; a key that strangers wrote into tells nothing."""
    parts = value.split(b" ", 3)
    if len(parts) < 4 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None, 0, None, None
    return int(parts[0]), int(parts[1]), parts[2], Owner.decode(parts[3].decode("utf-8", "replace"))


def _waiter(holder: bytes, ticket: bytes, entry: bytes, *, now_us: int) -> WaiterInfo:
    parts = entry.split(b" ", 4)
    owner = Owner.decode(parts[4].decode("utf-8", "replace")) if len(parts) == 5 else None
    return WaiterInfo(clean(holder.decode("utf-8", "replace")), owner, max(0.0, (now_us - int(ticket)) / 1e6))
