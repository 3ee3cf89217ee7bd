"""The keys of one lock: its name, and six auxiliary keys in the same cluster slot.

The server hashes the text between a key's first `{` and the next `}`, its hash tag, if there is any; otherwise the
whole key. If a name has a hash tag, its auxiliary keys use the same tag. A name without braces becomes their tag. A
name with a stray `}` cannot be a tag, so its auxiliary keys use a small number that hashes to the same slot.
"""

from __future__ import annotations

from binascii import crc_hqx
from functools import lru_cache
from typing import NamedTuple

from lockfast.stores.redis.protocol.resp import bulks
from lockfast.values import AUX_PREFIX

SLOTS = 16384
MARK_PREFIX = AUX_PREFIX.encode() + b"twin:"  # of the keys that show whether two members of a quorum are one server
META_PATTERN = AUX_PREFIX.encode() + b"{*}:m*"  # matches the meta key of every lock, for SCAN


class Keys(NamedTuple):
    """The keys of one lock, as `_layout.lua` describes them.

    `packed` (all seven) and `packed_pair` (lock and meta) are encoded for a request.
    """

    lock: bytes
    meta: bytes
    queue: bytes
    waiters: bytes
    grants: bytes
    details: bytes
    slots: bytes
    packed: bytes
    packed_pair: bytes
    slot: int


def hash_tag(key: bytes) -> bytes | None:
    """The part of `key` that the server hashes; None if it hashes the whole key.

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
def tag_in_slot(wanted: int) -> bytes:
    """The smallest number, as text, that hashes to a slot. The search takes some ten thousand steps."""
    number = 0
    while crc_hqx(b"%d" % number, 0) % SLOTS != wanted:
        number += 1
    return b"%d" % number


def companion(key: bytes, kind: bytes) -> bytes:
    """An auxiliary key in the slot of `key`.

    >>> companion(b"file:9527", b"f"), companion(b"a{b}", b"f")
    (b'lockfast:{file:9527}:f', b'lockfast:{b}:f:a{b}')
    """
    tag = hash_tag(key)
    if tag is None and b"}" not in key:
        tag, suffix = key, b""
    else:
        tag, suffix = tag or tag_in_slot(slot(key)), b":" + key
    return AUX_PREFIX.encode() + b"{%b}:%b%b" % (tag, kind, suffix)


@lru_cache(maxsize=8192)
def keys_of(name: str) -> Keys:
    """All keys of the lock `name`.

    >>> keys_of("file:9527").queue, keys_of("a{b}").queue
    (b'lockfast:{file:9527}:q', b'lockfast:{b}:q:a{b}')
    """
    lock = name.encode()
    meta, queue, waiters, grants, details, slots = (companion(lock, kind.encode()) for kind in "mqwgds")
    packed = bulks(lock, meta, queue, waiters, grants, details, slots)
    return Keys(lock, meta, queue, waiters, grants, details, slots, packed, bulks(lock, meta), slot(lock))


def name_of(meta: bytes) -> str | None:
    """The lock that a meta key belongs to; None for a foreign key that matches `META_PATTERN`.

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
