"""Keys of Redis or Valkey that refuse late writers: one script checks the fence and runs the command.

Rules:

- The greatest fence seen is in a guard key next to the data, in the same cluster slot.
- Each key has its own guard unless `guard` names one for all keys of a resource: data that changes together needs one
  guard.
- The guard never expires, unless `keep` gives a time after its last use. A holder that pauses for longer is accepted.

Not guaranteed: protection from writers that do not use this module.
"""

from __future__ import annotations

from importlib.resources import files
from math import ceil
from typing import Any

from lockfast.errors import ConfigurationError, shown
from lockfast.fenced import Fenced, fence_of, refused
from lockfast.stores.redis.keys import companion
from lockfast.values import Seconds, seconds

Value = bytes | str | int | float
SCRIPT = files(__package__).joinpath("write.lua").read_text("utf-8")


class BaseWriter:
    """The rules of a writer. `client` is one of redis-py or valkey-py, with any `decode_responses`."""

    def __init__(
        self, client: Any, fence: Fenced | int, *, guard: str | None = None, keep: Seconds | None = None
    ) -> None:
        if not callable(getattr(client, "register_script", None)) or hasattr(client, "command_stack"):
            raise ConfigurationError(f"A writer needs a client of redis-py or valkey-py, not {shown(client)}.")
        self._run = client.register_script(SCRIPT)
        self._fence = fence_of(fence)
        self._guard = guard
        self._keep = "" if keep is None else str(ceil(seconds(keep, "keep", least=0.001) * 1000))

    def _call(self, command: str, key: str, args: tuple[Value, ...]) -> Any:
        guard = companion((self._guard or key).encode(), b"f")
        return self._run(keys=[key, guard], args=[self._fence, self._keep, command, *args])

    def _checked(self, key: str, answer: Any) -> Any:
        done, reply = answer
        if not int(done):
            raise refused(key, self._fence, int(reply))
        return reply

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, fence {self._fence}>"


class Writer(BaseWriter):
    """Writes under one fence, for threads; make a new one for each lease.

    >>> Writer(None, 7)
    Traceback (most recent call last):
    lockfast.errors.ConfigurationError: A writer needs a client of redis-py or valkey-py, not None.
    """

    def call(self, command: str, key: str, *args: Value) -> Any:
        """Run any command on one key, such as `call("HSET", "doc:7", "title", "new")`; return the server's reply."""
        return self._checked(key, self._call(command, key, args))

    def get(self, key: str) -> Any:
        """The value or None. From now on older fences are refused."""
        return self.call("GET", key)

    def set(self, key: str, value: Value, *options: Value) -> Any:
        """SET with the server's options: `set("a", 1, "EX", 60)`."""
        return self.call("SET", key, value, *options)

    def hset(self, key: str, fields: dict[str, Value]) -> int:
        """Set fields of a hash; return how many are new."""
        return int(self.call("HSET", key, *(part for pair in fields.items() for part in pair)))

    def delete(self, key: str) -> bool:
        """Delete the key; return whether it existed."""
        return bool(self.call("DEL", key))


class AsyncWriter(BaseWriter):
    """Writes under one fence, for asyncio: the methods of `Writer`, awaited."""

    async def call(self, command: str, key: str, *args: Value) -> Any:
        return self._checked(key, await self._call(command, key, args))

    async def get(self, key: str) -> Any:
        return await self.call("GET", key)

    async def set(self, key: str, value: Value, *options: Value) -> Any:
        return await self.call("SET", key, value, *options)

    async def hset(self, key: str, fields: dict[str, Value]) -> int:
        return int(await self.call("HSET", key, *(part for pair in fields.items() for part in pair)))

    async def delete(self, key: str) -> bool:
        return bool(await self.call("DEL", key))
