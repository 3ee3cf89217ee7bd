"""Tests of the test support: servers, signals, and every fault of the proxy.

An absence is shown by order, never by waiting: a stream ends, or continues, without the lost frame.
"""

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.conversation import Conversation
from tests.support.proxy import FaultProxy
from tests.support.resp import ReplyError, Splitter, encode, parse
from tests.support.servers import Server, available, find, socket_folder
from tests.support.waiting import LONG, until
from tests.support.wire import WireClient

ROOT = Path(__file__).parents[1]


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[WireClient]:
    with WireClient(proxy.port) as client:
        yield client


def settle(proxy: FaultProxy) -> None:
    """Make a round trip on another connection; the proxy has then forwarded everything that it could."""
    with WireClient(proxy.port) as other:
        assert other.call("PING") == "PONG"


class TestFrames:
    REPLIES = (
        b"+OK\r\n:-7\r\n$-1\r\n$3\r\na\r\n\r\n*-1\r\n*2\r\n*1\r\n:1\r\n$0\r\n\r\n"
        b"_\r\n#t\r\n,1.5\r\n(12345678901234567890\r\n=7\r\ntxt:abc\r\n%1\r\n+k\r\n~1\r\n:2\r\n"
        b">2\r\n+message\r\n+hi\r\n|1\r\n+ttl\r\n:9\r\n:5\r\n"
    )

    def test_frames_survive_any_cut(self) -> None:
        whole = Splitter().feed(self.REPLIES)
        for cut in range(len(self.REPLIES)):
            splitter = Splitter()
            assert splitter.feed(self.REPLIES[:cut]) + splitter.feed(self.REPLIES[cut:]) == whole
        assert b"".join(frame.raw for frame in whole) == self.REPLIES
        assert [frame.value for frame in whole] == [
            *(b"OK", -7, None, b"a\r\n", None, [[1], b""], None, True, 1.5, 12345678901234567890),
            *(b"txt:abc", {b"k": [2]}, [b"message", b"hi"], 5),
        ]

    def test_error_replies(self) -> None:
        for raw in (b"-ERR no\r\n", b"!6\r\nERR no\r\n"):
            value, end = parse(raw)
            assert isinstance(value, ReplyError)
            assert (str(value), end) == ("ERR no", len(raw))

    def test_inline_requests(self) -> None:
        frames = Splitter(inline=True).feed(b"PING hi\r\n" + encode("GET", "k") + b"PI")
        assert [frame.value for frame in frames] == [[b"PING", b"hi"], [b"GET", b"k"]]


class TestConversation:
    @pytest.mark.parametrize("mark", [b"*", b">"], ids=["RESP2", "RESP3"])
    def test_confirmations_and_messages(self, mark: bytes) -> None:
        def answers(*parts: bytes) -> bytes | None:
            raw = mark + encode(*parts)[1:]
            asked = talk.answer(Splitter().feed(raw)[0])
            return asked.command if asked else None

        talk = Conversation()
        talk.request([b"SUBSCRIBE", b"a", b"b"], None)
        talk.request([b"UNSUBSCRIBE"], None)
        talk.request([b"PING"], None)
        assert answers(b"subscribe", b"a", b"1") == b"subscribe"
        assert answers(b"message", b"a", b"subscribe") is None
        assert answers(b"subscribe", b"b", b"2") == b"subscribe"
        assert answers(b"unsubscribe", b"b", b"1") == b"unsubscribe"
        assert answers(b"unsubscribe", b"a", b"0") == b"unsubscribe"
        ping = talk.answer(Splitter().feed(b"+PONG\r\n")[0])
        assert ping is not None
        assert ping.command == b"ping"


class TestServers:
    def test_every_kind_of_server_answers(self, any_server: Server) -> None:
        version = {"valkey9": "valkey_version:9", "redis62": "redis_version:6.2", "redis7": "redis_version:"}
        assert version[any_server.kind] in any_server.raw("INFO", "server")
        assert any_server.raw("SET", "n", 1) == "OK"
        assert any_server.raw("INCR", "n") == 2
        assert any_server.raw("MGET", "n", "none") == ["2", None]
        assert any_server.raw("DEBUG", "SLEEP", "0") == "OK"
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            any_server.raw("LPUSH", "n", "x")

    def test_shared_server_was_cleared(self, any_server: Server) -> None:
        assert any_server.raw("DBSIZE") == 0
        assert "incr" not in any_server.commands_processed()

    def test_commands_called_by_scripts_are_counted(self, any_server: Server) -> None:
        any_server.raw("EVAL", "redis.call('SET', KEYS[1], 1) return redis.call('GET', KEYS[1])", 1, "k")
        any_server.raw("GET", "k")
        counted = any_server.commands_processed()
        assert (counted["eval"], counted["set"], counted["get"]) == (1, 1, 2)

    def test_restart_keeps_the_port_and_loses_the_data(self, fresh_server: Server) -> None:
        fresh_server.raw("SET", "k", "v")
        before = fresh_server.pid, fresh_server.port
        fresh_server.restart()
        assert fresh_server.raw("GET", "k") is None
        assert fresh_server.pid != before[0]
        assert fresh_server.port == before[1]

    def test_killed_server_refuses_connections_and_keeps_its_port(self, fresh_server: Server) -> None:
        fresh_server.kill()
        with pytest.raises(ConnectionRefusedError):
            fresh_server.raw("PING")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((fresh_server.host, fresh_server.port))
        fresh_server.start()
        assert fresh_server.raw("PING") == "PONG"

    def test_paused_server_answers_after_it_resumes(self, fresh_server: Server) -> None:
        with WireClient(fresh_server.port) as client:
            fresh_server.pause()
            client.send("PING")
            state = Path(f"/proc/{fresh_server.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert state == "T"
            fresh_server.resume()
            assert client.receive() == "PONG"

    def test_paused_server_can_be_stopped(self, fresh_server: Server) -> None:
        fresh_server.pause()
        fresh_server.stop()
        with pytest.raises(RuntimeError, match="not running"):
            _ = fresh_server.pid
        assert "User requested shutdown" in fresh_server.log.read_text()

    def test_admin_connection_is_reopened(self, fresh_server: Server) -> None:
        admin = fresh_server.raw("CLIENT", "ID")
        with WireClient(fresh_server.port) as client:
            client.call("CLIENT", "KILL", "ID", admin)
            assert fresh_server.raw("CLIENT", "ID") != admin

    def test_unix_socket(self) -> None:
        if not available("valkey9"):
            pytest.skip("valkey9 is missing")
        with (
            socket_folder() as folder,
            Server(unix_socket=folder / "s.sock"),
            socket.socket(socket.AF_UNIX) as client,
        ):
            client.connect(str(folder / "s.sock"))
            client.sendall(encode("PING"))
            assert client.recv(100) == b"+PONG\r\n"

    def test_failed_start_shows_the_log(self) -> None:
        if not available("valkey9"):
            pytest.skip("valkey9 is missing")
        with (
            pytest.raises(RuntimeError, match=r"(?s)did not start.*no-such-option"),
            Server(args=["--no-such-option", "1"]),
        ):
            pass

    def test_unknown_kind(self) -> None:
        with pytest.raises(ValueError, match="redis62"):
            find("redis1")

    def test_server_ends_with_the_process_that_started_it(self) -> None:
        if not available("valkey9"):
            pytest.skip("valkey9 is missing")
        program = (
            "import threading, signal; from tests.support.servers import Server; server = Server();"
            "starter = threading.Thread(target=server.start); starter.start(); starter.join();"
            "print(server.raw('PING'), server.pid, server.directory, flush=True); signal.pause()"
        )
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            try:
                answer, pid, directory = owner.stdout.readline().rstrip("\n").split(" ", 2)
            finally:
                owner.send_signal(signal.SIGKILL)
        assert answer == "PONG"
        until(lambda: not is_running(int(pid)), "the server to end")
        (Path(directory) / "server.log").unlink()
        Path(directory).rmdir()


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie, which it may stay if nothing reaps orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)


class TestSignals:
    PROGRAM = """
import signal, subprocess, sys
for number in map(int, sys.argv[1:]):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
print(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)

from tests.support.signals import reset_for_children
reset_for_children()
signal.raise_signal(signal.SIGHUP)
print(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)
"""

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_children_get_defaults_and_the_parent_still_ignores(self) -> None:
        command = [sys.executable, "-c", self.PROGRAM, *(str(int(number)) for number in IGNORED)]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        ignored, blocked = (
            [int(mask, 16) for mask in re.findall(rf"{field}:\s*(\w+)", shown)] for field in ("SigIgn", "SigBlk")
        )
        planted = sum(1 << number - 1 for number in IGNORED)
        assert ignored[0] & planted == planted, "a child inherits ignored signals"
        assert blocked[0] == 1 << signal.SIGUSR2 - 1
        assert (ignored[1] & planted, blocked[1]) == (0, 0)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM], ids=str)
    def test_processes_under_test_have_defaults(self, number: signal.Signals) -> None:
        """However this run was started."""
        with subprocess.Popen(["sleep", "60"]) as process:
            process.send_signal(number)
            assert process.wait(LONG) == -number


class TestReplies:
    def test_without_rules_everything_is_forwarded(self, proxy: FaultProxy, client: WireClient) -> None:
        for command in (["SET", "k", "v" * 100_000], ["GET", "k"], ["PING"]):
            client.send(*command)
        assert client.receive() == "OK"
        assert client.receive() == "v" * 100_000
        assert client.receive() == "PONG"
        assert client.call("HELLO", "3")["proto"] == 3
        assert [args[0] for args in proxy.requests] == [b"SET", b"GET", b"PING", b"HELLO"]

    def test_dropped_reply_was_executed(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        rule = proxy.drop_reply(b"INCR")
        client.send("SET", "other", 1)
        client.send("INCR", "n")
        assert client.rest() == b"+OK\r\n"
        assert rule.hits == 1
        assert valkey.raw("GET", "n") == "1"
        with WireClient(proxy.port) as second:
            assert second.call("INCR", "n") == 2

    def test_dropped_reply_then_silence(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        rule = proxy.drop_reply(b"INCR", then="silence")
        client.send("INCR", "n")
        rule.wait()
        client.send("SET", "later", 1)
        until(lambda: valkey.raw("GET", "later"), "the later request to be executed")
        assert proxy.connections == 1
        proxy.close()
        assert client.rest() == b""
        assert valkey.raw("GET", "n") == "1"

    def test_dropped_reply_then_reset(self, proxy: FaultProxy, client: WireClient) -> None:
        proxy.drop_reply(b"PING", then="reset")
        client.send("PING")
        with pytest.raises(ConnectionResetError):
            client.rest()

    def test_half_reply(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        proxy.half_reply(b"GET")
        client.call("SET", "k", "12345678")
        client.send("GET", "k")
        assert client.rest() == b"$8\r\n123"
        assert valkey.raw("GET", "k") == "12345678"

    def test_held_reply_holds_later_replies(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        rule = proxy.hold_replies(b"INCR")
        client.send("INCR", "n")
        client.send("PING")
        rule.wait()
        assert valkey.raw("GET", "n") == "1"
        settle(proxy)
        assert not client.is_stale
        proxy.release_held()
        assert client.receive() == 1
        assert client.receive() == "PONG"
        assert client.call("INCR", "n") == 2

    def test_rule_is_bound_when_the_request_is_seen(self, proxy: FaultProxy, client: WireClient) -> None:
        rule = proxy.hold_replies(b"PING")
        client.send("PING")
        proxy.wait_for(b"PING")
        rule.release()  # the result does not depend on whether the reply has arrived
        assert client.receive() == "PONG"

    def test_delayed_reply(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        rule = proxy.delay_replies(b"INCR", 30.0)
        client.send("INCR", "n")
        rule.wait()
        assert valkey.raw("GET", "n") == "1"
        proxy.close()
        assert client.rest() == b""

    def test_short_delays_end(self, proxy: FaultProxy, client: WireClient) -> None:
        replies = proxy.delay_replies(b"PING", 0.02)
        requests = proxy.delay_requests(b"PING", 0.02)
        assert client.call("PING") == "PONG"
        assert (replies.hits, requests.hits) == (1, 1)
        proxy.clear()
        assert client.call("PING") == "PONG"
        assert (replies.hits, requests.hits) == (1, 1)


class TestRequests:
    def test_dropped_request_was_not_executed(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        proxy.drop_request(b"INCR")
        kept = proxy.drop_reply(b"INCR")  # not consumed by a request that never arrives
        client.send("INCR", "n")
        assert client.rest() == b""
        with WireClient(proxy.port) as second:
            second.send("INCR", "n")
            assert second.rest() == b""
        assert kept.hits == 1
        assert valkey.raw("GET", "n") == "1"
        assert proxy.requests == [[b"INCR", b"n"]] * 2

    def test_dropped_request_then_silence(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        rule = proxy.drop_request(b"INCR", then="silence")
        client.send("INCR", "n")
        client.send("SET", "later", 1)
        rule.wait()
        proxy.wait_for(b"SET")
        client.close()
        proxy.wait_connections(0)
        assert valkey.raw("MGET", "n", "later") == [None, None]

    def test_held_request_arrives_after_its_client_disconnected(
        self, proxy: FaultProxy, client: WireClient, valkey: Server
    ) -> None:
        rule = proxy.hold_requests(b"SET")
        client.send("SET", "k", "late")
        rule.wait()
        client.close()
        proxy.wait_connections(0)
        assert valkey.raw("GET", "k") is None
        rule.release()
        assert until(lambda: valkey.raw("GET", "k"), "the late request") == "late"

    def test_delayed_request(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        rule = proxy.delay_requests(lambda args: args[0] == b"SET", 30.0)
        assert client.call("GET", "SET") is None
        client.send("SET", "k", "v")
        rule.wait()
        proxy.close()
        assert client.rest() == b""
        assert valkey.raw("GET", "k") is None

    def test_wait_for_blocks_until_enough_requests(self, proxy: FaultProxy, client: WireClient) -> None:
        client.call("GET", "k:1")
        seen: list[Sequence[bytes]] = []

        def wait() -> None:
            proxy.wait_for(b"k:", count=2)
            seen.extend(proxy.requests)

        waiter = threading.Thread(target=wait)
        waiter.start()
        client.call("GET", "other")
        assert not seen
        client.call("GET", "k:2")
        waiter.join()
        assert seen == [[b"GET", b"k:1"], [b"GET", b"other"], [b"GET", b"k:2"]]

    def test_wait_for_times_out_and_shows_the_last_requests(self, proxy: FaultProxy, client: WireClient) -> None:
        client.call("ECHO", "something-else")
        with pytest.raises(TimeoutError, match="something-else"):
            proxy.wait_for(b"missing", timeout=0.01)

    def test_match_that_raises_is_reported(self, valkey: Server) -> None:
        proxy = FaultProxy(valkey.port)
        proxy.start()
        proxy.drop_reply(lambda args: args[1] == b"x")
        with WireClient(proxy.port) as client:
            client.send("PING")
            assert client.rest() == b""
        with pytest.raises(RuntimeError, match="proxy failed"):
            proxy.wait_for(b"never")
        with pytest.raises(RuntimeError, match="proxy failed"):
            proxy.close()


class TestPushes:
    @pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
    def subscriber(self, client: WireClient, request: pytest.FixtureRequest) -> WireClient:
        client.call("HELLO", request.param)
        assert client.call("SUBSCRIBE", "inbox") == ["subscribe", "inbox", 1]
        return client

    def test_dropped_push(self, proxy: FaultProxy, subscriber: WireClient, valkey: Server) -> None:
        rule = proxy.drop_pushes(b"two")
        for payload in ("one", "two", "two"):
            assert valkey.raw("PUBLISH", "inbox", payload) == 1
        assert subscriber.receive() == ["message", "inbox", "one"]
        assert subscriber.receive() == ["message", "inbox", "two"]
        assert rule.hits == 1
        subscriber.send("UNSUBSCRIBE")
        assert subscriber.receive() == ["unsubscribe", "inbox", 0]
        assert subscriber.call("PING") == "PONG"

    def test_held_push(self, proxy: FaultProxy, subscriber: WireClient, valkey: Server) -> None:
        rule = proxy.hold_pushes(b"inbox")
        valkey.raw("PUBLISH", "inbox", "one")
        rule.wait()
        settle(proxy)
        assert not subscriber.is_stale
        proxy.release_held()
        assert subscriber.receive() == ["message", "inbox", "one"]

    def test_reply_rules_do_not_apply_to_pushes(
        self, proxy: FaultProxy, subscriber: WireClient, valkey: Server
    ) -> None:
        proxy.drop_reply(b"")
        valkey.raw("PUBLISH", "inbox", "one")
        assert subscriber.receive() == ["message", "inbox", "one"]
        subscriber.send("PING")
        assert subscriber.rest() == b""


class TestConnections:
    def test_stalled_replies(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        proxy.stall("to_client")
        client.send("INCR", "n")
        proxy.wait_stalled()
        assert valkey.raw("GET", "n") == "1"
        assert not client.is_stale
        proxy.unstall()
        assert client.receive() == 1

    def test_stalled_requests(self, proxy: FaultProxy, client: WireClient, valkey: Server) -> None:
        proxy.stall()
        client.send("INCR", "n")
        proxy.wait_stalled()
        assert valkey.raw("GET", "n") is None
        proxy.unstall("to_server")
        until(lambda: valkey.raw("GET", "n"), "the request to be executed")
        proxy.wait_stalled()
        assert not client.is_stale
        proxy.unstall("to_client")
        assert client.receive() == 1

    def test_refused_connections(self, proxy: FaultProxy, client: WireClient) -> None:
        assert client.call("PING") == "PONG"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            WireClient(proxy.port)
        assert client.call("PING") == "PONG"
        proxy.accept()
        with WireClient(proxy.port) as second:
            assert second.call("PING") == "PONG"

    def test_reset_connections(self, proxy: FaultProxy, client: WireClient) -> None:
        assert client.call("PING") == "PONG"
        proxy.reset_connections()
        with pytest.raises(ConnectionResetError):
            client.rest()
        proxy.wait_connections(0)
        with WireClient(proxy.port) as second:
            assert second.call("PING") == "PONG"

    def test_connections_are_counted(self, proxy: FaultProxy) -> None:
        assert proxy.connections == 0
        with WireClient(proxy.port), WireClient(proxy.port):
            proxy.wait_connections(2)
        proxy.wait_connections(0)

    def test_killed_server_ends_the_connection(self, fresh_server: Server) -> None:
        with FaultProxy(fresh_server.port) as proxy, WireClient(proxy.port) as client:
            assert client.call("PING") == "PONG"
            fresh_server.kill()
            assert client.rest() == b""
            # The reset may come as early as in connect().
            with pytest.raises(ConnectionResetError), WireClient(proxy.port) as second:
                second.rest()
            fresh_server.start()
            with WireClient(proxy.port) as third:
                assert third.call("PING") == "PONG"

    def test_connection_accepted_during_close_is_closed(self, valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """A client connects while the proxy closes; its connection must not be forgotten."""
        paused, told = threading.Event(), threading.Event()

        def pause(_: Sequence[bytes]) -> bool:
            paused.set()
            assert told.wait(LONG)
            return False

        proxy = FaultProxy(valkey.port)
        proxy.start()
        post = proxy._post

        def post_and_tell(act: Callable[[], None]) -> None:
            post(act)
            told.set()

        monkeypatch.setattr(proxy, "_post", post_and_tell)
        proxy.drop_request(pause)
        with WireClient(proxy.port) as first:
            first.send("PING")
            assert paused.wait(LONG)
            with WireClient(proxy.port) as last:
                proxy.close()
                assert last.rest() == b""
