"""Every way to connect that a client library offers."""

import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from redis._parsers import _AsyncRESP2Parser, _AsyncRESP3Parser, _RESP2Parser, _RESP3Parser

import lockfast
from lockfast import StoreRefused
from tests.conftest import require
from tests.support.servers import Server, available, socket_folder
from tests.traps.flavours import Client, Flavour
from tests.traps.observation import await_queue, traces

PYTHON_PARSERS = {
    ("threads", 2): _RESP2Parser,
    ("threads", 3): _RESP3Parser,
    ("asyncio", 2): _AsyncRESP2Parser,
    ("asyncio", 3): _AsyncRESP3Parser,
}


def check_everything(first: Client, second: Client, server: Server) -> None:
    """Acquire, wait, hand off, renew, inspect, adopt and release with these clients."""
    lease = first.acquire("report", ttl=5)
    assert server.raw("GET", "report") == lease.holder
    waiting = second.acquiring("report", ttl=5)
    await_queue(server, "report", 1)
    first.renew(lease)
    info = first.inspect("report")
    assert (info.holder, info.fence, info.waiting) == (lease.holder, lease.fence, 1)
    assert first.release(lease) is True
    successor = waiting.result(20)
    assert successor.fence > lease.fence
    adopted = first.adopt(second.do(successor.export))
    assert adopted.fence > successor.fence
    assert first.release(adopted) is True
    assert traces(server, "report") == []


def redis_py_client(flavour: Flavour, url: str, **settings: Any) -> Any:
    pool = flavour.redis_module.ConnectionPool.from_url(url, **settings)
    return flavour.redis_module.Redis(connection_pool=pool)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode_responses", [False, True], ids=["bytes", "text"])
class TestSettings:
    def test_redis_py_without_hiredis(
        self, flavour: Flavour, valkey: Server, protocol: int, decode_responses: bool
    ) -> None:
        settings = {
            "protocol": protocol,
            "decode_responses": decode_responses,
            "parser_class": PYTHON_PARSERS[flavour.name, protocol],
        }
        first, second = (flavour.connect(redis_py_client(flavour, valkey.url, **settings)) for _ in range(2))
        check_everything(first, second, valkey)

    def test_redis_py_with_hiredis(
        self, flavour: Flavour, valkey: Server, protocol: int, decode_responses: bool
    ) -> None:
        if not find_spec("hiredis"):
            pytest.skip("hiredis is missing")
        settings = {"protocol": protocol, "decode_responses": decode_responses}
        first, second = (flavour.connect(redis_py_client(flavour, valkey.url, **settings)) for _ in range(2))
        check_everything(first, second, valkey)

    def test_valkey_py(self, flavour: Flavour, valkey: Server, protocol: int, decode_responses: bool) -> None:
        valkey_py = pytest.importorskip("valkey" if flavour.name == "threads" else "valkey.asyncio")
        settings = {"protocol": protocol, "decode_responses": decode_responses}
        first, second = (flavour.connect(valkey_py.Valkey.from_url(valkey.url, **settings)) for _ in range(2))
        check_everything(first, second, valkey)


def test_every_server(flavour: Flavour, any_server: Server) -> None:
    check_everything(flavour.connect(any_server.url), flavour.connect(any_server.url), any_server)


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_urls(flavour: Flavour, valkey: Server, scheme: str) -> None:
    url = f"{scheme}://{valkey.host}:{valkey.port}/0"
    check_everything(flavour.connect(url), flavour.connect(url), valkey)


def test_another_database(flavour: Flavour, valkey: Server) -> None:
    url = valkey.url.removesuffix("0") + "3"
    lease = flavour.connect(url).acquire("report")
    assert traces(valkey, "report") == []
    other = flavour.connect(url)
    assert other.try_acquire("report") is None
    assert other.inspect("report").holder == lease.holder


def test_client_name_and_pool_are_not_changed(flavour: Flavour, valkey: Server) -> None:
    given = redis_py_client(flavour, valkey.url, client_name=f"billing-{flavour.name}", max_connections=1)
    client = flavour.connect(given).warm_up_inbox()
    listed = valkey.raw("CLIENT", "LIST")
    assert listed.count(f"name=billing-{flavour.name}") == 2
    assert client.do(given.ping) is True  # lockfast uses connections outside the pool, which has only one
    client.do(given.connection_pool.disconnect)


def test_unix_socket(flavour: Flavour) -> None:
    require("valkey9")
    with socket_folder() as folder, Server(unix_socket=(path := folder / "s.sock")) as server:
        first, second = (flavour.connect(f"unix://{path}") for _ in range(2))
        check_everything(first, second, server)
        first.close()
        second.close()


@pytest.fixture(scope="module")
def protected() -> Iterator[Server]:
    require("valkey9")
    with Server() as server:
        server.raw("ACL", "SETUSER", "locker", "on", ">p@ss:w/rd", "~*", "&*", "+@all")
        server.raw("CONFIG", "SET", "requirepass", "se cret")  # the admin connection stays authenticated
        yield server


class TestCredentials:
    @pytest.mark.parametrize("login", [":se%20cret", "default:se%20cret", "locker:p%40ss%3Aw%2Frd"])
    def test_in_the_url(self, flavour: Flavour, protected: Server, login: str) -> None:
        url = f"redis://{login}@{protected.host}:{protected.port}/0"
        first, second = flavour.connect(url), flavour.connect(url)
        check_everything(first, second, protected)
        assert "cret" not in repr(first.locks)
        first.close()
        second.close()

    @pytest.mark.parametrize("login", ["", ":wrong-one@", "nobody:wrong-one@"])
    def test_that_are_wrong(self, flavour: Flavour, protected: Server, login: str) -> None:
        client = flavour.connect(f"redis://{login}{protected.host}:{protected.port}/0")
        for options in ({"blocking": False}, {"timeout": 5}, {}):
            with pytest.raises(StoreRefused) as refused:
                client.acquire("report", **options)
            assert "wrong-one" not in str(refused.value)
        assert traces(protected, "report") == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing; it makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@pytest.fixture(scope="module")
def secure(certificate: tuple[Path, Path]) -> Iterator[tuple[Server, int]]:
    if not available("redis7"):
        pytest.skip("a redis-server with TLS is missing")
    key, public = certificate
    with Server("redis7") as probe:
        port = probe.port
    options = ["--tls-port", str(port), "--tls-cert-file", str(public), "--tls-key-file", str(key)]
    with Server("redis7", args=[*options, "--tls-ca-cert-file", str(public), "--tls-auth-clients", "no"]) as server:
        yield server, port


class TestTls:
    """With a self-signed certificate. Debian's Redis has TLS; the Valkey wheel has not."""

    def test_verified(self, flavour: Flavour, secure: tuple[Server, int], certificate: tuple[Path, Path]) -> None:
        server, port = secure
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate[1]}"
        first, second = flavour.connect(url), flavour.connect(url)
        for _ in range(20):
            check_everything(first, second, server)

    def test_failed_connection_keeps_its_tls_layer(
        self, secure: tuple[Server, int], certificate: tuple[Path, Path]
    ) -> None:
        """Another thread may still read from it, and must not take encrypted bytes for a reply."""
        with lockfast.connect(f"rediss://127.0.0.1:{secure[1]}/0?ssl_ca_certs={certificate[1]}") as locks:
            with locks.lock("report"):
                pass
            store: Any = locks.session.store
            link = store.wire._link
            link.fail("closed by the test")
            assert link.socket._sslobj is not None
            with locks.lock("report"):  # over a new connection
                pass

    def test_unknown_certificate_is_refused(self, flavour: Flavour, secure: tuple[Server, int]) -> None:
        client = flavour.connect(f"rediss://127.0.0.1:{secure[1]}/0", store_timeout=2)
        with pytest.raises(ConnectionError, match=r"(?i)certificate"):
            client.acquire("report")
        assert traces(secure[0], "report") == []
