"""The public interface: names, signatures, errors, imported modules, and no password in any output.

A change here is a change for users. Make it on purpose, and describe it in the changelog.
"""

import copy
import inspect
import logging
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lockfast
import lockfast.aio
import lockfast.simple
import lockfast.simple.aio
from lockfast import errors, fenced
from lockfast.client import options
from tests.contract.driver import FLAVOURS, Driver, done, scenario
from tests.support.servers import Server

PASSWORD = "s3cret-Pa55"
WRONG = "wr0ng-Pa55"


# Names and signatures


def test_names() -> None:
    assert sorted(lockfast.__all__) == [
        "AcquireTimeout",
        "AllOf",
        "ConfigurationError",
        "HolderInfo",
        "Lease",
        "LeaseLost",
        "LeaseSet",
        "Lock",
        "LockError",
        "LockInfo",
        "Locks",
        "Mode",
        "NotHeld",
        "Outcome",
        "Owner",
        "Permit",
        "QuorumNotReached",
        "RLock",
        "RWLock",
        "Semaphore",
        "StaleFence",
        "State",
        "StoreError",
        "StoreProtocolError",
        "StoreRefused",
        "StoreUnavailable",
        "UpdateConflict",
        "WaiterInfo",
        "WouldDeadlock",
        "__version__",
        "connect",
        "errors",
    ]
    assert sorted(lockfast.aio.__all__) == [
        *("AllOf", "Lease", "LeaseSet", "Lock", "Locks", "Permit", "RLock", "RWLock", "Semaphore", "connect"),
    ]
    for module in (lockfast, lockfast.aio):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_names_of_the_simple_functions() -> None:
    names = ["How", "acquire", "acquire_lock", "acquire_lock_with_timeout", "release", "release_lock"]
    for module in (lockfast.simple, lockfast.simple.aio):
        assert sorted(module.__all__) == names
    for name in names[1:]:
        assert signature(getattr(lockfast.simple, name)) == signature(getattr(lockfast.simple.aio, name))


def test_names_of_the_redis_py_replacement() -> None:
    from lockfast.compat import redis_py

    assert sorted(redis_py.__all__) == ["AsyncLock", "Lock", "LockError", "LockNotOwnedError", "errors"]


def test_version() -> None:
    parts = lockfast.__version__.split(".")
    assert len(parts) == 3
    assert all(part.isdecimal() for part in parts)


def public_names(kind: type) -> dict[str, Any]:
    """The public attributes of a class, and the special methods that it documents."""
    protocols = {"__enter__", "__exit__", "__aenter__", "__aexit__", "__call__", "__bool__"}
    return {
        name: inspect.getattr_static(kind, name)
        for name in dir(kind)
        if not name.startswith("_") or (name in protocols and kind is not type)
    }


def signature(function: Callable[..., Any]) -> str:
    """The signature without annotations: callers rely on names, kinds and defaults."""
    bare = inspect.signature(function)
    parameters = [one.replace(annotation=one.empty) for one in bare.parameters.values()]
    return str(bare.replace(parameters=parameters, return_annotation=bare.empty))


SIGNATURES = {
    "connect": "(target=None, *, label='', store_timeout=10.0, observer=None, **options)",
    "Locks.lock": "(self, name, **options)",
    "Locks.guard": "(self, name, **options)",
    "Locks.rlock": "(self, name, **options)",
    "Locks.once": "(self, name, *, busy='skip', **options)",
    "Locks.update": "(self, key, change, *, attempts=100, timeout=10.0, adaptive=True)",
    "Locks.adopt": "(self, text, **options)",
    "Locks.guarantees": "(self)",
    "Locks.list": "(self, pattern='*', *, free=False)",
    "Locks.close": "(self)",
    "Lock": "(client, name, **options)",
    "Lock.acquire": "(self, blocking=True, timeout=None)",
    "Lock.release": "(self)",
    "Lock.locked": "(self)",
    "Lock.inspect": "(self)",
    "Lock.force_release": "(self, holder=None)",
    "Lock.__call__": "(self, function)",
    "Lease.release": "(self)",
    "Lease.renew": "(self, ttl=None)",
    "Lease.export": "(self)",
    "Lease.ensure_held": "(self)",
}


@pytest.mark.parametrize("module", [lockfast, lockfast.aio], ids=["threads", "asyncio"])
@pytest.mark.parametrize(("name", "wanted"), SIGNATURES.items(), ids=SIGNATURES)
def test_signatures(module: Any, name: str, wanted: str) -> None:
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    assert signature(found) == wanted


def test_signatures_of_fenced_writers() -> None:
    assert fenced.__all__ == ["file", "redis", "sql"]
    assert {name: signature(found) for name, found in public_names(fenced.file.FencedFile).items()} == {
        "change": "(self, change, missing=b'')",
        "read_bytes": "(self, missing=None)",
        "read_text": "(self, missing=None)",
        "write_bytes": "(self, data)",
        "write_text": "(self, text)",
    }
    for kind in (fenced.redis.Writer, fenced.redis.AsyncWriter):
        assert signature(kind) == "(client, fence, *, guard=None, keep=None)"
        assert {name: signature(found) for name, found in public_names(kind).items()} == {
            "call": "(self, command, key, *args)",
            "delete": "(self, key)",
            "get": "(self, key)",
            "hset": "(self, key, fields)",
            "set": "(self, key, value, *options)",
        }
    assert signature(fenced.file.FencedFile) == "(path, fence, *, patience=10.0)"
    assert signature(fenced.sql.Guard) == "(table='lockfast_fence')"
    assert signature(fenced.sql.Guard.check) == "(self, connection, name, fence)"
    assert signature(fenced.sql.update_row) == "(connection, table, where, values, fence, *, column='fence')"


def test_options_of_a_lock() -> None:
    assert set(options.NAMES) == set(options.LockOptions.__annotations__) | set(options.CommonOptions.__annotations__)
    defaults = options.checked(lockfast.Owner("host", 7), {})
    assert defaults._asdict() == {
        "ttl": 30.0,
        "timeout": None,
        "renew": True,
        "max_hold": None,
        "owner": "host:7:",
        "on_risk": None,
        "on_lost": None,
        "cancel_on_loss": True,
        "local_handoff": True,
    }


def test_attributes_of_a_lease() -> None:
    assert sorted(public_names(lockfast.Lease)) == [
        *("__bool__", "acknowledged", "downgrade", "ensure_held", "export", "fence", "holder", "inherited", "lost"),
        *("name", "reasserted", "release", "remaining", "renew", "state", "ttl"),
    ]
    assert sorted(public_names(type(lockfast.connect("memory://").lock("x").acquire(timeout=0).lost))) == [  # type: ignore[union-attr]
        "__bool__",
        "is_set",
        "wait",
    ]


@pytest.mark.parametrize("kind", [name for name in lockfast.aio.__all__ if name != "connect"])
def test_both_flavours_have_the_same_names(kind: str) -> None:
    sync, asynchronous = public_names(getattr(lockfast, kind)), public_names(getattr(lockfast.aio, kind))
    twins = {"__enter__": "__aenter__", "__exit__": "__aexit__"}
    assert sorted(twins.get(name, name) for name in sync) == sorted(asynchronous)
    for name, attribute in sync.items():
        if inspect.isfunction(attribute):
            assert signature(attribute) == signature(asynchronous[twins.get(name, name)]), name


def test_fields_of_inspected_locks() -> None:
    assert lockfast.LockInfo._fields == (*("name", "holders", "fence", "waiters", "waiting"),)
    assert lockfast.HolderInfo._fields == ("holder", "owner", "fence", "held_for", "ttl_left", "mode", "slots")
    assert lockfast.WaiterInfo._fields == ("holder", "owner", "waiting_for", "mode", "permits")
    assert lockfast.Owner._fields == ("host", "pid", "label")
    assert {state.name: state.value for state in lockfast.State} == {
        "HELD": "held",
        "AT_RISK": "at risk",
        "LOST": "lost",
        "RELEASED": "released",
    }


# Errors

TREE: dict[str, tuple[type, ...]] = {
    "LockError": (Exception,),
    "AcquireTimeout": (errors.LockError, TimeoutError),
    "LeaseLost": (errors.LockError,),
    "NotHeld": (errors.LockError, RuntimeError),
    "StaleFence": (errors.LockError,),
    "UpdateConflict": (errors.LockError,),
    "WouldDeadlock": (errors.LockError, RuntimeError),
    "ConfigurationError": (errors.LockError, ValueError),
    "StoreError": (errors.LockError,),
    "StoreUnavailable": (errors.StoreError, ConnectionError),
    "QuorumNotReached": (errors.StoreUnavailable,),
    "StoreRefused": (errors.StoreError, PermissionError),
    "StoreProtocolError": (errors.StoreError,),
}


def test_the_error_tree() -> None:
    found = {
        name: kind.__bases__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert found == TREE
    assert all(getattr(lockfast, name) is getattr(errors, name) for name in TREE)
    drawn = errors.__doc__ or ""
    assert all(name in drawn for name in TREE), "the docstring draws the tree"


ERRORS = [
    errors.LockError("text"),
    errors.AcquireTimeout("text", name="thing", timeout=2.5),
    errors.AcquireTimeout("text"),
    errors.LeaseLost("text", name="thing", fence=7),
    errors.LeaseLost("text"),
    errors.NotHeld("text"),
    errors.StaleFence("text", name="thing", fence=7, newest=8),
    errors.StaleFence("text"),
    errors.UpdateConflict("text", key="thing", attempts=3),
    errors.UpdateConflict("text"),
    errors.WouldDeadlock("text"),
    errors.ConfigurationError("text"),
    errors.StoreError("text"),
    errors.StoreUnavailable("text"),
    errors.StoreUnavailable("text", outcome=errors.Outcome.UNKNOWN),
    errors.QuorumNotReached("text", votes=(("redis://a:6379/0", "granted"),), outcome=errors.Outcome.UNKNOWN),
    errors.QuorumNotReached("text"),
    errors.StoreRefused("text"),
    errors.StoreProtocolError("text"),
]


def test_the_samples_contain_every_error() -> None:
    assert {type(error).__name__ for error in ERRORS} == set(TREE)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pickle(error: Exception, protocol: int) -> None:
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == "text"
        assert twin.args == error.args
        assert vars(twin) == vars(error)


def test_values_pickle() -> None:
    owner = lockfast.Owner("host", 7, "label")
    holder = lockfast.HolderInfo("holder", owner, 5, 1.5, 2.5)
    info = lockfast.LockInfo("thing", (holder,), 5, (lockfast.WaiterInfo("other", owner, 0.5),), 1)
    assert pickle.loads(pickle.dumps(info)) == info
    assert type(pickle.loads(pickle.dumps(owner))) is lockfast.Owner
    assert pickle.loads(pickle.dumps(errors.Outcome.UNKNOWN)) is errors.Outcome.UNKNOWN
    assert pickle.loads(pickle.dumps(lockfast.State.AT_RISK)) is lockfast.State.AT_RISK


# Imported modules


def loaded(program: str, *modules: str) -> list[str]:
    """Which of `modules` a new interpreter has loaded after `program`."""
    code = f"{program}\nimport sys\nprint(*[name for name in {modules!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


USE = "with locks.lock('thing', timeout=0) as lease: lease.ensure_held()\nlocks.close()"
LOADS = [
    ("import lockfast", ["redis", "valkey", "asyncio", "sqlite3", "inspect", "ssl", "subprocess"], []),
    (f"import lockfast; locks = lockfast.connect('memory://')\n{USE}", ["redis", "asyncio", "sqlite3"], []),
    ("import lockfast.aio; lockfast.aio.connect('memory://')", ["redis", "sqlite3", "asyncio"], ["asyncio"]),
    ("import lockfast; lockfast.connect('sqlite:///locks.db')", ["redis", "asyncio", "sqlite3"], ["sqlite3"]),
    ("import lockfast; lockfast.connect('redis://localhost')", ["sqlite3", "redis"], ["redis"]),
    ("from lockfast import fenced; fenced.file, fenced.redis, fenced.sql", ["redis", "sqlite3", "sqlalchemy"], []),
    ("import lockfast.testing", ["lupa", "hypothesis", "pytest"], []),
]


@pytest.mark.parametrize(("program", "watched", "wanted"), LOADS, ids=[program for program, *_ in LOADS])
def test_only_needed_modules_are_loaded(program: str, watched: list[str], wanted: list[str]) -> None:
    assert sorted(loaded(program, *watched)) == sorted(wanted)


# Passwords


@pytest.fixture(params=FLAVOURS)
def d(request: pytest.FixtureRequest) -> Driver:
    flavour: str = request.param
    return FLAVOURS[flavour]("", "")


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[Server]:
    """A server with a password, an account with all permissions, and one that may only read."""
    with Server("valkey9") as server:
        server.raw("ACL", "SETUSER", "app", "on", f">{PASSWORD}", "~*", "&*", "+@all")
        server.raw("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "&*", "+@read", "+@connection")
        server.raw("CONFIG", "SET", "requirepass", PASSWORD)
        yield server


def address(server: Server, user: str, password: str) -> str:
    return f"redis://{user}:{password}@{server.host}:{server.port}/0"


def report(error: BaseException) -> str:
    """All text of an error and its causes."""
    return "".join(traceback.format_exception(error)) + repr(error) + repr(error.__cause__) + repr(error.__context__)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return "".join(f"{record.getMessage()} {record.args} {record.exc_text}" for record in caplog.records)


def no_password(text: str) -> bool:
    return PASSWORD not in text and WRONG not in text


@scenario
async def test_the_right_password(d: Driver, guarded_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = d.open(address(guarded_server, "app", PASSWORD))
    lock = client.lock("thing")
    lease = await done(lock.acquire(timeout=0))
    assert lease is not None
    shown = f"{client!r} {client} {lock!r} {lock} {lease!r} {lease} {lease.lost!r} {await done(lock.inspect())}"
    await done(client.close())
    assert no_password(shown + f"{client!r}" + logged(caplog))


@pytest.mark.parametrize("user", ["app", "", "nosuch"])
@scenario
async def test_a_wrong_password(d: Driver, user: str, guarded_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = d.open(address(guarded_server, user, WRONG))
    with pytest.raises(lockfast.StoreRefused, match="does not accept this user name and password") as caught:
        await done(client.lock("thing").acquire(timeout=0))
    await done(client.close())
    assert no_password(report(caught.value) + logged(caplog) + f"{client!r}")


@scenario
async def test_a_missing_password(d: Driver, guarded_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = d.open(guarded_server.url)
    with pytest.raises(lockfast.StoreRefused, match="asks for a password"):
        await done(client.lock("thing").acquire(timeout=0))
    await done(client.close())


@scenario
async def test_an_account_without_permissions(
    d: Driver, guarded_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client = d.open(address(guarded_server, "reader", PASSWORD))
    with pytest.raises(lockfast.StoreRefused, match="may not do what a lock needs") as caught:
        await done(client.lock("thing").acquire(timeout=0))
    await done(client.close())
    assert no_password(report(caught.value) + logged(caplog))


@scenario
async def test_a_server_that_is_down(d: Driver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Server("valkey9") as server:
        url = address(server, "app", PASSWORD)
        server.kill()
        client = d.open(url)
        for timeout in (0, 0.1):
            with pytest.raises(lockfast.StoreUnavailable, match="No connection to the server") as caught:
                await done(client.lock("thing").acquire(timeout=timeout))
            assert caught.value.outcome is lockfast.Outcome.NOT_DONE
            assert no_password(report(caught.value))
        await done(client.close())
    assert no_password(logged(caplog) + f"{client!r}")


@pytest.mark.parametrize("make", ["locks", "lock", "lease", "semaphore"])
def test_pickling_says_what_to_do_instead(make: str) -> None:
    locks = lockfast.connect(f"memory://pickling-{make}")
    lease = locks.lock("y").acquire()
    things = {"locks": locks, "lock": locks.lock("x"), "lease": lease, "semaphore": locks.semaphore("z", 2)}
    with pytest.raises(TypeError, match=r"connect\(\) in the other process.*lease.export\(\)"):
        pickle.dumps(things[make])
