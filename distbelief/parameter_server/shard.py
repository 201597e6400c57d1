"""A parameter server shard: owns one slice of every vector and applies the pushed gradients.

    Shard            dispatches events: sessions, pushes, fetches, shard commands, replication
      WorkQueue      runs one piece of work at a time: apply, copy, save, command
      ReplicaState   primary or backup, if the shard has two copies

Shards never talk to each other (DB-5). After the last checkpoint request no push starts, because
it would be acknowledged and then lost. After `Stop` the shard finishes complete pushes and
requested checkpoints, starts nothing else and answers no client.
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
from distbelief.parameter_server.replication import TIMER as BACKUP_TIMER, Backup, Replicated
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


# --- primary and backup ---

FromPrimary = StartSync | StateBlock | ReplicatePush | PushBlock
FromBackup = StateAck | PushApplied | PushBlockAck
ReplicationMessage = Promote | FromPrimary | FromBackup


@final
class ReplicaState:
    """The role of one shard copy: waiting, backup, or primary.

        waiting ---- Promote ---------------------------------------------> primary
           |                                                                   ^
           +--- StartSync --> backup --- all state blocks --> in sync -- Promote

    A shard with one copy is always primary. A copy that was primary never becomes a backup in the
    same incarnation: it may have applied pushes that the new primary never saw, so it exits.
    """

    def __init__(
        self, config: ShardConfig, values: ShardStore, service: ClientService, *, memory: Memory
    ) -> None:
        self._name = config.name
        self._is_replicated = config.is_replicated
        self._values = values
        self._service = service
        self._primary = service.primary
        # None once this copy is the primary.
        self._backup: Backup | None = None
        if config.is_replicated:
            self._backup = Backup(
                values, memory=memory, bounds=service.bounds, n_clients_max=config.n_clients_max
            )
        self._incarnation = 0
        self._promotion: Promote | None = None  # received, but not yet carried out
        self._restored_term = 0  # recorded in the snapshot
        self._unrestored: str | None = None  # why no snapshot is usable
        self._former_primary: Address | None = None  # this copy was its backup

    @property
    def is_primary(self) -> bool:
        return self._backup is None

    @property
    def will_be_primary(self) -> bool:
        return self._backup is None or self._promotion is not None

    @property
    def activity(self) -> str:
        if self._backup is None:
            return "serving"
        return "following" if self._backup.has_primary else "waiting"

    def counters(self) -> Mapping[str, float]:
        if not self._is_replicated:
            return {}
        backup = self._backup
        part = self._primary if backup is None else backup
        return {
            "term": float(part.term),
            "in_sync": 0.0 if backup is None else float(backup.in_sync_term),
            "primary": float(backup is None),
        }

    # ------------------------------------------------------------------------- work

    def start(self, incarnation: int, *, unrestored: str | None = None) -> None:
        """Begin an incarnation; `unrestored` tells why no snapshot is usable."""
        self._incarnation = incarnation
        self._unrestored = unrestored

    def restored(self, state: ShardState) -> list[Action]:
        if self._backup is None:
            return self._service.open(state.clients)
        self._restored_term = state.incarnation
        return self._backup.restored(state.clients)

    def begin_next(self) -> Replicated | None:
        return None if self._backup is None else self._backup.begin_next()

    def end_push(self) -> list[Action]:
        if self._backup is not None:
            return self._backup.end()
        clock = self._values.clock
        self._values.end_push()
        held = self._primary.applied(clock=clock)
        actions = self._service.pushes.end(clock=clock, held=held)
        return [*actions, *self._service.answer_deferred()]

    def become_primary(self, now: Seconds) -> list[Action]:
        """Become the primary if `Promote` has come and all replicated pushes are applied."""
        backup, promote = self._backup, self._promotion
        if backup is None or promote is None or not backup.drained:
            return []
        # A copy that never synced serves its snapshot, so the snapshot must be readable and older
        # than this term. Otherwise acknowledged pushes would silently disappear.
        if not backup.has_primary and self._unrestored is not None:
            raise StorageError(self._unrestored)
        if not backup.has_primary and promote.term <= self._restored_term:
            raise StorageError(
                f"the snapshot of {self._name} has term {self._restored_term}, but Promote has "
                f"term {promote.term}: continue the count of terms in a resumed run"
            )
        self._backup = self._promotion = None
        self._former_primary = backup.primary
        backup.release()
        text = f"becomes primary in term {promote.term} at clock {self._values.clock}"
        return [
            Report(text=text),
            *self._service.promote(promote.term, backup.clients.values()),
            *self._primary.promote(promote, now),
        ]

    def release(self) -> None:
        if self._backup is not None:
            self._backup.release()

    # --------------------------------------------------------------------- messages

    def receive(self, event: Received, message: ReplicationMessage, now: Seconds) -> list[Action]:
        """Handle a message of the supervisor or of the other copy.

        Raises:
            RemoteProtocolError: The shard has no other copy, or the message is invalid.
            DistBeliefError: This incarnation cannot continue; the next one restores a snapshot.
        """
        if not self._is_replicated:
            raise RemoteProtocolError(
                f"{event.sender} sent {type(message).__name__} to {self._name}, which "
                "is the only copy of its shard"
            )
        match message:
            # A message for a former incarnation of this copy, delayed in the network.
            case Promote() | StartSync() if message.receiver_incarnation != self._incarnation:
                return []
            case Promote():
                return self._promote(message, now)
            case StartSync() | StateBlock() | ReplicatePush() | PushBlock():
                return self._from_primary(event.sender, message)
            case StateAck() | PushApplied() | PushBlockAck():
                return self._from_backup(event, message, now)
            case _:
                assert_never(message)

    def is_from_primary(self, sender: Address) -> bool:
        return self._backup is not None or sender == self._former_primary

    def _promote(self, promote: Promote, now: Seconds) -> list[Action]:
        if self._backup is not None:
            return self._prepare(self._backup, promote)
        if promote.term <= self._primary.term:
            return []
        actions = self._primary.promote(promote, now)
        return [*actions, *self._service.answer_deferred()]

    def _prepare(self, backup: Backup, promote: Promote) -> list[Action]:
        if promote.term <= backup.term:
            return []
        if not backup.promote(promote.term):
            raise DistBeliefError(
                f"{self._name} cannot become primary with {self._values.n_held} of "
                f"{self._values.n_state_blocks} state blocks of {backup.primary}: restart it "
                "from the newest snapshot"
            )
        self._promotion = promote
        return []

    def _from_primary(self, sender: Address, message: FromPrimary) -> list[Action]:
        backup = self._backup
        if backup is None:
            self._check_demoted(sender, message)
            return []
        match message:
            case StartSync():
                return backup.start_sync(sender, message)
            case StateBlock():
                return backup.take_state_block(sender, message)
            case ReplicatePush():
                return backup.replicate(sender, message)
            case PushBlock():
                return backup.take_block(sender, message)
            case _:
                assert_never(message)

    def _from_backup(self, event: Received, message: FromBackup, now: Seconds) -> list[Action]:
        if self._backup is not None:
            return []  # meant for an earlier incarnation
        primary = self._primary
        match message:
            case StateAck():
                return primary.state_acked(event, message, now)
            case PushBlockAck():
                return primary.blocks_acked(event, message, now)
            case PushApplied():
                actions = primary.acknowledged(event, message, now)
                return [*actions, *self._service.answer_deferred()]
            case _:
                assert_never(message)

    def _check_demoted(self, sender: Address, message: FromPrimary) -> None:
        if isinstance(message, StartSync) and message.term > self._primary.term:
            raise DistBeliefError(
                f"{sender} is primary in term {message.term} and {self._name} was in term "
                f"{self._primary.term}: restart {self._name} to make it a backup"
            )


# --- work queue ---


class _Work(Enum):
    """The kinds of work; at most one runs at a time. The values are the status words."""

    INITIALISE = "starting"
    SAVE = "saving"
    COPY = "copying"
    APPLY = "applying"
    STAGE = "staging"
    COMMAND = "executing"


@final
class WorkQueue:
    """Decides what a shard does next, one piece of work at a time.

        initialise --> serving --+--> command  a shard command; before everything else
                                 +--> save     a checkpoint was requested
                                 +--> copy     a fetch waits and a version is free; not twice in
                                 |             a row while a push waits
                                 +--> apply    the oldest complete push; not after the last
                                 |             checkpoint was requested
                                 +--> stage    the same for a gradient sum of a chunk
                                 +--> exit     after Stop, when nothing is left to do

    Of two copies, the backup applies replicated pushes only, until it is promoted.
    """

    def __init__(
        self,
        identity: ShardIdentity,
        values: ShardStore,
        *,
        service: ClientService,
        replica: ReplicaState,
        commands: CommandExecutor,
    ) -> None:
        self._identity = identity
        self._values = values
        self._service = service
        self._replica = replica
        self._commands = commands
        self._work: _Work | None = None
        self._ready = False
        self._copied_last = False
        self.saves = CheckpointWriter()  # requested checkpoints
        self.is_sealed = False  # whether the last checkpoint was requested
        self.is_stopping = False  # whether Stop has come
        self.is_over = False  # whether the shard may exit

    @property
    def activity(self) -> str | None:
        return None if self._work is None else self._work.value

    def initialise(self, action: Compute) -> Compute:
        self._work = _Work.INITIALISE
        return action

    def next(self, now: Seconds) -> list[Action]:
        if self._work is not None or not self._ready:
            return []
        actions = self._begin_replicated()
        if self._work is None:
            actions += self._replica.become_primary(now)
            if self._replica.is_primary:
                actions += self._serve(now)
            else:
                self.is_over = self.is_stopping
        return actions

    def _begin_replicated(self) -> list[Action]:
        if self.is_stopping:
            return []
        replicated = self._replica.begin_next()
        if replicated is None:
            return []
        message = replicated.message
        return self._apply(
            replicated.values,
            n_clients=max(1, message.n_pushing),
            shard_slice=replicated.shard_slice,
            touches=message.holds if message.touches else None,
        )

    def _serve(self, now: Seconds) -> list[Action]:
        first = self._begin_command_or_save()
        if first:
            return first
        may_copy = self._service.fetches.wants_copy and not self.is_stopping
        # Copies and pushes alternate, so neither fetches nor pushes starve.
        if may_copy and not self._copied_last:
            return self._begin_copy()
        actions = self._service.primary.transfer(now)
        applying = None
        if self._service.primary.may_apply and not self.is_sealed:
            applying = self._service.pushes.begin_next(clock=self._values.clock)
        if applying is not None:
            actions += self._begin_apply(applying, now)
        elif may_copy:
            actions += self._begin_copy()
        else:
            self.is_over = self.is_stopping
        return actions

    def _begin_command_or_save(self) -> list[Action]:
        if not self.is_stopping:
            command = self._commands.begin_next(self._snapshot)
            if command is not None:
                self._work = _Work.COMMAND
                return [command]
        label = self.saves.begin_next(clock=self._values.clock)
        return [] if label is None else self._begin_save(label)

    def _apply(
        self, pushed: Vector, *, n_clients: int, shard_slice: ShardSlice, touches: Vector | None
    ) -> list[Action]:
        self._work = _Work.APPLY
        self._copied_last = False
        touched = None if touches is None else self._values.slice_table.get(touches)
        work, cost = self._values.begin_push(
            pushed, n_clients=n_clients, shard_slice=shard_slice, touched=touched
        )
        return [Compute(name="apply", work=work, cost=cost)]

    def _begin_apply(self, applying: PushInProgress, now: Seconds) -> list[Action]:
        if applying.push.commit_token:
            self._work = _Work.STAGE
            self._copied_last = False
            work, cost = self._commands.stage_work(applying)
            return [Compute(name="collect", work=work, cost=cost)]
        n_clients = self._service.n_averaged(applying.client)
        replications = self._service.primary.replicate(applying, n_clients=n_clients, now=now)
        apply = self._apply(
            applying.push_buffer.values,
            n_clients=n_clients,
            shard_slice=applying.client.shard_slice,
            touches=applying.push.touches,
        )
        return [*replications, *apply]

    def _begin_copy(self) -> list[Action]:
        self._work = _Work.COPY
        self._copied_last = True
        work, cost = self._values.copy_work(self._service.fetches.begin_copy())
        return [Compute(name="copy", work=work, cost=cost)]

    def _begin_save(self, label: str) -> list[Action]:
        self._work = _Work.SAVE
        # The snapshot shares the arrays, so no work runs until it is written; pushes queue.
        snapshot = self._commands.with_vectors(self._snapshot(label))
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
        work, self._work = self._work, None
        if work is _Work.COMMAND:
            return self._commands.persisted(event)
        assert work is _Work.SAVE, work
        return self.saves.taken(event, clock=self._values.clock)

    def computed(self, event: Computed, now: Seconds) -> list[Action]:
        """Finish the running work, or raise the exception that it raised."""
        if event.error is not None:
            raise event.error
        work, self._work = self._work, None
        match work:
            case _Work.INITIALISE:
                assert isinstance(event.result, ShardState), event.result
                self._values.initialised(event.result)
                self.saves.begin_at(self._values.clock)
                self._ready = True
                self._commands.ready()
                return self._replica.restored(event.result)
            case _Work.APPLY:
                return self._replica.end_push()
            case _Work.STAGE:
                clock = self._values.clock
                actions = self._service.pushes.end(clock=clock, held=False, rises=False)
                return [*actions, *self._service.answer_deferred()]
            case _Work.COMMAND:
                return self._commands.computed(event)
            case _Work.COPY:
                return self._service.fetches.end_copy(clock=self._values.clock, now=now)
            case _Work.SAVE | None:
                raise AssertionError(f"unexpected result of {event.name} during {work}")
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
        """Create the role; it acts on `Started`.

        Args:
            config: Settings of the shard.
            memory: Memory that clients on this host can attach.
            initialise: Returns the initial values, (shard_size,); runs as work, and only without
                a snapshot.
        """
        self._memory = memory
        self._initialise = initialise
        self._values = ShardStore(config.identity, memory=memory)
        self._service = ClientService(config, self._values, memory=memory)
        self._replica = ReplicaState(config, self._values, self._service, memory=memory)
        self._commands = CommandExecutor(config, self._values)
        self._work_queue = WorkQueue(
            config.identity,
            self._values,
            service=self._service,
            replica=self._replica,
            commands=self._commands,
        )
        self._stopped_by: Address | None = None
        self._abandoned: str | None = None  # why the supervisor counts as lost

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        match event:
            case Started():
                actions = self._start(event)
            case Received():
                actions = self._receive(event, now)
            case TimerFired():
                actions = self._timer(event.name, now)
            case Computed():
                actions = self._work_queue.computed(event, now)
            case Persisted():
                actions = self._work_queue.persisted(event)
            case PeerLost():
                actions = self._lost(event, now)
            case PeerJoined():
                actions = []
            case _:
                assert_never(event)
        actions = [*actions, *self._work_queue.next(now)]
        return [*actions, *self._end()] if self._work_queue.is_over else actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the state and the counters.

        `pushes` counts whole pushes in the values, restored ones included: the ranks of one
        partitioned replica together make one. `pushes_applied` counts each rank's push since this
        incarnation began. `bytes_in` includes shared memory; `bytes_out` counts blocks only,
        because a shard cannot see reads of shared memory.
        """
        state = self._work_queue.activity
        if state is None:
            state = "stopping" if self._stopped_by is not None else self._replica.activity
        return state, {
            "clock": float(self._values.clock),
            "pushes": float(self._values.steps.n_pushes),
            "pushes_restored": float(self._values.n_restored),
            **self._service.counters(),
            **self._replica.counters(),
            **self._commands.counters(),
        }

    # ------------------------------------------------------------- start and stop

    def _start(self, event: Started) -> list[Action]:
        # Without this error the shard would start from the initial values and lose the run.
        if event.unrestored is not None and self._replica.is_primary:
            raise StorageError(event.unrestored)
        self._service.start(event.incarnation)
        self._replica.start(event.incarnation, unrestored=event.unrestored)
        why_not = self._values.publish(
            self._service.region("values"), incarnation=event.incarnation
        )
        restored, restore_vectors = self._commands.restore_work(event.restored)
        initialise, cost = self._values.initialise_work(
            restored,
            self._initialise,
            incarnation=event.incarnation if self._replica.is_primary else None,
        )

        def work() -> ShardState:
            state = initialise()
            restore_vectors()
            return state

        begun = Compute(name="initialise", work=work, cost=cost)
        actions: list[Action] = [self._work_queue.initialise(begun)]
        if why_not is not None:
            text = f"clients on this host fetch by messages, not shared memory: {why_not}"
            actions.append(Report(text=text, level="warning"))
        return actions

    def _end(self) -> list[Action]:
        assert self._stopped_by is not None
        self._service.release()
        self._replica.release()
        self._memory.release(self._values.region)
        if self._abandoned is not None:
            return [Exit(error=self._abandoned)]  # an error exit makes the launcher restart it
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [Send(receiver=self._stopped_by, message=finished), Exit()]

    def _timer(self, name: str, now: Seconds) -> list[Action]:
        if name == BACKUP_TIMER:
            return self._service.primary.timer(now)
        return self._service.timer(name, now)

    # ------------------------------------------------------------------- messages

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        sender, replica = event.sender, self._replica
        message = cast("ShardMessage", event.message)  # the driver refuses all others
        match message:
            case OpenSession():
                actions = self._service.open_session(event, message)
            case PushBlock() if replica.is_from_primary(sender):
                actions = replica.receive(event, message, now)
            case Fetch() | FetchAck() | PushBlock() | Push():
                actions = self._serve_client(event, message, now)
            case ShardCommand():
                actions = self._commands.take(event, message)
            case (
                Promote()
                | StartSync()
                | StateBlock()
                | ReplicatePush()
                | StateAck()
                | PushApplied()
                | PushBlockAck()
            ):
                actions = replica.receive(event, message, now)
            case SaveCheckpoint() | Stop():
                actions = self._control(sender, message)
        return actions

    def _serve_client(self, event: Received, message: ClientMessage, now: Seconds) -> list[Action]:
        if isinstance(message, Push) and not message.commit_token and self._commands.is_driven:
            reason = "this shard takes pushes of its coordinator's run only"
            refused = SessionRefused(reason=reason, for_good=True)
            return [Send(receiver=event.sender, message=refused)]
        return self._service.serve(event, message, now)

    def _control(self, sender: Address, message: SaveCheckpoint | Stop) -> list[Action]:
        if isinstance(message, SaveCheckpoint):
            self._work_queue.is_sealed = self._work_queue.is_sealed or message.last
            return self._save(sender, message.label)
        return self._stop(sender)

    def _stop(self, sender: Address) -> list[Action]:
        self._stopped_by, self._work_queue.is_stopping = sender, True
        self._service.close()
        return self._service.primary.stop()

    def _lost(self, event: PeerLost, now: Seconds) -> list[Action]:
        if not (event.peer == SUPERVISOR and event.for_good):
            return self._service.lost(event, now)
        if self._stopped_by is not None:
            return []
        # Without a supervisor, save what no checkpoint has, so that acknowledged pushes survive.
        # Not under a coordinator: only it can make savepoints that match across shards.
        self._abandoned = event.reason
        if self._replica.will_be_primary and not self._commands.was_driven:
            self._work_queue.is_sealed = True
            self._work_queue.saves.save_unsaved()
        return self._stop(SUPERVISOR)

    def _save(self, sender: Address, label: str) -> list[Action]:
        clock = self._values.clock
        if self._commands.is_driven:
            why_not = "a coordinator drives this shard: ask it to save"
            return self._work_queue.saves.refuse(sender, label, clock=clock, why_not=why_not)
        if not self._replica.will_be_primary:
            why_not = "this copy of the shard is a backup: send the request to the primary"
            return self._work_queue.saves.refuse(sender, label, clock=clock, why_not=why_not)
        return self._work_queue.saves.ask(sender, label, clock=clock)
