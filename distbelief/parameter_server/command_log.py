"""Shard commands: a coordinator's numbered commands, each executed once and in order.

    command n of this series, n = last + 1    executed as one piece of work -> CommandDone
    command n = last                          the same answer again
    command of an older series                answered with the current one: you are replaced
    BeginSeries of a higher series            drops what another series began
    other command of a higher series          answered with the known series: begin it first

A command that fails changes nothing, and the answer has the error. The published values change by
`BeginEvaluation`, `Publish` and `Checkpoint` only, so between two of them every reader sees one
version (DB-16). Until `Publish`, pushes without a commit token are refused.

The same commands and pushes in the same order leave the same bits. So of two copies the backup
executes what the primary has executed (Schneider 1990), and compares checksums of the results.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import assert_never, cast, final

import msgspec
import numpy as np

from distbelief.core.errors import DistBeliefError, RemoteProtocolError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.gradient_sums import GradientSums, SumsState
from distbelief.parameter_server.rows import STALENESS_MAX, RoundRows
from distbelief.parameter_server.savepoints import PARAMETERS, Savepoints, SavepointState, split
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.vector_store import VectorStore
from distbelief.protocol import batch as bt, replication as rp, role as rl
from distbelief.protocol.vector_commands import Command, Fill, Scalars, VectorName, writes


_Outcome = tuple[Scalars, int, str | None]  # what was measured, a checksum, and the error

_Replaces = bt.BeginEvaluation | bt.Publish | bt.Checkpoint  # the published values


class _CommandState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a backup needs to execute the next command."""

    series: int
    answer: bt.CommandDone
    is_driven: bool
    vectors: dict[str, Vector]
    savepoints: SavepointState
    sums: SumsState
    buffers: Vector | None
    rows: list[bt.AddRows]  # staged in the present rounds
    executed: int
    versions: dict[int, Vector]


@final
class CommandExecutor:
    """The state of one shard incarnation under a coordinator."""

    def __init__(self, config: ShardConfig, values: ShardStore) -> None:
        layout, index = config.layout, config.index
        self._config = config
        self._values = values
        self._n_gradient = layout.n_gradient(index)
        self._vector_store = VectorStore(
            layout, index, n_vectors_max=config.n_vectors_max, constants=config.constants
        )
        self._savepoints = Savepoints(self._vector_store)
        self._new_sums = partial(
            GradientSums,
            n_elements=layout.shard_size(index),
            n_gradient=self._n_gradient,
            dtype=layout.dtype,
        )
        self._sums = self._new_sums()
        self._buffers: Vector | None = None  # of the last chunk, for the next `BeginEvaluation`
        self._rows: RoundRows | None = None  # if there are rounds
        self._series = 0
        self._answer = bt.CommandDone(series=0, number=0)
        self._executed = 0  # the last command of this series, answered or not
        self.is_driven = False  # from `BeginSeries` to `Publish`
        self.waiting: tuple[rl.Address, bt.ShardCommand] | None = None
        self.running: tuple[rl.Address, bt.ShardCommand] | None = None
        self.term: int | msgspec.UnsetType = msgspec.UNSET  # of one of two copies
        self._checksum = 0  # of the last command
        # Executed here; the answer waits for the backup.
        self.held: tuple[rl.Address, bt.ShardCommand, bt.CommandDone] | None = None

    @property
    def was_driven(self) -> bool:
        return bool(self._series)

    def counters(self) -> Mapping[str, float]:
        if not self._series:
            return {}
        return {
            "series": float(self._series),
            "commands": float(self._answer.number),
            "chunks_committed": float(self._sums.n_committed),
            "chunks_refused": float(self._sums.n_refused),
            "sum_vectors": float(self._sums.n_vectors),
        }

    def restore_work(
        self, snapshot: rl.Snapshot | None
    ) -> tuple[rl.Snapshot | None, Callable[[], None]]:
        """Split a snapshot: return the shard's own part, and the work that restores the vectors.

        Run the work when the values are there. Both raise StorageError if the snapshot is damaged.
        """
        plain, saved = (None, ()) if snapshot is None else split(snapshot)
        return plain, partial(self._savepoints.restore, saved)

    def ready(self) -> None:
        self._savepoints.begin_at(self._values.clock)

    def take(self, event: rl.Received, command: bt.ShardCommand) -> list[rl.Action]:
        answer, is_current = self._answer, command.series == self._series
        if command.series > self._series and isinstance(command.task, bt.BeginSeries):
            self._series, self.is_driven = command.series, True
            self._answer = bt.CommandDone(series=command.series, number=0)
            self._executed = 0
            self.waiting = event.sender, command
            return []
        if is_current and command.number == answer.number + 1:
            # A repetition of the pending or running command gets the last answer: a sign of life.
            pending = [one[1] for one in (self.waiting, self.running, self.held) if one]
            if not any(known.series == command.series for known in pending):
                self.waiting = event.sender, command
                return []
        elif is_current and command.number != answer.number:
            return []
        return [self._send_answer(event.sender)]

    def is_present(self, message: bt.TakeRows | bt.AddRows) -> bool:
        """Return whether this is of a task of the present rounds; other tasks are void."""
        if message.series != self._series or not self.is_driven:
            return False
        begun = [one[1] for one in (self.waiting, self.running) if one is not None]
        if isinstance(message, bt.TakeRows):
            is_last = message.number == self._executed and not begun
            return is_last or message.number in self._vector_store.versions
        last = max((one.number for one in begun if one.series == self._series), default=0)
        last = max(last, self._executed)
        return last <= message.number <= last + STALENESS_MAX

    def rows(self, message: bt.TakeRows) -> bt.RowsTaken:
        store = self._vector_store
        vector = store.versions.get(message.number)
        if vector is None and (vector := store.export((PARAMETERS,)).get(PARAMETERS)) is None:
            raise RemoteProtocolError("this shard has no rows yet: restore a savepoint first")
        rows = self._round_rows()
        is_known = rows.is_known(message)
        return bt.RowsTaken(
            series=message.series,
            number=message.number,
            part=message.part,
            values=vector[:0] if is_known else rows.take(vector, message),
            unchanged=is_known,
        )

    def stage(self, message: bt.AddRows) -> bool:
        """Stage what a task adds; return whether that is new."""
        is_new = self._round_rows().stage(message)
        self._values.position += is_new
        return is_new

    def _round_rows(self) -> RoundRows:
        if self._rows is None:
            layout, index = self._config.layout, self._config.index
            self._rows = RoundRows(layout, index, number=self._executed)
        return self._rows

    def _send_answer(self, receiver: rl.Address) -> rl.Action:
        answer = self._answer
        if self.term is not msgspec.UNSET:
            answer = msgspec.structs.replace(answer, term=self.term)
        return rl.Send(receiver=receiver, message=answer)

    def begin_next(self, snapshot: Callable[[str], rl.Snapshot]) -> rl.Action:
        """Start the waiting command; `snapshot` makes the shard's own snapshot."""
        if self.running is not None:  # the second half of a `Checkpoint`: write to disk
            task = self.running[1].task
            assert isinstance(task, bt.Checkpoint)
            return rl.Persist(
                snapshot=self._savepoints.extend(snapshot(task.label), savepoint=task.savepoint)
            )
        assert self.waiting is not None
        (sender, command), self.waiting = self.waiting, None
        return self.begin(sender, command)

    def begin(self, sender: rl.Address, command: bt.ShardCommand) -> rl.Action:
        """Start a command: of a coordinator, or one that the primary has executed."""
        self.running = sender, command
        cost = self._cost(command.task)
        if isinstance(command.task, _Replaces):
            self._values.begin_replace()
        if isinstance(command.task, bt.CommitRound) and 0 < command.task.oldest < command.number:
            for vector in self._vector_store.export((PARAMETERS,)).values():
                self._vector_store.versions[command.number - 1] = vector

        def work() -> _Outcome:
            try:
                scalars = self._execute(command)
            except RemoteProtocolError as error:
                return (), 0, str(error)
            names = _computed_by(command.task) if self._config.is_replicated else ()
            return scalars, self._vector_store.checksum(names), None

        return rl.Compute(name="command", work=work, cost=cost)

    def computed(self, event: rl.Computed) -> bool:
        """Finish the work of a command; return whether a checkpoint must reach the disk first."""
        assert self.running is not None
        scalars, checksum, error = cast("_Outcome", event.result)
        task = self.running[1].task
        if isinstance(task, _Replaces):
            self._values.end_push()
        else:
            self._values.position += 1
        if isinstance(task, bt.Checkpoint) and error is None:
            return True
        self._end(scalars, checksum, error)
        return False

    def persisted(self, error: str | None) -> None:
        """Finish a checkpoint: it is on disk, or not because of an error."""
        assert self.running is not None
        task = self.running[1].task
        assert isinstance(task, bt.Checkpoint)
        if error is None:
            self._savepoints.on_disk(task.savepoint)
        self._end((), 0, error)

    def with_vectors(self, snapshot: rl.Snapshot) -> rl.Snapshot:
        """Add the named vectors to a snapshot that no coordinator requested, if that is consistent.

        It is if the vectors are exactly at a savepoint and the coordinator has left. Then a run
        can resume with its optimizer history.
        """
        savepoint = self._savepoints.current
        if self.is_driven or savepoint is None:
            return snapshot
        return self._savepoints.extend(snapshot, savepoint=savepoint)

    def _end(self, scalars: Scalars, checksum: int, error: str | None) -> None:
        assert self.running is not None
        (sender, command), self.running = self.running, None
        if command.series == self._series:
            self._executed = command.number
        if isinstance(command.task, bt.CommitRound):
            oldest, store = command.task.oldest or command.number, self._vector_store
            store.versions = {n: one for n, one in store.versions.items() if n >= oldest}
            if self._rows is not None:
                self._rows.drop(before=command.number)
        is_first = isinstance(command.task, bt.BeginSeries)
        if isinstance(command.task, bt.Publish) and command.series == self._series:
            self.is_driven = False
        done = bt.CommandDone(
            series=command.series,
            number=command.number,
            clock=self._values.clock,
            scalars=scalars,
            n_chunks=self._sums.n_committed,
            n_examples=self._sums.n_examples,
            digest=self._sums.digest,
            savepoints=self._savepoints.records() if is_first else (),
            error=error,
        )
        self.held = sender, command, done
        self._checksum = zlib.crc32(msgspec.msgpack.encode(done), checksum)

    # ------------------------------------------------------------------- two copies

    def answer(self) -> list[rl.Action]:
        """Answer the executed command: every copy has executed it."""
        assert self.held is not None
        (sender, command, done), self.held = self.held, None
        if command.series != self._series:
            return []  # its coordinator was replaced
        self._answer = done
        return [self._send_answer(sender)]

    def replication(self, *, term: int) -> rp.ReplicateCommand:
        """Return what the backup must repeat, just after the command was executed here."""
        assert self.held is not None
        _, command, done = self.held
        is_saved = not isinstance(command.task, bt.Checkpoint) or done.error is None
        return rp.ReplicateCommand(
            term=term,
            position=self._values.position - 1,
            command=command,
            checksum=self._checksum,
            not_saved=None if is_saved else done.error,
        )

    def repeated(self, event: rl.Computed, message: rp.ReplicateCommand) -> None:
        """Finish a command on the backup, or raise DistBeliefError if the copies differ now."""
        if message.command.series > self._series:
            self._series, self.is_driven = message.command.series, True
        if self.computed(event):
            self.persisted(message.not_saved)
        assert self.held is not None
        (sender, command, self._answer), self.held = self.held, None
        if self._checksum != message.checksum:
            raise DistBeliefError(
                f"{self._config.name} and {sender} differ after {type(command.task).__name__}, "
                f"command {command.number} of series {command.series}: run both copies on "
                "processors of one kind, with one build of torch"
            )

    @property
    def has_state(self) -> bool:
        """Whether there is more than the values to replicate."""
        return self.was_driven or self._savepoints.has_some

    def state(self) -> list[Vector]:
        """Return everything as arrays that a backup can `adopt`; they share memory."""
        arrays: list[Vector] = []
        numbers: dict[int, int] = {}

        def number(array: Vector) -> int:
            if id(array) not in numbers:
                numbers[id(array)] = len(arrays)
                arrays.append(array)
            return numbers[id(array)]

        state = _CommandState(
            series=self._series,
            answer=self._answer,
            is_driven=self.is_driven,
            vectors=self._vector_store.export(),
            savepoints=self._savepoints.state(),
            sums=self._sums.state(),
            buffers=self._buffers,
            rows=[] if self._rows is None else self._rows.staged,
            executed=self._executed,
            versions=self._vector_store.versions,
        )
        facts = msgspec.msgpack.encode(state, enc_hook=number)
        dtype = self._config.layout.dtype
        n_more = dtype.itemsize - len(facts) % dtype.itemsize  # at least 1: the last byte says it
        return [np.frombuffer(facts + bytes([n_more]) * n_more, dtype), *arrays]

    def adopt(self, arrays: Sequence[Vector]) -> None:
        """Become the copy of a primary; RemoteProtocolError if this is not its `state`."""
        first, *rest = arrays
        facts = first.tobytes()
        try:
            state = msgspec.msgpack.decode(
                facts[: -facts[-1]], type=_CommandState, dec_hook=lambda _, number: rest[number]
            )
        except (msgspec.MsgspecError, IndexError) as error:
            raise RemoteProtocolError(f"the primary's vectors cannot be read: {error}") from None
        self._series, self._answer = state.series, state.answer
        self.is_driven, self._buffers = state.is_driven, state.buffers
        self._executed = state.executed
        self._savepoints.adopt(state.savepoints)
        self._vector_store.versions = state.versions
        self._vector_store.adopt(state.vectors)
        self._sums.adopt(state.sums)
        self._rows = None  # which tables have changed lately, the primary knows
        for message in state.rows:
            self._round_rows().stage(message)

    def drop(self) -> None:
        """Drop all vectors and every series, as the copy of a primary that has none."""
        self._series, self._answer = 0, bt.CommandDone(series=0, number=0)
        self._executed, self._vector_store.versions = 0, {}
        self.is_driven, self._buffers, self._sums = False, None, self._new_sums()
        self._rows = None
        self._savepoints.drop()
        self._vector_store.adopt({})

    # ------------------------------------------------------------------------- work

    def _execute(self, command: bt.ShardCommand) -> Scalars:
        self._keep_savepoints(command)
        scalars: Scalars = ()
        match command.task:
            case bt.Execute(commands=commands):
                scalars = self._vector_store.perform(commands)
            case bt.BeginEvaluation() as task:
                scalars = self._vector_store.perform(task.before)
                self._publish(task.point)
                self._sums.open(
                    first_commit_token=task.first_commit_token, n_staged_max=task.n_staged_max
                )
            case bt.FinishEvaluation() as task:
                scalars = self._finish_evaluation(task)
            case bt.BeginSeries():
                self._sums.close()
                self._rows, self._vector_store.versions = None, {}
            case bt.CommitRound() as task:
                self._commit_round(task, command.number)
            case bt.Restore(savepoint=savepoint, whole=whole):
                self._rows, self._vector_store.versions = None, {}
                self._savepoints.return_to(savepoint, whole=whole, values=self._parameters)
            case bt.Commit() as task:
                chunks = [(one.chunk_index, one.commit_token) for one in task.chunks]
                self._sums.check(chunks)
                self._sums.forget(task.void)
                for chunk_index, commit_token in chunks:
                    self._sums.commit(chunk_index, commit_token)
            case bt.Publish(point=point):
                self._publish(point)
            case bt.Checkpoint(savepoint=savepoint):
                self._savepoints.check_current(savepoint)
                self._publish(PARAMETERS)
            case _:
                assert_never(command.task)
        return scalars

    def _keep_savepoints(self, command: bt.ShardCommand) -> None:
        self._savepoints.forget(command.on_disk)
        if command.savepoint is not None:
            self._savepoints.add(command.savepoint, settled=command.settled)
        else:
            self._savepoints.drop_before(command.settled)

    def _commit_round(self, task: bt.CommitRound, number: int) -> None:
        if self._rows is not None:  # else nothing was added here
            self._rows.check(task.tokens)
            vector = self._vector_store.vector(PARAMETERS)
            self._rows.commit(vector, task.tokens, task.pulls, number=number)

    def _parameters(self) -> Vector:
        return self._values.vector[: self._n_gradient]

    def _publish(self, point: str) -> None:
        vectors = self._vector_store.export((point,))
        if point not in vectors:
            raise RemoteProtocolError(
                f"cannot publish vector {point!r}: this shard has {self._vector_store.names()}"
            )
        self._parameters()[:] = vectors[point]
        if self._buffers is not None:
            self._values.vector[self._n_gradient :] = self._buffers

    def _finish_evaluation(self, task: bt.FinishEvaluation) -> Scalars:
        n, sums = self._n_gradient, self._sums
        if task.n_examples == 0:
            # The loss of zero examples is undefined.
            unknown = Fill(target=task.gradient, a=float("nan"))
            return self._vector_store.perform((unknown, *task.after))
        total = sums.total()
        # Pushes may claim examples for chunks of which others are missing.
        if total is None or task.n_examples != sums.n_examples:
            raise RemoteProtocolError(
                f"{sums.n_examples} of {task.n_examples} examples, in {sums.n_committed} chunks"
            )
        np.divide(total[:n], task.n_examples, out=self._vector_store.overwrite(task.gradient))
        self._buffers = total[n:].copy()
        return self._vector_store.perform(task.after)

    def _cost(self, task: bt.Task) -> rl.Cost:
        if isinstance(task, bt.Execute):
            return self._vector_store.cost(task.commands)
        if isinstance(task, bt.BeginSeries):
            return rl.Cost()
        n_passes = 3 * len(task.chunks) if isinstance(task, bt.Commit) else 3
        return rl.Cost(n_bytes=float(n_passes * self._values.vector.nbytes))

    def stage_work(
        self, values: Vector, *, token: int, n_examples: int, shard_slice: ShardSlice
    ) -> tuple[Callable[[], None], rl.Cost]:
        """Return the work that stages a pushed chunk gradient, or work that does nothing."""
        if not self._sums.wants(values, commit_token=token, shard_slice=shard_slice):
            return lambda: None, rl.Cost()
        work = self._sums.stage_work(
            values,
            commit_token=token,
            n_examples=n_examples,
            shard_slice=shard_slice,
            buffers=self._values.vector[self._n_gradient :],
        )
        return work, rl.Cost(n_bytes=2.0 * values.nbytes)


def _computed_by(task: bt.Task) -> Iterator[VectorName]:
    """Yield the names of the vectors that a command computes."""
    commands: Sequence[Command] = ()
    match task:
        case bt.Execute():
            commands = task.commands
        case bt.BeginEvaluation():
            commands = task.before
        case bt.FinishEvaluation():
            yield task.gradient
            commands = task.after
        case bt.CommitRound():
            yield PARAMETERS
        case _:
            pass  # it computes nothing
    for one in commands:
        yield from writes(one)
