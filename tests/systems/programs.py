"""Small programs in their own processes, to be stopped beyond their ttl and killed.

    python -m tests.systems.programs ROLE ARGUMENT…

A program prints a line at each point that a test waits for, and continues when it reads one.
"""

import sys
from collections.abc import Callable

import lockfast
from tests.contract.driver import FLAVOURS, Driver, held
from tests.keepalive import programs
from tests.keepalive.programs import say, told
from tests.systems.resources import FENCED, UNGUARDED


class Program(programs.Program):
    """A running program of this module."""

    module = "tests.systems.programs"


def run_a_job(flavour: str, url: str, name: str, ttl: str) -> None:
    """Run a job with an `at_least` of an hour until this process is killed."""
    driver = FLAVOURS[flavour]("", url)

    async def work(d: Driver) -> None:
        async with held(d.locks.once(name, at_least=3600, ttl=float(ttl))):
            say("running")
            told()

    driver.run(work(driver))


def read_and_write(url: str, kind: str, location: str, ttl: str) -> None:
    """Acquire the lock, read, be stopped beyond the ttl, and write nevertheless."""
    resource = {**FENCED, **UNGUARDED}[kind](location)
    with lockfast.connect(url) as locks:
        lease = locks.lock("file:9527", ttl=float(ttl)).acquire()
        assert lease is not None
        seen = resource.read(lease.fence)
        say("read", seen)
        told()
        try:
            resource.write(lease.fence, f"{seen}, and what came too late")
            say("written")
        except lockfast.StaleFence as refused:
            say("refused", refused.fence == lease.fence, refused.newest)


ROLES: dict[str, Callable[..., None]] = {role.__name__: role for role in (run_a_job, read_and_write)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
