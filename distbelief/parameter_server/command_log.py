"""Shard commands: a coordinator's numbered commands, each executed once and in order.

    command n of this series, n = last + 1    executed as one piece of work -> CommandDone
    command n = last                          the same answer again
    command of an older series                answered with the current one: you are replaced
    BeginSeries of a higher series            drops what another series began
    other command of a higher series          answered with the known series: begin it first

A command that fails changes nothing, and the answer has the error. The published values change by
`BeginEvaluation`, `Publish` and `Checkpoint` only, so between two of them every reader sees one
version (DB-16). Until `Publish`, pushes without a commit token are refused.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import assert_never, cast, final

import numpy as np

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.gradient_sums import GradientSums
from distbelief.parameter_server.savepoints import PARAMETERS, Savepoints, split
from distbelief.parameter_server.sessions import PushInProgress
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.vector_store import VectorStore
from distbelief.protocol import batch as bt, role as rl
from distbelief.protocol.vector_commands import Fill, Scalars


_Outcome = tuple[Scalars, str | None]  # what was measured, and the error


@final
class CommandExecutor:
    """The state of one shard incarnation under a coordinator."""

    def __init__(self, config: ShardConfig, values: ShardStore) -> None:
        layout, index = config.layout, config.index
        self._config = config
        self._values = values
        self._n_gradient = layout.n_gradient(index)
        self._vector_store = VectorStore(layout, index, n_vectors_max=config.n_vectors_max)
        self._savepoints = Savepoints(self._vector_store)
        self._sums = GradientSums(
            n_elements=layout.shard_size(index), n_gradient=self._n_gradient, dtype=layout.dtype
        )
        self._buffers: Vector | None = None  # of the last chunk, for the next `BeginEvaluation`
        self._series = 0
        self._answer = bt.CommandDone(series=0, number=0)
        self.is_driven = False  # from `BeginSeries` to `Publish`
        self.waiting: tuple[rl.Address, bt.ShardCommand] | None = None
        self.running: tuple[rl.Address, bt.ShardCommand] | None = None

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
        if self._config.is_replicated:
            error = (
                f"{self._config.name} has two copies, without named vectors: set shard_copies = 1"
            )
            answer = bt.CommandDone(series=command.series, number=command.number, error=error)
        elif command.series > self._series and isinstance(command.task, bt.BeginSeries):
            self._series, self.is_driven = command.series, True
            self._answer = bt.CommandDone(series=command.series, number=0)
            self.waiting = event.sender, command
            return []
        elif is_current and command.number == answer.number + 1:
            # A repetition of the pending or running command gets the last answer: a sign of life.
            pending = [one for one in (self.waiting, self.running) if one is not None]
            if not any(known.series == command.series for _, known in pending):
                self.waiting = event.sender, command
                return []
        elif is_current and command.number != answer.number:
            return []
        return [rl.Send(receiver=event.sender, message=answer)]

    def begin_next(self, snapshot: Callable[[str], rl.Snapshot]) -> rl.Action:
        """Start the waiting command; `snapshot` makes the shard's own snapshot."""
        if self.running is not None:  # the second half of a `Checkpoint`: write to disk
            task = self.running[1].task
            assert isinstance(task, bt.Checkpoint)
            return rl.Persist(
                snapshot=self._savepoints.extend(snapshot(task.label), savepoint=task.savepoint)
            )
        assert self.waiting is not None
        self.running, self.waiting = self.waiting, None
        command = self.running[1]
        cost = self._cost(command.task)
        if isinstance(command.task, bt.BeginEvaluation | bt.Publish | bt.Checkpoint):
            self._values.begin_replace()

        def work() -> _Outcome:
            try:
                return self._execute(command), None
            except RemoteProtocolError as error:
                return (), str(error)

        return rl.Compute(name="command", work=work, cost=cost)

    def computed(self, event: rl.Computed) -> list[rl.Action]:
        """Finish the work of a command; answer unless a checkpoint must reach the disk first."""
        assert self.running is not None
        outcome = cast("_Outcome", event.result)
        task = self.running[1].task
        if isinstance(task, bt.BeginEvaluation | bt.Publish | bt.Checkpoint):
            self._values.end_push()
        return [] if isinstance(task, bt.Checkpoint) and outcome[1] is None else self._end(*outcome)

    def persisted(self, event: rl.Persisted) -> list[rl.Action]:
        assert self.running is not None
        task = self.running[1].task
        assert isinstance(task, bt.Checkpoint)
        if event.error is None:
            self._savepoints.on_disk(task.savepoint)
        return self._end((), event.error)

    def with_vectors(self, snapshot: rl.Snapshot) -> rl.Snapshot:
        """Add the named vectors to a snapshot that no coordinator requested, if that is consistent.

        It is if the vectors are exactly at a savepoint and the coordinator has left. Then a run
        can resume with its optimizer history.
        """
        savepoint = self._savepoints.current
        if self.is_driven or savepoint is None:
            return snapshot
        return self._savepoints.extend(snapshot, savepoint=savepoint)

    def _end(self, scalars: Scalars, error: str | None) -> list[rl.Action]:
        assert self.running is not None
        (sender, command), self.running = self.running, None
        if command.series != self._series:
            return []  # its coordinator was replaced
        if isinstance(command.task, bt.Publish):
            self.is_driven = False
        self._answer = bt.CommandDone(
            series=command.series,
            number=command.number,
            clock=self._values.clock,
            scalars=scalars,
            n_chunks=self._sums.n_committed,
            n_examples=self._sums.n_examples,
            digest=self._sums.digest,
            savepoints=self._savepoints.records()
            if isinstance(command.task, bt.BeginSeries)
            else (),
            error=error,
        )
        return [rl.Send(receiver=sender, message=self._answer)]

    def _execute(self, command: bt.ShardCommand) -> Scalars:
        self._savepoints.forget(command.on_disk)
        if command.savepoint is not None:
            self._savepoints.add(command.savepoint, settled=command.settled)
        else:
            self._savepoints.drop_before(command.settled)
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
            case bt.Restore(savepoint=savepoint, whole=whole):
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

    def stage_work(self, applying: PushInProgress) -> tuple[Callable[[], None], rl.Cost]:
        """Return the work that stages a pushed chunk gradient, or work that does nothing."""
        push, values = applying.push, applying.pushed.values  # never words
        shard_slice, token = applying.client.shard_slice, push.commit_token
        if not self._sums.wants(values, commit_token=token, shard_slice=shard_slice):
            return lambda: None, rl.Cost()
        work = self._sums.stage_work(
            values,
            commit_token=token,
            n_examples=push.samples,
            shard_slice=shard_slice,
            buffers=self._values.vector[self._n_gradient :],
        )
        return work, rl.Cost(n_bytes=2.0 * values.nbytes)
