"""What a run of the simulator is made of: chosen by a seed, and made smaller when it fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

RATES = {
    # Per message: lost with the connection, its answer lost, both without a word, executed after it was given up.
    "lose_request": 0.03,
    "lose_reply": 0.03,
    "vanish": 0.01,
    "late": 0.02,
    "lose_push": 0.1,
    # Per second and client.
    "crash": 0.02,
    "pause": 0.05,
    "cut_inbox": 0.05,
    "cancel": 0.2,
    # Per second.
    "restart": 0.02,
    "failover": 0.05,
}
PER_CLIENT = ("crash", "pause", "cut_inbox", "cancel")
PER_SERVER = ("restart", "failover")


@dataclass(frozen=True)
class Setting:
    """What a run is made of; `faults` maps the name of a fault to its rate."""

    seed: int
    clients: int
    locks: int
    seconds: float
    ttl: float
    latency: float
    faults: tuple[tuple[str, float], ...]
    drift: bool
    liveness: bool

    @classmethod
    def of_seed(cls, seed: int) -> Setting:
        chance = random.Random(seed)
        faults = tuple(
            (name, rate * chance.choice((0.3, 1.0, 3.0))) for name, rate in RATES.items() if chance.random() < 0.4
        )
        return cls(
            seed=seed,
            clients=chance.choice((5, 5, 6, 7, 8, 10, 20)),
            locks=chance.choice((1, 1, 2, 3)),
            seconds=chance.choice((3.0, 6.0, 12.0)),
            ttl=chance.choice((0.5, 2.0, 5.0)),
            latency=chance.choice((0.0002, 0.002, 0.02, 0.1)),
            faults=faults,
            drift=chance.random() < 0.5,
            liveness=seed % 2 == 1,
        )


def smaller(setting: Setting) -> Iterator[Setting]:
    """Settings that are simpler by one step."""
    if setting.clients > 1:
        yield replace(setting, clients=max(1, setting.clients // 2))
        yield replace(setting, clients=setting.clients - 1)
    for fault in setting.faults:
        yield replace(setting, faults=tuple(one for one in setting.faults if one != fault))
    if setting.locks > 1:
        yield replace(setting, locks=1)
    if setting.drift:
        yield replace(setting, drift=False)
    if setting.seconds > 0.5:
        yield replace(setting, seconds=setting.seconds / 2)
