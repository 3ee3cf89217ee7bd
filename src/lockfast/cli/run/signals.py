"""Python's `signal` without its enumerations, which take longer to make than a short command to run."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

__all__ = ["signal"]
