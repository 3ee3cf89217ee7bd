"""What a folder and a file must be like to be trusted with locks; loads nothing that a healthy one does not need."""

from __future__ import annotations

import os
import stat

from lockfast.stores.sqlite.mounts import refuse_shared

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_folder(folder: str) -> None:
    """An error when the lock file cannot lie in `folder`, which must be its real path."""
    status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(f"{folder} is no folder, so the lock file cannot lie in it.")
    if status.st_mode & OTHERS_WRITE or status.st_uid not in (0, os.geteuid()):
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(
            f"Other users can write in {folder}, so they could replace the lock file. Make it this user's alone "
            f"(chmod go-w {folder}), or choose a folder that is."
        )
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(13, f"no right to write in {folder}")
    refuse_shared(folder)


def check_file(path: str) -> None:
    """An error when `path` cannot be the lock file of this user."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(f"{path} is no regular file, so it cannot hold locks. Choose another path.")
    if status.st_uid != os.geteuid():
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(
            f"The lock file {path} belongs to another user. Processes share an embedded store only as the same "
            "user; run them so, or use a Redis or Valkey server."
        )
    if status.st_mode & OTHERS:
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(
            f"Other users can open the lock file {path}. If that was not meant, run chmod 600 on it."
        )
