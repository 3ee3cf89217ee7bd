"""Kills the servers when the test process ends in any way, SIGKILL included.

A small process reads a pipe, which closes when the test process ends, and then kills every watched process.
(PR_SET_PDEATHSIG would bind a server to the *thread* that started it.)
"""

import atexit
import subprocess
import sys
import threading

SCRIPT = """
import os, signal, sys
watched = set()
for line in sys.stdin:
    (watched.add if line[0] == "+" else watched.discard)(int(line[1:]))
for pid in watched:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""

_lock = threading.Lock()
_guardian: subprocess.Popen[str] | None = None


def watch(pid: int) -> None:
    _send(f"+{pid}")


def unwatch(pid: int) -> None:
    """Stop watching an ended process; its id may be reused soon."""
    _send(f"-{pid}")


def _send(line: str) -> None:
    global _guardian
    with _lock:
        if _guardian is None:
            # Its own process group: Ctrl-C must not end the guardian before the tests.
            _guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", SCRIPT],
                stdin=subprocess.PIPE,
                text=True,
                process_group=0,
            )
            atexit.register(_close, _guardian)
        if _guardian.stdin is None:
            raise RuntimeError("the guardian has no pipe")
        _guardian.stdin.write(line + "\n")
        _guardian.stdin.flush()


def _close(guardian: subprocess.Popen[str]) -> None:
    guardian.communicate()
