"""What a server's error reply means for a lock: each has a decided answer.

LOADING, MASTERDOWN, CLUSTERDOWN, TRYAGAIN, BUSY, OOM, NOREPLICAS, max clients
                   not done; worth another try until the caller's time is up
READONLY           not done; this server is no master (any more): dial anew, then another try
NOAUTH, WRONGPASS, NOPERM
                   refused; trying again cannot help
WRONGTYPE          the key holds other data, so no lock of that name can ever be had
NOSCRIPT           answered by the store itself: sent again in full, once
MOVED, ASK         not done; the cluster store goes where it points
a script that met a key which is no longer here
                   unknown; the slot is being moved, and the script may have done its first half
"""

from __future__ import annotations

from lockfast.errors import Outcome, StoreError, StoreProtocolError, StoreRefused, StoreUnavailable
from lockfast.values import clean

PASSING = {
    "LOADING": "the server is still loading its data",
    "MASTERDOWN": "the server is a replica that has lost its master",
    "CLUSTERDOWN": "the cluster is down",
    "TRYAGAIN": "the cluster is moving this key",
    "BUSY": "the server is busy with a slow script (SCRIPT KILL ends it)",
    "OOM": "the server is out of memory; held locks can still be renewed and given back",
    "NOREPLICAS": "too few replicas are connected to the server (min-replicas-to-write)",
    "READONLY": "the server is a read-only replica; connect to the master",
    "MISCONF": "the server refuses writes because it cannot save its data to disk",
    "UNBLOCKED": "the server changed its role",
}
REFUSED = {
    "NOAUTH": "the server asks for a password; put it into the URL or the client",
    "WRONGPASS": "the server does not accept this user name and password",
    "NOPERM": "this account may not do what a lock needs; docs/permissions.md lists the least it must be given",
}
DENIED_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")
"""How Valkey and Redis say NOPERM for a command that a script calls."""
MOVES_AWAY = frozenset({"READONLY", "MASTERDOWN", "UNBLOCKED"})
"""Errors after which this connection leads nowhere: another server is the master now."""


_GONE_IN_SCRIPT = ("non local key", "TRYAGAIN")


class Redirected(StoreProtocolError):
    """Another node of a cluster has the key: for good (MOVED), or for this one request (ASK)."""

    def __init__(self, message: str, *, host: str = "", port: int = 0, claim: bool = False) -> None:
        super().__init__(message)
        self.host = host
        self.port = port
        self.claim = claim


def _redirected(text: str, name: str) -> Redirected:
    """What a MOVED or ASK reply says; an empty host means the one that was asked."""
    code, _, address = text.split()[:3]
    host, _, port = address.rpartition(":")
    return Redirected(
        f"The lock {name} lies on another node of a cluster, so nothing was changed. Connect to the cluster as a "
        "whole: with a URL redis+cluster://host:port, or with a RedisCluster client.",
        host=host,
        port=int(port),
        claim=code == "ASK",
    )


def code_of(text: str) -> str:
    """The first word of an error reply; errors raised inside a script carry it after some decoration.

    >>> code_of("NOSCRIPT No matching script."), code_of("ERR NOPERM User has no permissions")
    ('NOSCRIPT', 'NOPERM')
    """
    if any(denied in text for denied in DENIED_IN_SCRIPT):
        return "NOPERM"
    words = text.replace(":", " ").replace(" -", " ").split()  # Redis 6.2 leaves the dash of the inner error
    for word in words:
        if word in PASSING or word in REFUSED or word in ("WRONGTYPE", "NOSCRIPT", "MOVED", "ASK"):
            return word
    if "max number of clients" in text:
        return "MAXCLIENTS"
    return words[0] if words else "ERR"


def error_of(text: str, name: str) -> StoreError:
    """The error to raise for an error reply to an operation on the lock `name`."""
    code = code_of(text)
    said = clean(text, 160)
    if code in ("MOVED", "ASK"):
        return _redirected(text, name)
    if any(word in text for word in _GONE_IN_SCRIPT) and "script" in text.lower():
        return StoreUnavailable(
            f"The lock {name} is being moved to another node of the cluster. It may be tried again. [{said}]",
            outcome=Outcome.UNKNOWN,
        )
    if code in PASSING or code == "MAXCLIENTS":
        reason = PASSING.get(code, "the server has no connection to spare (maxclients)")
        return StoreUnavailable(
            f"The lock {name} could not be reached: {reason}. Nothing was changed; try again later. [{said}]"
        )
    if code in REFUSED:
        return StoreRefused(f"The server refused an operation on the lock {name}: {REFUSED[code]}. [{said}]")
    if code == "WRONGTYPE":
        return StoreProtocolError(
            f"The key {name} holds other data than a lock, so it was left alone and can't be locked. "
            "Choose another name, or remove that key."
        )
    return StoreProtocolError(
        f"The server answered an operation on the lock {name} with an error that lockfast does not know, so its "
        f"state is unknown: look with lock.inspect(). [{said}]"
    )
