"""A parameter server shard: owns one slice of every vector, and applies what is pushed.

No word passes between shards (DB-5). Rules:

* `agenda` has what is done next, one piece of work at a time.
* `standing` has the rules of who leads and who follows, `forwarding` those of a leader
  with a second, `following` those of a second.
* `service` has the rules of the handshake, `slots` and `pushes` those of pushes,
  `leases` and `fetches` those of fetches by blocks.
* `orders` has the rules of a shard under a coordinator.
* From the last snapshot on no push is begun: it would be acknowledged, and lost.
* After `Stop`: complete pushes and snapshots asked for are finished; nothing else is
  begun, and clients get no answer.
* Without a supervisor it saves what is in no snapshot, and ends; so what it has
  acknowledged is not lost. Of points that a coordinator drives to, only those fit
  together that it has had saved: then nothing is.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, assert_never, cast, final

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.errors import DistBeliefError, RemoteProtocolError, StorageError
from distbelief.parameter_server.checkpoint import CheckpointWriter, ShardIdentity, ShardState, take
from distbelief.parameter_server.client_service import ClientMessage, ClientService
from distbelief.parameter_server.command_log import CommandExecutor
from distbelief.parameter_server.config import ShardConfig
from distbelief.parameter_server.push_handler import PushInProgress
from distbelief.parameter_server.replication import TIMER as SECOND_TIMER, Backup, Replicated
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.store import ShardStore
from distbelief.protocol import (
    Fetch,
    FetchAck,
    Finished,
    OpenSession,
    Promote,
    Push,
    PushApplied,
    PushBlock,
    PushBlockAck,
    ReplicatePush,
    SaveCheckpoint,
    SessionRefused,
    ShardCommand,
    StartSync,
    StateAck,
    StateBlock,
    Stop,
)
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Exit,
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
    message_types,
)


__all__ = ["Shard", "ShardConfig"]


# Where a copy of a shard stands: it waits, follows, or leads.
#
#     waiting ---- Lead ------------------------------------------------> leading
#        |                                                                  ^
#        +--- Follow --> following --- all pieces --> whole ---- Lead ------+
#
# Rules:
#
# * A shard of one copy leads from the beginning, and hears nothing of all this.
# * A `Promote` or `StartSync` that is meant for another life of this copy is not obeyed.
# * Who is told to lead first applies what it has taken. It leads with what it has
#   followed if it is whole, or with what it began with if it has never followed.
#   Otherwise its life is over: the next one begins from the newest snapshot.
# * Who leads never follows again in the same life, for it may have applied what the other
#   leader never saw: if it hears of one, its life is over.

FromLeader = StartSync | StateBlock | ReplicatePush | PushBlock
FromSecond = StateAck | PushApplied | PushBlockAck
CopyMessage = Promote | FromLeader | FromSecond


@final
class ReplicaState:
    """Of one life of one copy."""

    def __init__(
        self, config: ShardConfig, values: ShardStore, service: ClientService, *, memory: Memory
    ) -> None:
        self._name = config.name
        self._has_other = config.waits_for_lead
        self._values = values
        self._service = service
        self._forwarding = service.forwarding
        self._following: Backup | None = None  # until it leads
        if config.waits_for_lead:
            self._following = Backup(
                values, memory=memory, bounds=service.bounds, n_clients_max=config.n_clients_max
            )
        self._life = 0
        self._lead: Promote | None = None  # that it is to obey
        self._restored_pairing = 0  # of the snapshot
        self._unrestored: str | None = None  # why there is none that can be used
        self._followed: Address | None = None  # before it led

    @property
    def leads(self) -> bool:
        """Does it serve the clients?"""
        return self._following is None

    @property
    def will_lead(self) -> bool:
        """Does it, or was it told to?"""
        return self._following is None or self._lead is not None

    @property
    def word(self) -> str:
        """What it is doing if nothing is to be done."""
        if self._following is None:
            return "serving"
        return "following" if self._following.follows else "waiting"

    def counters(self) -> Mapping[str, float]:
        """Return figures for the role's status, if there is another copy."""
        if not self._has_other:
            return {}
        following = self._following
        part = self._forwarding if following is None else following
        return {
            "pairing": float(part.pairing),
            "whole": 0.0 if following is None else float(following.whole_for),
            "leading": float(following is None),
        }

    # ------------------------------------------------------------------------- work

    def start(self, incarnation: int, *, unrestored: str | None = None) -> None:
        """The life of this copy begins.

        Args:
            incarnation: Of it.
            unrestored: Why none of its snapshots can be used; the other copy may help.
        """
        self._life = incarnation
        self._unrestored = unrestored

    def restored(self, state: ShardState) -> list[Action]:
        """The values are there."""
        if self._following is None:
            return self._service.open(state.clients)
        self._restored_pairing = state.incarnation
        return self._following.restored(state.clients)

    def begin_next(self) -> Replicated | None:
        """Take the next push of the leader, to apply it."""
        return None if self._following is None else self._following.begin_next()

    def end_push(self) -> list[Action]:
        """A push is applied: of the leader, or the oldest of the clients'."""
        if self._following is not None:
            return self._following.end()
        clock = self._values.clock
        self._values.end_push()
        held = self._forwarding.applied(clock=clock)
        actions = self._service.pushes.end(clock=clock, held=held)
        return [*actions, *self._service.greet_held()]

    def begin_to_lead(self, now: Seconds) -> list[Action]:
        """Lead, if that is due.

        Raises:
            StorageError: it would begin from a snapshot of a later leader, or anew
                where all snapshots are damaged.
        """
        following, lead = self._following, self._lead
        if following is None or lead is None or not following.drained:
            return []
        if not following.follows and self._unrestored is not None:
            raise StorageError(self._unrestored)
        if not following.follows and lead.pairing <= self._restored_pairing:
            raise StorageError(
                f"the snapshot of {self._name} is of pairing {self._restored_pairing}, "
                f"and it is told to lead as {lead.pairing}: a resumed run must go on "
                "counting pairings where the first ended"
            )
        self._following = self._lead = None
        self._followed = following.leader
        following.release()
        text = f"leads as pairing {lead.pairing}, from clock {self._values.clock}"
        return [
            Report(text=text),
            *self._service.lead(lead.pairing, following.clients.values()),
            *self._forwarding.lead(lead, now),
        ]

    def release(self) -> None:
        """Let go of all memory that is not the shard's own."""
        if self._following is not None:
            self._following.release()

    # --------------------------------------------------------------------- messages

    def receive(self, event: Received, message: CopyMessage, now: Seconds) -> list[Action]:
        """Take what the supervisor or the other copy says.

        Raises:
            RemoteProtocolError: there is no other copy, or it makes no sense.
            DistBeliefError: this life is over.
        """
        if not self._has_other:
            raise RemoteProtocolError(
                f"{event.sender} sent {type(message).__name__} to {self._name}, which "
                "is the only copy of its shard"
            )
        match message:
            case Promote() | StartSync() if message.receiver_incarnation != self._life:
                return []
            case Promote():
                return self._take_lead(message, now)
            case StartSync() | StateBlock() | ReplicatePush() | PushBlock():
                return self._from_leader(event.sender, message)
            case StateAck() | PushApplied() | PushBlockAck():
                return self._from_second(event, message, now)
            case _:
                assert_never(message)

    def is_leader(self, sender: Address) -> bool:
        """Return whether blocks of this sender come from a leader, not a client."""
        return self._following is not None or sender == self._followed

    def _take_lead(self, lead: Promote, now: Seconds) -> list[Action]:
        if self._following is not None:
            return self._prepare(self._following, lead)
        if lead.pairing <= self._forwarding.pairing:
            return []
        actions = self._forwarding.lead(lead, now)
        return [*actions, *self._service.greet_held()]

    def _prepare(self, following: Backup, lead: Promote) -> list[Action]:
        """Lead as soon as what was taken is applied."""
        if lead.pairing <= following.pairing:
            return []
        if not following.lead(lead.pairing):
            raise DistBeliefError(
                f"{self._name} is told to lead, and holds {self._values.n_held} of "
                f"{self._values.n_pieces} pieces of what {following.leader} held: its "
                "next life begins from the newest snapshot"
            )
        self._lead = lead
        return []

    def _from_leader(self, sender: Address, message: FromLeader) -> list[Action]:
        following = self._following
        if following is None:
            self._check_deposed(sender, message)
            return []
        match message:
            case StartSync():
                return following.follow(sender, message)
            case StateBlock():
                return following.take_piece(sender, message)
            case ReplicatePush():
                return following.forward(sender, message)
            case PushBlock():
                return following.take_block(sender, message)
            case _:
                assert_never(message)

    def _from_second(self, event: Received, message: FromSecond, now: Seconds) -> list[Action]:
        if self._following is not None:
            return []  # meant for an earlier life
        forwarding = self._forwarding
        match message:
            case StateAck():
                return forwarding.credit_pieces(event, message, now)
            case PushBlockAck():
                return forwarding.credit_blocks(event, message, now)
            case PushApplied():
                actions = forwarding.acknowledged(event, message, now)
                return [*actions, *self._service.greet_held()]
            case _:
                assert_never(message)

    def _check_deposed(self, sender: Address, message: FromLeader) -> None:
        if isinstance(message, StartSync) and message.pairing > self._forwarding.pairing:
            raise DistBeliefError(
                f"{sender} leads as pairing {message.pairing} where {self._name} led "
                f"as {self._forwarding.pairing}: only its next life can be a second"
            )


# What a shard does next: one piece of work at a time.
#
# Between two pieces of work the shard decides:
#
#     initialise --> serving --+--> save     a snapshot was asked for
#                              +--> copy     a fetch waits, and a copy is free; not twice
#                              |             in a row while a push waits
#                              +--> apply    the oldest complete push; not after the
#                              |             last snapshot was asked for
#                              +--> collect  the same, if it is of a set of portions
#                              +--> order    what a coordinator orders; before all else
#                              +--> halt     told to stop, and nothing is left to do
#
# One of two copies does not serve before it leads:
#
#     initialise --> waiting, following --> apply   what its leader has forwarded
#                         |            +--> halt    told to stop
#                         +--> serving              told to lead, and all that is applied
#
# Rules:
#
# * The published values are marked as being written from the `Compute` of an application
#   to its answer (`published`). Updates wait for no reader.
# * Snapshots: nothing changes the arrays from `Persist` to `Persisted`; pushes queue.


class _Work(Enum):
    """What may run; one at a time."""

    INITIALISE = "starting"
    SAVE = "saving"
    COPY = "copying"
    APPLY = "applying"
    COLLECT = "collecting"
    ORDER = "ordered"


@final
class WorkQueue:
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
        values: ShardStore,
        *,
        service: ClientService,
        standing: ReplicaState,
        orders: CommandExecutor,
    ) -> None:
        self._identity = identity
        self._values = values
        self._service = service
        self._standing = standing
        self._orders = orders
        self._work: _Work | None = None
        self._ready = False
        self._copied_last = False
        self.saves = CheckpointWriter()
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
        self, pushed: Vector, *, n_clients: int, holding: ShardSlice, touches: Vector | None
    ) -> list[Action]:
        self._work = _Work.APPLY
        self._copied_last = False
        touched = None if touches is None else self._values.holdings.get(touches)
        work, cost = self._values.begin_push(
            pushed, n_clients=n_clients, holding=holding, touched=touched
        )
        return [Compute(name="apply", work=work, cost=cost)]

    def _begin_apply(self, applying: PushInProgress, now: Seconds) -> list[Action]:
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


ShardMessage = (
    OpenSession
    | Fetch
    | FetchAck
    | PushBlock
    | Push
    | ShardCommand
    | Promote
    | StartSync
    | StateBlock
    | ReplicatePush
    | StateAck
    | PushApplied
    | PushBlockAck
    | SaveCheckpoint
    | Stop
)


@final
class Shard:
    """The role `shard-INDEX`, or one of two copies of it."""

    accepts: Final = message_types(ShardMessage)

    def __init__(
        self, config: ShardConfig, *, memory: Memory, initialise: Callable[[], Vector]
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
        self._values = ShardStore(config.identity, memory=memory)
        self._service = ClientService(config, self._values, memory=memory)
        self._standing = ReplicaState(config, self._values, self._service, memory=memory)
        self._orders = CommandExecutor(config, self._values)
        self._agenda = WorkQueue(
            config.identity,
            self._values,
            service=self._service,
            standing=self._standing,
            orders=self._orders,
        )
        self._stopped_by: Address | None = None
        self._abandoned: str | None = None  # why, if the supervisor is gone

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
                actions = self._agenda.computed(event, now)
            case Persisted():
                actions = self._agenda.persisted(event)
            case PeerLost():
                actions = self._lost(event, now)
            case PeerJoined():
                actions = []
            case _:
                assert_never(event)
        actions = [*actions, *self._agenda.next(now)]
        return [*actions, *self._end()] if self._agenda.is_over else actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters.

        `pushes` are those in its values, those of the snapshot that it began with
        included: of a replica of several machines it is one if all parts are there.
        `pushes_applied` counts what this life has applied, each part for itself.
        `bytes_in` counts what was pushed, by blocks or through shared memory;
        `bytes_out` blocks only: nobody tells a shard of reads from shared memory.
        """
        state = self._agenda.word
        if state is None:
            state = "stopping" if self._stopped_by is not None else self._standing.word
        return state, {
            "clock": float(self._values.clock),
            "pushes": float(self._values.steps.n_pushes),
            "pushes_restored": float(self._values.n_restored),
            **self._service.counters(),
            **self._standing.counters(),
            **self._orders.counters(),
        }

    # ------------------------------------------------------------- life and death

    def _start(self, event: Started) -> list[Action]:
        if event.unrestored is not None and self._standing.leads:
            raise StorageError(event.unrestored)  # else it would begin anew
        self._service.start(event.incarnation)
        self._standing.start(event.incarnation, unrestored=event.unrestored)
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

        begun = Compute(name="initialise", work=work, cost=cost)
        actions: list[Action] = [self._agenda.initialise(begun)]
        if why_not is not None:
            text = f"clients of this host have to fetch by messages: {why_not}"
            actions.append(Report(text=text, level="warning"))
        return actions

    def _end(self) -> list[Action]:
        assert self._stopped_by is not None
        self._service.release()
        self._standing.release()
        self._memory.release(self._values.region)
        if self._abandoned is not None:
            return [Exit(error=self._abandoned)]  # to be started again
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [Send(receiver=self._stopped_by, message=finished), Exit()]

    def _timer(self, name: str, now: Seconds) -> list[Action]:
        if name == SECOND_TIMER:
            return self._service.forwarding.timer(now)
        return self._service.timer(name, now)

    # ------------------------------------------------------------------- messages

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        sender, standing = event.sender, self._standing
        message = cast("ShardMessage", event.message)  # the driver refuses all others
        match message:
            case OpenSession():
                actions = self._service.greet(event, message)
            case PushBlock() if standing.is_leader(sender):
                actions = standing.receive(event, message, now)
            case Fetch() | FetchAck() | PushBlock() | Push():
                actions = self._serve_client(event, message, now)
            case ShardCommand():
                actions = self._orders.take(event, message)
            case (
                Promote()
                | StartSync()
                | StateBlock()
                | ReplicatePush()
                | StateAck()
                | PushApplied()
                | PushBlockAck()
            ):
                actions = standing.receive(event, message, now)
            case SaveCheckpoint() | Stop():
                actions = self._obey(sender, message)
        return actions

    def _serve_client(self, event: Received, message: ClientMessage, now: Seconds) -> list[Action]:
        if isinstance(message, Push) and not message.grant and self._orders.drives:
            reason = "a coordinator drives this shard: nothing else can be pushed"
            refused = SessionRefused(reason=reason, for_good=True)
            return [Send(receiver=event.sender, message=refused)]
        return self._service.serve(event, message, now)

    def _obey(self, sender: Address, message: SaveCheckpoint | Stop) -> list[Action]:
        if isinstance(message, SaveCheckpoint):
            self._agenda.is_sealed = self._agenda.is_sealed or message.last
            return self._save(sender, message.label)
        return self._stop(sender)

    def _stop(self, sender: Address) -> list[Action]:
        self._stopped_by, self._agenda.is_stopping = sender, True
        self._service.close()
        return self._service.forwarding.stop()

    def _lost(self, event: PeerLost, now: Seconds) -> list[Action]:
        if not (event.peer == SUPERVISOR and event.for_good):
            return self._service.lost(event, now)
        if self._stopped_by is not None:
            return []
        self._abandoned = event.reason
        if self._standing.will_lead and not self._orders.were_given:
            self._agenda.is_sealed = True
            self._agenda.saves.save_rest()
        return self._stop(SUPERVISOR)

    def _save(self, sender: Address, label: str) -> list[Action]:
        clock = self._values.clock
        if self._orders.drives:
            why_not = "a coordinator drives this shard: ask it to save"
            return self._agenda.saves.refuse(sender, label, clock=clock, why_not=why_not)
        if not self._standing.will_lead:
            why_not = "this copy of the shard does not lead: ask the one that does"
            return self._agenda.saves.refuse(sender, label, clock=clock, why_not=why_not)
        return self._agenda.saves.ask(sender, label, clock=clock)
