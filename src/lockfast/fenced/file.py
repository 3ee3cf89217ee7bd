"""A file that refuses late writers: read, change, write under a lock, and replaced in one step.

Rules kept here:

- The greatest fence seen stands in a small file next to it (`9527.txt.fence`). Who comes with a smaller one may neither
  read nor write; who reads raises it, so that no older holder can write between a read and the write that follows.
- A reader sees the old file or the new one, never a part: the new one is written and synced beside it, then renamed.
- Check and rename are one step, under an operating-system lock on the fence file. It is held for microseconds, but a
  process that is stopped just then stops the others, who give up after `patience` with `StoreUnavailable`: nobody
  writes on a guess.
- A crash between the fence and the rename leaves the old file and the new fence: nothing is lost but the write.

Not guaranteed: anything against writers that do not come through here, and, on a network file system, more than its
`flock` and `rename` give; run this where the file lies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from lockfast.errors import StoreProtocolError, StoreUnavailable
from lockfast.fenced.fences import Fenced, fence_of, refused
from lockfast.values import Seconds, seconds, shown

DIGITS = 20
"""Characters of the fence file: always as many, so that it is overwritten in one write within one disk sector."""
PAUSE = 0.002


class FencedFile:
    """One file under one fence; make one for each time that the lock was got.

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
        # Through links: what is replaced must be the file itself, and all its names must have one fence.
        self._path = given.resolve()
        self._guard = self._path.with_name(f"{self._path.name}.fence")

    def read_bytes(self, missing: bytes | None = None) -> bytes:
        """What the file holds; `missing` if it is not there, or FileNotFoundError."""
        with self._raised():
            pass
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            if missing is None:
                raise
            return missing

    def read_text(self, missing: str | None = None) -> str:
        """What the file holds, as UTF-8."""
        return self.read_bytes(None if missing is None else missing.encode()).decode()

    def write_bytes(self, data: bytes) -> None:
        """Replace the file in one step, or raise `StaleFence` and change nothing."""
        draft = self._path.with_name(f".{self._path.name}.{token_hex(8)}.draft")
        try:
            self._write_draft(draft, data)
            with self._raised():
                draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(self._path.parent)

    def write_text(self, text: str) -> None:
        """Replace the file in one step, as UTF-8."""
        self.write_bytes(text.encode())

    def change(self, change: Callable[[bytes], bytes], missing: bytes = b"") -> bytes:
        """Read, change, write; what was written."""
        data = change(self.read_bytes(missing))
        self.write_bytes(data)
        return data

    def _write_draft(self, draft: Path, data: bytes) -> None:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            shutil.copymode(self._path, draft)
        except FileNotFoundError:
            pass  # a new file has the mode that new files have

    @contextmanager
    def _raised(self) -> Iterator[None]:
        """While the block runs nobody else is in one, and our fence is the greatest so far."""
        number = os.open(self._guard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock(number)
            newest = self._newest(os.pread(number, DIGITS + 2, 0))
            if self._fence < newest:
                raise refused(self._shown, self._fence, newest)
            if self._fence > newest:
                os.pwrite(number, b"%0*d\n" % (DIGITS, self._fence), 0)
                os.fsync(number)
            yield
        finally:
            os.close(number)

    def _lock(self, number: int) -> None:
        give_up_at = time.monotonic() + self._patience
        while True:
            try:
                return fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() >= give_up_at:
                raise StoreUnavailable(
                    f"The fence of the file {shown(self._shown)} is locked by a process that does not go on (it may be "
                    "stopped), so nothing was read or written. Try again, or end that process."
                )
            time.sleep(PAUSE)

    def _newest(self, text: bytes) -> int:
        if not text:
            return 0
        if len(text) != DIGITS + 1 or not text[:DIGITS].isdigit():
            raise StoreProtocolError(
                f"The file {shown(str(self._guard))} should hold a fence, and holds {shown(text)}: nothing was read or "
                "written. Find out what wrote to it; removing it forgets which writers are late."
            )
        return int(text)

    def __repr__(self) -> str:
        return f"<FencedFile {shown(self._shown)}, fence {self._fence}>"


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut."""
    number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
