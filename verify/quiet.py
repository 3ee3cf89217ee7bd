"""Silence for the client's own log while faults are the order of the day."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """The client warns of lost leases, which is what happens here all the time."""
    log = logging.getLogger("lockfast")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
