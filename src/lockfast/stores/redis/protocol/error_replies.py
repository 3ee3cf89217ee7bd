"""Error replies of the server, and the error that each one becomes.

code                                              meaning for the request
LOADING, MASTERDOWN, CLUSTERDOWN, TRYAGAIN, BUSY, not executed; retry until the caller's deadline
  OOM, NOREPLICAS, MISCONF, max clients
READONLY, MASTERDOWN, UNBLOCKED                   not executed; this server is not the master: reconnect, then retry
NOAUTH, WRONGPASS, NOPERM                         denied; a retry cannot help
WRONGTYPE                                         the key holds other data, so the name cannot be locked
NOSCRIPT                                          the store resends the script's text, once
MOVED, ASK                                        not executed; the cluster store follows the redirection
a key that left the node while a script ran       unknown; the slot is migrating, and the script may be half executed
"""

from __future__ import annotations

import re

from lockfast.errors import Outcome, StoreError, StoreProtocolError, StoreRefused, StoreUnavailable
from lockfast.values import clean

TEMPORARY = {
    "LOADING": "the server is still loading its data",
    "MASTERDOWN": "the server is a replica that has lost its master",
    "CLUSTERDOWN": "the cluster is down",
    "TRYAGAIN": "the cluster is moving this key",
    "BUSY": "the server is busy with a slow script (SCRIPT KILL ends it)",
    "OOM": "the server is out of memory; leases can still be renewed and released",
    "NOREPLICAS": "too few replicas are connected to the server (min-replicas-to-write)",
    "READONLY": "the server is a read-only replica; connect to the master",
    "MISCONF": "the server rejects writes because it cannot save its data to disk",
    "UNBLOCKED": "the server changed its role",
    "MAXCLIENTS": "the server accepts no more connections (maxclients)",
}
DENIED = {
    "NOAUTH": "the server asks for a password; put it into the URL or the client",
    "WRONGPASS": "the server does not accept this user name and password",
    "NOPERM": "this account may not do what a lock needs; docs/permissions.md lists the permissions it must have",
}
NOT_MASTER = frozenset({"READONLY", "MASTERDOWN", "UNBLOCKED"})
"""Codes after which the connection must be closed: another server is the master now."""
_DENIED_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")
"""How Valkey and Redis report NOPERM for a command that a script calls."""
_MIGRATED_IN_SCRIPT = ("non local key", "TRYAGAIN")
_COMMAND = re.compile(r"(?:NOPERM .*? run the|(?:ERR )?unknown command),? ['`]([^'`|]+)", re.IGNORECASE)


class Redirected(StoreProtocolError):
    """Another cluster node serves the key: from now on (MOVED), or for this request only (`ask`)."""

    def __init__(self, message: str, *, host: str = "", port: int = 0, ask: bool = False) -> None:
        super().__init__(message)
        self.host = host
        self.port = port
        self.ask = ask


class UnknownCommand(StoreProtocolError):
    """The server has no `command` (lower case), because it is too old or the command was renamed."""

    def __init__(self, message: str, *, command: str = "") -> None:
        super().__init__(message)
        self.command = command


def denies_scripts(error: StoreError) -> bool:
    """Whether the server rejected a request because this account cannot run EVAL or EVALSHA.

    >>> denies_scripts(error_of("NOPERM User web has no permissions to run the 'evalsha' command", "'report'"))
    True
    """
    return isinstance(error, StoreRefused | UnknownCommand) and error.command in ("eval", "evalsha")


def code_of(text: str) -> str:
    """The code of an error reply. Errors raised inside a script carry it after some decoration.

    >>> code_of("NOSCRIPT No matching script."), code_of("ERR NOPERM User has no permissions")
    ('NOSCRIPT', 'NOPERM')
    """
    if any(denied in text for denied in _DENIED_IN_SCRIPT):
        return "NOPERM"
    words = text.replace(":", " ").replace(" -", " ").split()  # Redis 6.2 keeps the dash of the inner error
    for word in words:
        if word in TEMPORARY or word in DENIED or word in ("WRONGTYPE", "NOSCRIPT", "MOVED", "ASK"):
            return word
    if "max number of clients" in text:
        return "MAXCLIENTS"
    return words[0] if words else "ERR"


def error_of(text: str, name: str) -> StoreError:
    """The error to raise for an error reply to an operation on the lock `name`."""
    code = code_of(text)
    quoted = clean(text, 160)
    command = _COMMAND.match(text)
    if code in ("MOVED", "ASK"):
        host, _, port = text.split()[2].rpartition(":")  # an empty host is the node that sent the reply
        return Redirected(
            f"Another node of a cluster serves the lock {name}, so nothing was changed. Connect to the whole cluster: "
            "with a URL redis+cluster://host:port, or with a RedisCluster client.",
            host=host,
            port=int(port),
            ask=text.startswith("ASK"),
        )
    if any(word in text for word in _MIGRATED_IN_SCRIPT) and "script" in text.lower():
        return StoreUnavailable(
            f"The cluster was moving the lock {name} to another node, so the request may or may not have been "
            f"executed. Try again. [{quoted}]",
            outcome=Outcome.UNKNOWN,
        )
    if code in TEMPORARY:
        return StoreUnavailable(
            f"The server could not serve the lock {name}: {TEMPORARY[code]}. Nothing was changed; try again later. "
            f"[{quoted}]"
        )
    if code in DENIED:
        in_script = any(denied in text for denied in _DENIED_IN_SCRIPT)
        effect = "The script may be half executed" if in_script else "Nothing was changed"
        message = f"The server denied an operation on the lock {name}: {DENIED[code]}. {effect}. [{quoted}]"
        return StoreRefused(message, command=command[1].lower() if command else "")
    if code == "WRONGTYPE":
        return StoreProtocolError(
            f"The key {name} holds other data than a lock, so it cannot be locked and was not changed. "
            "Choose another name, or delete the key."
        )
    if command:
        return UnknownCommand(
            f"The server does not know a command that the lock {name} needs, so nothing was changed. Use Redis 6.2 or "
            f"later, or Valkey, and do not rename the command. [{quoted}]",
            command=command[1].lower(),
        )
    return StoreProtocolError(
        f"The server answered an operation on the lock {name} with an unexpected error, so the state of the lock is "
        f"unknown. Check it with lock.inspect(). [{quoted}]"
    )
