"""The id of the current boot. Times on the boot-time clock are comparable only within one boot.

A wrong "another boot" would void live grants, so nothing here is derived from the wall clock. If the system has no boot
id, or shifts this process's boot-time clock, the store refuses to work.
"""

from __future__ import annotations

from lockfast.stores.sqlite.location import refuse, text_of

LINUX_BOOT_ID = "/proc/sys/kernel/random/boot_id"
TIME_OFFSETS = "/proc/self/timens_offsets"


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
    for line in offsets.splitlines():
        clock, *offset = line.split()
        if clock == "boottime":
            return any(part != "0" for part in offset)
    return False


def _sysctl(key: str) -> str:
    """The value of `key` on macOS; empty if there is none."""
    import subprocess

    try:
        result = subprocess.run(["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
