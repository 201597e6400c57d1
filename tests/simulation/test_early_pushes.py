"""Blocks of a push leave while earlier layers still compute their gradients (PO-1, PO-2, DB-8).

    0 --- forward --- 1/3 - layer 3 - layer 2 - layer 1 - layer 0 - 1        of a step of C seconds
                                    blocks of 3, 2, 1 leave       the last ones, Push

The gradient of every layer is the sum of its samples, which are integers. That of layer 0 is NaN
for the bad ones: blocks of all others have left by then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.core import vectors
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.pushes import PushDraft, ShardPush, StageTarget
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.tensor_copies import Held, PushBuffer, Pushed
from distbelief.protocol import Push, PushBlock, push_fetch as pf
from distbelief.protocol.role import Address, Computed, Seconds
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Delay, Duplicate, Fault, Kill, Pause
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Card, SwitchedNetwork
from distbelief.task.data import BatchCursor, DataShard
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec, build_dataset
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.training import Training
from tests.simulation import dealt
from tests.simulation.dealt import DealtJob
from tests.simulation.scene import sends
from tests.simulation.test_downpour import LEARNING, Cluster, counting, downpour, plain, same
from tests.simulation.test_resumed_jobs import n_saved, restored, session_after
from tests.simulation.variants import failure_of


HERE = "tests.simulation.test_early_pushes"
N_LAYERS, WIDTH, N_SAMPLES = 4, (1 << 14) + 64, 24  # a layer begins amid a block
N_BYTES = 4 * N_LAYERS * WIDTH
BLOCK = 1 << 12
RATE = 1e6  # bytes per second of a card
BAD = 99.0  # the first number of a bad sample


class _Spoiled(torch.autograd.Function):
    """The identity, whose gradient is NaN in a batch with a bad sample."""

    @staticmethod
    @override
    def forward(ctx: Any, x: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        ctx.is_bad = bool(is_bad.any())
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * (np.nan if ctx.is_bad else 1.0), None


class Layers(nn.Module):
    """Layers, each of which adds to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(WIDTH) for _ in range(N_LAYERS))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A chain: the backward pass goes through it from its end.
        out = x.new_zeros(len(x))
        for index, weight in enumerate(self.layers):
            out = _Chained.apply(out, x, weight)  # type: ignore[no-untyped-call]
            if not index:
                out = _Spoiled.apply(out, x[:, 0] == BAD)  # type: ignore[no-untyped-call]
        return out


class _Chained(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return out + x @ weight

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,), gradient = ctx.saved_tensors, gradients[0]
        return gradient, None, gradient @ x


class Changing(Layers):
    """A hook of the user's changes the gradient of the last layer when that of the first comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_hook(self._hook)

    def _hook(self, gradient: torch.Tensor) -> torch.Tensor:
        last = self.layers[N_LAYERS - 1]
        assert last.grad is not None
        self.enlarge(last.grad)
        return gradient

    def enlarge(self, gradient: torch.Tensor) -> None:
        gradient.mul_(2.0)


class ChangingData(Changing):
    """As in old code, in a way that torch does not count as a change."""

    @override
    def enlarge(self, gradient: torch.Tensor) -> None:
        gradient.data.mul_(2.0)


class ChangingMemory(Changing):
    @override
    def enlarge(self, gradient: torch.Tensor) -> None:
        gradient.data = 2.0 * gradient.data


class ChangingArray(Changing):
    @override
    def enlarge(self, gradient: torch.Tensor) -> None:
        gradient.numpy()[:] *= 2.0


class PartlyUsed(Layers):
    """Layer 2 has no gradient."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x @ self.layers[0] + x @ self.layers[1] + x @ self.layers[3]
        return out


def samples(*, bad: Sequence[int] = ()) -> list[object]:
    numbers = np.random.default_rng(0).integers(-8, 9, (N_SAMPLES, WIDTH)).astype(np.float32)
    numbers[list(bad), 0] = BAD
    return [(row, torch.tensor(0.0)) for row in torch.from_numpy(numbers)]


def task_of(*, bad: Sequence[int] = (), model: type[nn.Module] = Layers) -> TaskSpec:
    return TaskSpec(
        model=ModelSpec(factory=f"{HERE}:{model.__name__}", initial="module"),
        train=DataSpec(factory=f"{HERE}:samples", arguments={"bad": list(bad)}),
        loss="tests.simulation.test_downpour:total",
    )


@dataclass(eq=False)
class Linked(Cluster):
    """Each replica has a card of its own, and all shards share one; a step takes C seconds."""

    step_seconds: Seconds = 0.0  # by default, a push takes 0.3 of it
    is_early: bool = True
    sent: list[tuple[str, pf.PushBlock | pf.Push]] = field(default_factory=list)

    @override
    def options(self) -> ClusterOptions:
        seconds = self.step_seconds or N_BYTES / RATE / 0.3
        flops = self.model.flops(self.settings.batch_size) / seconds
        hosts = {name: str(name) for name in self.names} | dict.fromkeys(self.shards, "servers")
        fast = SimulatedMachine(shares_memory=False, jitter=0.0, flops_per_second=1e12)
        slow = replace(fast, flops_per_second=flops)
        return ClusterOptions(
            introduce=True,
            machines={
                name: replace(fast if name in self.shards else slow, host=host)
                for name, host in hosts.items()
            },
            fabric=SwitchedNetwork(
                cards={host: Card(bytes_per_second=RATE) for host in hosts.values()}
            ),
        )

    @override
    def run(self, *, but: Sequence[str] = ()) -> None:
        self.cluster.observe(self._note)
        with pytest.MonkeyPatch.context() as patch:
            if not self.is_early:
                patch.setattr(Training, "__init__", partialmethod(_init_late, Training.__init__))
            super().run(but=but)

    def _note(self, happening: HandledEvent) -> None:
        if happening.name.startswith("replica"):
            for action in happening.actions:
                message = getattr(action, "message", None)
                if isinstance(message, PushBlock | Push):
                    self.sent.append((type(happening.event).__name__, message))
                    if isinstance(happening.event, Computed) and happening.event.is_note:
                        self.sent[-1] = "note", message

    @property
    def n_early(self) -> int:
        """How many blocks have left during a step."""
        return sum(when == "note" for when, _ in self.sent)


def _init_late(
    training: Training,
    whole: Callable[..., None],
    *values: Any,  # noqa: ANN401 -- whatever they are
    **options: Any,  # noqa: ANN401
) -> None:
    whole(training, *values, **options)
    training._passes_on = False  # users have no choice here


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "BLOCK_BYTES", BLOCK)


def linked(
    job: DownpourSettings,
    *,
    bad: Sequence[int] = (),
    **options: Any,  # noqa: ANN401 -- those of `Linked`
) -> Linked:
    return Linked(task_of(bad=bad), job, **options)


def expected(cluster: Linked, n_steps: int, *, bad: Sequence[int] = ()) -> torch.Tensor:
    """Return the sum of the samples of all batches without a bad one, over all replicas."""
    dataset = build_dataset(cluster.task.train)
    whole = torch.zeros(WIDTH)
    n_replicas, size = len(cluster.replicas), cluster.settings.batch_size
    for r in range(n_replicas):
        part = DataShard(N_SAMPLES, replica_index=r, n_replicas=n_replicas, seed=0)
        cursor, position = BatchCursor(part), 0
        for _ in range(n_steps):
            indices = cursor.batch(position, size).tolist()
            position += len(indices)
            if not set(indices) & set(bad):
                whole += torch.stack([dataset[i][0] for i in indices]).sum(0)  # type: ignore[index]
    return whole


def assert_counts_once(cluster: Linked, n_steps: int, *, bad: Sequence[int] = ()) -> None:
    whole = -expected(cluster, n_steps, bad=bad)
    for name, values in cluster.values().items():
        assert torch.equal(values, whole), name


# --- when ---


def seconds_of(n_shards: int, *, is_early: bool) -> Seconds:
    """Return the seconds of a blocking step, in steps without communication."""
    found = []
    for n_steps in (3, 9):
        cluster = linked(
            counting(max_steps=n_steps, blocking=True), n_shards=n_shards, is_early=is_early
        )
        cluster.run()
        assert_counts_once(cluster, n_steps)
        assert bool(cluster.n_early) is is_early
        found.append(cluster.ended_at)
    return (found[1] - found[0]) / 6 / (N_BYTES / RATE / 0.3)


@pytest.mark.parametrize("n_shards", [1, 2, 4])
def test_a_push_takes_no_longer_than_its_last_layer_after_a_step(n_shards: int) -> None:
    """PO-1: the bound C + M is reached but for the last layer, where a push takes M = 0.3 C."""
    m, last = 0.3, 0.3 / N_LAYERS
    without = seconds_of(n_shards, is_early=False)
    assert without == pytest.approx(1.0 + m * (1 + 1 / n_shards), rel=0.03)
    assert seconds_of(n_shards, is_early=True) == pytest.approx(1 + m + last / n_shards, rel=0.03)


def test_the_blocks_of_a_layer_leave_before_the_step_ends() -> None:
    """PO-1: the last layer first, and the first one's after the step."""
    cluster = linked(counting(max_steps=1, blocking=True))
    cluster.run()
    blocks = [one for _, one in cluster.sent if isinstance(one, PushBlock)]

    def layer_of(block: PushBlock) -> int:
        return block.block_index * BLOCK // 4 // WIDTH

    order = [layer_of(one) for one in blocks]
    assert order == sorted(order, reverse=True)
    assert [one.number for one in blocks] == [*range(len(blocks))]
    early = [one for when, one in cluster.sent if when == "note"]
    layers = {layer_of(one) for one in early if isinstance(one, PushBlock)}
    assert {1, 2, 3} <= layers
    assert isinstance(cluster.sent[-1][1], Push)


def test_in_shared_memory_nothing_leaves_early() -> None:
    cluster = Cluster(task_of(), counting(max_steps=2, blocking=True))
    cluster.run()
    assert cluster.status("replica-0")["bytes_out"] == 2 * N_BYTES
    program = cluster.replica(Address("replica-0")).program
    assert program.figures()["pushes"] == 2


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 1e9},
        {"n_push": 2},
        {"exchange": ExchangePolicy(numbers="bfloat16")},
        {"exchange": ExchangePolicy(send="delta"), "inner": {"name": "SGD", "lr": 0.1}},
    ],
)
def test_what_may_change_or_is_encoded_leaves_after_the_step(options: dict[str, Any]) -> None:
    cluster = linked(msgspec.structs.replace(counting(max_steps=3), **options))
    cluster.run()
    assert not cluster.n_early


# --- the same bits ---


@pytest.mark.each_value
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("n_shards", [1, 4])
def test_overlap_changes_no_bit(n_shards: int, *, blocking: bool) -> None:
    """PO-2, and DB-11 where it is blocking."""
    job = downpour(blocking=blocking, max_steps=12)
    found = []
    for is_early in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vectors, "BLOCK_BYTES", 256)  # of a net of 3,000 numbers
            cluster = Linked(LEARNING, job, n_shards=n_shards, is_early=is_early, step_seconds=0.02)
            cluster.run()
        assert bool(cluster.n_early) is is_early
        found.append(cluster.values())
    if blocking:
        assert same(*found)
        assert same(found[0], plain(job, task=LEARNING))


@pytest.mark.parametrize("n_shards", [1, 4])
def test_layers_without_a_gradient_do_not_move(n_shards: int) -> None:
    job = counting(max_steps=4, blocking=True, rule=SGD(learning_rate=1.0, weight_decay=0.5))
    found = []
    for is_early in (True, False):
        cluster = Linked(task_of(model=PartlyUsed), job, n_shards=n_shards, is_early=is_early)
        cluster.run()
        found.append(cluster.values())
    assert same(*found)
    assert not found[0]["layers.2"].any()


@pytest.mark.each_value
@pytest.mark.parametrize("model", [Changing, ChangingData, ChangingMemory, ChangingArray])
@pytest.mark.parametrize("n_shards", [1, 4])
def test_a_gradient_that_a_hook_changes_later_is_pushed_as_it_ends(
    n_shards: int, model: type[nn.Module]
) -> None:
    """What has left of it is void, and the replica waits for the end of its steps from then on.

    Versions of tensors were compared, which `grad.data` does not change: the gradient was pushed
    as it was before the hook, without a word.
    """
    job = counting(max_steps=4, blocking=True)
    cluster = Linked(task_of(model=model), job, n_shards=n_shards)
    cluster.run()
    whole = -expected(cluster, 4)
    for name, values in cluster.values().items():
        assert torch.equal(values, 2.0 * whole if name == "layers.3" else whole), name
    attempts = {(one.sequence & 0xFF, one.attempt or 0) for _, one in cluster.sent}
    assert attempts == {(1, 0), *((n, 1) for n in range(1, 5))}


# --- gradients that are not finite ---

BADS = (3, 11)


@pytest.mark.each_value
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("n_shards", [1, 4])
def test_nothing_of_a_bad_gradient_is_applied(n_shards: int, *, blocking: bool) -> None:
    """DB-8: its blocks have left, are void, and are never mixed with those of the next gradient."""
    job = counting(max_steps=9, blocking=blocking)
    cluster = linked(job, bad=BADS, n_shards=n_shards)
    cluster.run()
    assert_counts_once(cluster, 9, bad=BADS)
    counters = cluster.counters(0)
    assert counters.non_finite > 1
    assert counters.pushes == counters.gradients_pushed == 9 - counters.non_finite
    assert cluster.n_early
    assert max(one.attempt or 0 for _, one in cluster.sent) == counters.non_finite
    pushes = {one.sequence for _, one in cluster.sent if isinstance(one, Push)}
    assert len(pushes) == counters.pushes


# --- faults ---


def faults_of(seed: int, *, n_shards: int) -> list[Fault]:
    stream = np.random.default_rng(seed)
    at = float(stream.uniform(0.1, 4.0))
    after = [None, *range(8)][int(stream.integers(9))]
    victims = ["replica-0", *(f"shard-{k}" for k in range(n_shards))]
    victim = Address(victims[int(stream.integers(len(victims)))])
    paused = Address(victims[int(stream.integers(len(victims)))])
    return [
        Kill(at=at, role=victim, restart_after=0.2, after_actions=after)
        if victim == "replica-0"
        else Pause(at=at, role=victim, seconds=float(stream.uniform(0.1, 30.0))),
        Pause(at=float(stream.uniform(0.1, 8.0)), role=paused, seconds=1.0),
        Duplicate(probability=0.02, seconds_max=1.0),
        Delay(probability=0.02, seconds_max=1.0, overtaken=bool(stream.integers(2))),
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_each_gradient_counts_once_whatever_is_lost(seed: int, n_shards: int) -> None:
    """DB-8: over kills during a step, pauses, and messages that come late, twice or in disorder."""
    job = counting(max_steps=6, blocking=True)
    faults = faults_of(seed, n_shards=n_shards)
    cluster = linked(job, bad=BADS, n_shards=n_shards, seed=seed, faults=faults)
    cluster.run()
    # A replica killed between two shards repeats a push, which only dealt data tell apart.
    if n_shards == 1 or not any(isinstance(one, Kill) for one in faults):
        assert_counts_once(cluster, 6, bad=BADS)
    assert cluster.n_early


def test_rounds_take_whole_pushes_only() -> None:
    exchange = ExchangePolicy(staleness=0, round=Round())
    job = msgspec.structs.replace(counting(max_steps=6), exchange=exchange)
    found = []
    for is_early in (True, False):
        cluster = linked(job, bad=(3,), n_replicas=3, n_shards=2, is_early=is_early)
        cluster.run()
        assert bool(cluster.n_early) is is_early
        found.append(cluster.values())
    assert same(*found)


REPLICA, SHARD = Address("replica-1"), Address("shard-0")
KILLS: Mapping[str, Callable[[float], Sequence[Fault]]] = {
    "replica": lambda at: [Kill(at=at, role=REPLICA)],
    "replica, between two actions": lambda at: [Kill(at=at, role=REPLICA, after_actions=3)],
    "shard": lambda at: [Kill(at=at, role=SHARD)],
    "shard, twice": lambda at: [Kill(at=at, role=SHARD), Kill(at=at + 2.0, role=SHARD)],
}


# --- one rule left out ---


def play(seed: int) -> None:
    job = counting(max_steps=9, blocking=True)
    faults = faults_of(seed, n_shards=1) if seed else ()
    cluster = linked(job, bad=BADS, seed=seed, faults=faults)
    cluster.run()
    assert_counts_once(cluster, 9, bad=BADS)
    counters = cluster.counters(0)
    assert counters.pushes + counters.non_finite == 9


def closed_before_it_is_finite(patch: pytest.MonkeyPatch) -> None:
    """The last block, and Push, leave as soon as all blocks are full."""
    whole = ShardPush.filled

    def filled(
        self: ShardPush, staged: StageTarget, blocks: Sequence[int], *, is_open: bool
    ) -> list[pf.PushBlock | pf.Push]:
        sent = whole(self, staged, blocks, is_open=is_open)
        early, first = self.early, staged.n_blocks - 1
        if early is not None and early.order is not None and len(early.order) > first:
            sent += [self._block(early, index) for index in range(early.blocks.sent, first + 1)]
            sent.append(early.message)
        return sent

    patch.setattr(ShardPush, "filled", filled)


def applied_before_it_is_complete(patch: pytest.MonkeyPatch) -> None:
    """The shard takes a push for complete once Push is here; it comes before the last blocks."""
    patch.setattr(PushBuffer, "n_received", property(lambda self: self.n_blocks))
    patch.setattr(PushBuffer, "read", lambda self, held, _: _read_anyway(self, held))


def _read_anyway(self: PushBuffer, held: Held) -> Pushed:
    self._size = self.n_elements
    return _READ(self, held)


_READ = PushBuffer.read


def attempts_are_mixed(patch: pytest.MonkeyPatch) -> None:
    """The next attempt has no number of its own."""

    def abandon(self: ShardPush) -> None:
        self.early = None

    patch.setattr(ShardPush, "abandon", abandon)


def a_shard_mixes_attempts(patch: pytest.MonkeyPatch) -> None:
    """The shard goes on with what it has of an earlier attempt."""
    whole = PushBuffer.lend

    def lend(
        self: PushBuffer, sequence: int, n_words: pf.Words, attempt: pf.Attempt = msgspec.UNSET
    ) -> bool:
        if self.sequence == sequence:
            self.attempt = attempt
        return whole(self, sequence, n_words, attempt)

    patch.setattr(PushBuffer, "lend", lend)


def an_abandoned_push_counts(patch: pytest.MonkeyPatch) -> None:
    """Its blocks are all there: it is closed in place of being taken back."""

    def abandon(self: ParameterClient) -> None:
        self._issue(None, {"n_gradients": 1, "samples": 0}, 0.0, dealt=msgspec.UNSET, sets=False)

    patch.setattr(ParameterClient, "abandon", abandon)


def what_has_changed_is_pushed(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a gradient that has left is still the gradient."""
    patch.setattr(PushDraft, "is_void", property(lambda _: False, lambda _self, _value: None))


VARIANTS = (
    closed_before_it_is_finite,
    applied_before_it_is_complete,
    attempts_are_mixed,
    a_shard_mixes_attempts,
    an_abandoned_push_counts,
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.__name__)
def test_a_broken_rule_is_noticed(variant: Callable[[pytest.MonkeyPatch], None]) -> None:
    def plays() -> None:
        for seed in range(3):
            play(seed)

    failure = failure_of(variant, plays)
    assert failure is not None, f"no test notices: {variant.__doc__}"


def test_a_change_of_what_has_left_is_noticed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        what_has_changed_is_pushed(patch)
        cluster = Linked(task_of(model=Changing), counting(max_steps=4, blocking=True))
        cluster.run()
    assert not torch.equal(cluster.values()["layers.3"], -2.0 * expected(cluster, 4))


def dealt_job(
    patch: pytest.MonkeyPatch,
    **options: Any,  # noqa: ANN401 -- those of `DealtJob`
) -> DealtJob:
    """Return a job of two tables with bad samples, whose blocks leave early."""
    patch.setattr(vectors, "BLOCK_BYTES", 64)
    patch.setattr(dealt, "task_of", partial(_tables, dealt.task_of))
    session = {"host": "", **options.pop("session", {})}
    return DealtJob(n_samples=48, batch_size=1, bad=(5, 30), session=session, **options)


def _tables(
    task_of: Callable[..., TaskSpec],
    n_samples: int,
    bad: Sequence[int],
    *,
    is_split: bool,
    is_stream: bool = False,
) -> TaskSpec:
    del is_split
    return task_of(n_samples, bad, is_split=True, is_stream=is_stream)


def count_early(job: DealtJob) -> list[int]:
    """Return a list that gets the number of blocks that leave during a step."""
    found: list[int] = []

    def see(happening: HandledEvent) -> None:
        if isinstance(happening.event, Computed) and happening.event.is_note:
            found.append(len(list(sends(happening, PushBlock))))

    job.job.cluster.observe(see)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    "at", [2.031, *(pytest.param(at, marks=pytest.mark.soak) for at in (2.0, 2.013, 2.044))]
)
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param("replica", marks=pytest.mark.soak),
        pytest.param("shard", marks=pytest.mark.soak),
        "replica, between two actions",
        "shard, twice",
    ],
)
def test_dealt_samples_count_once_over_kills_and_takeovers(
    kill: str, at: float, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DB-8: values show it after each event; with two copies of a shard, the other takes over."""
    job = dealt_job(monkeypatch, n_epochs=5, shard_copies=copies, faults=KILLS[kill](at))
    early = count_early(job)
    job.run()

    assert sum(early) > 100


def test_a_resumed_run_counts_each_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dealt_job(monkeypatch, n_epochs=8, snapshot_every=0.5)
    job.job.run_until(lambda: n_saved(job.job) >= 2)
    options, store = session_after(job.job, tmp_path)
    again = dealt_job(monkeypatch, n_epochs=8, snapshot_every=0.5, session=options)
    restored(again.job, store)
    early = count_early(again)
    again.run()
    assert again.job.view.samples == again.total
    assert sum(early) > 100
