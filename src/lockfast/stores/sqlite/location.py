"""Where the lock file lies, whether it is safe there, and which boot of the machine this is.

Rules:

- Files are 0600, and folders that this module creates are 0700. A folder where another user could replace the file is
  refused.
- An existing lock file is never opened here: when a process closes any descriptor of a file, POSIX drops all locks that
  the process has on it, SQLite's included.
- Only one kernel may write the file system. SQLite's write-ahead log needs shared memory and advisory locks; over a
  network, or between a virtual machine and its host, two machines could both hold a lock. A system without a mount
  table (macOS) is not checked.
- Times on the boot-time clock are comparable only within one boot. A wrong "another boot" would void live grants, so
  the boot id never depends on the wall clock, and a system without one or with a shifted boot-time clock is refused.
- Import only cheap modules: `lockfast run` runs these checks before a command that may take a millisecond.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

GROUP_OR_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
GROUP_OR_OTHERS = stat.S_IRWXG | stat.S_IRWXO
MOUNT_TABLE = "/proc/self/mountinfo"
LINUX_BOOT_ID = "/proc/sys/kernel/random/boot_id"
TIME_OFFSETS = "/proc/self/timens_offsets"

SHARED_BETWEEN_MACHINES = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fhgfs", "gfs2", "glusterfs", "gpfs",
    "ibrix", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb", "smb2",
    "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
})  # fmt: skip
SHARED_THROUGH_FUSE = frozenset({
    "beegfs", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "curlftpfs", "davfs", "davfs2", "gcsfuse",
    "glusterfs", "goofys", "grpcfuse", "hdfs", "juicefs", "lizardfs", "mfs", "moosefs", "mountpoint-s3",
    "osxfs", "rclone", "s3fs", "seaweedfs", "smbnetfs", "sshfs", "vmhgfs-fuse",
})  # fmt: skip


def refuse(message: str) -> NoReturn:
    """Raise `ConfigurationError`, imported only now."""
    from lockfast.errors import ConfigurationError

    raise ConfigurationError(message)


def default_path() -> str:
    """The user's own lock file: `$XDG_STATE_HOME/lockfast/locks.db`, else below `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):  # the XDG specification says to ignore a relative one
        home = os.path.expanduser("~")
        if home.startswith("~"):
            refuse(
                "There is no home folder for the lock file. Nothing was locked. Set XDG_STATE_HOME, or give a path "
                "such as sqlite:////var/lib/app/locks.db."
            )
        state = f"{home}/.local/state"
    return f"{state}/lockfast/locks.db"


def checked_path(path: str | os.PathLike[str]) -> str:
    """Make `path` absolute, so that a later chdir has no effect, or raise if it cannot name a file."""
    text = os.fspath(path)
    if not hasattr(os, "mkfifo"):
        refuse(
            "The embedded store needs named pipes, which this system (Windows) lacks. Use a Redis or Valkey server, or "
            "memory:// within one process."
        )
    if not text or "\0" in text or text.endswith("/"):
        refuse("The embedded store needs the path of a file, such as sqlite:///locks.db.")
    if text == ":memory:":
        refuse("An SQLite memory file cannot be shared. For locks within one process, use memory://.")
    return os.path.join(os.getcwd(), text)


def prepare(path: str) -> str:
    """Create the folder and the file if missing, check both, and return the path without symbolic links."""
    from lockfast.errors import StoreError, StoreRefused

    real = os.path.realpath(path)
    try:
        make_private(os.path.dirname(real))
        check_folder(os.path.dirname(real))
        try:
            # SQLite gives its -wal and -shm files the same mode.
            os.close(os.open(real, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            pass
        check_file(real)
    except PermissionError as error:
        raise StoreRefused(
            f"The lock file {real} cannot be created or used: {error.strerror}. Nothing was locked. Give this user the "
            "right to write in its folder, or choose another path."
        ) from error
    except OSError as error:
        raise StoreError(
            f"The lock file {real} cannot be created: {error.strerror}. Nothing was locked. Check the disk, or choose "
            "another path."
        ) from error
    return real


def make_private(folder: str) -> None:
    """Create `folder` and its missing parents, for this user alone."""
    if not os.path.exists(folder):
        make_private(os.path.dirname(folder))
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass  # another process created it first


def check_folder(folder: str) -> None:
    """Raise unless the lock file may lie in `folder`, a path without symbolic links."""
    status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        refuse(f"{folder} is not a folder, so the lock file cannot lie in it. Choose another path.")
    if status.st_mode & GROUP_OR_OTHERS_WRITE or status.st_uid not in (0, os.geteuid()):
        refuse(
            f"Other users can write in {folder}, so they could replace the lock file. Restrict it to this user "
            f"(chmod go-w {folder}), or choose a private folder."
        )
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(13, f"no right to write in {folder}")
    refuse_shared(folder)


def check_file(path: str) -> None:
    """Raise unless `path` can be the lock file of this user."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        refuse(f"{path} is not a regular file, so it cannot hold locks. Choose another path.")
    if status.st_uid != os.geteuid():
        refuse(
            f"The lock file {path} belongs to another user. Only processes of one user can share an embedded store. "
            "Run them as the same user, or use a Redis or Valkey server."
        )
    if status.st_mode & GROUP_OR_OTHERS:
        refuse(f"Other users can open the lock file {path}, so they could change locks. Run chmod 600 on it.")


def refuse_shared(folder: str, table: str | None = None) -> None:
    """Raise if `folder` lies on a file system that other machines can write."""
    kind = file_system(folder, text_of(MOUNT_TABLE) if table is None else table)
    if is_shared(kind):
        refuse(
            f"{folder} lies on {kind}, a file system that other machines share. SQLite's locks are not reliable there, "
            "so two machines could hold the same lock. Choose a folder on a local disk, or use a Redis or Valkey "
            "server, which serves many machines."
        )


def is_shared(kind: str) -> bool:
    """Whether more than one kernel may write a file system of that kind.

    >>> is_shared("nfs4"), is_shared("fuse.sshfs"), is_shared("fuse.fuse-overlayfs"), is_shared("ext4")
    (True, True, False, False)
    """
    first, _, through_fuse = kind.partition(".")
    return first in SHARED_BETWEEN_MACHINES or through_fuse in SHARED_THROUGH_FUSE


def file_system(folder: str, table: str) -> str:
    """The kind of file system of an absolute `folder`, from a `mountinfo` table; empty if unknown.

    >>> table = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\\n2 1 0:40 / /home rw,nosuid shared:2 - nfs4 filer:/home rw"
    >>> file_system("/home/ada/state", table), file_system("/homes", table)
    ('nfs4', 'ext4')
    """
    found, longest = "", -1
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = _unescaped(fields[4])
        # A later mount at the same point covers the earlier one.
        if len(point) >= longest and (folder == point or folder.startswith(point.rstrip("/") + "/")):
            found, longest = right.split(" ", 1)[0], len(point)
    return found


def _unescaped(point: str) -> str:
    """Decode the octal escapes of a mount point.

    >>> _unescaped(r"/media/my\\040disk")
    '/media/my disk'
    """
    first, *rest = point.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def text_of(path: str) -> str:
    """The text of a file of the kernel; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def boot_id() -> str:
    """Return an id that no other boot of this machine has."""
    boot = text_of(LINUX_BOOT_ID).strip() or _sysctl("kern.bootsessionuuid")
    if not boot:
        refuse(
            "This system has no boot id, so the embedded store cannot recognise locks from before a restart. Nothing "
            "was locked. Use a Redis or Valkey server instead."
        )
    if is_shifted(text_of(TIME_OFFSETS)):  # empty on a kernel without time namespaces
        refuse(
            "This process runs in a time namespace with a shifted boot-time clock, so it would disagree with other "
            "processes on when a lock expires. Nothing was locked. Use a Redis or Valkey server, or run the process "
            "without a time namespace."
        )
    return boot


def is_shifted(offsets: str) -> bool:
    """Whether a `timens_offsets` table moves the boot-time clock.

    >>> is_shifted("monotonic           0         0\\nboottime            0         0\\n")
    False
    >>> is_shifted("boottime       86400         0")
    True
    """
    rows = [line.split() for line in offsets.splitlines()]
    return any(row[0] == "boottime" and row[1:] != ["0", "0"] for row in rows)


def _sysctl(key: str) -> str:
    """The value of `key` on macOS; empty if there is none."""
    import subprocess

    try:
        result = subprocess.run(["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
