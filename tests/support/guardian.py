"""Ends the servers when the tests end, however they end.

One small process reads a pipe. The pipe closes when the process that runs the tests has gone, by kill −9
too, and the guardian then kills what it was told to watch. (PR_SET_PDEATHSIG would tie a server to the
*thread* that started it.)
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
    _tell(f"+{pid}")


def unwatch(pid: int) -> None:
    """Forget a process that was ended: its id may soon be another one's."""
    _tell(f"-{pid}")


def _tell(line: str) -> None:
    global _guardian
    with _lock:
        if _guardian is None:
            # A group of its own: an interrupt from the keyboard must not end the guardian first.
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
