"""Keys of Redis or Valkey that refuse late writers: each command goes through one script that looks at the fence first.

Rules kept here:

- The greatest fence seen stands in a key of its own next to the data, in the same cluster slot. Reading through here
  raises it too, so that no older holder can write between a read and the write that follows.
- One guard for each key, or with `guard` one for all keys of a resource: what is changed together needs one guard.
- The guard is kept for ever, unless `keep` says for how long after the last use: a holder that is stopped for longer
  than that is not refused.

Not guaranteed: anything against writers that do not come through here.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from math import ceil
from typing import Any

from lockfast.errors import ConfigurationError
from lockfast.fenced.fences import Fenced, fence_of, refused
from lockfast.stores.redis.keys import companion
from lockfast.values import Seconds, seconds, shown

Value = bytes | str | int | float


@cache
def _script() -> str:
    return files(__package__).joinpath("write.lua").read_text("utf-8")


class BaseWriter:
    """What a writer is in both colours. `client` is one of redis-py or valkey-py, with any `decode_responses`."""

    def __init__(
        self, client: Any, fence: Fenced | int, *, guard: str | None = None, keep: Seconds | None = None
    ) -> None:
        if not callable(getattr(client, "register_script", None)) or hasattr(client, "command_stack"):
            raise ConfigurationError(f"A writer needs a client of redis-py or valkey-py, not {shown(client)}.")
        self._run = client.register_script(_script())
        self._fence = fence_of(fence)
        self._guard = guard
        self._keep = "" if keep is None else str(ceil(seconds(keep, "keep", least=0.001) * 1000))

    def _call(self, command: str, key: str, args: tuple[Value, ...]) -> Any:
        guard = companion((self._guard or key).encode(), b"f")
        return self._run(keys=[key, guard], args=[self._fence, self._keep, command, *args])

    def _reply(self, key: str, answer: Any) -> Any:
        done, reply = answer
        if not int(done):
            raise refused(key, self._fence, int(reply))
        return reply

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, fence {self._fence}>"


class Writer(BaseWriter):
    """Writes under one fence, for threads; make one for each time that the lock was got.

    >>> Writer(None, 7)
    Traceback (most recent call last):
    lockfast.errors.ConfigurationError: A writer needs a client of redis-py or valkey-py, not None.
    """

    def call(self, command: str, key: str, *args: Value) -> Any:
        """Any command on one key, such as `call("HSET", "doc:7", "title", "new")`; the server's reply as it is."""
        return self._reply(key, self._call(command, key, args))

    def get(self, key: str) -> Any:
        """The value, or None; from now on older holders are refused."""
        return self.call("GET", key)

    def set(self, key: str, value: Value, *options: Value) -> Any:
        """SET, with options as the server knows them: `set("a", 1, "EX", 60)`."""
        return self.call("SET", key, value, *options)

    def hset(self, key: str, fields: dict[str, Value]) -> int:
        """Set fields of a hash; how many were new."""
        return int(self.call("HSET", key, *(part for pair in fields.items() for part in pair)))

    def delete(self, key: str) -> bool:
        """Remove the key; whether it was there."""
        return bool(self.call("DEL", key))


class AsyncWriter(BaseWriter):
    """Writes under one fence, for asyncio: the same names, awaited."""

    async def call(self, command: str, key: str, *args: Value) -> Any:
        """Any command on one key; the server's reply as it is."""
        return self._reply(key, await self._call(command, key, args))

    async def get(self, key: str) -> Any:
        """The value, or None; from now on older holders are refused."""
        return await self.call("GET", key)

    async def set(self, key: str, value: Value, *options: Value) -> Any:
        """SET, with options as the server knows them."""
        return await self.call("SET", key, value, *options)

    async def hset(self, key: str, fields: dict[str, Value]) -> int:
        """Set fields of a hash; how many were new."""
        return int(await self.call("HSET", key, *(part for pair in fields.items() for part in pair)))

    async def delete(self, key: str) -> bool:
        """Remove the key; whether it was there."""
        return bool(await self.call("DEL", key))
