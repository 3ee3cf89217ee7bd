"""redis-py's lock and lockfast's replacement: the checks of redis-py's own tests hold for both, except for its bugs.

Every scenario runs on both (`theirs`, `ours`) and in both flavours. Each intended difference has a test.
"""

import asyncio
import inspect
import logging
import multiprocessing
import pickle
import threading
import time
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.lock
import redis.lock
import valkey as valkey_py
from redis.exceptions import LockError, LockNotOwnedError

import lockfast
from lockfast.compat import redis_py
from tests.contract.driver import done, held
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.waiting import until
from tests.systems.kit import Kit, run_cancelling, scenario
from tests.traps.observation import Stopwatch

CLASSES: dict[str, dict[str, Any]] = {
    "ours": {"threads": redis_py.Lock, "asyncio": redis_py.AsyncLock},
    "theirs": {"threads": redis.lock.Lock, "asyncio": redis.asyncio.lock.Lock},
}
each_side = pytest.mark.parametrize("side", CLASSES)


def lock_of(k: Kit, side: str, client: Any, name: Any = "foo", **options: Any) -> Any:
    return client.lock(name, lock_class=CLASSES[side][k.flavour], **options)


async def take(lock: Any, **options: Any) -> Any:
    return await done(lock.acquire(**{"blocking": False, **options}))


# The checks of redis-py's tests


@each_side
@scenario
async def test_acquire_and_release(k: Kit, side: str) -> None:
    client = k.client()
    lock = lock_of(k, side, client, timeout=10)
    assert await take(lock) is True
    assert await done(client.get("foo")) == lock.local.token
    assert 8 < await done(client.ttl("foo")) <= 10
    await done(lock.release())
    assert await done(client.get("foo")) is None
    assert lock.local.token is None


@each_side
@pytest.mark.parametrize("thread_local", [True, False])
@pytest.mark.parametrize("token", ["test", b"test", b"\xff\x00 raw", "two words", "x" * 300], ids=range(5))
@scenario
async def test_token_chosen_by_the_caller(k: Kit, side: str, thread_local: bool, token: str | bytes) -> None:
    client = k.client()
    raw = token if isinstance(token, bytes) else token.encode()
    lock = lock_of(k, side, client, thread_local=thread_local, timeout=10)
    assert await take(lock, token=token) is True
    assert await done(client.get("foo")) == raw
    assert lock.local.token == raw
    assert await take(lock, token=token) is False, "a second acquire fails, even with the same token"
    await done(lock.release())
    assert await done(client.get("foo")) is None
    assert lock.local.token is None


@each_side
@scenario
async def test_locked(k: Kit, side: str) -> None:
    lock = lock_of(k, side, k.client(), timeout=10)
    assert await done(lock.locked()) is False
    await take(lock)
    assert await done(lock.locked()) is True
    await done(lock.release())
    assert await done(lock.locked()) is False


@each_side
@pytest.mark.parametrize("decode", [False, True])
@scenario
async def test_owned(k: Kit, side: str, decode: bool) -> None:
    client = k.client(decode_responses=decode)
    first, second = (lock_of(k, side, client, timeout=10) for _ in range(2))
    for lock, other in ((first, second), (second, first)):
        assert [await done(lock.owned()), await done(other.owned())] == [False, False]
        await take(lock)
        assert [await done(lock.owned()), await done(other.owned())] == [True, False]
        await done(lock.release())
    assert [await done(first.owned()), await done(second.owned())] == [False, False]


@pytest.mark.parametrize("first", CLASSES)
@pytest.mark.parametrize("second", CLASSES)
@scenario
async def test_competing_locks_old_and_new(k: Kit, first: str, second: str) -> None:
    client = k.client()
    one, two = lock_of(k, first, client, timeout=10), lock_of(k, second, client, timeout=10)
    assert await take(one)
    assert not await take(two)
    with pytest.raises(LockError):
        await done(two.release())
    await done(one.release())
    assert await take(two)
    assert not await take(one)
    await done(two.release())


@each_side
@pytest.mark.parametrize(("timeout", "most_ms"), [(10, 10_000), (9.5, 9500), (0.25, 250)])
@scenario
async def test_timeout(k: Kit, side: str, timeout: float, most_ms: int) -> None:
    lock = lock_of(k, side, k.client(), timeout=timeout)
    assert await take(lock)
    assert 0 < k.server.raw("PTTL", "foo") <= most_ms
    await k.until(lambda: lock.timeout > 1 or not k.server.raw("EXISTS", "foo"), "the lock to expire")


@each_side
@scenario
async def test_blocking_timeout(k: Kit, side: str) -> None:
    client = k.client()
    first = lock_of(k, side, client, timeout=10)
    assert await take(first)
    started = time.monotonic()
    assert not await done(lock_of(k, side, client, sleep=0.05, blocking_timeout=0.2).acquire())
    assert 0.14 < time.monotonic() - started < 10
    assert not await done(lock_of(k, side, client).acquire(blocking_timeout=0))
    assert not await done(lock_of(k, side, client, blocking=False).acquire())
    assert not await done(lock_of(k, side, client).acquire(blocking=False))
    await done(first.release())


@each_side
@scenario
async def test_context_manager(k: Kit, side: str) -> None:
    client = k.client()
    lock = lock_of(k, side, client, timeout=10, blocking_timeout=0.2)
    async with held(lock) as entered:
        assert entered is lock
        assert await done(client.get("foo")) == lock.local.token
    assert await done(client.get("foo")) is None


@each_side
@scenario
async def test_context_manager_raises_when_the_lock_is_not_acquired(k: Kit, side: str) -> None:
    client = k.client()
    await done(client.set("foo", "bar"))
    with pytest.raises(LockError, match="Unable to acquire lock within the time specified"):
        async with held(lock_of(k, side, client, blocking_timeout=0.1)):
            raise AssertionError("entered without the lock")
    with pytest.raises(LockError):
        async with held(lock_of(k, side, client, blocking=False)):
            raise AssertionError("entered without the lock")


@each_side
@scenario
async def test_context_manager_blocks_without_a_timeout(k: Kit, side: str) -> None:
    client = k.client()
    assert await take(lock_of(k, side, client, timeout=0.2))
    async with held(lock_of(k, side, client, timeout=5, sleep=0.02)) as lock:
        assert await done(lock.owned())


@each_side
@pytest.mark.parametrize("raises", [True, False])
@scenario
async def test_context_manager_with_a_lost_lock(
    k: Kit, side: str, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = k.client()
    lock = lock_of(k, side, client, timeout=10, raise_on_release_error=raises)

    async def body() -> None:
        async with held(lock):
            await done(client.delete("foo"))

    if raises:
        with pytest.raises(LockNotOwnedError):
            await body()
    else:
        await body()
        assert "no longer owned" in caplog.text


@each_side
@pytest.mark.parametrize("raises", [True, False])
@scenario
async def test_context_manager_with_a_manual_release(k: Kit, side: str, raises: bool) -> None:
    lock = lock_of(k, side, k.client(), timeout=10, raise_on_release_error=raises)

    async def body() -> None:
        async with held(lock):
            await done(lock.release())

    if raises:
        with pytest.raises(LockError, match="Cannot release a lock that's not owned or is already unlocked"):
            await body()
    else:
        await body()


@each_side
@scenario
async def test_releasing_an_unlocked_lock(k: Kit, side: str) -> None:
    with pytest.raises(LockError, match="Cannot release a lock that's not owned or is already unlocked") as caught:
        await done(lock_of(k, side, k.client()).release())
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, LockNotOwnedError)


@each_side
@scenario
async def test_releasing_a_lock_that_is_no_longer_owned(k: Kit, side: str) -> None:
    client = k.client()
    lock = lock_of(k, side, client, timeout=10)
    await take(lock)
    await done(client.set("foo", "a"))
    with pytest.raises(LockNotOwnedError, match="Cannot release a lock that's no longer owned"):
        await done(lock.release())
    assert lock.local.token is None
    assert await done(client.get("foo")) == b"a"


@each_side
@pytest.mark.parametrize("more", [10, 10.0])
@pytest.mark.parametrize("replace", [False, True])
@scenario
async def test_extend(k: Kit, side: str, more: float, replace: bool) -> None:
    lock = lock_of(k, side, k.client(), timeout=10)
    assert await take(lock)
    assert 8000 < k.server.raw("PTTL", "foo") <= 10_000
    assert await done(lock.extend(more, replace_ttl=replace)) is True
    assert (8000 if replace else 16_000) < k.server.raw("PTTL", "foo") <= (10_000 if replace else 20_000)
    assert await done(lock.extend(2, replace_ttl=True)) is True
    assert k.server.raw("PTTL", "foo") <= 2000, "it may also shorten"
    await done(lock.release())


@each_side
@scenario
async def test_reacquire(k: Kit, side: str) -> None:
    lock = lock_of(k, side, k.client(), timeout=10)
    assert await take(lock)
    k.server.raw("PEXPIRE", "foo", 5000)
    assert await done(lock.reacquire()) is True
    assert 8000 < k.server.raw("PTTL", "foo") <= 10_000
    await done(lock.extend(50))
    assert await done(lock.reacquire()) is True
    assert k.server.raw("PTTL", "foo") <= 10_000
    await done(lock.release())


@each_side
@pytest.mark.parametrize("call", ["extend", "reacquire"])
@scenario
async def test_extend_and_reacquire_errors(k: Kit, side: str, call: str) -> None:
    client = k.client()
    args = (10,) if call == "extend" else ()
    lock = lock_of(k, side, client, timeout=10)
    with pytest.raises(LockError, match=f"Cannot {call} an unlocked lock"):
        await done(getattr(lock, call)(*args))
    assert await take(lock)
    await done(client.set("foo", "a"))
    with pytest.raises(LockNotOwnedError, match=f"Cannot {call} a lock that's no longer owned"):
        await done(getattr(lock, call)(*args))
    endless = lock_of(k, side, client, "bar")
    assert await take(endless)
    with pytest.raises(LockError, match=f"Cannot {call} a lock with no timeout"):
        await done(getattr(endless, call)(*args))
    await done(endless.release())


@each_side
@scenario
async def test_error_has_the_lock_name(k: Kit, side: str) -> None:
    with pytest.raises(LockError) as caught:
        await done(lock_of(k, side, k.client()).release())
    assert caught.value.lock_name == "foo"


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_signatures_and_attributes(flavour: str) -> None:
    theirs, ours = CLASSES["theirs"][flavour], CLASSES["ours"][flavour]
    for name in ("__init__", "acquire", "release", "extend", "reacquire", "locked", "owned"):
        wanted, found = (inspect.signature(getattr(kind, name)).parameters for kind in (theirs, ours))
        assert [(one.name, one.default, one.kind) for one in found.values()] == [
            (one.name, one.default, one.kind) for one in wanted.values()
        ], name
    public = {name for name in vars(theirs) if not name.startswith(("_", "lua_", "LUA_"))} - {"register_scripts"}
    assert public <= set(dir(ours))
    client = (redis.Redis if flavour == "threads" else redis.asyncio.Redis)()
    given: Any = {"timeout": 1, "sleep": 2, "blocking": False, "blocking_timeout": 3, "thread_local": False}
    for kind in (theirs, ours):
        lock: Any = kind(client, "foo", **given, raise_on_release_error=False)
        assert {**given, "name": "foo", "redis": client, "raise_on_release_error": False}.items() <= vars(lock).items()
        assert lock.local.token is None


@each_side
@scenario
async def test_token_can_be_set_manually(k: Kit, side: str) -> None:
    """Task queues release this way in another process."""
    client = k.client()
    assert await take(lock_of(k, side, client, timeout=10), token="job:17")
    elsewhere = lock_of(k, side, client, timeout=10)
    elsewhere.local.token = b"job:17"
    assert await done(elsewhere.owned())
    assert await done(elsewhere.extend(5))
    await done(elsewhere.release())
    assert not k.server.raw("EXISTS", "foo")


@each_side
def test_token_is_visible_only_in_its_thread(valkey: Server, side: str) -> None:
    kind: Any = CLASSES[side]["threads"]
    with redis.Redis.from_url(valkey.url) as client:
        local, shared = kind(client, "foo", timeout=10), kind(client, "bar", timeout=10, thread_local=False)
        assert local.acquire()
        assert shared.acquire()
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.extend([getattr(local.local, "token", None), shared.local.token]))
        thread.start()
        thread.join()
        assert seen == [None, shared.local.token]
        local.release()
        shared.release()


@each_side
@scenario
async def test_names_that_lockfast_does_not_accept(k: Kit, side: str) -> None:
    client = k.client()
    for name in (b"bytes", "with\nnewline", "lockfast:mine", "x" * 2000):
        first, second = (lock_of(k, side, client, name, timeout=10) for _ in range(2))
        assert await take(first)
        assert not await take(second)
        assert not await done(second.acquire(blocking_timeout=0.02))
        assert await done(first.owned())
        await done(first.release())


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("protocol", [2, 3])
def test_valkey_py_client(valkey: Server, decode: bool, protocol: int) -> None:
    with valkey_py.Valkey.from_url(valkey.url, decode_responses=decode, protocol=protocol) as client:
        lock: Any = client.lock("foo", timeout=10, lock_class=redis_py.Lock)
        with lock:
            assert lock.owned()
            assert lock.extend(5)
            assert not client.lock("foo").acquire(blocking=False)
        assert lock.acquire(token="mine")
        lock.release()


# Old and new locks together


@pytest.mark.parametrize("scripts", [None, False])
@scenario
async def test_old_new_and_lockfast_locks_exclude_each_other(k: Kit, scripts: bool | None) -> None:
    client, locks = k.client(), k.connect(scripts=scripts)
    inside = 0
    entered: list[int] = []

    async def worker(number: int) -> None:
        nonlocal inside
        for _ in range(4):
            lock = (
                locks.lock("foo", timeout=20)
                if number % 3 == 2
                else lock_of(k, ("ours", "theirs")[number % 3], client, timeout=5, sleep=0.005, blocking_timeout=20)
            )
            async with held(lock):
                inside += 1
                assert inside == 1
                entered.append(number)
                await k.sleep(0)
                inside -= 1

    workers = [k.start(worker, number) for number in range(6)]
    for one in workers:
        await one.result()
    assert sorted(entered) == sorted(list(range(6)) * 4)


@scenario
async def test_waiter_is_notified_by_the_compat_lock_and_polls_after_redis_pys(k: Kit) -> None:
    client, locks = k.client(), k.connect()
    for side, most in (("ours", 0.9), ("theirs", 3.0)):
        lock = lock_of(k, side, client, timeout=30)
        assert await take(lock)

        async def wait() -> Any:
            return await done(locks.lock("foo").acquire(timeout=20))

        waiting = k.start(wait)
        await k.until(lambda: k.server.raw("ZCARD", "lockfast:{foo}:q") == 1, "the waiter")
        watch = Stopwatch()
        await done(lock.release())
        lease = await waiting.result()
        assert watch.seconds < watch.most(most)
        assert not await take(lock)
        await done(lease.release())


@scenario
async def test_compat_lock_waits_in_lockfasts_queue(k: Kit) -> None:
    client, locks = k.client(), k.connect()
    lease = await done(locks.lock("foo").acquire())
    order: list[str] = []

    async def compat() -> None:
        async with held(lock_of(k, "ours", client, timeout=30)):
            order.append("compat")

    async def full() -> None:
        async with held(locks.lock("foo")):
            order.append("full")

    contenders = []
    for number, work in enumerate((compat, full, compat)):
        contenders.append(k.start(work))
        await k.until(lambda: k.server.raw("ZCARD", "lockfast:{foo}:q") == number + 1, "the waiter")  # noqa: B023
    await done(lease.release())
    for one in contenders:
        await one.result()
    assert order == ["compat", "full", "compat"]


# Improvements: one test for each line of docs/migrating.md


@scenario
async def test_lock_without_a_timeout_is_renewed_and_expires_after_a_crash(
    k: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lockfast.compat.redis_py.UNLIMITED", 2.4)
    client = k.client()
    for options in ({}, {"token": "mine"}):
        lock = lock_of(k, "ours", client)
        assert await take(lock, **options)
        assert 0 < k.server.raw("PTTL", "foo") <= 2400
        await k.sleep(2.6)
        assert await done(lock.owned()), "renewed past its ttl"
        k.server.raw("DEL", "foo")
        await k.until(lambda: "was lost" in caplog.text, "the loss to be logged")
        caplog.clear()
        with pytest.raises(LockNotOwnedError):
            await done(lock.release())


@scenario
async def test_blocking_timeout_is_waited_for_in_full(k: Kit) -> None:
    client = k.client()
    assert await take(lock_of(k, "ours", client, timeout=30))
    started = time.monotonic()
    assert not await done(lock_of(k, "ours", client, sleep=60, blocking_timeout=0.35).acquire())
    assert time.monotonic() - started >= 0.35
    started = time.monotonic()
    assert not await done(lock_of(k, "ours", client, sleep=60, blocking_timeout=0.35).acquire(token="mine"))
    assert time.monotonic() - started >= 0.35


def test_release_can_be_repeated_after_a_connection_error(proxy: FaultProxy, valkey: Server) -> None:
    with redis.Redis(port=proxy.port) as client:
        lock = redis_py.Lock(client, "foo", timeout=30)
        assert lock.acquire()
        proxy.refuse()
        proxy.reset_connections()
        with pytest.raises(redis.exceptions.ConnectionError) as caught:
            lock.release()
        assert isinstance(caught.value, lockfast.StoreUnavailable)
        assert lock.local.token is not None
        proxy.accept()
        until(lambda: valkey.raw("GET", "foo") in (None, lock.local.token.decode()), "the lock")  # type: ignore[union-attr]
        lock.release()
        assert not valkey.raw("EXISTS", "foo")


def test_lost_reply_does_not_fail_the_acquire(proxy: FaultProxy) -> None:
    with redis.Redis(port=proxy.port) as client:
        lock = redis_py.Lock(client, "foo", timeout=30)
        lock.acquire()
        lock.release()
        lost = proxy.drop_reply(b"EVALSHA")
        assert lock.acquire(blocking_timeout=5) is True
        lost.wait()
        lock.release()


def test_tasks_that_share_a_lock_object_release_only_their_own(valkey: Server) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis.from_url(valkey.url) as client:
            lock = redis_py.AsyncLock(client, "foo", timeout=30)
            taken = asyncio.Event()
            ended = asyncio.Event()

            async def first() -> None:
                assert await lock.acquire()
                valkey.raw("DEL", "foo")  # as if it had expired
                taken.set()
                await ended.wait()
                with pytest.raises(LockNotOwnedError):
                    await lock.release()
                with pytest.raises(LockError):
                    await lock.release()

            async def second() -> None:
                await taken.wait()
                assert await lock.acquire()
                ended.set()
                await asyncio.sleep(0.05)
                assert await lock.owned()
                await lock.release()

            await asyncio.gather(first(), second())

            assert await lock.acquire()
            await asyncio.create_task(lock.release())  # a task that never acquired it may release it, as in redis-py
            assert await asyncio.wait_for(asyncio.create_task(lock.acquire()), 5)
            await lock.release()  # the token of an ended task belongs to the task that awaited it

    asyncio.run(main())


def test_cancelled_acquire_leaves_no_lock(valkey: Server) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis.from_url(valkey.url) as client:
            for token in (None, "mine"):
                for steps in range(15):
                    lock = redis_py.AsyncLock(client, "foo", timeout=30)
                    task = asyncio.create_task(lock.acquire(token=token))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    try:
                        await task
                    except asyncio.CancelledError:
                        continue
                    await lock.release()
                await asyncio.to_thread(until, lambda: not valkey.raw("EXISTS", "foo"), "the lock to be free")

    run_cancelling(main)


def test_error_in_another_thread_names_thread_local(valkey: Server) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        lock = redis_py.Lock(client, "foo", timeout=30)
        assert lock.acquire()
        found: list[Any] = []

        def elsewhere() -> None:
            found.append(lock.owned())
            for call in (lock.release, lambda: lock.extend(1), lock.reacquire):
                try:
                    call()
                except LockError as error:
                    found.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(10)
        assert found[0] is False
        assert "thread_local=False" in found[1]
        assert len(found) == 4
        lock.release()


def _release_in_child(lock: Any, answers: Any) -> None:
    try:
        lock.release()
        answers.put("released")
    except LockError as error:
        answers.put(str(error))


def test_forked_child_holds_no_lock(valkey: Server) -> None:
    context = multiprocessing.get_context("fork")
    with redis.Redis.from_url(valkey.url) as client:
        for options in ({"timeout": 30}, {"timeout": 30, "thread_local": False}, {}):
            lock = redis_py.Lock(client, "foo", **options)  # type: ignore[arg-type]
            assert lock.acquire()
            answers = context.Queue()
            child = context.Process(target=_release_in_child, args=(lock, answers))
            child.start()
            assert "not owned" in answers.get(timeout=10)
            child.join(10)
            assert lock.owned()
            lock.release()


@scenario
async def test_key_with_other_data_is_an_error(k: Kit) -> None:
    k.server.raw("HSET", "foo", "field", "value")
    with pytest.raises(redis.exceptions.ResponseError, match="holds other data"):
        await done(lock_of(k, "ours", k.client(), timeout=10).acquire(blocking_timeout=9))


@scenario
async def test_errors_belong_to_both_libraries(k: Kit) -> None:
    lock = lock_of(k, "ours", k.client(), timeout=10)
    with pytest.raises(lockfast.LockError):
        await done(lock.release())
    k.server.raw("ACL", "SETUSER", "nobody", "reset", "on", "nopass", "+ping")
    denied = lock_of(k, "ours", k.client(username="nobody", password=""), timeout=10)
    with pytest.raises(redis.exceptions.NoPermissionError):
        await done(denied.acquire(blocking=False))
    with pytest.raises(lockfast.StoreRefused):
        await done(denied.acquire(blocking=False))


ERRORS = [
    redis_py.LockError("said", lock_name="foo"),
    redis_py.LockNotOwnedError("said", lock_name="foo"),
    redis_py.errors.ConnectionError("said", outcome=lockfast.Outcome.UNKNOWN),
    redis_py.errors.NoPermissionError("said"),
    redis_py.errors.ResponseError("said"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_look_like_redis_pys_and_pickle(error: Exception) -> None:
    theirs = getattr(redis.exceptions, type(error).__name__)
    assert isinstance(error, theirs)
    assert isinstance(error, lockfast.LockError)
    assert (str(error), repr(error)) == ("said", repr(theirs("said")))
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), vars(twin)) == (type(error), "said", vars(error))


def test_errors_keep_lockfasts_types_and_outcome() -> None:
    assert issubclass(redis_py.LockError, lockfast.LockError)
    assert issubclass(redis_py.LockError, LockError)
    assert redis_py.errors.ConnectionError("gone").outcome is lockfast.Outcome.NOT_DONE
    assert isinstance(redis_py.errors.NoPermissionError("not you"), PermissionError)
    assert str(redis_py.errors.ResponseError("the key holds other data")) == "the key holds other data"


def test_logs_contain_no_password(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    valkey.raw("ACL", "SETUSER", "app", "reset", "on", ">s3cret", "~*", "&*", "+@all")
    with redis.Redis(port=valkey.port, username="app", password="s3cret") as client:
        lock = redis_py.Lock(client, "foo")
        assert lock.acquire()
        valkey.raw("DEL", "foo")
        with pytest.raises(LockNotOwnedError):
            lock.release()
    assert "s3cret" not in caplog.text
