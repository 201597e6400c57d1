"""A parameter server shard: owns one slice of every vector and applies the pushed gradients.

    clients       Sessions         sessions, and pushes until they are acknowledged
                  PinnedVersions   fetches by blocks
    other copy    Primary, Backup  replication, if the shard has two copies
    coordinator   CommandExecutor  numbered commands on named vectors

`Shard` is the only one that calls them: it dispatches each event, then begins one piece of work.

    OpenSession  -> SessionOpened, or SessionRefused with a reason
    Push, Fetch  -> served in an open session only; otherwise SessionRefused, and the client
                    opens a session and sends again

Shards of different indices never talk to each other (DB-5). After the last checkpoint request no
push starts, because it would be acknowledged and then lost. After `Stop` the shard finishes
complete pushes and requested checkpoints, starts nothing else and answers no client.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, assert_never, cast, final

import msgspec

from distbelief.core.errors import (
    DistBeliefError,
    FalseClaimError,
    RemoteProtocolError,
    StorageError,
)
from distbelief.core.memory import Memory
from distbelief.core.spans import Spans
from distbelief.core.vectors import Vector
from distbelief.parameter_server.checkpoint import CheckpointWriter, ShardState, take
from distbelief.parameter_server.command_log import CommandExecutor
from distbelief.parameter_server.pinned_versions import TIMER as PINS_TIMER, PinnedVersions
from distbelief.parameter_server.replication import (
    TIMER as BACKUP_TIMER,
    Backup,
    FromBackup,
    FromPrimary,
    Primary,
    Replicated,
)
from distbelief.parameter_server.sessions import PushInProgress, Session, Sessions
from distbelief.parameter_server.shard_config import ShardConfig, other_copy
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.tensor_copies import Pushed
from distbelief.protocol import (
    batch as bt,
    membership as ms,
    push_fetch as pf,
    replication as rp,
    role as rl,
)


__all__ = ["Shard", "ShardConfig"]


ClientMessage = pf.Fetch | pf.FetchAck | pf.PushBlock | pf.Push
ReplicationMessage = rp.Promote | FromPrimary | FromBackup
ShardMessage = (
    pf.OpenSession
    | ClientMessage
    | ReplicationMessage
    | bt.ShardCommand
    | bt.TakeRows
    | bt.AddRows
    | ms.SaveCheckpoint
    | ms.Stop
)

_ABSENT: Final = "absent:"
_RETURNED: Final = "returned"  # clients had time to come back
_GRACE: Final = "grace"  # a round ends without late pushes
_TELL: Final = "tell"

# Where data are dealt: how often a shard checks for news of what it has applied, and how often it
# repeats the message, which may be lost.
TELL_SECONDS: Final = 0.2
TELL_SECONDS_EACH: Final = 1e-4  # of thousands of spans, as each costs the supervisor microseconds
TELL_SECONDS_MAX: Final = 1.0  # the dealer gives up on what it has not heard of for three
TELL_AGAIN_SECONDS: Final = 2.0


class _Work(Enum):
    """The kinds of work; at most one runs at a time. The values are the status words."""

    INITIALISE = "starting"
    SAVE = "saving"
    COPY = "copying"
    APPLY = "applying"
    STAGE = "staging"
    COMMAND = "executing"


@final
class Shard:
    """The role `shard-INDEX`, or one of two copies of it.

        waiting ---- Promote ---------------------------------------------> primary
           |                                                                   ^
           +--- StartSync --> backup --- all state blocks --> in sync -- Promote

    A shard with one copy is always primary. A copy that was primary never becomes a backup in the
    same incarnation: it may have applied pushes that the new primary never saw, so it exits.

    Args:
        config: Settings of the shard.
        memory: Memory that clients on this host can attach.
        initialise: Returns the initial values, (shard_size,); runs as work, and only without a
            snapshot.
    """

    accepts: Final = rl.message_types(ShardMessage)

    def __init__(
        self, config: ShardConfig, *, memory: Memory, initialise: Callable[[], Vector]
    ) -> None:
        self._config = config
        self._name = config.name
        self._memory = memory
        self._initialise = initialise
        self._values = ShardStore(config, memory=memory)
        self._sessions = Sessions(config, self._values, memory=memory)
        self._versions = PinnedVersions(config, self._values, self._sessions, memory=memory)
        self._commands = CommandExecutor(config, self._values)
        self._saves = CheckpointWriter()  # requested checkpoints
        self._deferred: dict[rl.Address, tuple[rl.Received, pf.OpenSession]] = {}
        self._serves = False  # clients
        # Replication.
        self._incarnation = 0
        self._region = ""  # prefix of the names of its memory
        self._primary = Primary(self._values, self._sessions, self._commands)
        self._backup: Backup | None = None  # None once this copy is the primary
        if config.is_replicated:
            self._backup = Backup(
                self._values, self._commands, memory=memory, n_clients_max=config.n_clients_max
            )
        self._promotion: rp.Promote | None = None  # received, but not yet carried out
        self._restored_term = 0  # recorded in the snapshot
        self._unrestored: str | None = None  # why no snapshot is usable
        self._former_primary: rl.Address | None = None  # this copy was its backup
        # Work.
        self._work: _Work | None = None
        self._spent: dict[str, rl.Seconds] = {}  # by state, since the first piece of work
        self._spent_until: rl.Seconds | None = None
        self._ready = False
        self._copied_last = False
        self._grace_until: rl.Seconds | None = None  # for which there is a timer
        self._told: tuple[Spans, rl.Seconds] | None = None  # what the supervisor heard last
        self._is_sealed = False  # whether the last checkpoint was requested
        self._stopped_by: rl.Address | None = None
        self._abandoned: str | None = None  # why the supervisor counts as lost

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        before = self._work
        match event:
            case rl.Started():
                actions = self._start(event)
            case rl.Received():
                actions = self._receive(event, now)
            case rl.TimerFired():
                actions = self._timer(event.name, now)
            case rl.Computed():
                actions = self._computed(event, now)
            case rl.Persisted():
                actions = self._persisted(event, now)
            case rl.PeerLost():
                actions = self._lost(event, now)
            case rl.PeerJoined():
                actions = []
            case _:
                assert_never(event)
        if self._sessions.counts_ticks:
            actions += self._sessions.tell_floor()
        actions += self._next(now)
        if (before or self._work) and _Work.INITIALISE not in (before, self._work):
            if self._spent_until is not None:
                state = "spent_serving" if before is None else f"spent_{before.value}"
                self._spent[state] = self._spent.get(state, 0.0) + now - self._spent_until
            self._spent_until = now
        if self._ready and self._work is None and self._stopped_by is not None:
            actions += self._end(self._stopped_by)
        return actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the state and the counters.

        `pushes` counts whole pushes in the values, restored ones included: the ranks of one
        partitioned replica together make one. `pushes_applied` counts each rank's push since this
        incarnation began. `bytes_in` includes shared memory; `bytes_out` counts blocks only,
        because a shard cannot see reads of shared memory. `spent_STATE` are seconds at work, and
        `spent_serving` those between.
        """
        values, backup = self._values, self._backup
        counters = {
            "clock": float(values.clock),
            "pushes": float(values.steps.n_pushes),
            "pushes_restored": float(values.n_restored),
            "bytes_out": float(self._versions.bytes_out),
            **self._sessions.counters(),
            **self._commands.counters(),
            **self._spent,
        }
        if self._config.is_replicated:
            counters["term"] = float(self._primary.term if backup is None else backup.term)
            counters["in_sync"] = float(0 if backup is None else backup.in_sync_term)
            counters["primary"] = float(backup is None)
        if self._work is not None:
            return self._work.value, counters
        if self._stopped_by is not None:
            return "stopping", counters
        if backup is None:
            return "serving", counters
        return "waiting" if backup.primary is None else "following", counters

    @property
    def values(self) -> ShardStore:
        return self._values

    def validate(self) -> None:
        """Check what holds after every event; only simulations call it."""
        self._sessions.validate()
        assert self._backup is None or not self._serves, "a backup serves clients"

    # ------------------------------------------------------------- start and stop

    def _start(self, event: rl.Started) -> list[rl.Action]:
        is_primary = self._backup is None
        # Without this error the shard would start from the initial values and lose the run.
        if event.unrestored is not None and is_primary:
            raise StorageError(event.unrestored)
        self._incarnation, self._unrestored = event.incarnation, event.unrestored
        self._region = f"{self._name}.{event.incarnation}"
        if is_primary:
            self._sessions.term = event.incarnation
        why_not = self._values.publish(f"{self._region}.values")
        restored, restore_vectors = self._commands.restore_work(event.restored)
        initialise, cost = self._values.initialise_work(
            restored, self._initialise, incarnation=event.incarnation if is_primary else None
        )

        def work() -> ShardState:
            state = initialise()
            restore_vectors()
            return state

        self._work = _Work.INITIALISE
        actions: list[rl.Action] = [rl.Compute(name="initialise", work=work, cost=cost)]
        if why_not is not None:
            text = f"clients on this host fetch by messages, not shared memory: {why_not}"
            actions.append(rl.Report(text=text, level="warning"))
        return actions

    def _initialised(self, state: ShardState, now: rl.Seconds) -> list[rl.Action]:
        self._values.initialised(state)
        self._saves.clock = state.clock
        self._commands.ready()
        self._ready = True
        if self._backup is None:
            return self._serve(state.clients, now)
        self._restored_term = state.incarnation
        return self._backup.restored(state.clients)

    def _stop(self, sender: rl.Address) -> list[rl.Action]:
        self._stopped_by = sender
        return self._primary.stop()

    def _end(self, stopped_by: rl.Address) -> list[rl.Action]:
        self._sessions.release()
        if self._backup is not None:
            self._backup.release()
        self._memory.release(self._values.region)
        if self._abandoned is not None:
            return [rl.Exit(error=self._abandoned)]  # an error exit makes the launcher restart it
        finished = ms.Finished(counters=dict(self.status()[1]))
        return [rl.Send(receiver=stopped_by, message=finished), rl.Exit()]

    def _lost(self, event: rl.PeerLost, now: rl.Seconds) -> list[rl.Action]:
        if not (event.peer == rl.SUPERVISOR and event.for_good):
            return self._client_lost(event, now)
        if self._stopped_by is not None:
            return []
        # Without a supervisor, save what no checkpoint has, so that acknowledged pushes survive.
        # Not under a coordinator: only it can make savepoints that match across shards.
        self._abandoned = event.reason
        if self._will_be_primary and not self._commands.was_driven:
            self._is_sealed = True
            self._saves.saves_unsaved = True
        return self._stop(rl.SUPERVISOR)

    # ------------------------------------------------------------------- messages

    def _receive(self, event: rl.Received, now: rl.Seconds) -> list[rl.Action]:
        message = cast("ShardMessage", event.message)  # the driver refuses all others
        match message:
            case pf.OpenSession():
                actions = self._open_session(event, message, now)
            case pf.PushBlock() if self._backup is not None or event.sender == self._former_primary:
                actions = self._replicate(event, message, now)
            case pf.Fetch() | pf.FetchAck() | pf.PushBlock() | pf.Push():
                actions = self._serve_client(event, message, now)
            case bt.ShardCommand():
                # The coordinator sends it to both copies, and the primary answers.
                actions = [] if self._backup is not None else self._commands.take(event, message)
            case bt.TakeRows() | bt.AddRows():
                # So does a worker that does not know which copy that is.
                actions = [] if self._backup is not None else self._rows(event, message, now)
            case ms.SaveCheckpoint() if self._backup is not None and event.sender != rl.SUPERVISOR:
                actions = []  # the same of a coordinator's warm start
            case ms.SaveCheckpoint():
                self._is_sealed = self._is_sealed or message.last
                # What the last pushes were of: the supervisor counts it before the job ends.
                tells = message.last and self._serves and self._config.deals
                actions = self._tell_news(now) if tells else []
                actions += self._save(event.sender, message.label)
            case ms.Stop():
                actions = self._stop(event.sender)
            case _:
                actions = self._replicate(event, message, now)
        return actions

    def _timer(self, name: str, now: rl.Seconds) -> list[rl.Action]:
        if name == BACKUP_TIMER:
            return self._primary.timer(now)
        if name == PINS_TIMER:
            return self._versions.timer(now)
        if name == _TELL:
            return self._tell(now)
        if name == _RETURNED:
            return self._sessions.place_new()
        if name == _GRACE:
            return []  # `_next` looks
        return self._absent(rl.Address(name.removeprefix(_ABSENT)), now)

    # ------------------------------------------------------------------- sessions

    def _serve(self, clients: Sequence[rp.SessionRecord], now: rl.Seconds) -> list[rl.Action]:
        """Serve from now on, deferred OpenSession messages first."""
        self._sessions.restore(clients)
        self._serves = True
        actions: list[rl.Action] = []
        if self._sessions.counts_ticks and self._sessions.term > 1:
            self._sessions.floor.awaits_clients = True
            actions.append(rl.SetTimer(name=_RETURNED, at=now + self._config.return_seconds))
        if self._config.deals:
            actions += self._tell(now)
        return [*actions, *self._answer_deferred(now)]

    def _tell(self, now: rl.Seconds) -> list[rl.Action]:
        """Tell the supervisor which dealt positions are applied, if that is news."""
        if self._stopped_by is not None:
            return []
        seldom = TELL_SECONDS_EACH * self._values.applied.n_spans
        after = min(max(TELL_SECONDS, seldom), TELL_SECONDS_MAX)
        return [rl.SetTimer(name=_TELL, at=now + after), *self._tell_news(now)]

    def _tell_news(self, now: rl.Seconds) -> list[rl.Action]:
        applied = self._values.applied
        if self._told is not None:
            told, at = self._told
            if told == applied and now - at < TELL_AGAIN_SECONDS:
                return []
        self._told = applied, now
        message = ms.SamplesApplied(spans=applied.to_wire()[: 2 * ms.N_APPLIED_MAX])
        return [rl.Send(receiver=rl.SUPERVISOR, message=message)]

    def _open_session(
        self, event: rl.Received, request: pf.OpenSession, now: rl.Seconds
    ) -> list[rl.Action]:
        sender, sessions = event.sender, self._sessions
        if self._backup is not None:  # it answers nobody until it is promoted
            self._defer(event, request)
            return []
        # The answer would reach the client's next incarnation.
        if self._stopped_by is not None or sessions.is_older(sender, event.incarnation):
            return []
        # A later primary may have acknowledged pushes that are not here: their ticks would raise
        # the floor for clients that read these values.
        if sessions.counts_ticks and request.known_term > sessions.term:
            return []
        reason = sessions.why_not(event, request)
        if reason is not None:
            return [sessions.refuse(sender, reason, for_good=True, layout=request.layout)]
        if not self._serves or sessions.must_wait(event, request):
            self._defer(event, request)
            return [sessions.refuse(sender, "busy; the session opens later")]
        before = sessions.get(sender)
        client, warning = sessions.admit(
            sender, event.incarnation, request, region=f"{self._region}.slots", now=now
        )
        if before is not None and client is not before:
            self._versions.expire(before)  # the former incarnation may still run
        actions: list[rl.Action] = [sessions.session_opened(client)]
        if warning is not None:
            actions.append(rl.Report(text=warning, level="warning"))
        return actions

    def _defer(self, event: rl.Received, request: pf.OpenSession) -> None:
        held = self._deferred.get(event.sender)
        if held is None and len(self._deferred) >= self._config.n_clients_max:
            return  # the client repeats it
        if held is None or held[0].incarnation <= event.incarnation:
            self._deferred[event.sender] = event, request

    def _answer_deferred(self, now: rl.Seconds) -> list[rl.Action]:
        held, self._deferred = self._deferred, {}
        actions: list[rl.Action] = []
        for sender, (event, request) in held.items():
            if not self._serves or self._sessions.must_wait(event, request):
                self._deferred[sender] = event, request
            else:
                actions += self._open_session(event, request, now)
        return actions

    def _client_lost(self, event: rl.PeerLost, now: rl.Seconds) -> list[rl.Action]:
        """Note that a client is gone: its pin ends, and its buffers are no longer averaged."""
        held = self._deferred.get(event.peer)
        if held is not None and held[0].incarnation <= event.incarnation:
            del self._deferred[event.peer]
        client = self._sessions.get(event.peer)
        if client is None or client.incarnation > event.incarnation:
            return []
        self._sessions.lost(client)
        self._versions.expire(client)
        return [self._wait_for(client, now)] if client.push_buffers else []

    def _absent(self, name: rl.Address, now: rl.Seconds) -> list[rl.Action]:
        """Release the push buffers of a client that is gone for too long."""
        client = self._sessions.get(name)
        if client is None or client.connected or not client.push_buffers:
            return []
        # The buffers are still needed here or by the backup; look again later.
        if self._sessions.is_applying(name) or client.queued or client.n_unconfirmed:
            return [self._wait_for(client, now)]
        n_bytes = client.push_buffer_nbytes
        self._sessions.take_back(client)
        text = f"{name} is gone for {self._config.absence_seconds_max:g} s: freed {n_bytes:,} bytes"
        return [rl.Report(text=text)]

    def _wait_for(self, client: Session, now: rl.Seconds) -> rl.SetTimer:
        at = now + self._config.absence_seconds_max
        return rl.SetTimer(name=f"{_ABSENT}{client.name}", at=at)

    def _serve_client(
        self, event: rl.Received, message: ClientMessage, now: rl.Seconds
    ) -> list[rl.Action]:
        sender, sessions = event.sender, self._sessions
        if self._commands.is_driven and isinstance(message, pf.Push) and not message.commit_token:
            reason = "this shard takes pushes of its coordinator's run only"
            return [sessions.refuse(sender, reason, for_good=True)]
        if self._backup is not None or self._stopped_by is not None:
            return []
        if sessions.is_older(sender, event.incarnation):
            if isinstance(message, pf.Push):
                sessions.count_refused(sender, message)
            return []
        client = sessions.get(sender)
        if (
            client is None
            or not client.opened
            or event.incarnation != client.incarnation
            or message.term != sessions.term
        ):
            # The client repeats the message in its next session, so nothing is lost.
            return [sessions.refuse(sender, "open a session first")]
        sessions.heard(client)
        match message:
            case pf.Fetch():
                actions = self._versions.fetch(client, message, now)
            case pf.FetchAck():
                actions = self._versions.ack(client, message, now)
            case pf.PushBlock():
                actions = sessions.take_block(client, message)
            case pf.Push():
                actions = sessions.take_push(client, message)
            case _:
                assert_never(message)
        return actions

    def _rows(
        self, event: rl.Received, message: bt.TakeRows | bt.AddRows, now: rl.Seconds
    ) -> list[rl.Action]:
        commands, primary = self._commands, self._primary
        if not commands.is_present(message):
            return []
        if isinstance(message, bt.TakeRows):
            return [rl.Send(receiver=event.sender, message=commands.rows(message))]
        if not primary.may_command:  # it comes again when the backup has the others
            return []
        is_new = commands.stage(message)
        added = bt.RowsAdded(series=message.series, token=message.token, part=message.part)
        answer = rl.Send(receiver=event.sender, message=added)
        return primary.staged(message, answer, is_new=is_new, now=now)

    # ---------------------------------------------------------------- replication

    @property
    def _will_be_primary(self) -> bool:
        return self._backup is None or self._promotion is not None

    def _replicate(
        self, event: rl.Received, message: ReplicationMessage, now: rl.Seconds
    ) -> list[rl.Action]:
        """Handle a message of the supervisor or of the other copy.

        DistBeliefError if this incarnation cannot continue: the next one restores a snapshot.
        """
        if not self._config.is_replicated:
            raise RemoteProtocolError(
                f"{event.sender} sent {type(message).__name__} to {self._name}, the only copy"
            )
        if isinstance(message, rp.StartSync) and event.sender != other_copy(self._name):
            raise FalseClaimError(f"{event.sender} is no copy of {self._name}")
        match message:
            # A message for a former incarnation of this copy, delayed in the network.
            case rp.Promote() | rp.StartSync() if message.receiver_incarnation != self._incarnation:
                return []
            case rp.Promote():
                return self._promote(message, now)
            case (
                rp.StartSync()
                | rp.StateBlock()
                | rp.ReplicatePush()
                | rp.ReplicateCommand()
                | rp.ReplicateRows()
                | pf.PushBlock()
            ):
                if self._backup is not None:
                    return self._backup.handle(event.sender, message)
                if isinstance(message, rp.StartSync) and message.term > self._primary.term:
                    raise DistBeliefError(
                        f"{event.sender} is primary in term {message.term}, {self._name} was in "
                        f"{self._primary.term}: restart {self._name} to make it a backup"
                    )
                return []
            case _ if self._backup is not None:
                return []  # an answer meant for an earlier incarnation
            case _:
                actions = self._primary.handle(event, message, now)
                # A confirmed push may free what a deferred session waits for.
                return [*actions, *self._answer_deferred(now)]

    def _promote(self, promote: rp.Promote, now: rl.Seconds) -> list[rl.Action]:
        backup = self._backup
        if backup is None:
            if promote.term <= self._primary.term:
                return []
            return [*self._primary.promote(promote, now), *self._answer_deferred(now)]
        if promote.term <= backup.term:
            return []
        if not backup.promote(promote.term):
            raise DistBeliefError(
                f"{self._name} cannot become primary with {self._values.n_held} of "
                f"{self._values.n_state_blocks} state blocks of {backup.primary}: restart it"
            )
        self._promotion = promote
        return []

    def _become_primary(
        self, backup: Backup, promote: rp.Promote, now: rl.Seconds
    ) -> list[rl.Action]:
        # A copy that never synced serves its snapshot, so the snapshot must be readable and older
        # than this term. Otherwise acknowledged pushes would silently disappear.
        if backup.primary is None and self._unrestored is not None:
            raise StorageError(self._unrestored)
        if backup.primary is None and promote.term <= self._restored_term:
            raise StorageError(
                f"the snapshot of {self._name} has term {self._restored_term}, Promote "
                f"{promote.term}: continue the count of terms in a resumed run"
            )
        self._backup = self._promotion = None
        self._former_primary = backup.primary
        backup.release()
        self._sessions.term = self._commands.term = promote.term
        clients = tuple(backup.clients.values())
        unheard = [rl.Address(one.name) for one in clients if one.name not in self._deferred]
        changed = rp.PrimaryChanged(term=promote.term)
        text = f"becomes primary in term {promote.term} at clock {self._values.clock}"
        return [
            rl.Report(text=text),
            *self._serve(clients, now),
            *(rl.Send(receiver=name, message=changed) for name in unheard),
            *self._primary.promote(promote, now),
        ]

    # ----------------------------------------------------------------------- work

    def _next(self, now: rl.Seconds) -> list[rl.Action]:
        """Begin the next piece of work, unless one is running.

            initialise --> serving --+--> command  a shard command; before everything else
                                     +--> save     a checkpoint was requested
                                     +--> copy     a fetch waits and a version is free; not twice
                                     |             in a row while a push waits
                                     +--> apply    the oldest complete push; not after the last
                                     |             checkpoint was requested
                                     +--> stage    the same for a gradient sum of a chunk

        Of two copies, the backup applies and executes what is replicated, until it is promoted.
        """
        if self._work is not None or not self._ready:
            return []
        actions: list[rl.Action] = []
        backup, is_stopping = self._backup, self._stopped_by is not None
        if backup is not None:
            actions += [] if is_stopping else backup.stage_rows()
            replicated = None if is_stopping else backup.begin_next()
            if replicated is not None:
                return [*actions, *self._repeat(backup, replicated)]
            if self._promotion is None or not backup.is_drained:
                return actions
            actions += self._become_primary(backup, self._promotion, now)
        return [*actions, *self._next_as_primary(now, is_stopping=is_stopping)]

    def _repeat(
        self, backup: Backup, replicated: Replicated | rp.ReplicateCommand
    ) -> list[rl.Action]:
        """Begin what the primary has begun."""
        if isinstance(replicated, rp.ReplicateCommand):
            assert backup.primary is not None
            self._work = _Work.COMMAND
            return [self._commands.begin(backup.primary, replicated.command)]
        message = replicated.message
        if message.commit_token:
            return self._stage(
                replicated.pushed,
                token=message.commit_token,
                n_examples=message.client.samples,
                shard_slice=replicated.shard_slice,
            )
        return self._apply(
            replicated.pushed,
            n_clients=max(1, message.n_pushing),
            shard_slice=replicated.shard_slice,
            touches=replicated.touches,
            share=message.share,
            dealt=message.dealt,
        )

    def _next_as_primary(self, now: rl.Seconds, *, is_stopping: bool) -> list[rl.Action]:
        commands, saves = self._commands, self._saves
        if self._versions.copying is not None and not is_stopping:
            return self._begin_copy()  # the next piece, before anything changes the values
        if self._sessions.is_in_round:  # nothing comes between its pushes
            push = self._sessions.begin_push(now)
            assert push is not None
            return self._begin_push(push, now)
        may_begin = commands.waiting and not commands.held and self._primary.may_command
        if not is_stopping and (commands.running or may_begin):
            self._work = _Work.COMMAND
            return [commands.begin_next(self._snapshot)]
        label = None
        if saves.waiting or saves.saves_unsaved:
            label = saves.begin_next(clock=self._values.clock)
        if label is not None:
            self._work = _Work.SAVE
            # The snapshot shares the arrays, so no work runs until it is written; pushes queue.
            return [rl.Persist(snapshot=commands.with_vectors(self._snapshot(label)))]
        may_copy = bool(self._versions.waiting) and self._versions.wants_copy and not is_stopping
        # Copies and pushes alternate, so neither fetches nor pushes starve.
        if may_copy and not self._copied_last:
            return self._begin_copy()
        actions: list[rl.Action] = []
        may_apply = not self._is_sealed
        if self._primary.backup is not None:
            actions += self._primary.transfer(now)
            may_apply = may_apply and self._primary.may_apply
        push = self._sessions.begin_push(now, is_last=is_stopping) if may_apply else None
        if push is not None:
            actions += self._begin_push(push, now)
        elif may_copy:
            actions += self._begin_copy()
        rounds = self._sessions.rounds
        until = None if rounds is None else rounds.due
        if until is not None and until != self._grace_until:
            self._grace_until = until
            actions.append(rl.SetTimer(name=_GRACE, at=until))
        if rounds is not None:
            actions += self._sessions.round_calls(rounds)
        return actions

    def _begin_push(self, push: PushInProgress, now: rl.Seconds) -> list[rl.Action]:
        client = push.client
        if push.push.dealt is not msgspec.UNSET and self._values.knows(push.push.dealt):
            client.dropped = push.push.sequence
        replications: list[rl.Action] = []
        n_clients = self._sessions.n_averaged(client, push.push)
        if self._primary.backup is not None:
            replications = self._primary.replicate(push, n_clients=n_clients, now=now)
        if push.push.commit_token:
            stage = self._stage(
                push.pushed,
                token=push.push.commit_token,
                n_examples=push.push.samples,
                shard_slice=client.shard_slice,
            )
            return [*replications, *stage]
        apply = self._apply(
            push.pushed,
            n_clients=n_clients,
            shard_slice=client.shard_slice,
            touches=push.push.touches,
            share=push.share,
            dealt=push.push.dealt,
        )
        return [*replications, *apply]

    def _apply(
        self,
        pushed: Pushed,
        *,
        n_clients: int,
        shard_slice: ShardSlice,
        touches: Vector | None,
        share: rp.Share,
        dealt: pf.Dealt,
    ) -> list[rl.Action]:
        self._work = _Work.APPLY
        self._copied_last = False
        touched = None if touches is None else self._values.slice_table.get(touches)
        work, cost = self._values.begin_push(
            pushed,
            n_clients=n_clients,
            shard_slice=shard_slice,
            touched=touched,
            share=share,
            dealt=dealt,
        )
        return [rl.Compute(name="apply", work=work, cost=cost)]

    def _stage(
        self, pushed: Pushed, *, token: int, n_examples: int, shard_slice: ShardSlice
    ) -> list[rl.Action]:
        self._work = _Work.STAGE
        self._copied_last = False
        work, cost = self._commands.stage_work(
            pushed.values,  # never words
            token=token,
            n_examples=n_examples,
            shard_slice=shard_slice,
        )
        return [rl.Compute(name="collect", work=work, cost=cost)]

    def _begin_copy(self) -> list[rl.Action]:
        self._work = _Work.COPY
        self._copied_last = True
        work, cost = self._versions.copy_work()
        return [rl.Compute(name="copy", work=work, cost=cost)]

    def _computed(self, event: rl.Computed, now: rl.Seconds) -> list[rl.Action]:
        if event.error is not None:
            raise event.error
        work, self._work = self._work, None
        match work:
            case _Work.INITIALISE:
                assert isinstance(event.result, ShardState), event.result
                return self._initialised(event.result, now)
            case _Work.APPLY | _Work.STAGE:
                return self._applied(now, staged=work is _Work.STAGE)
            case _Work.COMMAND if self._backup is not None:
                return self._backup.end_command(event)
            case _Work.COMMAND:
                must_save = self._commands.computed(event)
                return [] if must_save else self._primary.executed(now)
            case _Work.COPY:
                assert isinstance(event.result, int), event.result
                return self._versions.copied(event.result, now)
            case _Work.SAVE | None:
                raise AssertionError(f"unexpected result of {event.name} during {work}")
            case _:
                assert_never(work)

    def _applied(self, now: rl.Seconds, *, staged: bool) -> list[rl.Action]:
        if staged:
            self._values.position += 1
        else:
            self._values.end_push()
        if self._backup is not None:
            return self._backup.end_push()
        primary, position = self._primary, self._values.position - 1
        held = primary.backup is not None and primary.applied(position=position)
        actions = self._sessions.end_push(held=held, staged=staged)
        return [*actions, *self._answer_deferred(now)]

    # ---------------------------------------------------------------- checkpoints

    def _save(self, sender: rl.Address, label: str) -> list[rl.Action]:
        why_not = None
        if self._commands.is_driven:
            why_not = "a coordinator drives this shard: ask it to save"
        elif not self._will_be_primary:
            why_not = "this copy of the shard is a backup: send the request to the primary"
        return self._saves.ask(sender, label, clock=self._values.clock, why_not=why_not)

    def _snapshot(self, label: str) -> rl.Snapshot:
        state = ShardState(
            incarnation=self._sessions.term,
            clock=self._values.clock,
            values=self._values.settled,
            state=self._values.state,
            clients=self._sessions.records(),
            steps=self._values.steps,
            applied=self._values.applied,
        )
        return take(label, state, config=self._config)

    def _persisted(self, event: rl.Persisted, now: rl.Seconds) -> list[rl.Action]:
        work, self._work = self._work, None
        if work is _Work.COMMAND:
            self._commands.persisted(event.error)
            return self._primary.executed(now)
        assert work is _Work.SAVE, work
        return self._saves.taken(event, clock=self._values.clock)
