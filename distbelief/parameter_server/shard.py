"""A parameter server shard: owns one slice of every vector, and applies what is pushed.

No word passes between shards (DB-5). One piece of work runs at a time, and between two
pieces the shard decides what is next:

    initialise --> serving --+--> save     a snapshot was asked for
                             +--> copy     a fetch waits, and a copy is free; not twice
                             |             in a row while a push waits
                             +--> apply    the oldest complete push
                             +--> collect  the same, if it is of a set of portions
                             +--> order    what a coordinator orders; before all else
                             +--> halt     told to stop, and nothing is left to do

One of two copies does not serve before it leads:

    initialise --> waiting, following --> apply   what its leader has forwarded
                        |            +--> halt    told to stop
                        +--> serving              told to lead, and all that is applied

Rules:

* `standing` has the rules of who leads and who follows, `forwarding` those of a leader
  with a second, `following` those of a second.
* `service` has the rules of the handshake, `slots` and `pushes` those of pushes,
  `leases` and `fetches` those of fetches by blocks.
* `orders` has the rules of a shard under a coordinator.
* The published values are marked as being written from the `Compute` of an application
  to its answer (`published`). Updates wait for no reader.
* Snapshots: nothing changes the arrays from `Persist` to `Persisted`; pushes queue.
* After `Stop`: complete pushes and snapshots asked for are finished; nothing else is
  begun, and clients get no answer.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import assert_never, final

from distbelief.errors import RemoteProtocolError
from distbelief.memory import Memory
from distbelief.messages import (
    Account,
    Acknowledge,
    Alive,
    Alone,
    Assignment,
    Begin,
    Credit,
    Evaluate,
    Failed,
    Fetch,
    Finished,
    Follow,
    Forward,
    Gather,
    Gathered,
    Heartbeat,
    Hello,
    Join,
    Lead,
    Leading,
    Measured,
    Order,
    ParameterBlock,
    Peers,
    Performed,
    Proceed,
    Progress,
    Push,
    PushBlock,
    PushCredit,
    Refused,
    Save,
    Saved,
    StateBlock,
    StateCredit,
    Stepped,
    Stop,
    Taken,
    Transfer,
    Welcome,
    Whole,
)
from distbelief.parameter_server.forwarding import TIMER as SECOND_TIMER
from distbelief.parameter_server.holding import Holding
from distbelief.parameter_server.orders import Orders
from distbelief.parameter_server.pushes import Applying
from distbelief.parameter_server.saves import Saves
from distbelief.parameter_server.service import ClientMessage, Service
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.snapshots import ShardState, take
from distbelief.parameter_server.standing import Standing
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
    Snapshot,
    Started,
    TimerFired,
)
from distbelief.vectors import Vector


__all__ = ["ParameterServerShard", "ShardConfig"]


class _Work(Enum):
    """What may run; one at a time."""

    INITIALISE = "starting"
    SAVE = "saving"
    COPY = "copying"
    APPLY = "applying"
    COLLECT = "collecting"
    ORDER = "ordered"


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
        self._standing = Standing(config, self._values, self._service, memory=memory)
        self._saves = Saves()
        self._orders = Orders(config, self._values)
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
                actions = self._timer(event.name, now)
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
        return [*actions, *self._next_work(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters.

        `bytes_in` counts what was pushed, by blocks or through shared memory;
        `bytes_out` blocks only: nobody tells a shard of reads from shared memory.
        """
        if self._work is not None:
            state = self._work.value
        else:
            state = "stopping" if self._stopped_by is not None else self._standing.word
        return state, {
            "clock": float(self._values.clock),
            **self._service.counters(),
            **self._standing.counters(),
            **self._orders.counters(),
        }

    # ------------------------------------------------------------- life and death

    def _start(self, event: Started) -> list[Action]:
        self._service.start(event.incarnation)
        self._standing.start(event.incarnation)
        why_not = self._values.publish(
            self._service.region("values"), incarnation=event.incarnation
        )
        restored, restore_vectors = self._orders.restoring(event.restored)
        initialise, cost = self._values.initialising(
            restored,
            self._initialise,
            incarnation=event.incarnation if self._standing.leads else None,
        )

        def work() -> ShardState:
            state = initialise()
            restore_vectors()
            return state

        self._work = _Work.INITIALISE
        actions: list[Action] = [Compute(name="initialise", work=work, cost=cost)]
        if why_not is not None:
            text = f"clients of this host have to fetch by messages: {why_not}"
            actions.append(Report(text=text, level="warning"))
        return actions

    def _end(self) -> list[Action]:
        assert self._stopped_by is not None
        self._service.release()
        self._standing.release()
        self._memory.release(self._values.region)
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [Send(receiver=self._stopped_by, message=finished), Halt()]

    # ----------------------------------------------------------------------- work

    def _next_work(self, now: Seconds) -> list[Action]:
        if self._work is not None or not self._ready:
            return []
        actions = self._begin_forwarded()
        if self._work is None:
            actions += self._standing.begin_to_lead(now)
            if self._standing.leads:
                actions += self._serve(now)
            elif self._stopped_by is not None:
                actions += self._end()
        return actions

    def _begin_forwarded(self) -> list[Action]:
        """Apply what the leader has forwarded."""
        if self._stopped_by is not None:
            return []
        forwarded = self._standing.begin_next()
        if forwarded is None:
            return []
        n_clients = max(1, forwarded.message.n_pushing)
        return self._apply(
            forwarded.values, n_clients=n_clients, holding=forwarded.holding
        )

    def _serve(self, now: Seconds) -> list[Action]:
        """Do what is next for the clients."""
        first = self._begin_order_or_save()
        if first:
            return first
        may_copy = self._service.fetches.wants_copy and self._stopped_by is None
        if may_copy and not self._copied_last:
            return self._begin_copy()
        actions = self._service.forwarding.transfer(now)
        applying = None
        if self._service.forwarding.may_apply:
            applying = self._service.pushes.begin_next()
        if applying is not None:
            actions += self._begin_apply(applying, now)
        elif may_copy:
            actions += self._begin_copy()
        elif self._stopped_by is not None:
            actions += self._end()
        return actions

    def _begin_order_or_save(self) -> list[Action]:
        """Do what comes before all that clients want."""
        if self._stopped_by is None:
            order = self._orders.begin_next(self._snapshot)
            if order is not None:
                self._work = _Work.ORDER
                return [order]
        label = self._saves.next_label
        return [] if label is None else self._begin_save(label)

    def _apply(
        self, pushed: Vector, *, n_clients: int, holding: Holding
    ) -> list[Action]:
        self._work = _Work.APPLY
        self._copied_last = False
        work, cost = self._values.begin_push(
            pushed, n_clients=n_clients, holding=holding
        )
        return [Compute(name="apply", work=work, cost=cost)]

    def _begin_apply(self, applying: Applying, now: Seconds) -> list[Action]:
        if applying.push.grant:
            self._work = _Work.COLLECT
            self._copied_last = False
            work, cost = self._orders.collecting(applying)
            return [Compute(name="collect", work=work, cost=cost)]
        n_clients = self._service.n_averaged(applying.client)
        forwards = self._service.forwarding.forward(
            applying, n_clients=n_clients, now=now
        )
        values, holding = applying.slot.values, applying.client.holding
        return [*forwards, *self._apply(values, n_clients=n_clients, holding=holding)]

    def _begin_copy(self) -> list[Action]:
        self._work = _Work.COPY
        self._copied_last = True
        work, cost = self._values.copying(self._service.fetches.begin_copy())
        return [Compute(name="copy", work=work, cost=cost)]

    def _begin_save(self, label: str) -> list[Action]:
        self._work = _Work.SAVE
        snapshot = self._orders.extended(self._snapshot(label))
        return [Persist(snapshot=snapshot)]

    def _snapshot(self, label: str) -> Snapshot:
        state = ShardState(
            incarnation=self._service.incarnation,
            clock=self._values.clock,
            values=self._values.vector,
            state=self._values.state,
            clients=self._service.clients,
            steps=self._values.steps,
        )
        return take(label, state, identity=self._identity)

    def _persisted(self, event: Persisted) -> list[Action]:
        work, self._work = self._work, None
        if work is _Work.ORDER:
            return self._orders.persisted(event)
        assert work is _Work.SAVE, work
        return self._saves.taken(event, clock=self._values.clock)

    def _timer(self, name: str, now: Seconds) -> list[Action]:
        if name == SECOND_TIMER:
            return self._service.forwarding.timer(now)
        return self._service.fetches.timer(name, now)

    def _computed(self, event: Computed, now: Seconds) -> list[Action]:
        if event.error is not None:
            raise event.error
        work, self._work = self._work, None
        match work:
            case _Work.INITIALISE:
                assert isinstance(event.result, ShardState), event.result
                self._values.initialised(event.result)
                self._ready = True
                self._orders.ready()
                return self._standing.restored(event.result)
            case _Work.APPLY:
                return self._standing.end_push()
            case _Work.COLLECT:
                clock = self._values.clock
                actions = self._service.pushes.end(clock=clock, held=False)
                return [*actions, *self._service.greet_held()]
            case _Work.ORDER:
                return self._orders.computed(event)
            case _Work.COPY:
                return self._service.fetches.end_copy(clock=self._values.clock, now=now)
            case _Work.SAVE | None:
                raise AssertionError(f"{event.name} was not asked for ({work})")
            case _:
                assert_never(work)

    # ------------------------------------------------------------------- messages

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        sender, message, standing = event.sender, event.message, self._standing
        match message:
            case Hello():
                actions = self._service.greet(event, message)
            case PushBlock() if standing.is_leader(sender):
                actions = standing.receive(event, message, now)
            case Fetch() | Credit() | PushBlock() | Push():
                actions = self._serve_client(event, message, now)
            case Order():
                actions = self._orders.take(event, message)
            case (
                Lead()
                | Follow()
                | StateBlock()
                | Forward()
                | StateCredit()
                | Acknowledge()
                | PushCredit()
            ):
                actions = standing.receive(event, message, now)
            case Save() | Stop():
                actions = self._obey(sender, message)
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
                | Performed()
                | Assignment()
                | Account()
                | Gather()
                | Gathered()
                | Proceed()
                | Stepped()
                | Transfer()
                | Taken()
            ):
                raise RemoteProtocolError(
                    f"{sender} sent {type(message).__name__} to a shard, which has no "
                    "use for it"
                )
            case _:
                assert_never(message)
        return actions

    def _serve_client(
        self, event: Received, message: ClientMessage, now: Seconds
    ) -> list[Action]:
        if isinstance(message, Push) and not message.grant and self._orders.drives:
            reason = "a coordinator drives this shard: nothing else can be pushed"
            refused = Refused(reason=reason, for_good=True)
            return [Send(receiver=event.sender, message=refused)]
        return self._service.serve(event, message, now)

    def _obey(self, sender: Address, message: Save | Stop) -> list[Action]:
        if isinstance(message, Save):
            return self._save(sender, message.label)
        return self._stop(sender)

    def _stop(self, sender: Address) -> list[Action]:
        self._stopped_by = sender
        self._service.close()
        return self._service.forwarding.stop()

    def _save(self, sender: Address, label: str) -> list[Action]:
        clock = self._values.clock
        if self._orders.drives:
            why_not = "a coordinator drives this shard: ask it to save"
            return self._saves.refuse(sender, label, clock=clock, why_not=why_not)
        if not self._standing.will_lead:
            why_not = "this copy of the shard does not lead: ask the one that does"
            return self._saves.refuse(sender, label, clock=clock, why_not=why_not)
        return self._saves.ask(sender, label, clock=clock)
