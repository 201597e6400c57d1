"""A worker that holds the whole model: assignments in, mini-batches computed, sums pushed."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief import protocol as wire
from distbelief.core.errors import JobError, LocalProtocolError, RemoteProtocolError
from distbelief.protocol import role as rl
from distbelief.task import dry_run
from distbelief.task.data import Samples
from distbelief.task.losses import Loss
from distbelief.worker.local_executor import FlatModel, LocalExecutor
from sandblaster.build import whole_worker
from sandblaster.chunks import COORDINATOR, ChunkSizes
from sandblaster.group_tasks import N_CHUNKS_HELD, TIMER, WorkerConfig
from tests.distbelief.worker.bench import SHARD, RoleBench


CHUNK_SIZES = ChunkSizes(mini_batch_size=2, mini_batches_per_chunk=2)
N_SAMPLES = 12


class Lines:
    """Samples (x, 2 x)."""

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((1,), float(index))
        return x, 2.0 * x


class Net(nn.Module):
    """A line through 0, and the largest input seen as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))
        self.register_buffer("largest", torch.zeros(1))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest: torch.Tensor = torch.maximum(self.largest, x.max())
        return x * self.slope


class Bench(RoleBench):
    """A worker; the test is its coordinator."""

    def __init__(
        self,
        *,
        loss: Loss = functional.mse_loss,
        begun: bool = True,
        chunk_sizes: ChunkSizes = CHUNK_SIZES,
    ) -> None:
        model = FlatModel(Net())
        super().__init__(model)
        self.role = self.replica = whole_worker(
            WorkerConfig(chunk_sizes=chunk_sizes),
            client=self.client,
            executor=LocalExecutor(
                model,
                Lines(),
                loss=loss,
                sums=True,
                names=dry_run.Names(model="Net", loss="mse", data="data.train"),
                seed=(0, 0),
            ),
            samples=Samples(N_SAMPLES),
            await_begin=not begun,
        )
        self.deaf = False
        self.start()

    @property
    def accounts(self) -> list[wire.WorkReport]:
        return [message for message in self.reported if isinstance(message, wire.WorkReport)]

    @override
    def deliver(self) -> None:
        if not self.deaf:
            super().deliver()

    def happen(self, event: rl.Event) -> None:
        self.feed(event)
        self.deliver()

    def hear(self, message: wire.Message, *, sender: rl.Address = SHARD) -> None:
        self.happen(rl.Received(sender=sender, incarnation=1, message=message))

    def assign(
        self,
        version: int,
        *tasks: tuple[int, int, int],
        evaluation: int = 1,
        series: int = 1,
        clock: int = 0,
        incarnation: int = 1,
    ) -> None:
        """Assign these (chunk index, attempt, token)."""
        message = wire.Assignment(
            series=series,
            replica_incarnation=incarnation,
            version=version,
            evaluation=evaluation,
            versions=(wire.ShardVersion(incarnation=1, clock=clock),),
            n_examples=N_SAMPLES,
            tasks=tuple(
                wire.ChunkTask(chunk_index=i, attempt=a, commit_token=g) for i, a, g in tasks
            ),
        )
        self.hear(message, sender=COORDINATOR)

    def work(self) -> str:
        """Let one piece of work run; return its name."""
        name = self.compute().name
        self.deliver()
        return name

    @property
    def attempts(self) -> dict[int, tuple[float, bool]]:
        """Of the last account: attempt -> loss, staged."""
        results = self.accounts[-1].results
        return {one.attempt: (one.loss, one.staged) for one in results}


def gradient_of(*xs: float) -> float:
    """Return the sum over (2 x - 0 x)^2 differentiated by the slope, at 0."""
    return sum(2.0 * -2.0 * x * x for x in xs)


def test_a_chunk_is_computed_reported_pushed_and_reported_again() -> None:
    bench = Bench()
    bench.assign(1, (1, 7, 0))
    names = bench.run_while_it_can()
    assert names.count("replica:step") == 2
    assert names.count("replica:install") == 1
    xs = (4.0, 5.0, 6.0, 7.0)
    assert bench.attempts == {7: (sum(4.0 * x * x for x in xs), False)}
    assert bench.accounts[-1].n_computed == 4
    assert bench.shard.pushed == []
    bench.assign(2, (1, 7, 33))
    assert bench.run_while_it_can() == ["replica:push"]
    ((push, values),) = bench.shard.pushed
    assert (push.commit_token, push.samples, push.n_gradients) == (33, 4, 2)
    assert values[0] == gradient_of(*xs)
    assert values[64] == 7.0  # the buffer
    assert bench.attempts[7][1]
    assert bench.accounts[-1].version == 2


def test_each_chunk_begins_with_the_fetched_buffers() -> None:
    bench = Bench()
    bench.assign(1, (2, 1, 0), (0, 2, 0))
    bench.run_while_it_can()
    bench.assign(2, (2, 1, 5), (0, 2, 6))
    bench.run_while_it_can()
    assert [values[64] for _, values in bench.shard.pushed] == [11.0, 3.0]


def test_parameters_are_fetched_once_for_an_evaluation_and_of_its_version() -> None:
    """DB-16."""
    bench = Bench()
    bench.assign(1, (0, 1, 0), clock=4)  # the shard is at 0
    for _ in range(3):
        bench.run_while_it_can()
        assert "replica:step" not in bench.pending
        bench.happen(rl.TimerFired(name="replica:retry"))
    bench.shard.pushed = [(push_of(4), bench.shard.values)] * 4  # its clock is 4
    bench.run_while_it_can()
    bench.happen(rl.TimerFired(name="replica:retry"))
    names = bench.run_while_it_can()
    assert names.count("replica:step") == 2
    bench.assign(2, (0, 1, 0), (1, 2, 0), clock=4)
    assert "replica:install" not in bench.run_while_it_can()


def push_of(sequence: int) -> wire.Push:
    return wire.Push(sequence=sequence, term=1, fetched_clock=0, n_gradients=1, samples=1)


def test_a_chunk_that_is_no_longer_named_is_dropped_half_way() -> None:
    bench = Bench()
    bench.assign(1, (0, 1, 0), (1, 2, 0))
    while bench.work() != "replica:step":
        pass
    bench.assign(2, (1, 2, 0))
    bench.run_while_it_can()
    bench.assign(3, (1, 2, 9))
    bench.run_while_it_can()
    ((_, values),) = bench.shard.pushed
    xs = (4.0, 5.0, 6.0, 7.0)
    assert values[0] == gradient_of(*xs)
    assert bench.attempts[2][0] == sum(4.0 * x * x for x in xs)
    assert 6 <= bench.accounts[-1].n_computed <= 8  # what was in vain is counted too


def test_a_mini_batch_of_another_evaluation_does_not_count() -> None:
    bench = Bench()
    bench.assign(1, (0, 1, 0))
    while "replica:step" not in bench.pending:
        bench.work()
    bench.assign(2, (1, 2, 0), evaluation=2)
    bench.run_while_it_can()
    assert bench.accounts[-1].n_computed == 4


def test_no_more_sums_are_held_than_there_is_room_for() -> None:
    bench = Bench()
    bench.assign(1, *((index, index + 1, 0) for index in range(3)))
    bench.run_while_it_can()
    assert len(bench.attempts) == N_CHUNKS_HELD
    assert bench.replica.status()[1]["sets_held"] == N_CHUNKS_HELD
    bench.assign(2, (0, 1, 9), (1, 2, 0), (2, 3, 0))
    bench.run_while_it_can()
    assert len(bench.attempts) == 3


def test_old_and_foreign_assignments_change_nothing() -> None:
    bench = Bench()
    bench.assign(5, (0, 1, 0))
    n_said = len(bench.accounts)
    bench.assign(6, (0, 1, 0), incarnation=2)
    bench.assign(6, (0, 1, 0), series=0)
    assert len(bench.accounts) == n_said
    bench.assign(4)  # superseded: it gets a report
    assert len(bench.accounts) == n_said + 1
    assert bench.accounts[-1].version == 5


def test_an_impossible_assignment_breaks_the_protocol_and_changes_nothing() -> None:
    bench = Bench()
    bench.assign(1, (0, 1, 0))
    with pytest.raises(RemoteProtocolError, match="invalid assignment: chunk 3"):
        bench.assign(2, (3, 2, 0))
    bench.run_while_it_can()
    assert list(bench.attempts) == [1]


def test_other_messages_are_rejected() -> None:
    with pytest.raises(RemoteProtocolError, match="HeartbeatAck, which is not for it"):
        Bench().hear(wire.HeartbeatAck(), sender=rl.Address("stranger"))


def test_it_asks_for_work_once_all_shards_are_there() -> None:
    assert len(Bench().accounts) == 1


def test_it_asks_for_work_again_and_again() -> None:
    bench = Bench(begun=False)
    assert bench.accounts == []
    assert bench.replica.status()[0] == "waiting for begin"
    bench.happen(rl.TimerFired(name=TIMER))
    assert bench.accounts == []
    bench.hear(wire.StartTraining(), sender=rl.SUPERVISOR)
    bench.happen(rl.TimerFired(name=TIMER))
    bench.happen(rl.PeerJoined(peer=COORDINATOR, incarnation=1))
    bench.happen(rl.PeerJoined(peer=rl.Address("evaluator"), incarnation=1))
    assert len(bench.accounts) == 3
    assert bench.replica.status()[0] == "waiting for work"


def test_status_names_the_shard_it_waits_for() -> None:
    bench = Bench()
    bench.deaf = True
    bench.assign(1, (0, 1, 0))
    while bench.work() != "replica:read":
        pass
    bench.run_while_it_can()
    assert bench.replica.status()[0] == "waiting for shard-0"


def test_it_stops_once_its_work_is_done() -> None:
    bench = Bench()
    bench.assign(1, (0, 1, 0))
    while "replica:step" not in bench.pending:
        bench.work()
    assert bench.replica.status()[0] == "computing"
    bench.hear(wire.Stop(reason="enough"), sender=rl.SUPERVISOR)
    assert not bench.has_halted()
    bench.run_while_it_can()
    assert isinstance(bench.reported[-1], wire.Finished)
    assert bench.has_halted()


def test_a_loss_that_is_not_finite_is_reported_with_its_positions() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs, targets) * math.nan

    bench = Bench(loss=loss)
    bench.assign(1, (0, 1, 0))
    bench.run_while_it_can()
    assert math.isnan(bench.attempts[1][0])
    assert "positions 0 to 1 of the data" in bench.reports[-1].text


def test_a_sum_that_is_not_finite_is_found_when_it_is_pushed() -> None:
    """Each mini-batch's gradient is finite, their sum is not."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        del targets
        return outputs.sum() * 1e37

    bench = Bench(loss=loss)
    bench.assign(1, (2, 1, 0))
    bench.run_while_it_can()
    bench.assign(2, (2, 1, 8))
    bench.run_while_it_can()
    assert bench.shard.pushed == []
    assert math.isnan(bench.attempts[1][0])


def test_user_errors_end_with_a_message() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs - targets

    bench = Bench(loss=loss)
    bench.assign(1, (0, 1, 0))
    with pytest.raises(JobError, match="loss"):
        bench.run_while_it_can()
    other = Bench()
    with pytest.raises(JobError, match="step 0 failed: KeyError"):
        other.happen(rl.Computed(name="replica:step", error=KeyError("x")))
    with pytest.raises(LocalProtocolError, match="unexpected result of work 'x'"):
        other.happen(rl.Computed(name="x"))


def test_the_next_chunk_is_read_while_this_one_is_computed() -> None:
    bench = Bench()
    bench.assign(1, (0, 1, 0), (2, 2, 0))
    names = bench.run_while_it_can()
    second_step = [at for at, name in enumerate(names) if name == "replica:step"][1]
    assert names[:second_step].count("replica:read") == 3
    assert names.count("replica:read") == names.count("replica:step") == 4  # each read once


def test_a_pushed_sum_leaves_room_for_another() -> None:
    bench = Bench()
    bench.shard.acknowledges = False
    bench.assign(1, (0, 1, 9), (1, 2, 0), (2, 3, 0))
    bench.run_while_it_can()
    assert len(bench.attempts) == 3


def test_a_report_without_news_is_repeated_ever_more_slowly() -> None:
    bench = Bench()
    bench.assign(1, (0, 1, 0))
    pauses = []
    for _ in range(5):
        pauses.append(bench.timers[TIMER] - bench.now)
        bench.now = bench.timers[TIMER]
        bench.happen(rl.TimerFired(name=TIMER))
    assert pauses == [0.5, 1.0, 2.0, 2.0, 2.0]
    bench.run_while_it_can()  # news
    assert bench.timers[TIMER] == bench.now + 0.5
    bench.assign(2)  # idle
    assert bench.timers[TIMER] == bench.now + 4.0


def test_the_loss_of_a_chunk_is_exactly_rounded() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.0 * outputs.sum() + (5e15 if targets.max() < 3.0 else 0.5)

    bench = Bench(loss=loss, chunk_sizes=ChunkSizes(mini_batch_size=2, mini_batches_per_chunk=3))
    bench.assign(1, (0, 1, 0))
    bench.run_while_it_can()
    large = 2.0 * float(torch.tensor(5e15))
    assert large + 1.0 + 1.0 == large  # as a plain sum is
    assert bench.attempts == {1: (large + 2.0, False)}
