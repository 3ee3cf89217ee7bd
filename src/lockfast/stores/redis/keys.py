"""The keys of one lock: the name itself, and three of lockfast's own in the same cluster slot.

The server hashes what stands between a key's first `{` and the next `}`, if anything does; else the whole key. A
name that has such a tag lends it to its companions. A name without braces becomes the tag. A name with a stray `}`
can be no tag, so its companions get a small number that hashes to the same slot.
"""

from __future__ import annotations

from binascii import crc_hqx
from functools import lru_cache
from typing import NamedTuple

from lockfast.stores.redis.protocol.resp import bulks
from lockfast.values import AUX_PREFIX

SLOTS = 16384


class Keys(NamedTuple):
    """The keys of one lock, and the same written for the wire."""

    lock: bytes
    meta: bytes
    queue: bytes
    waiters: bytes
    packed: bytes
    packed_pair: bytes
    slot: int


def hash_tag(key: bytes) -> bytes | None:
    """What the server hashes instead of the whole key, if anything.

    >>> hash_tag(b"{a}{b}"), hash_tag(b"{}a"), hash_tag(b"a}b")
    (b'a', None, None)
    """
    start = key.find(b"{")
    stop = key.find(b"}", start + 1) if start >= 0 else -1
    return key[start + 1 : stop] if stop > start + 1 else None


def slot(key: bytes) -> int:
    """The cluster slot of `key`.

    >>> slot(b"foo"), slot(b"{user1000}.following") == slot(b"user1000")
    (12182, True)
    """
    tag = hash_tag(key)
    return crc_hqx(key if tag is None else tag, 0) % SLOTS


@lru_cache(maxsize=SLOTS)
def number_in(wanted: int) -> bytes:
    """The smallest number whose digits hash to the slot; found within some ten thousand tries."""
    number = 0
    while crc_hqx(b"%d" % number, 0) % SLOTS != wanted:
        number += 1
    return b"%d" % number


def companion(key: bytes, kind: bytes) -> bytes:
    """A key of our own in the slot of `key`.

    >>> companion(b"file:9527", b"f"), companion(b"a{b}", b"f")
    (b'lockfast:{file:9527}:f', b'lockfast:{b}:f:a{b}')
    """
    tag = hash_tag(key)
    plain = tag is None and b"}" not in key
    if plain:
        tag = key
    elif tag is None:
        tag = number_in(slot(key))
    return AUX_PREFIX.encode() + b"{%b}:%b%b" % (tag, kind, b"" if plain else b":" + key)


@lru_cache(maxsize=8192)
def keys_of(name: str) -> Keys:
    """All keys of the lock `name`.

    >>> keys_of("file:9527").queue, keys_of("a{b}").queue
    (b'lockfast:{file:9527}:q', b'lockfast:{b}:q:a{b}')
    """
    lock = name.encode()
    meta, queue, waiters = (companion(lock, kind) for kind in (b"m", b"q", b"w"))
    return Keys(lock, meta, queue, waiters, bulks(lock, meta, queue, waiters), bulks(lock, meta), slot(lock))


EVERY_META = AUX_PREFIX.encode() + b"{*}:m*"
"""A pattern for SCAN that the meta key of every lock fits."""


def name_of(meta: bytes) -> str | None:
    """The lock that a key fitting `EVERY_META` belongs to; None for a key that is not ours.

    >>> name_of(b"lockfast:{file:9527}:m"), name_of(b"lockfast:{b}:m:a{b}"), name_of(b"lockfast:{b}:m:other")
    ('file:9527', 'a{b}', None)
    """
    tag, _, rest = meta.removeprefix(AUX_PREFIX.encode() + b"{").partition(b"}")
    lock = tag if rest == b":m" else rest.removeprefix(b":m:")
    try:
        name = lock.decode()
    except UnicodeDecodeError:
        return None
    return name if name and keys_of(name).meta == meta else None
