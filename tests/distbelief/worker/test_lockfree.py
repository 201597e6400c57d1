"""Threads of a replica on the same parameters: what they compute, in turn and at the same time.

AD-   Project Adam (Chilimbi et al. 2014)       HG-  Hogwild (Niu et al. 2011)
DP-   Dpplee3
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier, Event, Lock
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.protocol.role import Together, in_turn
from distbelief.task import dry_run
from distbelief.task.data import Batch, Dataset
from distbelief.transport.node import in_threads
from distbelief.worker.batches import BatchIndices, BatchSlice
from distbelief.worker.downpour_settings import LockFree
from distbelief.worker.execution.executor import StepResult
from distbelief.worker.local_executor import FlatModel, LocalExecutor
from distbelief.worker.lockfree import LockFreeSteps, descend, prove, sharing_copy
from tests.distbelief.examples import Frames, everything_net, minus_mean, net


WAIT_SECONDS = 60.0  # of a thread for another one, before a test fails
SGD: Mapping[str, object] = {"name": "SGD", "lr": 0.1}


@dataclass(kw_only=True)
class Replica:
    """A model that takes lock-free steps on a data set."""

    module: nn.Module
    data: Dataset
    threads: int = 1
    samples: int | None = None
    inner: Mapping[str, object] | None = field(default_factory=lambda: SGD)
    together: Together = in_turn
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy
    clip_norm: float | None = None
    batch_size: int = 8
    n_steps: int = 0
    pushed: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module.train()
        self.model = FlatModel(self.module)
        self.small = LockFreeSteps(
            self.model,
            LockFree(threads=self.threads, samples=self.samples),
            batch_size=self.batch_size,
            together=self.together,
            name="net",
            inner=self.inner,
        )
        self.executor = LocalExecutor(
            self.model,
            self.data,
            loss=self.loss,
            names=dry_run.Names(model="net", loss="loss", data="data.train"),
            seed=(3, 1),
            clip_norm=self.clip_norm,
            small=self.small,
        )

    def slice(self, indices: Sequence[int]) -> BatchSlice:
        samples = BatchIndices(position=100 * self.n_steps, indices=np.array(indices))
        return self.executor.batches.read(0, self.n_steps, samples)

    def step(self, indices: Sequence[int], *, rate: float = 0.1, counts: bool = True) -> StepResult:
        batch, self.pushed = self.slice(indices), {}
        self.small.begin(number=self.n_steps, rate=lambda: rate, counts=counts)
        self.n_steps += 1
        return self.executor.run(batch, self.pushed.__setitem__)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model.named_tensors().items()}


def trained(
    module: nn.Module, data: Dataset, batches: Sequence[Sequence[int]], inner: Mapping[str, object]
) -> Mapping[str, torch.Tensor]:
    """Return what plain torch makes of these batches; a schedule is not part of it."""
    keywords = {key: value for key, value in inner.items() if key != "name"}
    optimizer = torch.optim.SGD(module.train().parameters(), **keywords)  # type: ignore[arg-type] # a table's
    for indices in batches:
        inputs, targets = torch.utils.data.default_collate([data[i] for i in indices])
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        for parameter in module.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        optimizer.step()
    return dict(module.state_dict())


class Words:
    """Rows of a table, and a class."""

    def __init__(self, *, n_rows: int = 30, n_samples: int = 48) -> None:
        draw = torch.Generator().manual_seed(2)
        self.rows = torch.randint(n_rows, (n_samples, 5), generator=draw)
        self.targets = torch.randint(3, (n_samples,), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index], self.targets[index]


class Bag(nn.Module):
    def __init__(self, *, n_rows: int = 30, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(n_rows, 7, sparse=sparse)
        self.last = nn.Linear(7, 3)

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.table(rows).sum(1).tanh())
        return output


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


# ------------------------------------------------------------ in turn: plain SGD


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("make", "data"),
    [
        (net, Frames()),
        (everything_net, Frames()),
        (Bag, Words()),
        (partial(Bag, sparse=False), Words()),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None)), Frames()),
    ],
    ids=["net", "everything", "sparse", "dense rows", "cumulative statistics"],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize(("threads", "samples"), [(1, None), (1, 4), (3, 4)])
def test_in_turn_small_batches_are_plain_sgd_to_the_bit(
    make: Callable[[], nn.Module],
    data: Dataset,
    weight_decay: float,
    threads: int,
    samples: int | None,
) -> None:
    """In virtual time, or with one thread: parameters and buffers."""
    inner = {**SGD, "weight_decay": weight_decay}
    replica = Replica(
        module=seeded(make), data=data, threads=threads, samples=samples, inner=inner, batch_size=16
    )
    batches = [range(16), range(16, 32), range(30, 46)]
    for indices in batches:
        replica.step(indices)
    n = samples or 16
    small = [indices[i : i + n] for indices in batches for i in range(0, 16, n)]
    expected = trained(seeded(make), data, small, inner)
    for name, value in replica.values.items():
        assert torch.equal(value, expected[name]), name
    assert not replica.pushed  # a - x is, which the exchange knows


def test_the_rate_follows_the_schedule_of_the_inner_optimizer() -> None:
    inner = {**SGD, "schedule": {"name": "StepLR", "step_size": 1, "gamma": 0.5}}
    replica = Replica(module=seeded(net), data=Frames(), inner=inner)
    module = seeded(net)
    for number in range(3):
        replica.step(range(8 * number, 8 * number + 8))
        rate = 0.1 * 0.5**number
        trained(module, Frames(), [range(8 * number, 8 * number + 8)], {"name": "SGD", "lr": rate})
    assert all(map(torch.equal, replica.values.values(), _sorted(module).values()))


def _sorted(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in sorted(module.named_parameters())}


def test_gradients_are_summed_raw_while_the_values_move() -> None:
    """DB-7 with send = "gradient": what is pushed is the sum of the small batches' gradients."""
    replica = Replica(module=seeded(Bag), data=Words(), threads=2, samples=4, inner=None)
    module = seeded(Bag)
    replica.step(range(12), rate=0.5)
    total = {name: torch.zeros_like(one) for name, one in _sorted(module).items()}
    for start in (0, 4, 8):
        before = copy.deepcopy(module)
        trained(module, Words(), [range(start, start + 4)], {"name": "SGD", "lr": 0.5})
        for name, old in before.named_parameters():
            total[name] += (old.detach() - _sorted(module)[name]) / 0.5
    for item, (name, value) in enumerate(replica.values.items()):
        assert torch.equal(value, _sorted(module)[name])
        torch.testing.assert_close(replica.pushed[item].view_as(value), total[name])


def test_a_step_that_the_shards_have_already_moves_nothing() -> None:
    replica = Replica(module=seeded(net), data=Frames(), threads=2)
    before = {name: value.clone() for name, value in replica.values.items()}
    replica.step(range(8), counts=False)
    assert all(map(torch.equal, before.values(), replica.values.values()))


def test_small_batches_draw_from_streams_of_their_own() -> None:
    def play() -> list[torch.Tensor]:
        module = seeded(lambda: nn.Sequential(nn.Linear(4, 50), nn.Dropout(), nn.Linear(50, 2)))
        replica = Replica(module=module, data=Frames(), threads=2, samples=4)
        replica.step(range(16))
        return [*replica.values.values()]

    assert all(map(torch.equal, play(), play()))


@pytest.mark.parametrize(
    ("settings", "n", "sizes"),
    [
        (LockFree(threads=4), 32, [8, 8, 8, 8]),
        (LockFree(threads=3), 32, [10, 11, 11]),
        (LockFree(threads=4), 5, [5]),  # small batches of 8, as in a whole step of 32
        (LockFree(threads=4), 17, [8, 9]),
        (LockFree(threads=4), 31, [8, 8, 8, 7]),
        (LockFree(threads=2, samples=4), 32, [4] * 8),
        (LockFree(threads=2, samples=4), 11, [4, 4, 3]),
        (LockFree(threads=2, samples=4), 9, [4, 5]),  # as the last batch of a pass
        (LockFree(threads=2, samples=1), 3, [1, 1, 1]),
        (LockFree(threads=2, samples=4), 1, [1]),
    ],
)
def test_a_step_is_cut_into_small_batches(settings: LockFree, n: int, sizes: list[int]) -> None:
    assert settings.sizes(n, batch_size=32) == sizes


# ------------------------------------------------------------ what is not finite


class Bad(Frames):
    def __init__(self, *bad: int) -> None:
        super().__init__()
        self.inputs[list(bad)] = torch.nan


@pytest.mark.parametrize("inner", [SGD, None])
def test_only_the_small_batch_with_a_bad_sample_is_skipped(
    inner: Mapping[str, object] | None,
) -> None:
    make = partial(seeded, lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    replica = Replica(module=make(), data=Bad(5), threads=2, samples=4, inner=inner)
    found = replica.step(range(12))
    assert found.n_skipped == 1
    assert found.loss is not None
    assert 0.0 < found.loss < 24.0
    expected = trained(make(), Frames(), [range(4), range(8, 12)], SGD)
    for name, value in replica.values.items():
        assert torch.equal(value, expected[name]), name
    assert all(bool(one.isfinite().all()) for one in replica.pushed.values())


def test_a_step_without_any_finite_gradient_has_no_loss() -> None:
    replica = Replica(module=seeded(net), data=Bad(*range(8)), threads=2, samples=4)
    before = {name: value.clone() for name, value in replica.values.items()}
    found = replica.step(range(8))
    assert found.n_skipped == 2
    assert found.loss != found.loss
    assert all(map(torch.equal, before.values(), replica.values.values()))


def test_gradients_are_clipped_one_by_one() -> None:
    replica = Replica(module=seeded(net), data=Frames(), threads=2, samples=4, clip_norm=1e-3)
    before = {name: value.clone() for name, value in replica.values.items()}
    replica.step(range(8))
    moved = [value - before[name] for name, value in replica.values.items()]
    norm = float(torch.cat([one.flatten() for one in moved]).norm())
    assert 1e-4 < norm <= 2 * 0.1 * 1e-3


# ------------------------------------------------------------ at the same time


class Meeting(nn.Module):
    """Adds 1 to the weight of each sample's row; calls back in the middle of forward."""

    met: ClassVar[Callable[[int], None]] = staticmethod(lambda _: None)

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))
        self.other = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        Meeting.met(int(numbers[0]))
        return self.weight[numbers] + self.other


class Numbers:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.tensor(1.0)


def meeting(
    monkeypatch: pytest.MonkeyPatch, met: Callable[[int], None], *, threads: int, samples: int
) -> Replica:
    replica = Replica(
        module=Meeting(64),
        data=Numbers(),
        threads=threads,
        samples=samples,
        together=in_threads,
        inner={"name": "SGD", "lr": 1.0},
        loss=minus_mean,
    )
    # Of 16, the first 8 were looked at now and then: such a look is for one at a time.
    replica.step(range(8 * samples))
    for value in replica.model.values:
        value.zero_()
    monkeypatch.setattr(Meeting, "met", staticmethod(met))
    return replica


def test_a_slow_sample_stops_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """AD-3: the first sample ends after all others; in order, it would wait for ever."""
    done: list[int] = []
    others = Event()

    def met(number: int) -> None:
        if number == 0:
            assert others.wait(WAIT_SECONDS)
        done.append(number)
        if len(done) == 5:
            others.set()

    replica = meeting(monkeypatch, met, threads=2, samples=1)
    replica.step(range(6))
    assert done == [1, 2, 3, 4, 5, 0]


def test_weights_are_read_while_another_thread_updates_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AD-2: a forward pass that has begun goes on with what another thread has written."""
    begun, updated = Event(), Event()
    seen: list[float] = []

    def met(number: int) -> None:
        if number == 0:
            begun.set()
            assert updated.wait(WAIT_SECONDS)
            seen.append(float(replica.values["other"]))
        elif number == 1:
            assert begun.wait(WAIT_SECONDS)
        else:  # its thread has updated the values by number 1
            seen.append(float(replica.values["other"]))
            updated.set()

    replica = meeting(monkeypatch, met, threads=2, samples=1)
    replica.step(range(3))
    # The forward pass that began with 0.0 has seen one update, or two.
    assert seen[0] == 1.0
    assert seen[1] in {1.0, 2.0}


def test_all_threads_compute_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = Barrier(4)
    met: list[int] = []

    def meet(number: int) -> None:
        barrier.wait(WAIT_SECONDS)
        met.append(number)

    replica = meeting(monkeypatch, meet, threads=4, samples=2)
    replica.step(range(8))
    assert sorted(met) == [0, 2, 4, 6]


def test_an_error_in_a_thread_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def met(number: int) -> None:
        if number == 2:
            raise RuntimeError("no such number")

    replica = meeting(monkeypatch, met, threads=2, samples=1)
    with pytest.raises(JobError, match="no such number"):
        replica.step(range(6))


class Turns(nn.Module):
    """Keeps the last number; the small batches of a step are for two threads in turn."""

    last: torch.Tensor
    n: torch.Tensor
    turns: ClassVar[Barrier]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("last", torch.tensor(-1.0))
        self.register_buffer("n", torch.tensor(7))

    @override
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        if numbers[0] < 8:  # no thread takes two
            Turns.turns.wait(WAIT_SECONDS)
        self.last.copy_(numbers[-1])
        self.n += 1
        return self.weight * numbers


def test_buffers_are_the_mean_of_the_threads_and_counters_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Turns, "turns", Barrier(2), raising=False)
    replica = Replica(
        module=Turns(), data=Numbers(), threads=2, samples=1, together=in_threads, loss=minus_mean
    )
    replica.step(range(8, 16))
    assert replica.values["n"] == 15
    replica.step([2, 4])
    assert replica.values["last"] == 3.0
    assert replica.values["n"] == 17


# ------------------------------------------------------------ without locks, and with one


def raced(
    replica: Replica, indices: Sequence[int], *, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Take steps; if `locked`, no two small batches at the same time."""
    lock = Lock()
    take = LockFreeSteps._take

    def one_at_a_time(*arguments: object) -> float:
        with lock:
            return take(*arguments)  # type: ignore[arg-type] # as they come

    with monkeypatch.context() as patch:
        if locked:
            patch.setattr(LockFreeSteps, "_take", one_at_a_time)
        for start in range(0, len(indices), 16):
            replica.step(indices[start : start + 16])
    return {name: value.clone() for name, value in replica.values.items()}


class Apart:
    """Sample i reads row i of a table; its target is drawn."""

    def __init__(self, *, n: int = 64) -> None:
        draw = torch.Generator().manual_seed(4)
        self.targets = torch.rand(n, generator=draw)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), self.targets[index]


class Rows(nn.Module):
    """Sample i reads row i, of which it has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 33, sparse=True)

    @override
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        means: torch.Tensor = self.table(numbers).square().mean(1)
        return means


class Branches(nn.Module):
    """Sample i reads a tensor of its own; the others have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([torch.randn(33) for _ in range(64)])

    @override
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.tables[int(number)].square().mean() for number in numbers])


@pytest.mark.parametrize("make", [Rows, Branches], ids=["sparse", "dense"])
def test_disjoint_supports_end_where_locks_would(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    """HG-1: with ==, after each of three passes."""
    found = []
    for locked in (False, True):
        replica = Replica(
            module=seeded(make),
            data=Apart(),
            threads=4,
            samples=1,
            together=in_threads,
            loss=nn.functional.mse_loss,
        )
        passes = range(3)
        found += [raced(replica, range(64), locked=locked, monkeypatch=monkeypatch) for _ in passes]
    for one, other in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_dense_updates_learn_what_locked_ones_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """HG-1, a statistical test: held against the fall of the loss, within which all runs end."""
    data = Frames(n_samples=256, width=8)
    losses = {}
    for locked in (False, True):
        module = seeded(partial(net, width=8, hidden=(64,)))
        replica = Replica(module=module, data=data, threads=4, samples=2, together=in_threads)
        before = loss_of(module, data)
        for _ in range(4):
            raced(replica, range(256), locked=locked, monkeypatch=monkeypatch)
        losses[locked] = before - loss_of(module, data)
    assert losses[True] > 0.3
    assert losses[False] > 0.75 * losses[True]


def loss_of(module: nn.Module, data: Frames) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(data.inputs), data.targets))


def test_an_update_may_be_lost_and_none_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """DP-4: no locks, so updates may overwrite each other; what is pushed has all of them."""
    n_steps, n_small = 20, 16
    replica = meeting(monkeypatch, lambda _: None, threads=4, samples=1)
    for _ in range(n_steps):
        replica.step(range(n_small))
    reached = float(replica.values["other"])
    assert reached == int(reached)
    assert n_steps <= reached <= n_steps * n_small  # the last to write had seen an own update
    assert replica.values["weight"].equal(replica.values["weight"].round())


def test_pushed_gradients_have_all_that_a_race_may_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """DB-8: each thread has a sum of its own."""
    monkeypatch.setattr(Meeting, "met", staticmethod(lambda _: None))
    replica = Replica(
        module=Meeting(64),
        data=Numbers(),
        threads=4,
        samples=1,
        together=in_threads,
        inner=None,
        loss=minus_mean,
    )
    for _ in range(10):
        replica.step(range(16), rate=1.0)
        pushed = dict(zip(replica.values, map(replica.pushed.get, range(2)), strict=True))
        other, weight = pushed["other"], pushed["weight"]
        assert other is not None
        assert weight is not None
        assert float(other) == -16.0
        assert weight.tolist() == [-1.0] * 16 + [0.0] * 48


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.float64, 1 + 2**-40), (torch.float32, 1 + 2**-12)]
)
@pytest.mark.parametrize("sparse", [True, False])
def test_no_element_is_torn(dtype: torch.dtype, step: float, *, sparse: bool) -> None:
    """Each is a whole multiple of a step with bits in both halves: one that a thread has written.

    After at most 1600 updates all multiples are exact.
    """
    n = 64
    value = torch.zeros(n, 37, dtype=dtype)
    one = torch.full((n, 37), step, dtype=dtype)
    given = torch.sparse_coo_tensor(torch.arange(n)[None], one, check_invariants=True)
    gradient = given if sparse else one
    seen: set[float] = set()

    def add(rate: float) -> None:
        for _ in range(400):  # up and down
            descend({0: value}, {0: gradient}, rate=rate)
            descend({0: value}, {0: gradient}, rate=-rate)

    def look() -> None:
        for _ in range(400):
            seen.update(value.unique().tolist())

    in_threads([partial(add, 1.0), partial(add, -1.0), look])
    seen.update(value.unique().tolist())
    assert all((each / step).is_integer() for each in seen)


# ------------------------------------------------------------ copies, and their proof


class Shared(nn.Module):
    """A layer whose penalty stands in a list of the class until the loss takes it."""

    penalties: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Shared.penalties.append(self.last.weight.square().sum())
        output: torch.Tensor = self.last(x)
        return output


def with_penalties(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    penalty = sum(Shared.penalties, torch.tensor(0.0))
    Shared.penalties.clear()
    return nn.functional.cross_entropy(outputs, targets) + penalty


class Closure(nn.Module):
    """Its forward is of the module that was built, also in a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.function = closure(self.last)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def closure(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer(x)
        return output

    return function


def pair() -> tuple[Batch, Batch]:
    frames = Frames()
    return (
        Batch(frames.inputs[:8], frames.targets[:8]),
        Batch(frames.inputs[8:16], frames.targets[8:16]),
    )


@pytest.mark.parametrize(
    "make",
    [
        net,
        everything_net,
        lambda: nn.Sequential(nn.Linear(4, 9), nn.Dropout(), nn.Linear(9, 2)),
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))),
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
    ],
    ids=["net", "everything", "dropout", "spectral norm", "batch norm"],
)
def test_copies_of_usual_models_are_proved(make: Callable[[], nn.Module]) -> None:
    prove(partial(seeded, make), pair(), loss=nn.functional.cross_entropy, name="net")


@pytest.mark.parametrize(
    ("make", "loss"), [(Shared, with_penalties), (Closure, nn.functional.cross_entropy)]
)
def test_copies_that_share_more_than_parameters_are_refused(
    make: Callable[[], nn.Module], loss: Callable[..., torch.Tensor]
) -> None:
    with pytest.raises(JobError, match=r"two copies of net .* leave .algorithm. lockfree out"):
        prove(partial(seeded, make), pair(), loss=loss, name="net")


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused(kind: str) -> None:
    """Regression: copies had none of them, and a hook that clips may do nothing on one batch."""
    module = seeded(net)
    parameter = next(module.parameters())
    getattr(parameter, kind)(lambda _: None)
    with pytest.raises(JobError, match=r"parameter '.*' has a hook .* leave .algorithm. lockfree"):
        sharing_copy(module, model="net")


class Uncopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def __deepcopy__(self, memo: object) -> "Uncopied":
        raise TypeError("one of a kind")


class Separate(Uncopied):
    @override
    def __deepcopy__(self, memo: object) -> "Uncopied":
        return Separate()


def test_a_module_without_a_copy_or_with_parameters_of_its_own_is_refused() -> None:
    with pytest.raises(JobError, match=r"cannot be copied .*TypeError: one of a kind"):
        sharing_copy(Uncopied(), model="net")
    with pytest.raises(JobError, match=r"copies of net do not share 'last\.(bias|weight)'"):
        Replica(module=Separate(), data=Frames(), threads=2)
