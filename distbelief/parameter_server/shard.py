"""A parameter server shard: owns one slice of every vector, and applies what is pushed.

No word passes between shards (DB-5). One piece of work runs at a time, and between two
pieces the shard decides what is next:

    initialise --> serving --+--> save     a snapshot was asked for
                             +--> copy     a fetch waits, and a copy is free; not twice
                             |             in a row while a push waits
                             +--> apply    the oldest complete push
                             +--> halt     told to stop, and nothing is left to do

One of two copies does not serve before it is told to lead, and may be a second before:

    initialise --> waiting --+-----------------------------------> serving
                             +--> following --+--> apply             ^
                                      |       +--> halt              |
                                      +-- Lead, and all is applied --+

Rules:

* `forwarding` has the rules of a leader with a second, `following` those of a second.
  Who leads never follows again in the same life: it halts if another one leads.

* `service` has the rules of the handshake, `slots` and `pushes` those of pushes,
  `leases` and `fetches` those of fetches by blocks.
* The published values are marked as being written from the `Compute` of an application
  to its answer (`published`). Updates wait for no reader.
* Snapshots: nothing changes the arrays from `Persist` to `Persisted`; pushes queue.
* After `Stop`: complete pushes and snapshots asked for are finished; nothing else is
  begun, and clients get no answer.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import assert_never, final

from distbelief.errors import DistBeliefError, RemoteProtocolError, StorageError
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
from distbelief.parameter_server.following import Following
from distbelief.parameter_server.forwarding import TIMER as SECOND_TIMER
from distbelief.parameter_server.pushes import Applying
from distbelief.parameter_server.saves import Saves
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

CopyMessage = Follow | StateBlock | Forward | StateCredit | Acknowledge | PushCredit


class _Work(Enum):
    """What may run; one at a time."""

    INITIALISE = "starting"
    SAVE = "saving"
    COPY = "copying"
    APPLY = "applying"


@final
class ParameterServerShard:
    """The role `shard-INDEX`, or one of two copies of it."""

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
        self._following: Following | None = None  # until it leads
        if config.waits_for_lead:
            self._following = Following(
                self._values,
                memory=memory,
                bounds=self._service.bounds,
                n_clients_max=config.n_clients_max,
            )
        self._waits_for_lead = config.waits_for_lead
        self._lead: Lead | None = None  # that it is to obey
        self._followed: Address | None = None  # before it led
        self._restored_pairing = 0  # of the snapshot
        self._saves = Saves()
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
            case TimerFired() if event.name == SECOND_TIMER:
                actions = self._service.forwarding.timer(now)
            case TimerFired():
                actions = self._service.fetches.timer(event.name, now)
            case Computed():
                actions = self._computed(event, now)
            case Persisted():
                assert self._work is _Work.SAVE, self._work
                self._work = None
                actions = self._saves.taken(event, clock=self._values.clock)
            case PeerLost():
                self._service.lost(event)
                actions = []
            case PeerJoined():
                actions = []
            case _:
                assert_never(event)
        return [*actions, *self._next_work(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters.

        `bytes_in` counts what was pushed, by blocks or through shared memory;
        `bytes_out` blocks only: nobody tells a shard of reads from shared memory.
        """
        following = self._following
        if self._work is not None:
            state = self._work.value
        elif self._stopped_by is not None:
            state = "stopping"
        elif following is None:
            state = "serving"
        else:
            state = "following" if following.follows else "waiting"
        counters = {
            "clock": float(self._values.clock),
            **self._service.counters(),
        }
        if self._waits_for_lead:
            part = self._service.forwarding if following is None else following
            counters |= {
                "pairing": float(part.pairing),
                "whole": 0.0 if following is None else float(following.whole_for),
                "leading": float(following is None),
            }
        return state, counters

    # ------------------------------------------------------------- life and death

    def _start(self, event: Started) -> list[Action]:
        self._service.start(event.incarnation)
        why_not = self._values.publish(
            self._service.region("values"), incarnation=event.incarnation
        )
        work, cost = self._values.initialising(
            event.restored,
            self._initialise,
            incarnation=None if self._waits_for_lead else event.incarnation,
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
        if self._following is not None:
            self._following.release()
        self._memory.release(self._values.region)
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [Send(receiver=self._stopped_by, message=finished), Halt()]

    # ----------------------------------------------------------------------- work

    def _next_work(self, now: Seconds) -> list[Action]:
        if self._work is not None or not self._ready:
            return []
        if self._following is not None:
            return self._follow(self._following, now)
        label = self._saves.next_label
        if label is not None:
            return self._begin_save(label)
        may_copy = self._service.fetches.wants_copy and self._stopped_by is None
        if may_copy and not self._copied_last:
            return self._begin_copy()
        forwarding = self._service.forwarding
        actions = forwarding.transfer(now)
        if forwarding.may_apply:
            applying = self._service.pushes.begin_next()
            if applying is not None:
                return [*actions, *self._begin_apply(applying, now)]
        if may_copy:
            return [*actions, *self._begin_copy()]
        return actions if self._stopped_by is None else self._end()

    def _follow(self, following: Following, now: Seconds) -> list[Action]:
        """Do what is next for a copy that does not lead."""
        if self._stopped_by is not None:
            return self._end()
        forwarded = following.begin_next()
        if forwarded is not None:
            n_clients = max(1, forwarded.message.n_pushing)
            return self._apply(forwarded.values, n_clients=n_clients)
        if self._lead is not None:
            actions = self._begin_to_lead(following, self._lead, now)
            return [*actions, *self._next_work(now)]
        return []

    def _apply(self, pushed: Vector, *, n_clients: int) -> list[Action]:
        self._work = _Work.APPLY
        self._copied_last = False
        work, cost = self._values.begin_push(pushed, n_clients=n_clients)
        return [Compute(name="apply", work=work, cost=cost)]

    def _begin_apply(self, applying: Applying, now: Seconds) -> list[Action]:
        n_clients = max(1, self._service.n_pushing)
        forwards = self._service.forwarding.forward(
            applying, n_clients=n_clients, now=now
        )
        return [*forwards, *self._apply(applying.slot.values, n_clients=n_clients)]

    def _end_apply(self) -> list[Action]:
        if self._following is not None:
            return self._following.end()
        clock = self._values.clock
        self._values.end_push()
        held = self._service.forwarding.applied(clock=clock)
        actions = self._service.pushes.end(clock=clock, held=held)
        return [*actions, *self._service.greet_held()]

    def _begin_copy(self) -> list[Action]:
        self._work = _Work.COPY
        self._copied_last = True
        work, cost = self._values.copying(self._service.fetches.begin_copy())
        return [Compute(name="copy", work=work, cost=cost)]

    def _begin_save(self, label: str) -> list[Action]:
        self._work = _Work.SAVE
        state = ShardState(
            incarnation=self._service.incarnation,
            clock=self._values.clock,
            values=self._values.vector,
            state=self._values.state,
            clients=self._service.clients,
        )
        return [Persist(snapshot=take(label, state, identity=self._identity))]

    def _computed(self, event: Computed, now: Seconds) -> list[Action]:
        if event.error is not None:
            raise event.error
        work, self._work = self._work, None
        match work:
            case _Work.INITIALISE:
                assert isinstance(event.result, ShardState), event.result
                self._values.initialised(event.result)
                self._ready = True
                if self._following is None:
                    return self._service.open(event.result.clients)
                self._restored_pairing = event.result.incarnation
                return self._following.restored(event.result.clients)
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
            case PushBlock() if self._following is not None:
                return self._following.take_block(sender, message)
            case PushBlock() if sender == self._followed:
                return []  # it was deposed
            case Fetch() | Credit() | PushBlock() | Push():
                return self._service.serve(event, message, now)
            case (
                Follow()
                | StateBlock()
                | Forward()
                | StateCredit()
                | Acknowledge()
                | PushCredit()
            ):
                return self._receive_from_copy(event, message, now)
            case Save():
                return self._save(sender, message.label)
            case Stop():
                return self._stop(sender)
            case Lead():
                return self._take_lead(message, now)
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
                | Alone()
                | Whole()
                | Leading()
                | Welcome()
                | Refused()
                | ParameterBlock()
            ):
                raise RemoteProtocolError(
                    f"{sender} sent {type(message).__name__} to a shard, which has no "
                    "use for it"
                )
            case _:
                assert_never(message)

    def _receive_from_copy(
        self, event: Received, message: CopyMessage, now: Seconds
    ) -> list[Action]:
        """Take a message of the other copy of this shard."""
        if not self._waits_for_lead:
            raise RemoteProtocolError(
                f"{event.sender} sent {type(message).__name__}, but shard "
                f"{self._identity.index} has one copy only"
            )
        if self._following is not None:
            return _to_second(self._following, event.sender, message)
        forwarding = self._service.forwarding
        match message:
            case StateCredit():
                return forwarding.credit_pieces(event, message, now)
            case Acknowledge():
                actions = forwarding.acknowledged(event, message, now)
                return [*actions, *self._service.greet_held()]
            case PushCredit():
                return forwarding.credit_blocks(event, message, now)
            case Follow() if message.pairing > forwarding.pairing:
                raise DistBeliefError(
                    f"{event.sender} leads shard {self._identity.index} as pairing "
                    f"{message.pairing}, after this life did as {forwarding.pairing}: "
                    "only the next one can be its second"
                )
            case Follow() | StateBlock() | Forward():
                return []  # of a leader that was deposed
            case _:
                assert_never(message)

    def _stop(self, sender: Address) -> list[Action]:
        self._stopped_by = sender
        self._service.close()
        return self._service.forwarding.stop()

    def _save(self, sender: Address, label: str) -> list[Action]:
        clock = self._values.clock
        if self._following is not None and self._lead is None:
            return self._saves.refuse(sender, label, clock=clock)
        return self._saves.ask(sender, label, clock=clock)

    # -------------------------------------------------------------------- leading

    def _take_lead(self, message: Lead, now: Seconds) -> list[Action]:
        """Lead, or go on leading with another second."""
        if not self._waits_for_lead:
            raise RemoteProtocolError(
                f"shard {self._identity.index} has one copy only, and leads already"
            )
        following, forwarding = self._following, self._service.forwarding
        if following is None:
            if message.pairing <= forwarding.pairing:
                return []
            actions = forwarding.lead(message.pairing, _second(message), now)
            return [*actions, *self._service.greet_held()]
        if message.pairing <= following.pairing:
            return []
        if not following.lead(message.pairing):
            raise DistBeliefError(
                f"told to lead shard {self._identity.index} as pairing "
                f"{message.pairing} with {self._values.n_held} of "
                f"{self._values.n_pieces} pieces of what {following.leader} held: the "
                "next life begins from the newest snapshot"
            )
        self._lead = message
        return []

    def _begin_to_lead(
        self, following: Following, lead: Lead, now: Seconds
    ) -> list[Action]:
        if not following.follows and lead.pairing <= self._restored_pairing:
            raise StorageError(
                f"the snapshot of shard {self._identity.index} is of pairing "
                f"{self._restored_pairing}, and the shard is told to lead as "
                f"{lead.pairing}: a resumed run must go on counting pairings where the "
                "first ended"
            )
        self._following = self._lead = None
        self._followed = following.leader
        following.release()
        text = f"leads as pairing {lead.pairing}, from clock {self._values.clock}"
        return [
            Report(text=text),
            *self._service.lead(lead.pairing, following.clients.values()),
            *self._service.forwarding.lead(lead.pairing, _second(lead), now),
        ]


def _second(lead: Lead) -> Address | None:
    return Address(lead.second) if lead.second else None


def _to_second(
    following: Following, sender: Address, message: CopyMessage
) -> list[Action]:
    match message:
        case Follow():
            return following.follow(sender, message)
        case StateBlock():
            return following.take_piece(sender, message)
        case Forward():
            return following.forward(sender, message)
        case StateCredit() | Acknowledge() | PushCredit():
            return []  # meant for an earlier life
        case _:
            assert_never(message)
