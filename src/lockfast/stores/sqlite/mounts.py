"""Which file systems can carry the lock file: those that one kernel alone writes.

SQLite's write-ahead log is coordinated through shared memory and advisory locks. Over a network, or between a
virtual machine and its host, neither is dependable: two machines could both hold a lock. The table of mounts says
what a folder lies on; a system without that table (macOS) is not checked.
"""

from __future__ import annotations

MOUNT_TABLE = "/proc/self/mountinfo"

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


def refuse_shared(folder: str, table: str | None = None) -> None:
    """An error when `folder` lies on a file system that other machines write too."""
    kind = file_system(folder, _mount_table() if table is None else table)
    if is_shared(kind):
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(
            f"{folder} lies on {kind}, a file system that other machines share. SQLite's locks cannot be trusted "
            "there, so two machines could hold the same lock. Choose a folder on a local disk, or use a Redis or "
            "Valkey server, which serves many machines."
        )


def is_shared(kind: str) -> bool:
    """Whether more than one kernel may write a file system of that kind.

    >>> is_shared("nfs4"), is_shared("fuse.sshfs"), is_shared("fuse.fuse-overlayfs"), is_shared("ext4")
    (True, True, False, False)
    """
    first, _, through_fuse = kind.partition(".")
    return first in SHARED_BETWEEN_MACHINES or through_fuse in SHARED_THROUGH_FUSE


def file_system(folder: str, table: str) -> str:
    """The kind of file system that an absolute `folder` lies on, by a `mountinfo` table; empty when unknown.

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
        point = _plain(fields[4])
        # A later mount at the same point covers the earlier one.
        if len(point) >= longest and _is_below(folder, point):
            found, longest = right.split(" ", 1)[0], len(point)
    return found


def _plain(point: str) -> str:
    """A mount point as it is; the table writes a space as its octal number.

    >>> _plain(r"/media/my\\040disk")
    '/media/my disk'
    """
    first, *rest = point.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _is_below(folder: str, point: str) -> bool:
    return folder == point or folder.startswith(point.rstrip("/") + "/")


def _mount_table() -> str:
    try:
        with open(MOUNT_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            return table.read()
    except OSError:
        return ""
