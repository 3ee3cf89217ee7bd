"""The simulator: many clients for a long time, with faults chosen by a seed.

Every client runs the shipped code in a `Process`; the server is a `VirtualRedis` with the shipped Lua; a `Monitor`
checks the rules. The seed decides everything: the number of clients and locks, the mix and rates of faults, message
delays, and clock rates within the allowed drift. The same seed gives the same trace, hence the same digest, on every
run.

Two modes: in *safety* mode the faults last to the end; in *liveness* mode they stop, and every client that is alive
must then acquire a lock. A failing seed is shrunk: fewer clients, fewer faults, less time, as long as it fails.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple

from lockfast.core.lease_state import DRIFT
from lockfast.stores.redis.protocol.resp import Reader
from verify.monitor import Monitor, RuleBroken
from verify.process import Process, log_disabled
from verify.scenario import DEVICE, DOCUMENT, PER_CLIENT, PER_SERVER, Scenario, Workload
from verify.virtual_server import START_US, Replica, VirtualRedis

SEEDS_PER_STEP = 4
CATCH_UP = 0.3
"""Probability that the replica catches up before a request, so it usually lags by a few requests."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `digest` identifies the whole trace; `violation` is empty if no rule was broken."""

    scenario: Scenario
    digest: str
    events: int
    grants: int
    seconds: float
    violation: str = ""
    trace: tuple[str, ...] = ()


class Event(NamedTuple):
    """A future event; `incarnation` is the one of the client that it is for."""

    at: float
    order: int
    kind: str
    client: int
    incarnation: int
    detail: Any


class SimulatedClient:
    """One client: its current process, its clock, and the ends of its connections.

    A crashed client starts again as a new incarnation. `…_after` keep the messages on each connection in order.
    """

    def __init__(self, number: int, rate: float, offset: float) -> None:
        self.number = number
        self.rate = rate
        self.offset = offset
        self.process: Process | None = None
        self.incarnation = 0
        self.paused_until = 0.0
        self.sent = 0
        self.requests_after = 0.0
        self.replies_after = 0.0
        self.notifications_after = 0.0

    def local(self, now: float) -> float:
        return self.offset + now * self.rate

    def true(self, local: float) -> float:
        return (local - self.offset) / self.rate


class Simulation:
    """One run."""

    def __init__(self, scenario: Scenario, *, keep_trace: bool = False) -> None:
        self.scenario = scenario
        self._rng = random.Random(scenario.seed ^ 0x5EED)
        self._faults = dict(scenario.faults)
        self._server = VirtualRedis()
        self._replica = Replica(self._server)
        kinds = (DOCUMENT, DEVICE) if scenario.seed % 4 < 2 else (DEVICE, DOCUMENT)
        names = tuple(f"{kinds[n % 2]}{n}" for n in range(scenario.locks))
        self._monitor = Monitor(self._server, names)
        self._workload = Workload(names, scenario.ttl, scenario.seconds, scenario.liveness)
        self._queue: list[Event] = []
        self._order = 0
        self._now = 0.0
        self._events = 0
        self._digest = sha256()
        self._trace: list[str] | None = [] if keep_trace else None
        self._by_name: dict[str, SimulatedClient] = {}
        self._clients = [self._client(number) for number in range(scenario.clients)]
        # After the faults: a ttl for leftovers to expire, then time for every client, one by one.
        turns = scenario.clients * scenario.locks  # several locks may have to be acquired again
        self._end = scenario.seconds + 6 * scenario.ttl + 20 * turns * max(0.02, scenario.latency) + 15

    def _client(self, number: int) -> SimulatedClient:
        rate = 1.0 + (self._rng.uniform(-DRIFT, DRIFT) * 0.999 if self.scenario.drift else 0.0)
        return SimulatedClient(number, rate, self._rng.uniform(0, 1000))

    def run(self) -> Outcome:
        violation = ""
        with log_disabled():
            try:
                self._play()
            except RuleBroken as error:
                violation = str(error)
        return Outcome(
            scenario=self.scenario,
            digest=self._digest.hexdigest(),
            events=self._events,
            grants=self._monitor.grants,
            seconds=self._now,
            violation=violation,
            trace=tuple(self._trace or ()),
        )

    def _play(self) -> None:
        for client in self._clients:
            self._schedule(self._rng.uniform(0, 0.5), "start", client, None)
            for fault in PER_CLIENT:
                if fault in self._faults:
                    self._schedule(self._rng.expovariate(self._faults[fault]), fault, client, None)
        for fault in PER_SERVER:
            if fault in self._faults:
                self._schedule(self._rng.expovariate(self._faults[fault]), fault, self._clients[0], None)
        while self._queue and self._queue[0].at <= self._end:
            event = heapq.heappop(self._queue)
            self._now = event.at
            self._server.now_us = START_US + round(event.at * 1e6)
            self._events += 1
            self._handle(event)
        if self.scenario.liveness:
            self._check_liveness()

    def _check_liveness(self) -> None:
        waiting = [client.process.name for client in self._clients if client.process and 1 in client.process.tasks]
        if waiting:
            raise RuleBroken("LIVE", f"the faults stopped long ago, and {', '.join(waiting)} still wait")

    def _schedule(self, delay: float, kind: str, client: SimulatedClient, detail: Any) -> None:
        self._order += 1
        event = Event(self._now + delay, self._order, kind, client.number, client.incarnation, detail)
        heapq.heappush(self._queue, event)

    def _faults_over(self) -> bool:
        return self.scenario.liveness and self._now >= self.scenario.seconds

    def _handle(self, event: Event) -> None:
        client = self._clients[event.client]
        handler: Callable[[SimulatedClient, Event], None] = getattr(self, f"_{event.kind}")
        if event.kind in ("reply", "notification", "timer", "connection_lost", "inbox_lost", "cancel"):
            if event.incarnation != client.incarnation or client.process is None:
                return
            if self._now < client.paused_until:
                self._schedule(client.paused_until - self._now, event.kind, client, event.detail)
                return
        handler(client, event)

    def _note(self, *words: object) -> None:
        line = " ".join(map(str, words))
        self._digest.update(line.encode())
        if self._trace is not None:
            self._trace.append(line)

    # Clients.

    def _start(self, client: SimulatedClient, event: Event) -> None:
        client.incarnation += 1
        name = f"c{client.number}.{client.incarnation}-"
        rng = random.Random(self.scenario.seed * 1000 + client.number * 50 + client.incarnation)
        program = self._workload.program(rng, client.local)
        process = Process(name, program, listening=False, started=client.local(self._now))
        process.random_source = rng.random
        self._by_name[name] = client
        client.process = process
        client.sent = 0
        client.paused_until = 0.0
        process.start(client.local(self._now))
        self._acted(client, "starts")

    def _feed(self, client: SimulatedClient, kind: str, key: Any, value: Any = None) -> None:
        if client.process is not None:
            client.process.feed(kind, key, value, client.local(self._now))
            self._acted(client, kind)

    def _acted(self, client: SimulatedClient, what: str) -> None:
        """Send the new requests of a client, set its timers, and check its beliefs."""
        process = client.process
        if process is None:
            return
        self._note(f"{self._now:.6f}", process.name, what, *process.notes)
        process.notes.clear()
        for number, _, request in process.sent[client.sent :]:
            self._send(client, number, request)
        client.sent = len(process.sent)
        for number, task in process.tasks.items():
            wait = task.wait
            if wait is not None and wait.until is not None and wait is not task.timed:
                task.timed = wait
                delay = max(0.0, client.true(wait.until) - self._now) + 1e-9
                self._schedule(delay, "timer", client, (number, wait))
        self._monitor.check_client(process, client.local(self._now), client.local(client.paused_until))
        self._check_beliefs()

    def _check_beliefs(self) -> None:
        self._monitor.check_beliefs(lambda name: self._by_name[name].local(self._now))

    def _timer(self, client: SimulatedClient, event: Event) -> None:
        number, wait = event.detail
        task = client.process.tasks.get(number) if client.process else None
        if task is None or task.wait is not wait:
            return
        self._feed(client, "timer", number)

    def _reply(self, client: SimulatedClient, event: Event) -> None:
        self._feed(client, "reply", *event.detail)

    def _notification(self, client: SimulatedClient, event: Event) -> None:
        self._feed(client, "notification", *event.detail)

    def _connection_lost(self, client: SimulatedClient, event: Event) -> None:
        self._feed(client, "connection_lost", (event.detail,))

    def _inbox_lost(self, client: SimulatedClient, event: Event) -> None:
        self._feed(client, "inbox_lost", None)

    # Network and server.

    def _delay(self) -> float:
        return self._rng.expovariate(1 / self.scenario.latency)

    def _strikes(self, fault: str) -> bool:
        rate = self._faults.get(fault)
        return rate is not None and not self._faults_over() and self._rng.random() < rate

    def _send(self, client: SimulatedClient, number: int, request: bytes) -> None:
        if self._strikes("lose_request"):
            self._schedule(self._delay(), "connection_lost", client, number)
            return
        if self._strikes("lose_silently"):
            return
        if self._strikes("execute_late"):
            self._schedule(self._delay(), "connection_lost", client, number)
            self._schedule(self._rng.uniform(0, 2 * self.scenario.ttl), "execute", client, (number, request, False))
            return
        client.requests_after = max(client.requests_after + 1e-7, self._now + self._delay())
        self._schedule(client.requests_after - self._now, "execute", client, (number, request, True))

    def _execute(self, client: SimulatedClient, event: Event) -> None:
        number, request, answer = event.detail
        (words,) = Reader().feed(request)
        if words[0] == b"SUBSCRIBE":
            reply: Any = [b"subscribe", words[1], 1]
            if event.incarnation == client.incarnation and client.process is not None:
                self._server.subscribe(client.process.name, words[1])
        else:
            if "failover" in self._faults and self._rng.random() < CATCH_UP:
                self._replica.catch_up()  # this request may never reach the replica
            before = self._monitor.before_request(words)
            reply = self._server.run(words)
            self._monitor.after_request(before, words, reply)
        self._note(f"{self._now:.6f}", "server", client.number, words[1][:8], words[-1][:40], reply)
        self._notify()
        self._check_beliefs()
        if answer and event.incarnation == client.incarnation:
            if self._strikes("lose_reply"):
                self._schedule(self._delay(), "connection_lost", client, number)
            else:
                client.replies_after = max(client.replies_after + 1e-7, self._now + self._delay())
                self._schedule(client.replies_after - self._now, "reply", client, (number, reply))

    def _notify(self) -> None:
        """Send the published messages to their subscribers."""
        for message in self._server.messages:
            if self._strikes("lose_notification"):
                continue
            for client in self._clients:
                if client.process is not None and client.process.name == message.subscriber:
                    client.notifications_after = max(client.notifications_after + 1e-7, self._now + self._delay())
                    delay = client.notifications_after - self._now
                    self._schedule(delay, "notification", client, (message.channel, message.payload))
        self._server.messages.clear()

    # Faults at random times.

    def _recur(self, client: SimulatedClient, kind: str) -> bool:
        """Schedule the next fault of this kind; False if the faults are over."""
        if self._now >= self.scenario.seconds:
            return False
        self._schedule(self._rng.expovariate(self._faults[kind]), kind, client, None)
        return True

    def _crash(self, client: SimulatedClient, event: Event) -> None:
        if self._recur(client, "crash") and client.process is not None:
            self._note(f"{self._now:.6f}", client.process.name, "crashes")
            self._monitor.remove_client(client.process)
            self._schedule(self._rng.choice((0.0, self.scenario.ttl)), "disconnect", client, client.process.name)
            client.process = None
            client.incarnation += 1
            self._schedule(self._rng.uniform(0, self.scenario.ttl), "start", client, None)

    def _disconnect(self, client: SimulatedClient, event: Event) -> None:
        self._server.unsubscribe(event.detail)

    def _pause(self, client: SimulatedClient, event: Event) -> None:
        if self._recur(client, "pause"):
            client.paused_until = max(client.paused_until, self._now + self._rng.uniform(0, 2 * self.scenario.ttl))
            if client.process is not None:
                client.process.was_paused = True
            self._note(f"{self._now:.6f}", client.number, "is paused")

    def _cut_inbox(self, client: SimulatedClient, event: Event) -> None:
        if self._recur(client, "cut_inbox") and client.process is not None:
            self._server.unsubscribe(client.process.name)
            self._schedule(self._delay(), "inbox_lost", client, None)

    def _cancel(self, client: SimulatedClient, event: Event) -> None:
        if self._recur(client, "cancel") and client.process is not None and client.process.cancellable:
            self._feed(client, "cancel", None)

    def _restart(self, client: SimulatedClient, event: Event) -> None:
        if self._recur(client, "restart"):
            self._note(f"{self._now:.6f}", "server restarts")
            self._server.restart()
            self._break_connections()

    def _failover(self, client: SimulatedClient, event: Event) -> None:
        if self._recur(client, "failover"):
            self._note(f"{self._now:.6f}", "replica takes over", self._replica.lags)
            self._replica.take_over()
            self._break_connections()

    def _break_connections(self) -> None:
        """Break every connection; the store may have lost grants."""
        self._monitor.epoch += 1
        kept: list[Event] = []
        for event in self._queue:
            if event.kind != "execute":
                kept.append(event)
            elif event.detail[2]:  # a client waits for the reply
                kept.append(event._replace(kind="connection_lost", detail=event.detail[0]))
        self._queue = kept
        heapq.heapify(self._queue)
        for client in self._clients:
            self._schedule(self._delay(), "inbox_lost", client, None)


def simulate(seed: int) -> Outcome:
    """Run one seed."""
    return Simulation(Scenario.of_seed(seed)).run()


def shrink(scenario: Scenario) -> Outcome:
    """Find the simplest scenario that breaks the same rule, and run it with its trace."""
    rule = Simulation(scenario).run().violation.partition(":")[0]
    simpler: Scenario | None = scenario
    while simpler is not None:
        scenario = simpler
        candidates = _candidates(scenario)
        simpler = next((one for one in candidates if Simulation(one).run().violation.startswith(rule)), None)
    return Simulation(scenario, keep_trace=True).run()


def _candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Simpler scenarios, each with a few seeds: a simpler run draws other random numbers."""
    for simpler in scenario.simpler():
        for shift in range(SEEDS_PER_STEP):
            yield replace(simpler, seed=scenario.seed + shift)
