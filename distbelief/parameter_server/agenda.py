"""What a shard does next: one piece of work at a time.

Between two pieces of work the shard decides:

    initialise --> serving --+--> save     a snapshot was asked for
                             +--> copy     a fetch waits, and a copy is free; not twice
                             |             in a row while a push waits
                             +--> apply    the oldest complete push; not after the
                             |             last snapshot was asked for
                             +--> collect  the same, if it is of a set of portions
                             +--> order    what a coordinator orders; before all else
                             +--> halt     told to stop, and nothing is left to do

One of two copies does not serve before it leads:

    initialise --> waiting, following --> apply   what its leader has forwarded
                        |            +--> halt    told to stop
                        +--> serving              told to lead, and all that is applied

Rules:

* The published values are marked as being written from the `Compute` of an application
  to its answer (`published`). Updates wait for no reader.
* Snapshots: nothing changes the arrays from `Persist` to `Persisted`; pushes queue.
"""

from enum import Enum
from typing import assert_never, final

from distbelief.parameter_server.layout.holding import Holding
from distbelief.parameter_server.orders.orders import Orders
from distbelief.parameter_server.service import Service
from distbelief.parameter_server.serving.pushes import Applying
from distbelief.parameter_server.standing import Standing
from distbelief.parameter_server.state.saves import Saves
from distbelief.parameter_server.state.snapshots import ShardIdentity, ShardState, take
from distbelief.parameter_server.state.values import ShardValues
from distbelief.roles import Action, Compute, Computed, Persist, Persisted, Seconds, Snapshot
from distbelief.vectors import Vector


class _Work(Enum):
    """What may run; one at a time."""

    INITIALISE = "starting"
    SAVE = "saving"
    COPY = "copying"
    APPLY = "applying"
    COLLECT = "collecting"
    ORDER = "ordered"


@final
class Agenda:
    """What one life of a shard does.

    Attributes:
        saves: Snapshots asked for.
        is_sealed: Has the last snapshot been asked for?
        is_stopping: Is the shard told to stop?
        is_over: Is it, and nothing is left to do?
    """

    def __init__(
        self,
        identity: ShardIdentity,
        values: ShardValues,
        *,
        service: Service,
        standing: Standing,
        orders: Orders,
    ) -> None:
        self._identity = identity
        self._values = values
        self._service = service
        self._standing = standing
        self._orders = orders
        self._work: _Work | None = None
        self._ready = False
        self._copied_last = False
        self.saves = Saves()
        self.is_sealed = False
        self.is_stopping = False
        self.is_over = False

    @property
    def word(self) -> str | None:
        """What is under way; None if nothing is."""
        return None if self._work is None else self._work.value

    def initialise(self, action: Compute) -> Compute:
        """Begin with this; nothing else is begun before it is done."""
        self._work = _Work.INITIALISE
        return action

    def next(self, now: Seconds) -> list[Action]:
        """Begin what is next, if nothing is under way."""
        if self._work is not None or not self._ready:
            return []
        actions = self._begin_forwarded()
        if self._work is None:
            actions += self._standing.begin_to_lead(now)
            if self._standing.leads:
                actions += self._serve(now)
            else:
                self.is_over = self.is_stopping
        return actions

    def _begin_forwarded(self) -> list[Action]:
        """Apply what the leader has forwarded."""
        if self.is_stopping:
            return []
        forwarded = self._standing.begin_next()
        if forwarded is None:
            return []
        message = forwarded.message
        return self._apply(
            forwarded.values,
            n_clients=max(1, message.n_pushing),
            holding=forwarded.holding,
            touches=message.holds if message.touches else None,
        )

    def _serve(self, now: Seconds) -> list[Action]:
        """Do what is next for the clients."""
        first = self._begin_order_or_save()
        if first:
            return first
        may_copy = self._service.fetches.wants_copy and not self.is_stopping
        if may_copy and not self._copied_last:
            return self._begin_copy()
        actions = self._service.forwarding.transfer(now)
        applying = None
        if self._service.forwarding.may_apply and not self.is_sealed:
            applying = self._service.pushes.begin_next(clock=self._values.clock)
        if applying is not None:
            actions += self._begin_apply(applying, now)
        elif may_copy:
            actions += self._begin_copy()
        else:
            self.is_over = self.is_stopping
        return actions

    def _begin_order_or_save(self) -> list[Action]:
        """Do what comes before all that clients want."""
        if not self.is_stopping:
            order = self._orders.begin_next(self._snapshot)
            if order is not None:
                self._work = _Work.ORDER
                return [order]
        label = self.saves.begin_next(clock=self._values.clock)
        return [] if label is None else self._begin_save(label)

    def _apply(
        self, pushed: Vector, *, n_clients: int, holding: Holding, touches: Vector | None
    ) -> list[Action]:
        self._work = _Work.APPLY
        self._copied_last = False
        touched = None if touches is None else self._values.holdings.get(touches)
        work, cost = self._values.begin_push(
            pushed, n_clients=n_clients, holding=holding, touched=touched
        )
        return [Compute(name="apply", work=work, cost=cost)]

    def _begin_apply(self, applying: Applying, now: Seconds) -> list[Action]:
        if applying.push.grant:
            self._work = _Work.COLLECT
            self._copied_last = False
            work, cost = self._orders.collecting(applying)
            return [Compute(name="collect", work=work, cost=cost)]
        n_clients = self._service.n_averaged(applying.client)
        forwards = self._service.forwarding.forward(applying, n_clients=n_clients, now=now)
        apply = self._apply(
            applying.slot.values,
            n_clients=n_clients,
            holding=applying.client.holding,
            touches=applying.push.touches,
        )
        return [*forwards, *apply]

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

    def persisted(self, event: Persisted) -> list[Action]:
        """A snapshot is safe, or not."""
        work, self._work = self._work, None
        if work is _Work.ORDER:
            return self._orders.persisted(event)
        assert work is _Work.SAVE, work
        return self.saves.taken(event, clock=self._values.clock)

    def computed(self, event: Computed, now: Seconds) -> list[Action]:
        """The work is done.

        Raises:
            Exception: what the work raised.
        """
        if event.error is not None:
            raise event.error
        work, self._work = self._work, None
        match work:
            case _Work.INITIALISE:
                assert isinstance(event.result, ShardState), event.result
                self._values.initialised(event.result)
                self.saves.begin_at(self._values.clock)
                self._ready = True
                self._orders.ready()
                return self._standing.restored(event.result)
            case _Work.APPLY:
                return self._standing.end_push()
            case _Work.COLLECT:
                clock = self._values.clock
                actions = self._service.pushes.end(clock=clock, held=False, rises=False)
                return [*actions, *self._service.greet_held()]
            case _Work.ORDER:
                return self._orders.computed(event)
            case _Work.COPY:
                return self._service.fetches.end_copy(clock=self._values.clock, now=now)
            case _Work.SAVE | None:
                raise AssertionError(f"{event.name} was not asked for ({work})")
            case _:
                assert_never(work)
