"""Lua 5.1 as embedded in a Redis server: `KEYS`, `ARGV`, `redis.call`, and the type conversions of a real server.

    from Lua                      to the client        from a command      to Lua
    number                        integer, truncated   integer             number
    string                        bulk                 bulk                string
    false, nil                    nil                  nil                 false
    true                          1                    status              table with `ok`
    table up to its first nil     array                array               table
    table with `ok` or `err`      status, error        error               raised (`pcall`: table with `err`)

A number that is an argument of a command is formatted with up to 17 digits, like a real server does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import Any

from lockfast.stores.redis.protocol.resp import ReplyError
from verify.server_commands import Status

Call = Callable[[list[bytes]], Any]

_texts: dict[str, bytes] = {}
_compiled: dict[str, Any] = {}

# The library functions that the scripts use; like a real server, none of them reaches the outside world.
_MAKE = b"""
local python_call, python_args = ...
local function raise(reply)
  if type(reply) == 'table' and reply.err then error(reply, 0) end
  return reply
end
local api = {
  call = function(...) return raise(python_call(...)) end,
  pcall = function(...) return python_call(...) end,
  error_reply = function(text) return {err = text} end,
  status_reply = function(text) return {ok = text} end,
  sha1hex = function(text) return python_args(text) end,
}
return function(text)
  local allowed = {redis = api, string = string, table = table, math = math, tonumber = tonumber,
    tostring = tostring, type = type, ipairs = ipairs, pairs = pairs, unpack = unpack, next = next,
    select = select, assert = assert, error = error, pcall = pcall}
  local chunk, problem = loadstring(text, '@user_script')
  if not chunk then return nil, problem end
  return function(keys, args)
    local scope = setmetatable({KEYS = keys, ARGV = args}, {__index = allowed, __newindex = function(_, name)
      error('Script attempted to create global variable ' .. tostring(name), 2) end})
    setfenv(chunk, scope)
    return pcall(chunk)
  end
end
"""


class _Machine:
    """One Lua state for the process; `call` executes commands on the server of the running script."""

    def __init__(self) -> None:
        from lupa import lua51

        self._runtime = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._table_type = lua51.lua_type
        self.call: Call = lambda words: None
        self.compile = self._runtime.execute(_MAKE, self._call, lambda text: sha1(text).hexdigest().encode())

    def _call(self, *words: Any) -> Any:
        try:
            return self.to_lua(self.call([_word(word) for word in words]))
        except ReplyError as error:
            return self._runtime.table_from({b"err": str(error).encode()})

    def table(self, values: Sequence[Any]) -> Any:
        return self._runtime.table_from(list(values))

    def to_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._runtime.table_from({b"ok": reply.text})
        if isinstance(reply, list):
            return self.table([self.to_lua(item) for item in reply])
        return reply

    def from_lua(self, value: Any) -> Any:
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, float):
            return int(value)
        if self._table_type(value) != "table":
            return value
        if (text := value[b"err"]) is not None:
            raise ReplyError(text.decode("utf-8", "replace"))
        if (text := value[b"ok"]) is not None:
            return Status(text)
        items: list[Any] = []
        while (item := value[len(items) + 1]) is not None:
            items.append(self.from_lua(item))
        return items


_machine: _Machine | None = None


def _word(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return b"%.17g" % value
    raise ReplyError("ERR Lua redis lib command arguments must be strings or integers")


def register(text: bytes) -> str:
    """Store a script's text; return its digest."""
    digest = sha1(text, usedforsecurity=False).hexdigest()
    _texts.setdefault(digest, text)
    return digest


def text_of(digest: str) -> bytes:
    return _texts[digest]


def run(digest: str, keys: Sequence[bytes], args: Sequence[bytes], call: Call) -> Any:
    """Run a registered script; return its reply or raise `ReplyError`. Writes before an error stay, as on a server."""
    global _machine
    if _machine is None:
        _machine = _Machine()
    machine = _machine
    script = _compiled.get(digest)
    if script is None:
        script = machine.compile(_texts[digest])
        if isinstance(script, tuple):
            raise ReplyError(f"ERR Error compiling script (new function): {script[1].decode('utf-8', 'replace')}")
        _compiled[digest] = script
    machine.call = call
    outcome = script(machine.table(keys), machine.table(args))
    done, value = outcome if isinstance(outcome, tuple) else (outcome, None)
    if done:
        return machine.from_lua(value)
    if isinstance(value, bytes):
        raise ReplyError(f"ERR {value.decode('utf-8', 'replace')} script: {digest}, on @user_script.")
    message = value[b"err"].decode("utf-8", "replace")
    raise ReplyError(f"{message} script: {digest}, on @user_script.")
