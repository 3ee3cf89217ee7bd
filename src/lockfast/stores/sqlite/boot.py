"""Which boot of the machine this is: the boot-time clock means something only within one.

Rules kept here: a wrong "it is another boot" would void living grants, so nothing is derived from the wall clock;
where the system does not tell its boots apart, or shows this process a shifted clock, the store refuses to work.
"""

from __future__ import annotations

LINUX_BOOT_ID = "/proc/sys/kernel/random/boot_id"
TIME_OFFSETS = "/proc/self/timens_offsets"


def boot_id() -> str:
    """A name for this boot that no other has."""
    boot = _text(LINUX_BOOT_ID).strip() or _ask_sysctl("kern.bootsessionuuid")
    if not boot:
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(
            "This system does not tell its boots apart, so the embedded store could not know which locks are "
            "from before a restart. Use a Redis or Valkey server instead."
        )
    if shifted(_text(TIME_OFFSETS)):  # nothing in it on a kernel without time namespaces
        from lockfast.errors import ConfigurationError

        raise ConfigurationError(
            "This process runs in a time namespace whose boot-time clock is shifted, so it would disagree with "
            "others on when a lock expires. Use a Redis or Valkey server, or run it without a time namespace."
        )
    return boot


def shifted(offsets: str) -> bool:
    """Whether a `timens_offsets` table moves the boot-time clock.

    >>> shifted("monotonic           0         0\\nboottime            0         0\\n")
    False
    >>> shifted("boottime       86400         0")
    True
    """
    for line in offsets.splitlines():
        clock, *offset = line.split()
        if clock == "boottime":
            return any(part != "0" for part in offset)
    return False


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _ask_sysctl(key: str) -> str:
    """What macOS calls `key`; empty where there is no such thing."""
    import subprocess

    try:
        asked = subprocess.run(["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()
