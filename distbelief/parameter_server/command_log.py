"""A shard under a coordinator: orders, each performed once, in the order given.

    Order n of this epoch, n = last + 1   performed, as one piece of work -> Performed
    Order n = last                        the same answer again
    Order of an older epoch               answered by the present one: you are over
    Attach of a higher epoch              whatever another epoch began is given up
    any other Order of a higher epoch     answered by what is known here: attach first

Rules:

* One order is performed at a time, and none is begun before the one before it ended.
* An order that cannot be performed changes nothing, and the answer says why.
* The published values are replaced by `BeginEvaluation`, `Publish` and `Checkpoint` alone:
  between two of those everybody reads one version of them (DB-16).
* While a coordinator drives the shard nothing else may change its values: pushes
  without a grant are refused. `Publish` ends that, until another attaches.
* An order that waits or is performed is answered by what was said last: a sign of life.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never, final

import numpy as np

from distbelief.core.vectors import Vector
from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.config import ShardConfig
from distbelief.parameter_server.gradient_sums import GradientSums
from distbelief.parameter_server.push_handler import PushInProgress
from distbelief.parameter_server.savepoints import PARAMETERS, Savepoints, split
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.vector_store import VectorStore
from distbelief.protocol import (
    BeginEpoch,
    BeginEvaluation,
    Checkpoint,
    CommandDone,
    Commit,
    Execute,
    FinishEvaluation,
    Publish,
    Restore,
    ShardCommand,
    Task,
)
from distbelief.protocol.vector_commands import Batch, Fill, Scalars, targets
from distbelief.roles.role import (
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Persist,
    Persisted,
    Received,
    Send,
    Snapshot,
)


@final
@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the work of an order came to."""

    scalars: Scalars = ()
    error: str | None = None


@final
class CommandExecutor:
    """What a coordinator has made of one life of a shard.

    Args:
        config: Of the shard.
        values: What everybody reads.
    """

    def __init__(self, config: ShardConfig, values: ShardStore) -> None:
        layout, index = config.layout, config.index
        self._name = config.name
        self._has_other = config.waits_for_lead
        self._values = values
        self._n_gradient = layout.n_gradient(index)
        self._algebra = VectorStore(layout, index, n_vectors_max=config.n_vectors_max)
        self._collecting = GradientSums(
            n_elements=layout.shard_size(index), n_gradient=self._n_gradient, dtype=layout.dtype
        )
        self._cuts: Savepoints | None = None  # once the values are there
        self._buffers: Vector | None = None  # of the last set, for the next `BeginEvaluation`
        self._epoch = 0
        self._is_free = True
        self._answer = CommandDone(epoch=0, number=0)
        self._next: tuple[Address, ShardCommand] | None = None
        self._running: tuple[Address, ShardCommand] | None = None

    @property
    def drives(self) -> bool:
        """Does a coordinator decide what the values are?"""
        return not self._is_free

    @property
    def were_given(self) -> bool:
        """Has a coordinator driven this shard, in this life?"""
        return bool(self._epoch)

    def counters(self) -> Mapping[str, float]:
        """Return figures for the role's status, if there is a coordinator."""
        if not self._epoch:
            return {}
        return {
            "epoch": float(self._epoch),
            "orders": float(self._answer.number),
            "sets_folded": float(self._collecting.n_folded),
            "sets_refused": float(self._collecting.n_refused),
            "set_vectors": float(self._collecting.n_vectors),
        }

    # ------------------------------------------------------------------------- life

    def restoring(self, snapshot: Snapshot | None) -> tuple[Snapshot | None, Callable[[], None]]:
        """Return what of a snapshot is the shard's, and the work that restores ours.

        The work is to be done when the values are there.

        Raises:
            StorageError: the snapshot is damaged; so does the work.
        """
        plain, saved = (None, None) if snapshot is None else split(snapshot)

        def work() -> None:
            if saved is not None:
                cuts = Savepoints(self._algebra, base_clock=0)
                cuts.restore(saved)
                self._cuts = cuts

        return plain, work

    def ready(self) -> None:
        """The values are there."""
        if self._cuts is None:
            self._cuts = Savepoints(self._algebra, base_clock=self._values.clock)

    # --------------------------------------------------------------------- messages

    def take(self, event: Received, order: ShardCommand) -> list[Action]:
        """Let an order wait for its turn, or answer it at once."""
        sender = event.sender
        if self._has_other:
            text = (
                f"{self._name} is one of two copies of its shard, and vectors have "
                "none: set shard_copies = 1"
            )
            refusal = CommandDone(epoch=order.epoch, number=order.number, error=text)
            return [Send(receiver=sender, message=refusal)]
        if order.epoch > self._epoch and isinstance(order.task, BeginEpoch):
            self._epoch, self._is_free = order.epoch, False
            self._answer = CommandDone(epoch=order.epoch, number=0)
            self._next = sender, order
            return []
        if order.epoch == self._epoch and order.number == self._answer.number + 1:
            if self._knows(order):
                return [Send(receiver=sender, message=self._answer)]
            self._next = sender, order
            return []
        if order.epoch == self._epoch and order.number != self._answer.number:
            return []
        return [Send(receiver=sender, message=self._answer)]

    def _knows(self, order: ShardCommand) -> bool:
        """Return whether it waits or is performed already."""
        return any(
            known is not None and known[1].epoch == order.epoch
            for known in (self._next, self._running)
        )

    # ------------------------------------------------------------------------- work

    def begin_next(self, snapshot: Callable[[str], Snapshot]) -> Action | None:
        """Begin the order that waits, if one does.

        Args:
            snapshot: Returns a snapshot of all that is the shard's, under a label.
        """
        if self._running is not None:  # a `Checkpoint`, of which the second half is due
            return self._save(self._running[1], snapshot)
        if self._next is None:
            return None
        self._running, self._next = self._next, None
        order = self._running[1]
        cost = self._cost(order.task)
        if isinstance(order.task, BeginEvaluation | Publish | Checkpoint):
            self._values.begin_replacing()

        def work() -> _Outcome:
            try:
                return _Outcome(self._perform(order))
            except RemoteProtocolError as error:
                return _Outcome(error=str(error))

        return Compute(name="order", work=work, cost=cost)

    def computed(self, event: Computed) -> list[Action]:
        """The work is done: answer, unless something is to be saved first."""
        assert self._running is not None
        assert isinstance(event.result, _Outcome), event.result
        task = self._running[1].task
        if isinstance(task, BeginEvaluation | Publish | Checkpoint):
            self._values.end_push()
        if isinstance(task, Checkpoint) and event.result.error is None:
            return []
        return self._end(event.result)

    def persisted(self, event: Persisted) -> list[Action]:
        """The cut is on disk, or is not."""
        assert self._running is not None
        task = self._running[1].task
        assert isinstance(task, Checkpoint)
        assert self._cuts is not None
        if event.error is None:
            self._cuts.on_disk(task.cut)
        return self._end(_Outcome(error=event.error))

    def extended(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot that no coordinator asked for, with all vectors, or not.

        With them if the present is a cut, which its coordinator has left behind: then a
        run can go on from it with its history.
        """
        cuts = self._cuts
        if self.drives or cuts is None or cuts.present is None:
            return snapshot
        return cuts.extend(snapshot, cut=cuts.present)

    def _save(self, order: ShardCommand, snapshot: Callable[[str], Snapshot]) -> Action:
        task = order.task
        assert isinstance(task, Checkpoint)
        assert self._cuts is not None
        return Persist(snapshot=self._cuts.extend(snapshot(task.label), cut=task.cut))

    def _end(self, outcome: _Outcome) -> list[Action]:
        assert self._running is not None
        assert self._cuts is not None
        (sender, order), self._running = self._running, None
        if order.epoch != self._epoch:
            return []  # who gave it is over
        if isinstance(order.task, Publish):
            self._is_free = True
        collecting = self._collecting
        self._answer = CommandDone(
            epoch=order.epoch,
            number=order.number,
            clock=self._values.clock,
            scalars=outcome.scalars,
            n_sets=collecting.n_folded,
            n_examples=collecting.n_examples,
            digest=collecting.digest,
            cuts=self._cuts.records() if isinstance(order.task, BeginEpoch) else (),
            error=outcome.error,
        )
        return [Send(receiver=sender, message=self._answer)]

    # ------------------------------------------------------------------- performing

    def _perform(self, order: ShardCommand) -> Scalars:
        """Perform an order, in the compute lane.

        Raises:
            RemoteProtocolError: it cannot be performed.
        """
        assert self._cuts is not None
        self._cuts.forget(order.on_disk)
        if order.mark is not None:
            self._cuts.mark(order.mark, settled=order.settled)
        else:
            self._cuts.settle(order.settled)
        match order.task:
            case Execute() | BeginEvaluation() | FinishEvaluation():
                return self._measure(order.task)
            case BeginEpoch():
                self._collecting.close()
            case Restore(cut=cut, whole=whole):
                self._cuts.recall(cut, whole=whole, values=self._parameters)
            case Commit():
                self._fold(order.task)
            case Publish() | Checkpoint():
                self._replace(order.task)
            case _:
                assert_never(order.task)
        return ()

    def _measure(self, task: Execute | BeginEvaluation | FinishEvaluation) -> Scalars:
        match task:
            case Execute(commands=commands):
                return self._run(commands)
            case BeginEvaluation():
                scalars = self._run(task.before)
                self._publish(task.point)
                self._collecting.open(first_grant=task.first_grant, n_staged_max=task.n_staged_max)
                return scalars
            case FinishEvaluation():
                return self._seal(task)
            case _:
                assert_never(task)

    def _fold(self, task: Commit) -> None:
        sets = [(one.set_index, one.grant) for one in task.sets]
        self._collecting.check(sets)
        self._collecting.forget(task.void)
        for set_index, grant in sets:
            self._collecting.fold(set_index, grant)

    def _replace(self, task: Publish | Checkpoint) -> None:
        assert self._cuts is not None
        if isinstance(task, Publish):
            self._publish(task.point)
        else:
            self._cuts.check_present(task.cut)
            self._publish(PARAMETERS)

    def _run(self, commands: Batch) -> Scalars:
        assert self._cuts is not None
        self._algebra.check(commands)
        self._cuts.touch(targets(commands))
        return self._algebra.perform(commands)

    def _parameters(self) -> Vector:
        return self._values.vector[: self._n_gradient]

    def _publish(self, point: str) -> None:
        vectors = self._algebra.export((point,))
        if point not in vectors:
            raise RemoteProtocolError(
                f"vector {point!r} is to be published, and this shard holds {self._algebra.names()}"
            )
        self._parameters()[:] = vectors[point]
        if self._buffers is not None:
            self._values.vector[self._n_gradient :] = self._buffers

    def _seal(self, task: FinishEvaluation) -> Scalars:
        assert self._cuts is not None
        n, collecting = self._n_gradient, self._collecting
        if task.n_examples == 0:
            unknown = Fill(target=task.gradient, a=float("nan"))
            return self._run((unknown, *task.after))
        if task.n_examples != collecting.n_examples:
            raise RemoteProtocolError(
                f"the evaluation is to be sealed with {task.n_examples} examples; this "
                f"shard counts {collecting.n_examples}, in {collecting.n_folded} sets"
            )
        self._cuts.touch((task.gradient,))
        total = collecting.total()
        assert total is not None
        np.divide(total[:n], task.n_examples, out=self._algebra.vector(task.gradient))
        self._buffers = total[n:].copy()
        return self._run(task.after)

    def _cost(self, task: Task) -> Cost:
        match task:
            case Execute(commands=commands):
                return self._algebra.cost(commands)
            case BeginEpoch():
                return Cost()
            case Commit(sets=sets):
                n_passes = 3 * len(sets)
            case Restore() | BeginEvaluation() | FinishEvaluation() | Publish() | Checkpoint():
                n_passes = 3
            case _:
                assert_never(task)
        return Cost(n_bytes=float(n_passes * self._values.vector.nbytes))

    # ---------------------------------------------------------------------- pushes

    def collecting(self, applying: PushInProgress) -> tuple[Callable[[], None], Cost]:
        """Return the work that stages what was pushed under a grant, if it counts."""
        push, values = applying.push, applying.slot.values
        holding, collecting = applying.client.holding, self._collecting
        if not collecting.wants(values, grant=push.grant, holding=holding):
            return _nothing, Cost()
        work = collecting.staging(
            values,
            grant=push.grant,
            n_examples=push.samples,
            holding=holding,
            buffers=self._values.vector[self._n_gradient :],
        )
        return work, Cost(n_bytes=2.0 * values.nbytes)


def _nothing() -> None:
    pass
