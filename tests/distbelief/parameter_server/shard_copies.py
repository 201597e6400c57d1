"""One shard copy on a bench: the test plays all its peers and its executor."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from distbelief.core.memory import Memory, PrivateMemory
from distbelief.core.vectors import Vector, block_bounds
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.rules import SGD, UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.protocol import Message, Promote, push_fetch as pf
from distbelief.protocol.role import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Persist,
    Persisted,
    Received,
    Seconds,
    Send,
    SetTimer,
    Snapshot,
    Started,
    TimerFired,
)
from tests.distbelief.parameter_server.pair import CLIENT, layout_of, sent


A, B = Address("shard-0"), Address("shard-0b")
LAYOUT = layout_of()
N = LAYOUT.shard_size(0)
PLUS_ONE = SGD(learning_rate=1.0)

M = TypeVar("M", bound=Message)


class OneCopy:
    """Its work waits in `lane` until the test runs it."""

    def __init__(
        self,
        name: Address,
        *,
        memory: Memory | None = None,
        layout: Layout = LAYOUT,
        rule: UpdateRule = PLUS_ONE,
        initialise: Callable[[], Vector] | None = None,
        restored: Snapshot | None = None,
        unrestored: str | None = None,
        life: int = 1,
        ready: bool = True,
        is_replicated: bool = True,
        **settings: object,
    ) -> None:
        self.name = name
        self.life = life
        self.layout = layout
        self.memory = PrivateMemory() if memory is None else memory
        self.now: Seconds = 0.0
        self.timers: dict[str, Seconds] = {}
        self.executor: deque[Compute | Persist] = deque()
        self.snapshots: list[Snapshot] = []
        self.disk_error: str | None = None
        config = ShardConfig(
            index=0,
            layout=layout,
            rule=rule,
            name=name,
            is_replicated=is_replicated,
            **settings,  # type: ignore[arg-type]
        )
        zeros = partial(np.zeros, layout.shard_size(0), layout.dtype)
        self.shard = Shard(config, memory=self.memory, initialise=initialise or zeros)
        started = Started(incarnation=life, restored=restored, unrestored=unrestored)
        self.started = self._note(self.shard.handle(started, self.now))
        if ready:
            self.work()

    def receive(
        self, message: Message, sender: Address = SUPERVISOR, *, life: int = 1
    ) -> list[Action]:
        event = Received(sender=sender, incarnation=life, message=message)
        return self._note(self.shard.handle(event, self.now))

    def work(self, actions: Sequence[Action] | None = None) -> list[Action]:
        """Run the piece of work that waits, or the one among these actions."""
        if actions is not None:
            self.executor = deque(a for a in actions if isinstance(a, Compute | Persist))
        work = self.executor.popleft()
        assert not self.executor
        if isinstance(work, Persist):
            if self.disk_error is None:
                self.snapshots.append(work.snapshot)
            event = Persisted(label=work.snapshot.label, error=self.disk_error)
            return self._note(self.shard.handle(event, self.now))
        done = Computed(name=work.name, result=work.work())
        return self._note(self.shard.handle(done, self.now))

    def work_all(self, actions: Sequence[Action] | None = None) -> list[Action]:
        """Run work until there is none; return all actions, these included."""
        collected = list(actions or ())
        if actions is not None:
            self.executor = deque(a for a in actions if isinstance(a, Compute | Persist))
        while self.executor:
            collected += self.work()
        return collected

    def wait(self, seconds: Seconds) -> list[Action]:
        """Let time pass; fire what comes due."""
        end, actions = self.now + seconds, list[Action]()
        while self.timers and min(self.timers.values()) <= end:
            name = min(self.timers, key=lambda timer: self.timers[timer])
            self.now = max(self.now, self.timers.pop(name))
            actions += self._note(self.shard.handle(TimerFired(name=name), self.now))
        self.now = end
        return actions

    def _note(self, actions: Sequence[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Compute | Persist):
                self.executor.append(action)
            elif isinstance(action, SetTimer):
                self.timers[action.name] = action.at
        self.shard.validate()
        return list(actions)

    def lead(self, term: int, second: str = "", *, life: int | None = None) -> list[Action]:
        """Promote this incarnation, or another one; the backup is in its first."""
        lead = Promote(
            term=term,
            receiver_incarnation=self.life if life is None else life,
            backup=second,
            backup_incarnation=1 if second else 0,
        )
        return self.receive(lead)

    def hello(
        self,
        sender: Address = CLIENT,
        *,
        life: int = 1,
        host: str = "",
        pushes: bool = True,
        next_sequence: int = 1,
        holds: Vector | None = None,
        tick: pf.Ticks = msgspec.UNSET,  # set: it is in
        enters: bool = False,  # without a tick: at the floor, or a little later
        number: int = 0,
    ) -> list[Action]:
        message = pf.OpenSession(
            layout=self.layout.fingerprint,
            pushes=pushes,
            host=host,
            next_sequence=next_sequence,
            holds=holds,
            entries=1 if enters or tick is not msgspec.UNSET else msgspec.UNSET,
            tick=tick,
            known_term=number,
        )
        return self.receive(message, sender, life=life)

    def push(
        self,
        sequence: int,
        *,
        number: int | None = None,
        sender: Address = CLIENT,
        value: float = -1.0,
        life: int = 1,
        samples: int | None = None,
        fetched_clock: int = 0,
        tick: pf.Ticks = msgspec.UNSET,
    ) -> list[Action]:
        """Send every block of a push, and the push itself; return its actions."""
        dtype = self.layout.dtype
        bounds = block_bounds(self.layout.shard_size(0), itemsize=dtype.itemsize)
        for index, (start, stop) in enumerate(bounds):
            values = np.full(stop - start, value, dtype)
            self.receive(block(sequence, index, values, number=number or 1), sender, life=life)
        message = said(
            sequence,
            samples=samples,
            fetched_clock=fetched_clock,
            number=number or self.life,
            tick=tick,
        )
        return self.receive(message, sender, life=life)

    def said(self, sequence: int, *, number: int) -> list[Action]:
        return self.receive(said(sequence, number=number), CLIENT)

    @property
    def values(self) -> Vector:
        return self.shard.values.vector

    @property
    def activity(self) -> str:
        return self.shard.status()[0]

    def counters(self) -> dict[str, float]:
        return dict(self.shard.status()[1])


def block(sequence: int, index: int, values: Vector, *, number: int = 1) -> pf.PushBlock:
    return pf.PushBlock(sequence=sequence, term=number, block_index=index, values=values)


def said(
    sequence: int,
    *,
    samples: int | None = None,
    fetched_clock: int = 0,
    number: int = 1,
    tick: pf.Ticks = msgspec.UNSET,
) -> pf.Push:
    return pf.Push(
        sequence=sequence,
        term=number,
        fetched_clock=fetched_clock,
        n_gradients=1,
        samples=10 * sequence if samples is None else samples,
        tick=tick,
    )


def only(actions: Sequence[Action], kind: type[M]) -> M:
    (message,) = sent(actions, kind)
    return message


def kinds(actions: Sequence[Action], receiver: Address) -> list[str]:
    """Return the kinds of messages to this receiver, in order."""
    return [
        type(a.message).__name__ for a in actions if isinstance(a, Send) and a.receiver == receiver
    ]
