"""The simulator: many clients for a long time, with faults chosen by a seed.

Every client runs the shipped code in a `Process`; the server is a `VirtualRedis` with the shipped Lua; `Observer`
watches. A seed decides everything: how many clients and locks there are, which faults happen and how often (each run
has its own mix, so that some runs are calm in one respect and wild in another), how long messages take, how fast clocks
run (within the drift that is allowed for). The same seed gives the same trace, and so the same hash, on every run.

Two modes: in *safety* the faults go on to the end; in *liveness* they stop, and everybody who still lives must get the
lock once more. A seed that fails is shrunk: fewer clients, fewer faults, a shorter time, as long as it fails.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple

from lockfast.core.validity import DRIFT
from lockfast.stores.redis.protocol.resp import Reader
from verify.behaviours import Shared, life
from verify.observer import Broken, Observer
from verify.process import Process
from verify.quiet import quiet
from verify.scenario import PER_CLIENT, PER_SERVER, Setting, smaller
from verify.simulated_client import Seat
from verify.virtual_server import START_US, Replica, VirtualRedis

SEEDS_PER_STEP = 4
COPIED = 0.3
"""The share of requests before which the replica catches up: most of the time it lags by a few."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `digest` stands for the whole trace."""

    setting: Setting
    digest: str
    events: int
    grants: int
    seconds: float
    broken: str = ""
    trace: tuple[str, ...] = ()


class Event(NamedTuple):
    """Something that will happen; `life` is the life of the client it is meant for."""

    at: float
    order: int
    kind: str
    seat: int
    life: int
    detail: Any


class Simulation:
    """One run."""

    def __init__(self, setting: Setting, *, keep_trace: bool = False) -> None:
        self.setting = setting
        self._chance = random.Random(setting.seed ^ 0x5EED)
        self._faults = dict(setting.faults)
        self._server = VirtualRedis()
        self._replica = Replica(self._server)
        names = tuple(f"lock{n}" for n in range(setting.locks))
        self._observer = Observer(self._server, names)
        self._shared = Shared(names, setting.ttl, setting.seconds, setting.liveness)
        self._queue: list[Event] = []
        self._order = 0
        self._now = 0.0
        self._events = 0
        self._digest = sha256()
        self._trace: list[str] | None = [] if keep_trace else None
        self._by_name: dict[str, Seat] = {}
        self._seats = [self._seat(number) for number in range(setting.clients)]
        # After the faults everybody has its turn: a ttl for what was left behind, then one after the other.
        self._end = setting.seconds + (6 * setting.ttl + 20 * setting.clients * max(0.02, setting.latency) + 15)

    def _seat(self, number: int) -> Seat:
        rate = 1.0 + (self._chance.uniform(-DRIFT, DRIFT) * 0.999 if self.setting.drift else 0.0)
        return Seat(number, rate, self._chance.uniform(0, 1000))

    def run(self) -> Outcome:
        broken = ""
        with quiet():
            try:
                self._play()
            except Broken as error:
                broken = str(error)
        return Outcome(
            setting=self.setting,
            digest=self._digest.hexdigest(),
            events=self._events,
            grants=self._observer.grants,
            seconds=self._now,
            broken=broken,
            trace=tuple(self._trace or ()),
        )

    def _play(self) -> None:
        for seat in self._seats:
            self._later(self._chance.uniform(0, 0.5), "birth", seat, None)
            for fault in PER_CLIENT:
                if fault in self._faults:
                    self._later(self._chance.expovariate(self._faults[fault]), fault, seat, None)
        for fault in PER_SERVER:
            if fault in self._faults:
                self._later(self._chance.expovariate(self._faults[fault]), fault, self._seats[0], None)
        while self._queue and self._queue[0].at <= self._end:
            event = heapq.heappop(self._queue)
            self._now = event.at
            self._server.now_us = START_US + round(event.at * 1e6)
            self._events += 1
            self._happens(event)
        if self.setting.liveness:
            self._all_done()

    def _all_done(self) -> None:
        waiting = [seat.process.name for seat in self._seats if seat.process and 1 in seat.process.tasks]
        if waiting:
            raise Broken("LIVE", f"faults have long stopped, and {', '.join(waiting)} still wait")

    def _later(self, delay: float, kind: str, seat: Seat, detail: Any, life: int | None = None) -> None:
        self._order += 1
        at = self._now + delay
        heapq.heappush(
            self._queue, Event(at, self._order, kind, seat.number, seat.lives if life is None else life, detail)
        )

    def _calm(self) -> bool:
        return self.setting.liveness and self._now >= self.setting.seconds

    def _happens(self, event: Event) -> None:
        seat = self._seats[event.seat]
        handler: Callable[[Seat, Event], None] = getattr(self, f"_{event.kind}")
        if event.kind in ("reply", "push", "timer", "broken", "deaf", "cancel"):
            if event.life != seat.lives or seat.process is None:
                return
            if self._now < seat.stopped_until:
                self._later(seat.stopped_until - self._now, event.kind, seat, event.detail)
                return
        handler(seat, event)

    def _note(self, *words: object) -> None:
        line = " ".join(map(str, words))
        self._digest.update(line.encode())
        if self._trace is not None:
            self._trace.append(line)

    # What clients go through.

    def _birth(self, seat: Seat, event: Event) -> None:
        seat.lives += 1
        name = f"c{seat.number}.{seat.lives}-"
        chance = random.Random(self.setting.seed * 1000 + seat.number * 50 + seat.lives)
        process = Process(name, life(self._shared, chance, seat.local), listening=False, started=seat.local(self._now))
        process.chance = chance.random
        seat.process = self._alive(seat, process)
        seat.sent = 0
        seat.stopped_until = 0.0
        process.start(seat.local(self._now))
        self._acted(seat, "starts")

    def _alive(self, seat: Seat, process: Process) -> Process:
        self._by_name[process.name] = seat
        return process

    def _feed(self, seat: Seat, kind: str, key: Any, value: Any = None) -> None:
        if seat.process is not None:
            seat.process.feed(kind, key, value, seat.local(self._now))
            self._acted(seat, kind)

    def _acted(self, seat: Seat, what: str) -> None:
        """A client acted: send what it sent, set its timers, and see what it believes."""
        process = seat.process
        if process is None:
            return
        self._note(f"{self._now:.6f}", process.name, what, *process.notes)
        process.notes.clear()
        for number, _, request in process.sent[seat.sent :]:
            self._send(seat, number, request)
        seat.sent = len(process.sent)
        for number, task in process.tasks.items():
            wait = task.wait
            if wait is not None and wait.until is not None and wait is not task.timed:
                task.timed = wait
                self._later(max(0.0, seat.true(wait.until) - self._now) + 1e-9, "timer", seat, (number, wait))
        self._observer.look(process, seat.local(self._now), seat.local(seat.stopped_until))
        self._check()

    def _check(self) -> None:
        self._observer.check(lambda name: self._by_name[name].local(self._now))

    def _timer(self, seat: Seat, event: Event) -> None:
        number, wait = event.detail
        task = seat.process.tasks.get(number) if seat.process else None
        if task is None or task.wait is not wait:
            return
        self._feed(seat, "timer", number)

    def _reply(self, seat: Seat, event: Event) -> None:
        self._feed(seat, "reply", *event.detail)

    def _push(self, seat: Seat, event: Event) -> None:
        self._feed(seat, "push", *event.detail)

    def _broken(self, seat: Seat, event: Event) -> None:
        self._feed(seat, "broken", (event.detail,))

    def _deaf(self, seat: Seat, event: Event) -> None:
        self._feed(seat, "deaf", None)

    # The network and the server.

    def _delay(self) -> float:
        return self._chance.expovariate(1 / self.setting.latency)

    def _strikes(self, fault: str) -> bool:
        rate = self._faults.get(fault)
        return rate is not None and not self._calm() and self._chance.random() < rate

    def _send(self, seat: Seat, number: int, request: bytes) -> None:
        if self._strikes("lose_request"):
            self._later(self._delay(), "broken", seat, number)
            return
        if self._strikes("vanish"):
            return
        if self._strikes("late"):
            self._later(self._delay(), "broken", seat, number)
            self._later(self._chance.uniform(0, 2 * self.setting.ttl), "execute", seat, (number, request, False))
            return
        seat.arrives_after = max(seat.arrives_after + 1e-7, self._now + self._delay())
        self._later(seat.arrives_after - self._now, "execute", seat, (number, request, True))

    def _execute(self, seat: Seat, event: Event) -> None:
        number, request, answer = event.detail
        (words,) = Reader().feed(request)
        if words[0] == b"SUBSCRIBE":
            reply: Any = [b"subscribe", words[1], 1]
            if event.life == seat.lives and seat.process is not None:
                self._server.subscribe(seat.process.name, words[1])
        else:
            if "failover" in self._faults and self._chance.random() < COPIED:
                self._replica.catch_up()  # what comes now may never reach it
            before = self._observer.before()
            reply = self._server.run(words)
            self._observer.after(before, words)
        self._note(f"{self._now:.6f}", "server", seat.number, words[1][:8], words[-1][:40], reply)
        self._post()
        self._check()
        if answer and event.life == seat.lives:
            if self._strikes("lose_reply"):
                self._later(self._delay(), "broken", seat, number)
            else:
                seat.answers_after = max(seat.answers_after + 1e-7, self._now + self._delay())
                self._later(seat.answers_after - self._now, "reply", seat, (number, reply))

    def _post(self) -> None:
        """Send what was published to those who had subscribed."""
        for message in self._server.messages:
            if self._strikes("lose_push"):
                continue
            for seat in self._seats:
                if seat.process is not None and seat.process.name == message.subscriber:
                    seat.pushes_after = max(seat.pushes_after + 1e-7, self._now + self._delay())
                    self._later(seat.pushes_after - self._now, "push", seat, (message.channel, message.payload))
        self._server.messages.clear()

    # Faults that come by themselves.

    def _again(self, seat: Seat, kind: str) -> bool:
        """Set the next such fault; False when the faults are over."""
        if self._now >= self.setting.seconds:
            return False
        self._later(self._chance.expovariate(self._faults[kind]), kind, seat, None)
        return True

    def _crash(self, seat: Seat, event: Event) -> None:
        if self._again(seat, "crash") and seat.process is not None:
            self._note(f"{self._now:.6f}", seat.process.name, "crashes")
            self._observer.gone(seat.process)
            self._later(self._chance.choice((0.0, self.setting.ttl)), "notice", seat, seat.process.name)
            seat.process = None
            seat.lives += 1
            self._later(self._chance.uniform(0, self.setting.ttl), "birth", seat, None)

    def _notice(self, seat: Seat, event: Event) -> None:
        self._server.unsubscribe(event.detail)

    def _pause(self, seat: Seat, event: Event) -> None:
        if self._again(seat, "pause"):
            seat.stopped_until = max(seat.stopped_until, self._now + self._chance.uniform(0, 2 * self.setting.ttl))
            if seat.process is not None:
                seat.process.was_stopped = True
            self._note(f"{self._now:.6f}", seat.number, "is stopped")

    def _cut_inbox(self, seat: Seat, event: Event) -> None:
        if self._again(seat, "cut_inbox") and seat.process is not None:
            self._server.unsubscribe(seat.process.name)
            self._later(self._delay(), "deaf", seat, None)

    def _cancel(self, seat: Seat, event: Event) -> None:
        if self._again(seat, "cancel") and seat.process is not None and seat.process.cancellable:
            self._feed(seat, "cancel", None)

    def _restart(self, seat: Seat, event: Event) -> None:
        if self._again(seat, "restart"):
            self._note(f"{self._now:.6f}", "server restarts")
            self._server.restart()
            self._all_cut_off()

    def _failover(self, seat: Seat, event: Event) -> None:
        if self._again(seat, "failover"):
            self._note(f"{self._now:.6f}", "the replica takes over", self._replica.lags)
            self._replica.take_over()
            self._all_cut_off()

    def _all_cut_off(self) -> None:
        """Every connection is broken, and the store may have forgotten what it granted."""
        self._observer.epoch += 1
        kept: list[Event] = []
        for one in self._queue:
            if one.kind == "execute":
                self._broken_soon(one, kept)
            else:
                kept.append(one)
        self._queue = kept
        heapq.heapify(self._queue)
        for each in self._seats:
            self._later(self._delay(), "deaf", each, None)

    def _broken_soon(self, event: Event, kept: list[Event]) -> None:
        number, _, answer = event.detail
        if answer:
            kept.append(event._replace(kind="broken", detail=number))


def simulate(seed: int) -> Outcome:
    """One seed's run."""
    return Simulation(Setting.of_seed(seed)).run()


def shrunk(setting: Setting) -> Outcome:
    """The smallest setting found that breaks the same promise, run with its trace."""
    rule = Simulation(setting).run().broken.partition(":")[0]
    best: Setting | None = setting
    while best is not None:
        setting = best
        best = next((one for one in _candidates(setting) if Simulation(one).run().broken.startswith(rule)), None)
    return Simulation(setting, keep_trace=True).run()


def _candidates(setting: Setting) -> Iterator[Setting]:
    """Simpler settings; each with a few seeds, since a simpler run meets with other chances."""
    for simpler in smaller(setting):
        for shift in range(SEEDS_PER_STEP):
            yield replace(simpler, seed=setting.seed + shift)
