"""A parameter server shard: owns one slice of every vector, and applies what is pushed.

No word passes between shards (DB-5). One piece of work runs at a time, and between two
pieces the shard decides what is next:

    initialise --> serving --+--> save     a snapshot was asked for
                             +--> copy     a fetch waits, and a copy is free; not twice
                             |             in a row while a push waits
                             +--> apply    the oldest complete push
                             +--> halt     told to stop, and nothing is left to do

Rules:

* `service` has the rules of the handshake, `slots` and `pushes` those of pushes,
  `leases` and `fetches` those of fetches by blocks.
* The published values are marked as being written from the `Compute` of an application
  to its answer (`published`). Updates wait for no reader.
* Snapshots: nothing changes the arrays from `Persist` to `Persisted`; pushes queue.
* After `Stop`: complete pushes and snapshots asked for are finished; nothing else is
  begun, and clients get no answer.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import assert_never, final

from distbelief.errors import RemoteProtocolError
from distbelief.memory import Memory
from distbelief.messages import (
    Acknowledge,
    Alive,
    Alone,
    Begin,
    Credit,
    Evaluate,
    Failed,
    Fetch,
    Finished,
    Follow,
    Forward,
    Heartbeat,
    Hello,
    Join,
    Lead,
    Leading,
    Measured,
    ParameterBlock,
    Peers,
    Progress,
    Push,
    PushBlock,
    PushCredit,
    Refused,
    Save,
    Saved,
    StateBlock,
    StateCredit,
    Stop,
    Welcome,
    Whole,
)
from distbelief.parameter_server.service import Service
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.snapshots import ShardState, take
from distbelief.parameter_server.values import ShardValues
from distbelief.roles import (
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Halt,
    PeerJoined,
    PeerLost,
    Persist,
    Persisted,
    Received,
    Report,
    Seconds,
    Send,
    Started,
    TimerFired,
)
from distbelief.vectors import Vector


__all__ = ["ParameterServerShard", "ShardConfig"]

N_SAVES_MAX = 8
"""Snapshots that may wait to be taken."""


class _Work(Enum):
    """What may run; one at a time."""

    INITIALISE = "starting"
    SAVE = "saving"
    COPY = "copying"
    APPLY = "applying"


@final
class ParameterServerShard:
    """The role `shard-INDEX`."""

    def __init__(
        self,
        config: ShardConfig,
        *,
        memory: Memory,
        initialise: Callable[[], Vector],
    ) -> None:
        """Store; `Started` acts.

        Args:
            config: What it is to be.
            memory: Where values and slots lie that clients of this host can reach.
            initialise: Returns the initial values, (shard_size,); called as work, and
                only if there is no snapshot.
        """
        self._memory = memory
        self._initialise = initialise
        self._identity = config.identity
        self._values = ShardValues(self._identity, memory=memory)
        self._service = Service(config, self._values, memory=memory)
        self._saves: deque[tuple[str, Address]] = deque()  # label, who asked for it
        self._last_saved = ""
        self._work: _Work | None = None
        self._ready = False
        self._copied_last = False
        self._stopped_by: Address | None = None

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                actions = self._start(event)
            case Received():
                actions = self._receive(event, now)
            case TimerFired():
                actions = self._service.fetches.timer(event.name, now)
            case Computed():
                actions = self._computed(event, now)
            case Persisted():
                actions = self._persisted(event)
            case PeerLost():
                self._service.lost(event)
                actions = []
            case PeerJoined():
                actions = []
            case _:
                assert_never(event)
        return [*actions, *self._next_work()]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters.

        `bytes_in` counts what was pushed, by blocks or through shared memory;
        `bytes_out` blocks only: nobody tells a shard of reads from shared memory.
        """
        if self._work is not None:
            state = self._work.value
        else:
            state = "serving" if self._stopped_by is None else "stopping"
        return state, {
            "clock": float(self._values.clock),
            **self._service.counters(),
        }

    # ------------------------------------------------------------- life and death

    def _start(self, event: Started) -> list[Action]:
        self._service.start(event.incarnation)
        why_not = self._values.publish(
            self._service.region("values"), incarnation=event.incarnation
        )
        work, cost = self._values.initialising(
            event.restored, self._initialise, incarnation=event.incarnation
        )
        self._work = _Work.INITIALISE
        actions: list[Action] = [Compute(name="initialise", work=work, cost=cost)]
        if why_not is not None:
            text = f"clients of this host have to fetch by messages: {why_not}"
            actions.append(Report(text=text, level="warning"))
        return actions

    def _end(self) -> list[Action]:
        assert self._stopped_by is not None
        self._service.release()
        self._memory.release(self._values.region)
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [Send(receiver=self._stopped_by, message=finished), Halt()]

    # ----------------------------------------------------------------------- work

    def _next_work(self) -> list[Action]:
        if self._work is not None or not self._ready:
            return []
        if self._saves:
            return self._begin_save()
        may_copy = self._service.fetches.wants_copy and self._stopped_by is None
        if may_copy and not self._copied_last:
            return self._begin_copy()
        pushed = self._service.pushes.begin_next()
        if pushed is not None:
            return self._begin_apply(pushed)
        if may_copy:
            return self._begin_copy()
        return [] if self._stopped_by is None else self._end()

    def _begin_apply(self, pushed: Vector) -> list[Action]:
        self._work = _Work.APPLY
        self._copied_last = False
        n_clients = max(1, self._service.n_pushing)
        work, cost = self._values.begin_push(pushed, n_clients=n_clients)
        return [Compute(name="apply", work=work, cost=cost)]

    def _end_apply(self) -> list[Action]:
        _, acknowledgement = self._service.pushes.end(clock=self._values.clock)
        self._values.end_push()
        return [acknowledgement, *self._service.greet_held()]

    def _begin_copy(self) -> list[Action]:
        self._work = _Work.COPY
        self._copied_last = True
        work, cost = self._values.copying(self._service.fetches.begin_copy())
        return [Compute(name="copy", work=work, cost=cost)]

    def _begin_save(self) -> list[Action]:
        self._work = _Work.SAVE
        label, _ = self._saves[0]
        state = ShardState(
            incarnation=self._service.incarnation,
            clock=self._values.clock,
            values=self._values.vector,
            state=self._values.state,
            clients=self._service.clients,
        )
        return [Persist(snapshot=take(label, state, identity=self._identity))]

    def _persisted(self, event: Persisted) -> list[Action]:
        assert self._work is _Work.SAVE, self._work
        self._work = None
        label, requester = self._saves.popleft()
        if event.error is None:
            self._last_saved = label
        return [self._saved(requester, label, error=event.error)]

    def _computed(self, event: Computed, now: Seconds) -> list[Action]:
        if event.error is not None:
            raise event.error
        work, self._work = self._work, None
        match work:
            case _Work.INITIALISE:
                assert isinstance(event.result, ShardState), event.result
                self._values.initialised(event.result)
                self._ready = True
                return self._service.open(event.result)
            case _Work.APPLY:
                return self._end_apply()
            case _Work.COPY:
                return self._service.fetches.end_copy(clock=self._values.clock, now=now)
            case _Work.SAVE | None:
                raise AssertionError(f"{event.name} was not asked for ({work})")
            case _:
                assert_never(work)

    # ------------------------------------------------------------------- messages

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        sender, message = event.sender, event.message
        match message:
            case Hello():
                return self._service.greet(event, message)
            case Fetch() | Credit() | PushBlock() | Push():
                return self._service.serve(event, message, now)
            case Save():
                return self._save(sender, message.label)
            case Stop():
                self._stopped_by = sender
                self._service.close()
                return []
            case (
                Join()
                | Peers()
                | Heartbeat()
                | Alive()
                | Begin()
                | Finished()
                | Failed()
                | Progress()
                | Evaluate()
                | Measured()
                | Saved()
                | Lead()
                | Alone()
                | Whole()
                | Follow()
                | StateBlock()
                | StateCredit()
                | Forward()
                | Leading()
                | Welcome()
                | Refused()
                | ParameterBlock()
                | PushCredit()
                | Acknowledge()
            ):
                raise RemoteProtocolError(
                    f"{sender} sent {type(message).__name__} to a shard, which has no "
                    "use for it"
                )
            case _:
                assert_never(message)

    def _save(self, sender: Address, label: str) -> list[Action]:
        if label == self._last_saved:
            return [self._saved(sender, label)]
        if (label, sender) in self._saves:
            return []
        if len(self._saves) >= N_SAVES_MAX:
            error = f"{N_SAVES_MAX} snapshots wait to be taken already: ask less often"
            return [self._saved(sender, label, error=error)]
        self._saves.append((label, sender))
        return []

    def _saved(
        self, receiver: Address, label: str, *, error: str | None = None
    ) -> Action:
        saved = Saved(label=label, clock=self._values.clock, error=error)
        return Send(receiver=receiver, message=saved)
