"""Where the lock file lives, and who may touch it.

Rules kept here: files are 0600 and folders that we make 0700; a folder in which somebody else could replace the
file is refused. The lock file is never opened here once it exists: POSIX drops all locks that a process has on a
file when it closes any descriptor of it, and those locks are SQLite's.
"""

from __future__ import annotations

import os
from pathlib import Path

from lockfast.errors import ConfigurationError, StoreError, StoreRefused
from lockfast.stores.sqlite.checks import check_file, check_folder


def default_path() -> Path:
    """The user's own lock file: in `$XDG_STATE_HOME/lockfast`, else in `~/.local/state/lockfast`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if state.startswith("/"):  # a relative one is to be ignored, as the XDG specification says
        return Path(state) / "lockfast" / "locks.db"
    try:
        return Path.home() / ".local" / "state" / "lockfast" / "locks.db"
    except RuntimeError as error:
        raise ConfigurationError(
            "There is no home folder to keep the lock file in. Set XDG_STATE_HOME, or give a path such as "
            "sqlite:////var/lib/app/locks.db."
        ) from error


def checked_path(path: str | os.PathLike[str]) -> str:
    """`path` made absolute, so that a later chdir changes nothing; an error when it can name no file."""
    text = os.fspath(path)
    if not hasattr(os, "mkfifo"):
        raise ConfigurationError(
            "The embedded store needs named pipes, which this system (Windows) has not. Use a Redis or Valkey "
            "server, or memory:// within one process."
        )
    if not text or "\0" in text or text.endswith("/"):
        raise ConfigurationError("The embedded store needs the path of a file, such as sqlite:///locks.db.")
    if text == ":memory:":
        raise ConfigurationError("Locks of one process alone are at memory://, not in an SQLite memory file.")
    return str(Path(text).absolute())


def prepare(path: str) -> Path:
    """Make folder and file if they are missing, check them, and return the path without symbolic links."""
    real = Path(path).resolve()
    folder = real.parent
    try:
        make_private(folder)
        check_folder(str(folder))
        _make_file(real)
        check_file(str(real))
    except PermissionError as error:
        raise StoreRefused(
            f"The lock file {real} cannot be made or used: {error.strerror}. Give this user the right to write in "
            "its folder, or choose another path."
        ) from error
    except OSError as error:
        raise StoreError(
            f"The lock file {real} cannot be made: {error.strerror}. Nothing was changed; see to the disk, or "
            "choose another path."
        ) from error
    return real


def make_private(folder: Path) -> None:
    """Make `folder` and what is missing above it, for this user alone."""
    missing = []
    above = folder
    while not above.exists():
        missing.append(above)
        above = above.parent
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def _make_file(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return  # another's, or ours from before; SQLite gives its side files the same mode
