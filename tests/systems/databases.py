"""A PostgreSQL server for the whole run, from the package pgserver."""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support import guardian
from tests.support.servers import socket_folder


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yield its address in libpq form."""
    for package in ("pgserver", "psycopg"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"PostgreSQL is missing: it needs the package {package}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a dependency warns if XDG_RUNTIME_DIR is not set
        from pgserver.postgres_server import get_server
    with socket_folder() as folder:  # pg_ctl splits the path at spaces
        server = get_server(folder, cleanup_mode="stop")
        pid = server.get_pid() or 0
        guardian.watch(pid)
        try:
            yield str(server.get_uri())
        finally:
            server.cleanup()
            guardian.unwatch(pid)
