"""Tables of bad inputs: each raises a clear error at once, in both flavours, and changes nothing in the store.

Each case names a text that its message must contain, because a message says which values fit. Unusual but valid inputs
have their own tables, so that no check becomes too strict.
"""

import base64
import json
import math
import os
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import valkey
import valkey.asyncio

from lockfast import ConfigurationError, LeaseLost, State
from lockfast.stores.memory import hub
from tests.contract.driver import FLAVOURS, Driver, done, scenario

PASSWORD = "s3cret"
YEAR = timedelta(days=365)


class Table:
    """Cases with readable ids: the value, then the text that its message must contain."""

    def __init__(self, *cases: tuple[Any, ...]) -> None:
        self.cases = cases

    def params(self) -> list[Any]:
        return [pytest.param(*case, id=f"{at}-{_shown(case[0])}") for at, case in enumerate(self.cases)]


def _shown(value: object) -> str:
    try:
        text = ascii(value)
    except Exception:
        text = type(value).__name__
    if " at 0x" in text:
        text = type(value).__name__
    return text if len(text) < 40 else text[:37] + "..."


@pytest.fixture(params=FLAVOURS)
def d(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A driver with its own memory store, which must be empty after the test."""
    flavour: str = request.param
    name = str(uuid.uuid4())
    yield FLAVOURS[flavour]("memory", f"memory://{name}")
    space = hub(name).space
    assert not space._grants, "the test left a lock"
    assert not space._queues, "the test left a ticket"


def untouched(d: Driver) -> bool:
    """Whether the store never granted anything."""
    return not hub(d.url.removeprefix("memory://")).space._fences


async def refused(says: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        await done(call(*args, **kwargs))
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")
    return caught.value


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("has no repr")


# Names

TEXT = "must be text"
CONTROL = "control characters"
BAD_NAMES = Table(
    ("", "must not be empty"),
    (None, TEXT),
    (b"thing", TEXT),
    (5, TEXT),
    (1.5, TEXT),
    (True, TEXT),
    (["thing"], TEXT),
    (("thing",), TEXT),
    (object, TEXT),
    (Path("thing"), TEXT),
    (Unshowable(), TEXT),
    (10**5000, TEXT),
    ("\0", CONTROL),
    ("a\0b", CONTROL),
    ("a\nb", CONTROL),
    ("a\r", CONTROL),
    ("\ta", CONTROL),
    ("a\x1b[2J", CONTROL),
    ("\x7f", CONTROL),
    ("a\x80", CONTROL),
    ("\x9f", CONTROL),
    ("x" * 1025, "1024 bytes"),
    ("é" * 513, "1024 bytes"),
    ("x" * 2**20, "1024 bytes"),
    ("\ud800", "valid Unicode"),
    ("a\udfff", "valid Unicode"),
    ("lockfast:", "must not begin with 'lockfast:'"),
    ("lockfast:{thing}:q", "must not begin with 'lockfast:'"),
)


@pytest.mark.parametrize(("name", "says"), BAD_NAMES.params())
@scenario
async def test_bad_names(d: Driver, name: Any, says: str) -> None:
    error = await refused(says, d.locks.lock, name)
    assert len(str(error)) < 300, "a message does not repeat a megabyte"
    assert untouched(d)


@pytest.mark.parametrize(("name", "says"), BAD_NAMES.params())
@scenario
async def test_bad_names_from_a_guard(d: Driver, name: Any, says: str) -> None:
    async def deposit() -> None:
        raise AssertionError("must not be entered")

    await refused(says, d.locks.guard(lambda: name)(d.function(deposit)))
    assert untouched(d)


GOOD_NAMES = [
    *("{", "}", "{}", "{a}{b}", "a}b", "🔒", " ", "two words", "x" * 1024, "é" * 512, "a\u00a0b", "\u202e"),
    *("Lockfast:", "lockfast", "xlockfast:", "%s", "'", "\\", "/", "0"),
]


@pytest.mark.parametrize("name", GOOD_NAMES, ids=_shown)
@scenario
async def test_unusual_names(d: Driver, name: str) -> None:
    lock = d.lock(name)
    assert lock.name == name
    assert repr(lock).isprintable()
    assert await done(lock.acquire(timeout=0)) is not None
    assert await done(lock.release()) is True


# Seconds

FITS = "must be seconds (a number or a timedelta)"
RANGE = "seconds, not"
NO_SECONDS: tuple[tuple[Any, str], ...] = (
    ("10", FITS),
    (b"10", FITS),
    ("", FITS),
    (True, FITS),
    (False, FITS),
    (1j, FITS),
    ([10], FITS),
    ({}, FITS),
    (object(), FITS),
    (Fraction(1, 2), FITS),
    (Unshowable(), FITS),
    (-1, RANGE),
    (-0.5, RANGE),
    (-(10**400), RANGE),
    (math.nan, RANGE),
    (math.inf, RANGE),
    (-math.inf, RANGE),
    (10**18, RANGE),
    (10**400, RANGE),
    (10**5000, RANGE),
    (1e308, RANGE),
    (Decimal("NaN"), RANGE),
    (Decimal("sNaN"), RANGE),
    (Decimal("Infinity"), RANGE),
    (Decimal(-1), RANGE),
    (Decimal("1e400"), RANGE),
    (timedelta(seconds=-1), RANGE),
    (timedelta.max, RANGE),
    (timedelta(days=367), RANGE),
)
NO_TTL = Table(
    *NO_SECONDS,
    (None, FITS),
    (0, RANGE),
    (0.0, RANGE),
    (-0.0, RANGE),
    (1e-9, RANGE),
    (5e-324, RANGE),
    (Decimal(0), RANGE),
    (timedelta(0), RANGE),
    (timedelta(microseconds=1), RANGE),
)
NO_TIMEOUT = Table(*NO_SECONDS)


@pytest.mark.parametrize(("value", "says"), NO_TTL.params())
@pytest.mark.parametrize("option", ["ttl", "max_hold"])
@scenario
async def test_bad_ttl(d: Driver, option: str, value: Any, says: str) -> None:
    if option == "max_hold" and value is None:
        pytest.skip("None is the default of max_hold")
    error = await refused(says, d.lock, **{option: value})
    assert str(error).startswith(option)
    assert untouched(d)


@pytest.mark.parametrize(("value", "says"), NO_TTL.params())
@scenario
async def test_bad_store_timeout(d: Driver, value: Any, says: str) -> None:
    error = await refused(says, d.connect, store_timeout=value)
    assert str(error).startswith("store_timeout")


@pytest.mark.parametrize(("value", "says"), NO_TIMEOUT.params())
@scenario
async def test_bad_timeout(d: Driver, value: Any, says: str) -> None:
    for call in (d.lock, d.lock().acquire):
        error = await refused(says, call, timeout=value)
        assert str(error).startswith("timeout")
        assert "Leave it out to wait without a limit" in str(error)
    assert untouched(d)


@pytest.mark.parametrize(("value", "says"), NO_TTL.params())
@scenario
async def test_bad_ttl_for_a_renewal(d: Driver, value: Any, says: str) -> None:
    lease = await done(d.lock(ttl=20).acquire())
    if value is not None:  # None: the same as before
        await refused(says, lease.renew, value)
        text = lease.export()
        await refused(says, d.locks.adopt, text, ttl=value)
        lease = await done(d.locks.adopt(text))
    assert (lease.ttl, lease.state) == (20, State.HELD)
    assert 10 < (await done(d.lock().inspect())).ttl_left <= 20
    await done(lease.release())


@scenario
async def test_bad_timeout_for_a_loss(d: Driver) -> None:
    lease = await done(d.lock().acquire())
    for value, says in NO_TIMEOUT.cases:
        await refused(says, lease.lost.wait, timeout=value)
    assert lease.state is State.HELD
    await done(lease.release())


GOOD_TTLS = [0.01, 1, 1.5, 10**6, Decimal("0.5"), Decimal("1E+3"), timedelta(milliseconds=10), timedelta(days=1), YEAR]


@pytest.mark.parametrize("value", GOOD_TTLS, ids=_shown)
@scenario
async def test_unusual_ttls(d: Driver, value: Any) -> None:
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    lease = await done(d.lock(ttl=value, renew=False).acquire())
    assert lease.ttl == seconds
    await done(lease.release())
    lease = await done(d.lock(max_hold=value, renew=False).acquire())
    assert lease.ttl == min(30, seconds)
    await done(lease.release())
    if seconds >= 0.05:
        assert d.connect(store_timeout=value).session.store_timeout == seconds


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 1e-9, Decimal(0), timedelta(0), timedelta(milliseconds=5)], ids=_shown)
@scenario
async def test_unusual_timeouts(d: Driver, value: Any) -> None:
    lease = await done(d.lock().acquire(timeout=value))
    assert await done(d.lock().acquire(timeout=value)) is None
    assert await done(d.lock(timeout=value).acquire()) is None
    assert await done(lease.lost.wait(timeout=value)) is False
    await done(lease.release())


# Flags, labels, callbacks, unknown options

BOOL = "must be True or False"
NO_BOOLS: tuple[Any, ...] = (1, 0, "yes", "", None, [], 1.0)


@pytest.mark.parametrize("value", NO_BOOLS, ids=_shown)
@scenario
async def test_bad_flags(d: Driver, value: Any) -> None:
    await refused(BOOL, d.lock().acquire, blocking=value)
    await refused(BOOL, d.lock().acquire, value)
    await refused(BOOL, d.lock, renew=value)
    await refused(BOOL, d.lock, cancel_on_loss=value)
    assert untouched(d)


@pytest.mark.parametrize("value", [0, 1, 0.5, timedelta(seconds=1)], ids=_shown)
@scenario
async def test_a_timeout_without_blocking(d: Driver, value: Any) -> None:
    await refused("use one of them", d.lock().acquire, blocking=False, timeout=value)
    await refused("use one of them", d.lock().acquire, False, value)
    assert untouched(d)


@scenario
async def test_the_timeout_of_a_lock_allows_a_non_blocking_acquire(d: Driver) -> None:
    lease = await done(d.lock(timeout=5).acquire(blocking=False))
    assert await done(d.lock(timeout=5).acquire(blocking=False)) is None
    await done(lease.release())


PRINTABLE = "must be printable"
BAD_LABELS = Table(
    (1, TEXT),
    (b"label", TEXT),
    (True, TEXT),
    (["label"], TEXT),
    ("a\nb", PRINTABLE),
    ("\0", PRINTABLE),
    ("\x1b[2J", PRINTABLE),
    ("\x7f", PRINTABLE),
    ("\ud800", PRINTABLE),
    ("\u202e", PRINTABLE),
    ("x" * 129, "128 characters"),
    ("x" * 2**20, "128 characters"),
)


@pytest.mark.parametrize(("label", "says"), BAD_LABELS.params())
@scenario
async def test_bad_labels(d: Driver, label: Any, says: str) -> None:
    await refused(says, d.connect, label=label)
    await refused(says, d.lock, label=label)
    assert untouched(d)


@scenario
async def test_no_label(d: Driver) -> None:
    await refused(TEXT, d.connect, label=None)
    lease = await done(d.connect(label="the client's").lock("thing", label=None).acquire())
    assert (await done(d.lock().inspect())).owner.label == "the client's"
    await done(lease.release())


@pytest.mark.parametrize("value", [1, "print", [], {}, True, b""], ids=_shown)
@pytest.mark.parametrize("option", ["on_lost", "on_risk"])
@scenario
async def test_bad_callbacks(d: Driver, option: str, value: Any) -> None:
    await refused(f"{option} must be callable", d.lock, **{option: value})
    assert untouched(d)


@pytest.mark.parametrize("option", ["nosuch", "Ttl", "expire", "blocking_timeout", "owner", ""])
@scenario
async def test_unknown_options(d: Driver, option: str) -> None:
    text = base64.urlsafe_b64encode(json.dumps(["thing", "holder", 30, 0, 0]).encode()).decode()
    calls = (d.connect, d.lock, partial(d.locks.guard, "thing"), partial(d.locks.adopt, f"lf1.{text}"))
    for call in calls:
        error = await refused(repr(option), call, **{option: 1})
        assert "ptions are" in str(error)
    assert untouched(d)


# Functions under a lock


@scenario
async def test_bad_guards(d: Driver) -> None:
    async def deposit(account_id: int) -> None:
        raise AssertionError("must not be entered")

    def guard_and_call(name: Any) -> Any:
        return d.locks.guard(name)(d.function(deposit))(1)

    names: tuple[tuple[Any, str], ...] = (
        (None, "text"),
        (5, "text"),
        (b"account", "text"),
        ("", "empty"),
        ("account:{", "account:{"),
        ("account:{}", "account:{}"),
        ("account:{0}", "account:{0}"),
        ("account:{nosuch}", "nosuch"),
        ("account:{account_id.nosuch}", "nosuch"),
    )
    for name, says in names:
        await refused(says, guard_and_call, name)
    assert untouched(d)


@scenario
async def test_bad_functions(d: Driver) -> None:
    for value in (1, "text", None):
        await refused("function", d.lock(), value)
        await refused("function", d.locks.guard("thing"), value)
    assert untouched(d)


@scenario
async def test_a_body_that_would_run_without_the_lock(d: Driver) -> None:
    """A function of the other flavour and a generator would only start under the lock, and run without it."""

    async def task() -> None: ...

    async def tasks() -> Any:
        yield 1

    def plain() -> None: ...

    def generator() -> Any:
        yield 1

    unfit: tuple[Any, ...] = (task, tasks, generator) if d.flavour == "threads" else (plain, tasks, generator)
    for function in unfit:
        await refused("function", d.lock(), function)
        await refused("function", d.locks.guard("thing"), function)
    assert untouched(d)


# URLs

KNOWN = "redis://"
SHAPE = "redis://user:password@host:6379/0"
BAD_URLS = Table(
    ("", KNOWN),
    ("localhost", KNOWN),
    ("localhost:6379", KNOWN),
    ("redis", KNOWN),
    ("redis:localhost", KNOWN),
    ("redis:/localhost", KNOWN),
    ("/tmp/locks.db", KNOWN),
    ("://localhost", KNOWN),
    (" redis://localhost", KNOWN),
    ("http://localhost", KNOWN),
    ("https://localhost", KNOWN),
    ("file:///tmp/locks.db", KNOWN),
    ("postgres://localhost", KNOWN),
    ("redis+sentinel://localhost", "redis+sentinel://user:password@host1"),
    ("redis+sentinel://localhost/", "redis+sentinel://user:password@host1"),
    ("redis+sentinel://localhost/main/0/1", "redis+sentinel://user:password@host1"),
    ("redis+sentinel://localhost,/main", "redis+sentinel://user:password@host1"),
    ("redis+sentinel://a,b,a/main", "twice"),
    ("redis+sentinel://localhost:0/main", "redis+sentinel://user:password@host1"),
    ("redis+sentinel://localhost/main/zero", "can't be read"),
    ("redis+sentinel://localhost/main?nonsense=1", "nonsense"),
    ("redis+cluster://", "redis+cluster://user:password@host1"),
    ("redis+cluster://[::1/", "redis+cluster://user:password@host1"),
    ("redis+cluster://localhost:99999", "redis+cluster://user:password@host1"),
    ("redis+tower://localhost", KNOWN),
    ("redis://host:notaport", SHAPE),
    ("redis://host:99999", SHAPE),
    ("redis://host:-1", SHAPE),
    ("redis://host/notadb", SHAPE),
    ("redis://host/-1", SHAPE),
    ("redis://host/1/2", SHAPE),
    ("redis://host/1.5", SHAPE),
    ("redis://host?db=notadb", SHAPE),
    ("redis://host?socket_timeout=soon", SHAPE),
    ("redis://host?nosuch=1", "nosuch"),
    ("redis://host?protocol=9", SHAPE),
    ("rediss://host?ssl_cert_reqs=nosuch", SHAPE),
    ("redis://:%zz@host", SHAPE),
    ("redis://[::1", SHAPE),
    ("unix://", "unix:///path"),
    ("sqlite://relative", "three slashes"),
    ("sqlite://host/locks.db", "three slashes"),
    ("sqlite:///folder/", "path of a file"),
    ("sqlite:///a\0b", "path of a file"),
    ("sqlite:///:memory:", "memory://"),
)


@pytest.mark.parametrize(("url", "says"), BAD_URLS.params())
@scenario
async def test_bad_urls(d: Driver, url: str, says: str) -> None:
    await refused(says, d.open, url)


@pytest.mark.parametrize(("url", "says"), BAD_URLS.params())
@scenario
async def test_bad_urls_from_the_environment(d: Driver, url: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not url or "\0" in url:
        pytest.skip("an empty variable counts as none, and none can have a NUL")
    monkeypatch.setenv("LOCKFAST_URL", url)
    await refused(says, d.open, None)


LEAKS = [
    f"redis://user:{PASSWORD}@host:notaport",
    f"redis://user:{PASSWORD}@host/notadb",
    f"redis://user:{PASSWORD}@host?nosuch=1",
    f"redis://host?password={PASSWORD}&nosuch=1",
    f"redis://user:{PASSWORD}/x@host",
    f"redis://user:{PASSWORD}#x@host",
    f"redis://user:{PASSWORD}@[::1",
    f"redis:/user:{PASSWORD}@host",
    f"user:{PASSWORD}@host:6379",
    f"user:{PASSWORD}@redis://host",
    f"http://user:{PASSWORD}@host",
    f"sqlite://user:{PASSWORD}@host",
    f"redis+sentinel://user:{PASSWORD}@host",
    f"redis+sentinel://user:{PASSWORD}@host/main/x",
    f"redis+sentinel://user:{PASSWORD}@host:x/main",
    f"redis+sentinel://host/main?sentinel_password={PASSWORD}&nosuch=1",
    f"redis+cluster://user:{PASSWORD}@host/x",
    f"redis+cluster://user:{PASSWORD}@host:x",
]


@pytest.mark.parametrize("url", LEAKS, ids=_shown)
@scenario
async def test_no_password_in_the_error(d: Driver, url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        d.open(url)
    told = "".join(traceback.format_exception_only(caught.value)) + repr(caught.value)
    shown = "".join(f"{error!r} {error}" for error in (caught.value, caught.value.__cause__) if error is not None)
    assert PASSWORD not in told + shown


GOOD_URLS = Table(
    ("redis://", "redis://localhost:6379/0"),
    ("redis://example.com", "redis://example.com:6379/0"),
    ("REDIS://example.com", "redis://example.com:6379/0"),
    ("Valkey://example.com", "redis://example.com:6379/0"),
    ("redis://example.com:7000/3", "redis://example.com:7000/3"),
    ("redis://example.com?db=4", "redis://example.com:6379/4"),
    ("redis://[::1]:7000", "redis://::1:7000/0"),
    ("valkey://example.com:1", "redis://example.com:1/0"),
    ("valkey://valkey:1", "redis://valkey:1/0"),
    ("rediss://example.com", "redis://example.com:6379/0"),
    ("valkeys://example.com", "redis://example.com:6379/0"),
    ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
    (f"redis://user:{PASSWORD}@example.com", "redis://example.com:6379/0"),
    ("redis://:p%40ss%2Fw%3A@example.com", "redis://example.com:6379/0"),
    (f"redis+sentinel://user:{PASSWORD}@a,b:7000/main/3", "sentinel service main, database 3"),
    (f"valkeys+sentinel://a/main?sentinel_password={PASSWORD}", "sentinel service main, database 0"),
    (f"redis+cluster://user:{PASSWORD}@a,b:7000", "redis+cluster://a:6379,b:7000"),
    ("Valkeys+Cluster://[::1]", "redis+cluster://::1:6379"),
    ("memory://", "memory://"),
    ("memory://a name", "memory://a name"),
    ("MEMORY://", "memory://"),
    ("sqlite:///locks.db", "sqlite:///"),
    ("sqlite:////tmp/lockfast/locks.db", "sqlite:////tmp/lockfast/locks.db"),
)


@pytest.mark.parametrize(("url", "shown"), GOOD_URLS.params())
@scenario
async def test_unusual_urls(d: Driver, url: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    client = d.open(url)
    assert shown in repr(client)
    assert PASSWORD not in repr(client)
    await done(client.close())
    assert not any(os.scandir(tmp_path)), "nothing is created before a lock is used"


@scenario
async def test_no_target(d: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCKFAST_URL", "memory://from the environment")
    assert "memory://from the environment" in repr(d.open(None))
    for empty in ("", None):
        if empty is None:
            monkeypatch.delenv("LOCKFAST_URL")
        else:
            monkeypatch.setenv("LOCKFAST_URL", empty)
        assert f"{tmp_path}/lockfast/locks.db" in repr(d.open(None))


# Clients

TAKES = "a URL or a client of redis-py or valkey-py"


def _sentinel(library: Any) -> Any:
    return library.Sentinel([("localhost", 26379)])


NO_CLIENTS = Table(
    (5, TAKES),
    (1.5, TAKES),
    (True, TAKES),
    (object(), TAKES),
    (b"redis://localhost", TAKES),
    (Path("/tmp/locks.db"), TAKES),
    ({}, TAKES),
    (redis, TAKES),
    (redis.Redis, TAKES),
    (redis.ConnectionPool(), TAKES),
    (redis.asyncio.ConnectionPool(), TAKES),
    (Unshowable(), TAKES),
    ([], "list is empty"),
    ((), "list is empty"),
    (["redis://localhost"], "three or five"),
    (("redis://localhost", "redis://localhost:2"), "three or five"),
    (["redis://localhost:1", "redis://localhost:1", "redis://localhost:2"], "in the list twice"),
    (["redis://localhost:1", "redis://localhost:1/5", "redis://localhost:2"], "in the list twice"),
    (["redis://localhost", "memory://", "sqlite://"], "consists of Redis or Valkey"),
    ([redis.Redis(), redis.asyncio.Redis(port=6380), redis.Redis(port=6381)], "made for"),
    (["redis://localhost", None, "redis://localhost:2"], TAKES),
    ({"redis://localhost"}, "one list of URLs and clients"),
    (redis.Redis().pipeline(), "not a pipeline"),
    (redis.asyncio.Redis().pipeline(), "not a pipeline"),
    (valkey.Valkey().pipeline(), "not a pipeline"),
    (_sentinel(redis), "service="),
    (_sentinel(redis.asyncio), "service="),
    (_sentinel(redis).slave_for("mymaster"), "master_for"),
)


@pytest.mark.parametrize(("target", "says"), NO_CLIENTS.params())
@scenario
async def test_bad_clients(d: Driver, target: Any, says: str) -> None:
    await refused(says, d.open, target)


def test_a_cluster_client_of_the_other_flavour() -> None:
    with pytest.raises(ConfigurationError, match=r"lockfast\.aio\.connect"):
        FLAVOURS["threads"].open(redis.asyncio.RedisCluster(host="localhost"))


def clients(library: Any, twin: Any) -> list[Callable[[], Any]]:
    """Clients of redis-py and valkey-py, in one flavour."""
    return [
        library.Redis,
        twin.Valkey,
        lambda: library.Redis(decode_responses=True, protocol=3),
        lambda: library.Redis(connection_pool=library.BlockingConnectionPool()),
        lambda: library.Sentinel([("localhost", 26379)]).master_for("mymaster"),
    ]


CLIENTS = {"threads": clients(redis, valkey), "asyncio": clients(redis.asyncio, valkey.asyncio)}


@pytest.mark.parametrize("at", range(5))
@scenario
async def test_clients_of_the_same_flavour(d: Driver, at: int) -> None:
    user = CLIENTS[d.flavour][at]()
    settings = dict(user.connection_pool.connection_kwargs)
    client = d.open(user)
    assert "localhost:6379/0" in repr(client) or "mymaster" in repr(client)
    assert user.connection_pool.connection_kwargs == settings, "the client of the user is not changed"
    await done(client.close())


@pytest.mark.parametrize("at", range(5))
@scenario
async def test_clients_of_the_other_flavour(d: Driver, at: int) -> None:
    other = "asyncio" if d.flavour == "threads" else "threads"
    use = "lockfast.aio.connect()" if d.flavour == "threads" else "lockfast.connect()"
    await refused(use, d.open, CLIENTS[other][at]())


# Exported leases


def exported(*parts: Any, version: str = "lf1") -> str:
    return f"{version}." + base64.urlsafe_b64encode(json.dumps(parts).encode()).decode()


def packed(raw: bytes) -> str:
    return "lf1." + base64.urlsafe_b64encode(raw).decode()


VERY = "the string that lease.export() returned"
BAD_EXPORTS = Table(
    (None, VERY),
    (5, VERY),
    (b"lf1.W10=", VERY),
    (["lf1.W10="], VERY),
    ("", VERY),
    (".", VERY),
    ("lf1", VERY),
    ("lf1.", VERY),
    ("lf1.!!!", VERY),
    ("lf1.é", VERY),
    ("lf1.\ud800", VERY),
    ("garbage", VERY),
    ("x" * 2**20, VERY),
    (packed(b""), VERY),
    (packed(b"\xff\xfe"), VERY),
    (packed(b"null"), VERY),
    (packed(b"5"), VERY),
    (packed(b"[" * 100_000), VERY),
    (packed(b"1" * 5000), VERY),
    (packed(b'"' + b"x" * 1000 + b'"'), VERY),
    (exported(), VERY),
    (exported("thing"), VERY),
    (exported("thing", "holder"), VERY),
    (exported("thing", "holder", 30), VERY),
    (exported("thing", "holder", 30, 0, 0, "more"), VERY),
    (exported("thing", "holder", 30, 3, 2), VERY),
    (exported("thing", "holder", 30, -1, 2), VERY),
    (exported("thing", "holder", 30, True, 2), VERY),
    (exported("thing", "holder", 30, 0, 0, version="hf2"), VERY),
    (exported("thing", "holder", 30, 0, 0, version="HF1"), VERY),
    (exported("thing", "holder", 30, 0, 0, version=""), VERY),
    (exported("thing", "holder", 30, 0, 0) + "!", VERY),
    (" " + exported("thing", "holder", 30, 0, 0), VERY),
    (exported("", "holder", 30, 0, 0), "must not be empty"),
    (exported(5, "holder", 30, 0, 0), TEXT),
    (exported("lockfast:x", "holder", 30, 0, 0), "must not begin"),
    (exported("a\0b", "holder", 30, 0, 0), CONTROL),
    (exported("thing", "", 30, 0, 0), "1 to 128"),
    (exported("thing", 5, 30, 0, 0), "1 to 128"),
    (exported("thing", "x" * 2**20, 30, 0, 0), "1 to 128"),
    (exported("thing", "é", 30, 0, 0), "1 to 128"),
    (exported("thing", "a b", 30, 0, 0), "must not have spaces"),
    (exported("thing", "a\r\nb", 30, 0, 0), "must not have spaces"),
    (exported("thing", "holder", 0, 0, 0), RANGE),
    (exported("thing", "holder", -1, 0, 0), RANGE),
    (exported("thing", "holder", math.nan, 0, 0), RANGE),
    (exported("thing", "holder", math.inf, 0, 0), RANGE),
    (exported("thing", "holder", 10**400, 0, 0), RANGE),
    (exported("thing", "holder", "30", 0, 0), FITS),
    (exported("thing", "holder", True, 0, 0), FITS),
    (exported("thing", "holder", None, 0, 0), FITS),
    (exported("thing", "holder", [30], 0, 0), FITS),
)


@pytest.mark.parametrize(("text", "says"), BAD_EXPORTS.params())
@scenario
async def test_bad_exports(d: Driver, text: Any, says: str) -> None:
    await refused(says, d.locks.adopt, text)
    assert untouched(d)


@scenario
async def test_a_damaged_export_does_not_end_the_lease(d: Driver) -> None:
    text = (await done(d.lock().acquire())).export()
    damaged = [text[:cut] for cut in range(0, len(text), 7)]
    damaged += [text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :] for at in range(0, len(text), 5)]
    for wrong in damaged:
        with pytest.raises((ConfigurationError, LeaseLost)):
            await done(d.locks.adopt(wrong))
    lease = await done(d.locks.adopt(text))
    assert await done(lease.release()) is True


def test_the_tables_are_long_enough() -> None:
    tables = (BAD_NAMES, NO_TTL, NO_TIMEOUT, BAD_LABELS, BAD_URLS, NO_CLIENTS, BAD_EXPORTS)
    assert sum(len(table.cases) for table in tables) >= 150
