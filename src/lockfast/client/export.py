"""An exported lease as text: what `lease.export()` gives and `locks.adopt()` takes."""

from __future__ import annotations

import base64
import binascii
import json
from typing import NamedTuple

from lockfast.errors import ConfigurationError
from lockfast.values import holder_id, lock_name, seconds


class Exported(NamedTuple):
    """What an exported lease consists of."""

    name: str
    holder: str
    ttl: float

    def encode(self) -> str:
        packed = json.dumps([self.name, self.holder, self.ttl], separators=(",", ":")).encode()
        return "hf1." + base64.urlsafe_b64encode(packed).decode()

    @classmethod
    def decode(cls, text: str) -> Exported:
        try:
            version, _, packed = text.partition(".")
            name, holder, ttl = json.loads(base64.b64decode(packed, altchars=b"-_", validate=True))
            if version != "hf1":
                raise ValueError(version)
        except (AttributeError, TypeError, ValueError, RecursionError, binascii.Error):
            raise ConfigurationError(
                "This is no exported lease. Give locks.adopt() the very string that lease.export() returned."
            ) from None
        return cls(lock_name(name), holder_id(holder), seconds(ttl, "ttl"))
