"""Keys: all keys of a lock are in the slot of its name, no two locks share a key, and a fence outlives its lock."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

import lockfast
from lockfast.stores.redis.keys import Keys, keys_of, slot
from tests.support.servers import Server

names = st.text(alphabet="ab{}:é", min_size=1, max_size=12)


def _keys(keys: Keys) -> tuple[bytes, ...]:
    return keys[:7]


@given(name=names)
@example(name="{")
@example(name="}")
@example(name="{}")
@example(name="{}{a}")
@example(name="a}b")
@example(name="a}{b}")
@example(name="{a}{b}")
def test_all_keys_of_a_lock_are_in_its_slot(name: str) -> None:
    wanted = key_slot(name.encode())
    assert slot(name.encode()) == wanted
    assert {key_slot(key) for key in _keys(keys_of(name))} == {wanted}


@given(one=names, other=names)
def test_no_two_locks_share_a_key(one: str, other: str) -> None:
    if one != other:
        assert not set(_keys(keys_of(one))) & set(_keys(keys_of(other)))


@pytest.mark.parametrize("name", ["file:9527", "a b", "é"])
def test_the_lock_key_is_the_name_itself(name: str) -> None:
    assert keys_of(name).lock == name.encode()


@pytest.mark.parametrize("ttl", [1, 9999, 9999.9999, 10000, 80000])
def test_a_fence_is_kept_a_day_longer_than_its_grant(any_server: Server, ttl: float) -> None:
    with lockfast.connect(any_server.url) as locks:
        locks.lock("thing", ttl=ttl, renew=False).acquire()
        kept = any_server.raw("PTTL", keys_of("thing").meta.decode())
        held = any_server.raw("PTTL", "thing")
        assert held + 86_400_000 <= kept < ttl * 1000 + 1.2 * 86_400_000
