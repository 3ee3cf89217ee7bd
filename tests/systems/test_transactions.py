"""`connect(..., scripts=False)`, and the fallback for accounts that may not run scripts.

The contract suite runs in this mode too (`tests/contract/stores.py`), except for tests that need a queue.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lockfast
from lockfast import State, StoreRefused, StoreUnavailable
from lockfast.client.guarantees import Verdict
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.redis.store import FairMutex
from tests.contract.driver import done, held
from tests.contract.stores import NO_SCRIPTS
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.topologies import Group
from tests.support.waiting import until
from tests.systems.conftest import on_all_servers
from tests.systems.kit import Kit, scenario
from tests.traps.observation import Stopwatch


def denied(server: Server, *rules: str) -> str:
    """The URL of an account that may not run scripts."""
    known = [rule for rule in NO_SCRIPTS if server.kind != "redis62" or rule[1:] in ("eval", "evalsha", "script")]
    server.raw("ACL", "SETUSER", "plain", "reset", "on", ">word", "~*", "&*", "+@all", *known, *rules)
    return server.url.replace("//", "//plain:word@")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.system("A2")
@on_all_servers
@scenario
async def test_account_without_scripts_can_lock(k: Kit) -> None:
    first, second = (k.connect(denied(k.server)) for _ in range(2))
    async with held(first.lock("thing", ttl=5)) as lease:
        assert k.server.raw("GET", "thing") == lease.holder
        assert 4000 < k.server.raw("PTTL", "thing") <= 5000
        assert await done(second.lock("thing").acquire(timeout=0)) is None
        assert await done(second.lock("thing").acquire(timeout=0.05)) is None
        await done(lease.renew(60))
        assert k.server.raw("PTTL", "thing") > 55_000
        info = await done(second.lock("thing").inspect())
        assert (info.holder, info.fence, info.waiting) == (lease.holder, lease.fence, 0)
    following = await done(second.lock("thing").acquire(timeout=0))
    assert following.fence > lease.fence


@pytest.mark.system("A2")
@scenario
async def test_callers_denied_at_the_same_time_exclude_one_another(k: Kit) -> None:
    """They share a connection, so even their first transactions must not overlap."""
    locks = k.connect(denied(k.server))
    inside: list[int] = []

    async def worker(number: int) -> None:
        async with held(locks.lock("thing", timeout=9, local_handoff=False)):
            inside.append(number)
            assert len(inside) == 1
            await k.sleep(0.01)
            inside.remove(number)

    workers = [k.start(worker, number) for number in range(6)]
    for one in workers:
        await one.result()


@pytest.mark.system("A2")
@scenario
async def test_switch_is_logged_once_and_shown_by_guarantees(k: Kit, caplog: pytest.LogCaptureFixture) -> None:
    locks = k.connect(denied(k.server))
    for _ in range(3):
        async with held(locks.lock("thing")):
            pass
    assert len([line for line in warnings(caplog) if "may not run scripts" in line]) == 1
    order = (await done(locks.guarantees())).about("order")
    assert order.verdict is Verdict.NO
    assert "overtaken" in order.text


@pytest.mark.system("A2")
@scenario
async def test_guarantees_are_right_before_the_first_acquire(k: Kit) -> None:
    locks = k.connect(denied(k.server))
    assert (await done(locks.guarantees())).about("order").verdict is Verdict.NO
    locks = k.connect(k.server.url)
    assert (await done(locks.guarantees())).about("order").verdict is Verdict.YES


@pytest.mark.system("A2")
@scenario
async def test_scripts_false_logs_no_warning_and_runs_no_script(k: Kit, caplog: pytest.LogCaptureFixture) -> None:
    locks = k.connect(k.server.url, scripts=False)
    async with held(locks.lock("thing")):
        pass
    assert warnings(caplog) == []
    assert not [name for name in k.server.commands_processed() if "eval" in name]
    assert (await done(locks.guarantees())).about("order").verdict is Verdict.NO


@pytest.mark.system("A2")
@scenario
async def test_scripts_true_raises_instead_of_falling_back(k: Kit) -> None:
    locks = k.connect(denied(k.server), scripts=True)
    with pytest.raises(StoreRefused, match="evalsha"):
        await done(locks.lock("thing").acquire(timeout=0))


@pytest.mark.system("A2")
@scenario
async def test_account_without_scripts_and_watch_gets_the_error_about_scripts(
    k: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    locks = k.connect(denied(k.server, "-watch"))
    with pytest.raises(StoreRefused, match="evalsha"):
        await done(locks.lock("thing").acquire(timeout=0))
    assert not [line for line in warnings(caplog) if "use transactions" in line]


@pytest.mark.system("A2")
@pytest.mark.parametrize("scripts", [0.5, "no", []])
@scenario
async def test_scripts_option_must_be_a_bool_or_none(k: Kit, scripts: Any) -> None:
    with pytest.raises(lockfast.ConfigurationError, match="scripts must be"):
        k.connect(k.server.url, scripts=scripts)


@pytest.mark.system("A2")
@scenario
async def test_scripts_and_transactions_share_one_lock_and_one_fence_sequence(k: Kit) -> None:
    clients = [k.connect(k.server.url, scripts=scripts) for scripts in (True, False)]
    fences: list[int] = []
    inside = 0

    async def worker(number: int) -> None:
        nonlocal inside
        for _ in range(6):
            async with held(clients[number % 2].lock("thing", ttl=5, timeout=9)) as lease:
                inside += 1
                assert inside == 1
                fences.append(lease.fence)
                await k.sleep(0)
                inside -= 1

    workers = [k.start(worker, number) for number in range(6)]
    for one in workers:
        await one.result()
    assert len(fences) == 36
    assert fences == sorted(set(fences))


@pytest.mark.system("A2")
@scenario
async def test_adopt_and_force_release_work_across_both_modes(k: Kit) -> None:
    plain, scripted = (k.connect(k.server.url, scripts=scripts) for scripts in (False, True))
    lease = await done(scripted.lock("thing", label="till").acquire())
    adopted = await done(plain.adopt(lease.export(), label="desk"))
    assert adopted.fence > lease.fence
    info = await done(scripted.lock("thing").inspect())
    assert (info.holder, info.fence, info.owner.label) == (adopted.holder, adopted.fence, "desk")
    assert await done(plain.session.store.force_release("thing", "somebody", plain.session.runtime.now() + 5)) is False
    assert (
        await done(plain.session.store.force_release("thing", adopted.holder, plain.session.runtime.now() + 5)) is True
    )
    info = await done(plain.lock("thing").inspect())
    assert (info.locked, info.fence > adopted.fence) == (False, True)
    following = await done(scripted.lock("thing").acquire(timeout=0))
    assert following.fence > info.fence


@pytest.mark.system("A2")
@scenario
async def test_listing_and_inspect_of_keys_with_other_data(k: Kit) -> None:
    locks = k.connect(k.server.url, scripts=False)
    lease = await done(locks.lock("a:1").acquire())
    k.server.raw("HSET", "a:2", "field", "value")
    k.server.raw("SET", "a:3", "another's")
    page = await locks.session.store.listing("a:*", "", locks.session.runtime.now() + 5)
    assert {info.name: info.holder for info in page.infos if info.locked}.get("a:1") == lease.holder
    with pytest.raises(lockfast.StoreProtocolError, match="holds other data"):
        await done(locks.lock("a:2").acquire(timeout=0))
    with pytest.raises(lockfast.StoreProtocolError, match="holds other data"):
        await done(locks.lock("a:2").inspect())
    assert (await done(locks.lock("a:3").inspect())).holder == "another's"


@pytest.mark.system("A2")
@scenario
async def test_key_overwritten_with_other_data_does_not_stop_other_renewals(k: Kit) -> None:
    locks = k.connect(k.server.url, scripts=False)
    leases = [await done(locks.lock(f"thing:{number}", ttl=3).acquire()) for number in range(3)]
    k.server.raw("DEL", "thing:1")
    k.server.raw("HSET", "thing:1", "field", "value")
    await k.until(lambda: leases[1].state is State.LOST, "the loss to be reported")
    await k.sleep(3.2)
    assert [leases[0].state, leases[2].state] == [State.HELD, State.HELD]


@pytest.mark.system("A2")
@scenario
async def test_many_leases_are_renewed_under_contention(k: Kit) -> None:
    """A batch of renewals that keeps losing races is renewed one by one."""
    locks = k.connect(k.server.url, scripts=False)
    leases = [await done(locks.lock(f"thing:{number}", ttl=3).acquire()) for number in range(10)]
    ending = False

    async def busy(number: int) -> None:
        while not ending:
            async with held(locks.lock(f"busy:{number}")):
                await k.sleep(0.001)

    contenders = [k.start(busy, number) for number in range(3)]
    await k.sleep(2.2)
    ending = True
    for one in contenders:
        await one.result()
    assert {lease.state for lease in leases} <= {State.HELD, State.AT_RISK}


@pytest.mark.system("A2")
@scenario
async def test_polling_is_infrequent_but_notices_a_release_quickly(k: Kit) -> None:
    locks = k.connect(k.server.url, scripts=False)
    lease = await done(locks.lock("thing").acquire())

    async def wait() -> Any:
        return await done(locks.lock("thing").acquire(timeout=9))

    waiting = k.start(wait)
    await k.until(lambda: len(locks.session.store.inbox.open) == 1, "the waiter")
    await k.sleep(0.3)
    k.server.raw("CONFIG", "RESETSTAT")
    await k.sleep(0.5)
    polls = k.server.commands_processed().get("get", 0)
    assert 2 <= polls <= 12, "pauses of 50 to 100 ms"
    watch = Stopwatch()
    await done(lease.release())
    assert await waiting.result() is not None
    assert watch.seconds < watch.most(1)


@pytest.mark.system("A2")
@scenario
async def test_a_waiter_that_the_other_shared_mode_overtakes_keeps_waiting(k: Kit) -> None:
    locks = k.connect(k.server.url, scripts=False)
    writer = await done(locks.rwlock("thing").writer.acquire())

    async def wait() -> Any:
        return await done(locks.semaphore("thing", 2).acquire(timeout=9))

    waiting = k.start(wait)
    await k.until(lambda: len(locks.session.store.inbox.open) == 1, "the waiter")
    await done(writer.downgrade())
    k.server.raw("CONFIG", "RESETSTAT")
    await k.until(lambda: k.server.commands_processed().get("hgetall", 0) >= 2, "the waiter to find a reader twice")
    await done(writer.release())
    assert (await waiting.result()).slots == (0,)


@pytest.mark.system("A2")
@on_all_servers
@scenario
async def test_documented_permissions_suffice_without_scripts(k: Kit) -> None:
    page = (Path(__file__).parents[2] / "docs" / "permissions.md").read_text("utf-8").partition("## Without scripts")[2]
    (rules,) = re.findall(r"^ACL SETUSER billing (.*)$", page, re.MULTILINE)
    k.server.raw("ACL", "SETUSER", "billing", "reset", *rules.split())
    first, second = (k.connect(k.server.url.replace("//", "//billing:secret@"), scripts=False) for _ in range(2))
    lease = await done(first.lock("billing:report", ttl=5).acquire())
    assert await done(second.lock("billing:report").acquire(timeout=0.05)) is None
    await done(lease.renew())
    assert (await done(second.lock("billing:report").inspect())).holder == lease.holder
    adopted = await done(second.adopt(lease.export()))
    assert await done(adopted.release()) is True
    permits = [await done(locks.semaphore("billing:gpu", 3).acquire()) for locks in (first, second)]
    writer = await done(first.rwlock("billing:config").writer.acquire())
    await done(writer.downgrade())
    reader = await done(second.rwlock("billing:config").reader.acquire())
    for lease in (*permits, writer, reader):
        await done(lease.renew())
        assert await done(lease.release()) is True


@pytest.mark.system("A2")
@on_all_servers
@scenario
async def test_scripts_and_transactions_share_permits_and_readers(k: Kit) -> None:
    """Never more than three permits, and never a writer beside a reader, whatever the client."""
    clients = [k.connect(k.server.url, scripts=scripts) for scripts in (True, False, False)]
    slots: list[int] = []
    inside = {"permits": 0, "reader": 0, "writer": 0}

    async def worker(number: int) -> None:
        locks = clients[number % 3]
        rwlock = locks.rwlock("config", timeout=30)
        for turn in range(4):
            weight = 1 + (number + turn) % 2
            async with held(locks.semaphore("gpu", 3, permits=weight, timeout=30)) as permit:
                assert not set(permit.slots) & set(slots)
                slots.extend(permit.slots)
                assert max(slots) < 3
                await k.sleep(0.001)
                for slot in permit.slots:
                    slots.remove(slot)
            side = "writer" if (number + turn) % 3 == 0 else "reader"
            async with held(rwlock.writer if side == "writer" else rwlock.reader):
                inside[side] += 1
                assert inside["writer"] == 0 or (inside["writer"], inside["reader"]) == (1, 0)
                await k.sleep(0.001)
                inside[side] -= 1

    workers = [k.start(worker, number) for number in range(6)]
    for one in workers:
        await one.result()
    keys = [key for key in k.server.raw("KEYS", "*") if not key.endswith(":m")]
    assert keys == []


@pytest.mark.system("A2")
@scenario
async def test_readers_without_scripts_do_not_starve_a_waiting_writer(k: Kit) -> None:
    plain, other, scripted = (k.connect(k.server.url, scripts=scripts) for scripts in (False, False, True))
    first = await done(plain.rwlock("config").reader.acquire())

    async def write() -> Any:
        return await done(scripted.rwlock("config").writer.acquire(timeout=9))

    waiting = k.start(write)
    await k.until(lambda: k.server.raw("EXISTS", "lockfast:{config}:q"), "the writer to wait")
    late = other.rwlock("config").reader
    assert await done(late.acquire(timeout=0.2)) is None
    await done(first.release())
    writer = await waiting.result()
    await done(writer.downgrade())
    assert await done(late.acquire(timeout=1)) is not None


@pytest.mark.system("A2")
def test_scripts_false_works_with_sentinels_and_is_rejected_elsewhere(shared_group: Callable[[str], Group]) -> None:
    with lockfast.connect(shared_group("sentinel").url, scripts=False) as locks, locks.lock("thing") as lease:
        assert locks.lock("thing").inspect().fence == lease.fence
        assert locks.lock("thing", local_handoff=False).acquire(timeout=0) is None
    elsewhere: list[Any] = ["redis+cluster://localhost", ["redis://one", "redis://two", "redis://three"], "memory://"]
    for target in elsewhere:
        with pytest.raises(lockfast.ConfigurationError):
            lockfast.connect(target, scripts=False)
    with pytest.raises(lockfast.ConfigurationError, match="need scripts"):
        lockfast.connect("redis://localhost", scripts=False, replicas=1)


# Faults


@pytest.fixture
def plain(proxy: FaultProxy) -> Iterator[lockfast.Locks]:
    with lockfast.connect(proxy.url, scripts=False) as locks:
        yield locks


@pytest.mark.system("A2")
def test_lost_exec_reply_leads_to_the_same_grant(plain: lockfast.Locks, proxy: FaultProxy) -> None:
    lost = proxy.drop_reply(b"EXEC")
    lease = plain.lock("thing", ttl=10).acquire(timeout=5)
    lost.wait()
    assert lease is not None
    info = plain.lock("thing").inspect()
    assert (info.holder, info.fence) == (lease.holder, lease.fence)
    lost = proxy.drop_reply(b"EXEC")
    assert lease.release() is True
    lost.wait()
    assert not plain.lock("thing").locked()


@pytest.mark.system("A2")
def test_no_exec_is_sent_after_the_watching_connection_is_lost(
    plain: lockfast.Locks, proxy: FaultProxy, valkey: Server
) -> None:
    """After the read, the connection breaks and another client acquires the lock: EXEC must not be sent."""
    plain.lock("other").locked()
    store: Any = plain.session.store
    exchange = store._exchange
    cut: list[bool] = []

    async def cut_after_read(requests: Any, until: float, on: Any = None) -> Any:
        if on is None and b"WATCH" in b"".join(requests[1:]) and not cut:
            cut.append(True)
            found = await exchange(requests, until)
            proxy.reset_connections()
            valkey.raw("SET", "thing", "another", "PX", 60_000)
            store.wire.drop()
            return found
        return await exchange(requests, until, on)

    store._exchange = cut_after_read
    assert plain.lock("thing").acquire(timeout=0.3) is None
    assert cut
    assert valkey.raw("GET", "thing") == "another"


@pytest.mark.system("A2")
def test_cancelled_transaction_leaves_no_lock_behind(valkey: Server) -> None:
    async def main() -> None:
        async with lockfast.aio.connect(valkey.url, scripts=False) as locks:
            await locks.lock("thing").locked()
            for steps in range(20):
                task = asyncio.create_task(locks.lock("thing").acquire(timeout=5))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    lease = await task
                except asyncio.CancelledError:
                    continue
                if lease is not None:
                    await lease.release()
            await asyncio.to_thread(until, lambda: not valkey.raw("EXISTS", "thing"), "the lock to be free")
            async with locks.lock("thing", timeout=5):
                pass

    asyncio.run(main())


@pytest.mark.system("A2")
def test_wait_for_a_busy_connection_times_out() -> None:
    runtime = ThreadRuntime()
    mutex = FairMutex(runtime)

    async def nested() -> None:
        async with mutex.held(runtime.now() + 1):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match="busy"):
                async with mutex.held(runtime.now() + 0.05):
                    pass
            assert 0.04 <= time.monotonic() - started < 10
        async with mutex.held(runtime.now()):
            pass

    run(nested())


@pytest.mark.system("A2")
def test_full_server_still_renews_and_releases_but_grants_nothing(fresh_server: Server) -> None:
    with lockfast.connect(fresh_server.url, scripts=False, store_timeout=0.2) as locks:
        lease = locks.lock("thing", ttl=10).acquire(timeout=0)
        assert lease is not None
        fresh_server.raw("CONFIG", "SET", "maxmemory", "1")
        lease.renew()
        with pytest.raises(StoreUnavailable, match="out of memory"):
            locks.lock("other").acquire(timeout=0.05)
        assert lease.release() is True


@pytest.mark.system("A2")
def test_full_server_releases_readers_but_does_not_renew_them(fresh_server: Server) -> None:
    with (
        lockfast.connect(fresh_server.url, scripts=False, store_timeout=0.2) as first,
        lockfast.connect(fresh_server.url, scripts=False, store_timeout=0.2) as second,
    ):
        leases = [locks.rwlock("thing", ttl=10).reader.acquire(timeout=0) for locks in (first, second)]
        fresh_server.raw("CONFIG", "SET", "maxmemory", "1")
        assert leases[0] is not None
        assert leases[1] is not None
        with pytest.raises(StoreUnavailable):
            leases[0].renew(20)
        assert [lease.release() for lease in leases if lease] == [True, True]
        assert fresh_server.raw("KEYS", "*") == ["lockfast:{thing}:m"]
