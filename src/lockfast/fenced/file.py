"""A file that refuses late writers: read, change and write it under a lock.

Rules:

- The greatest fence seen is stored in a small file next to it (`9527.txt.fence`). A smaller fence may neither read nor
  write.
- A reader sees the old file or the new one, never a part: the new one is written and synced under another name, then
  renamed.
- Check and rename happen under a `flock` on the fence file, which is held for microseconds. If its holder is stopped
  just then, the others give up after `patience` with `StoreUnavailable`; none writes unchecked.
- A crash between the fence and the rename leaves the old file and the new fence: only that write is lost.

Not guaranteed: protection from writers that do not use this class; on a network file system, more than its `flock` and
`rename` guarantee.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from lockfast.errors import StoreProtocolError, StoreUnavailable, shown
from lockfast.fenced import Fenced, fence_of, refused
from lockfast.values import Seconds, seconds

DIGITS = 20  # length of the fence file, always the same: one write within one disk sector replaces the content
POLL = 0.002


class FencedFile:
    """One file under one fence; make a new object for each lease.

    >>> import lockfast
    >>> locks = lockfast.connect("memory://")
    >>> with locks.lock("file:9527") as lease:
    ...     page = FencedFile("9527.txt", lease)
    ...     page.write_text(page.read_text(missing="") + "one more line")
    ...     page.read_text()
    'one more line'
    """

    def __init__(self, path: str | os.PathLike[str], fence: Fenced | int, *, patience: Seconds = 10.0) -> None:
        given = Path(path)
        self._shown = str(given)
        self._fence = fence_of(fence)
        self._patience = seconds(patience, "patience")
        # Resolve links: rename must replace the file itself, and all its names share one fence.
        self._path = given.resolve()
        self._guard = self._path.with_name(f"{self._path.name}.fence")

    def read_bytes(self, missing: bytes | None = None) -> bytes:
        """The content. If the file does not exist, `missing`, else FileNotFoundError."""
        with self._checked():
            pass
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            if missing is None:
                raise
            return missing

    def read_text(self, missing: str | None = None) -> str:
        """The content, as UTF-8."""
        return self.read_bytes(None if missing is None else missing.encode()).decode()

    def write_bytes(self, data: bytes) -> None:
        """Replace the file atomically, or raise `StaleFence` and change nothing."""
        draft = self._path.with_name(f".{self._path.name}.{token_hex(8)}.draft")
        try:
            with draft.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):  # a new file gets the default mode
                shutil.copymode(self._path, draft)
            with self._checked():
                draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)
        # Sync the folder too: the rename must survive a power failure.
        fd = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_text(self, text: str) -> None:
        """Replace the file atomically, as UTF-8."""
        self.write_bytes(text.encode())

    def change(self, change: Callable[[bytes], bytes], missing: bytes = b"") -> bytes:
        """Read, change and write; return the new content."""
        data = change(self.read_bytes(missing))
        self.write_bytes(data)
        return data

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Inside the block, this process alone has the `flock`, and its fence is the greatest so far."""
        fd = os.open(self._guard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock(fd)
            newest = self._newest(os.pread(fd, DIGITS + 2, 0))
            if self._fence < newest:
                raise refused(self._shown, self._fence, newest)
            if self._fence > newest:
                os.pwrite(fd, b"%0*d\n" % (DIGITS, self._fence), 0)
                os.fsync(fd)
            yield
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        give_up_at = time.monotonic() + self._patience
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() >= give_up_at:
                raise StoreUnavailable(
                    f"Another process has locked the fence of the file {shown(self._shown)} for too long and may be "
                    "stopped; nothing was read or written. Try again, or end that process."
                )
            time.sleep(POLL)

    def _newest(self, text: bytes) -> int:
        if not text:
            return 0
        if len(text) != DIGITS + 1 or not text[:DIGITS].isdigit():
            raise StoreProtocolError(
                f"The file {shown(str(self._guard))} should contain a fence, but contains {shown(text)}; nothing was "
                "read or written. Find out which program wrote to it. Without this file, late writes are accepted."
            )
        return int(text)

    def __repr__(self) -> str:
        return f"<FencedFile {shown(self._shown)}, fence {self._fence}>"
