"""Live roles between honest peers and one that sends whatever its types allow.

    recorded    what a role receives in a simulated run, with the time of each message
    replayed    to a role of its own, in that order; its timers fire, its work runs
    in between  messages made of recorded ones, some of whose fields have any legal value

Whoever gives orders is honest (supervisor, coordinator), and so are the other copy of a shard and
the shards of a coordinator: the key of a worker or a replica proves another name. An error that is
no RemoteProtocolError, an end, or an answer that cannot be sent is a finding.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, TypeVar

import msgspec
import numpy as np
from msgspec import inspect

from distbelief.core import formatting
from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import other_copy
from distbelief.protocol import Message, StartSync, role as rl
from distbelief.protocol.codec import Codec
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.supervisor.supervisor import Supervisor
from distbelief.worker.member import JobMember
from experiments.fuzz.inputs import Sampler, numbers


S = TypeVar("S", bound=msgspec.Struct)

N_BETWEEN: Final = 4  # hostile messages after each honest one
N_BETWEEN_LOOKS: Final = 500
TRUSTED: Final = frozenset({rl.SUPERVISOR, rl.USER, rl.Address("coordinator")})
STRANGERS: Final = tuple(map(rl.Address, ("replica-7", "worker-9-x", "host-5f", "evaluator")))
INCARNATIONS: Final = (0, 1, 1, 1, 2, (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Letter:
    at: rl.Seconds
    event: rl.Received


class Recorder:
    """What each role receives, in its first incarnation."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.letters: dict[rl.Address, list[Letter]] = {}
        self._cluster = cluster
        cluster.observe(self._see)

    def _see(self, handled: HandledEvent) -> None:
        event = handled.event
        if isinstance(event, rl.Received) and handled.incarnation == 1:
            # What is lent changes later.
            message = _copied(event.message)
            kept = msgspec.structs.replace(event, message=message)
            self.letters.setdefault(handled.name, []).append(Letter(self._cluster.now, kept))


def _copied(message: Message) -> Message:
    arrays = {
        name: value.copy()
        for name in message.__struct_fields__
        if isinstance(value := getattr(message, name), np.ndarray)
    }
    return msgspec.structs.replace(message, **arrays) if arrays else message


def bare(builder: Builder) -> rl.Role:
    role = builder(PrivateMemory())
    return role._build() if isinstance(role, JobMember) else role


@cache
def _fields(kind: type) -> Mapping[str, tuple[inspect.Type, bool]]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {
        one.name: (one.type, not one.required and one.default is one.default_factory)
        for one in info.fields
    }


class Forger:
    """Makes messages of recorded ones."""

    def __init__(self, letters: Sequence[Letter], *, name: str, seed: int) -> None:
        self._draw = numbers(seed)
        self._sampler = Sampler(self._draw)
        by_kind: dict[type, list[rl.Received]] = {}
        for letter in letters:
            by_kind.setdefault(type(letter.event.message), []).append(letter.event)
        self._of_kind = list(by_kind.values())
        senders = {letter.event.sender for letter in letters}
        self._other = other_copy(name) if name.startswith("shard-") else None
        shards = {one for one in senders if one.startswith("shard-")}
        self._trusted = TRUSTED | (shards if name == "coordinator" else frozenset())
        self._senders = sorted(senders - self._trusted) or list(STRANGERS)

    def _pick(self, choices: Sequence[rl.Address]) -> rl.Address:
        return choices[self._draw(len(choices))]

    def next(self) -> rl.Received:
        draw = self._draw
        same_kind = self._of_kind[draw(len(self._of_kind))]
        event = same_kind[draw(len(same_kind))]
        message = event.message
        for _ in range(draw(3)):
            message = self._changed(message)
        sender, incarnation = event.sender, event.incarnation
        is_order = sender in self._trusted or (sender == self._other and type(message) is StartSync)
        if is_order or draw(2):
            sender = self._pick(STRANGERS)
        elif not draw(4):
            sender = self._pick(self._senders)
        if not draw(8):
            incarnation = INCARNATIONS[draw(len(INCARNATIONS))]
        return rl.Received(sender=sender, incarnation=incarnation, message=message)

    def _changed(self, struct: S) -> S:
        fields = _fields(type(struct))
        if not fields:
            return struct
        name = list(fields)[self._draw(len(fields))]
        kind, may_be_unset = fields[name]
        value: object = getattr(struct, name)
        if may_be_unset and not self._draw(4):
            value = msgspec.UNSET
        elif isinstance(value, msgspec.Struct) and self._draw(2):
            value = self._changed(value)
        else:
            value = self._sampler.value(kind)
        return msgspec.structs.replace(struct, **{name: value})


@dataclass(kw_only=True)
class Life:
    """One role, and what it has asked of its driver."""

    name: rl.Address
    role: rl.Role
    now: rl.Seconds = 0.0
    timers: dict[str, rl.Seconds] = field(default_factory=dict)
    work: deque[rl.Compute | rl.Persist] = field(default_factory=deque)
    n_refused: int = 0
    ended: rl.Exit | None = None
    finding: str | None = None

    def __post_init__(self) -> None:
        self._codec = Codec(run="hostile")
        self.deliver(rl.Started(incarnation=1))

    @property
    def is_over(self) -> bool:
        return self.ended is not None or self.finding is not None

    def deliver(self, event: rl.Event) -> None:
        if self.is_over:
            return
        try:
            rl.check_accepted(self.role, event, name=self.name)
            for action in self.role.handle(event, self.now):
                self._perform(action)
        except RemoteProtocolError:
            self.n_refused += 1
        except Exception as error:  # noqa: BLE001 -- whatever ends a role
            self.finding = f"{type(error).__name__}: {error!s:.300} by {event!r:.900}"

    def _perform(self, action: rl.Action) -> None:
        match action:
            case rl.Send(message=message):
                self._codec.encode(message, sender=self.name, incarnation=1)
            case rl.SetTimer(name=name, at=at):
                assert at == at, "NaN is no time"  # noqa: PLR0124
                self.timers[name] = at
            case rl.CancelTimer(name=name):
                self.timers.pop(name, None)
            case rl.Compute() | rl.Persist():
                self.work.append(action)
            case rl.Report(text=text):
                assert text == formatting.plain(text), repr(text)
            case rl.Exit():
                self.ended = action
            case _:
                pass

    def work_once(self) -> None:
        if self.work:
            done = self.work.popleft()
            if isinstance(done, rl.Persist):
                self.deliver(rl.Persisted(label=done.snapshot.label))
                return
            result, error = None, None
            try:
                result = done.work()
            except Exception as failed:  # noqa: BLE001 -- the role gets it
                error = failed
            self.deliver(rl.Computed(name=done.name, result=result, error=error))

    def wait_until(self, at: rl.Seconds) -> None:
        while not self.is_over and (due := [n for n, t in self.timers.items() if t <= at]):
            first = min(due, key=self.timers.__getitem__)
            self.now = max(self.now, self.timers.pop(first))
            self.deliver(rl.TimerFired(name=first))
        self.now = max(self.now, at)

    def look(self) -> None:
        """What the driver tells others now and then."""
        _, counters = self.role.status()
        msgspec.json.encode(dict(counters))
        if isinstance(self.role, Supervisor):
            msgspec.json.encode(self.role.view(self.now))
            assert self.role.view(self.now).samples < 1 << 63


class Trial:
    """Lives of one role, one after the other, until so many hostile messages were sent."""

    def __init__(
        self, name: str, letters: Sequence[Letter], build: Callable[[], rl.Role], *, seed: int
    ) -> None:
        self.name = rl.Address(name)
        self._build = build
        accepted = build().accepts
        self._letters = [one for one in letters if type(one.event.message) in accepted]
        assert self._letters, name
        self._forger = Forger(self._letters, name=name, seed=seed)
        self.n = self.n_refused = self.n_lives = self.n_ended = 0
        self.findings: list[str] = []

    def run(self, n: int) -> None:
        while self.n < n and not self.findings:
            life = Life(name=self.name, role=self._build())
            self.n_lives += 1
            for letter in self._events(life):
                life.deliver(letter)
                if self.n >= n or life.is_over:
                    break
            self.n_refused += life.n_refused
            if life.finding is not None:
                self.findings.append(life.finding)
            elif life.ended is not None:
                self.n_ended += 1
                if isinstance(life.role, Shard):
                    self.findings.append(f"{life.ended}")

    def _events(self, life: Life) -> Iterator[rl.Event]:
        life.work_once()
        for letter in self._letters:
            life.wait_until(letter.at)
            yield letter.event
            for k in range(N_BETWEEN):
                yield self._forger.next()
                self.n += 1
                if k % 2:
                    life.work_once()
                if self.n % N_BETWEEN_LOOKS == 0:
                    life.look()
