"""A pseudo-terminal with a program on it."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios

from tests.support.waiting import until

LONGEST = 50.0
"""Seconds to wait for output that is due within one; the machine may be busy."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Pty:
    """A program in the foreground of its own terminal."""

    def __init__(self, command: list[str], environment: dict[str, str], size: tuple[int, int] = (24, 100)) -> None:
        self._master, slave = os.openpty()
        self.text = ""
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        start = f"import os; os.login_tty(0); os.execvp({command[0]!r}, {command!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        os.set_blocking(self._master, False)

    def read(self) -> str:
        """Return all output so far."""
        try:
            while new := os.read(self._master, 65536):
                self.text += new.decode("utf-8", "replace")
        except OSError:
            pass  # no output for now, or the end
        return self.text

    @property
    def plain(self) -> str:
        return ESCAPES.sub("", self.read()).replace("\r\n", "\n")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def await_text(self, text: str, after: int = 0) -> None:
        until(lambda: text in self.read()[after:], f"{text!r} on the terminal, which shows {self.text!r}", LONGEST)

    def end(self) -> int:
        def over() -> bool:
            self.read()  # a full buffer would block the program
            return self.process.poll() is not None

        until(over, "the program to end", LONGEST)
        self.read()
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
