"""Jobs whose replicas push local steps: nothing is lost, and one replica is plain training."""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from distbelief.config.job import StopTable
from distbelief.config.presets import PRESETS, expand
from distbelief.core.muon import Muon
from distbelief.parameter_server.codecs import Int4, TopK
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, Momentum, UpdateRule
from distbelief.protocol import StartTraining, Stop
from distbelief.protocol.role import Address
from distbelief.simulation.faults import Delay, DiskFull, Drop, Duplicate, Fault, Kill, Pause, Slow
from distbelief.task.losses import loss_function
from distbelief.task.task import TaskSpec, build_dataset, build_model
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.group import member_names
from tests.simulation import test_downpour as td
from tests.simulation.groups import Group
from tests.simulation.jobs import TASK, JobCluster, seeds
from tests.simulation.test_machines import faults_of


ADD = SGD(learning_rate=1.0)
ADAMW: Mapping[str, object] = {
    "name": "AdamW",
    "lr": 0.01,
    "betas": [0.8, 0.9],
    "schedule": {"name": "CosineAnnealingLR", "T_max": 40},
}


def job(
    every: int | Literal["auto"],
    *,
    inner: Mapping[str, object] = ADAMW,
    rule: UpdateRule = ADD,
    loss: str = td.LEARNING.loss,
    blocking: bool = False,
    max_steps: int | None = 10,
) -> DownpourSettings:
    return DownpourSettings(
        loss=loss,
        batch_size=4,
        rule=rule,
        inner=inner,
        exchange=ExchangePolicy(every=every, send="delta"),
        blocking=blocking,
        max_steps=max_steps,
    )


def counting(every: int, *, max_steps: int, blocking: bool = False) -> DownpourSettings:
    """Return a job whose local steps are integers, each the gradient of its samples."""
    inner = {"name": "SGD", "lr": 1.0}
    return job(every, inner=inner, loss=td.COUNTING.loss, max_steps=max_steps, blocking=blocking)


def reference(
    settings: DownpourSettings, *, task: TaskSpec, n_replicas: int = 1
) -> dict[str, torch.Tensor]:
    """Return the parameters of one process that plays all replicas, one after the other.

    Each takes `every` local steps from the values; then the mean of their a - x is the gradient of
    the outer optimizer. All begin again where that has come to.
    """
    assert settings.max_steps is not None
    drawn = td.drawn(task)
    modules = [build_model(task.model) for _ in range(n_replicas)]
    shapes = {name: value.shape for name, value in modules[0].named_parameters()}
    values = {name: drawn[name].view(shape).clone() for name, shape in shapes.items()}
    outer = _outer(settings.rule, values)
    optimizers = [_inner(settings, module) for module in modules]
    dataset, loss = build_dataset(task.train), loss_function(task.loss)
    batches = [
        td._batches(settings, n_samples=len(dataset), replica_index=r, n_replicas=n_replicas)
        for r in range(n_replicas)
    ]
    every = 1 if settings.exchange.send == "gradient" else cast("int", settings.exchange.every)
    for first in range(0, settings.max_steps, every):
        pushes: list[dict[str, torch.Tensor]] = []
        for module, (optimizer, scheduler), of_replica in zip(
            modules, optimizers, batches, strict=True
        ):
            local = dict(module.named_parameters())
            for name, value in local.items():
                value.data.copy_(values[name].data)
            for _ in range(first, min(first + every, settings.max_steps)):
                samples = [dataset[i] for i in next(of_replica)]
                inputs, targets = torch.utils.data.default_collate(samples)
                module.zero_grad()
                loss(module(inputs), targets).backward()
                if optimizer is not None:
                    optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            if optimizer is None:
                pushes.append({name: cast("torch.Tensor", p.grad) for name, p in local.items()})
            else:
                pushes.append({name: values[name].data - p.data for name, p in local.items()})
        for name, shared in values.items():
            shared.grad = torch.stack([push[name] for push in pushes]).sum(0) / n_replicas
        outer.step()
    return {name: value.detach().reshape(-1) for name, value in values.items()}


def _outer(rule: UpdateRule, values: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    if isinstance(rule, Momentum):
        options = {"momentum": rule.momentum, "nesterov": rule.nesterov}
        return torch.optim.SGD(values.values(), lr=rule.learning_rate, **options)  # type: ignore[arg-type]
    return td._optimizer(rule, values)


def _inner(
    settings: DownpourSettings, module: nn.Module
) -> tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None]:
    if settings.inner is None:
        return None, None
    keywords = dict(settings.inner)
    schedule = dict(cast("Mapping[str, object]", keywords.pop("schedule", {})))
    name = str(keywords.pop("name"))
    own: Mapping[str, type] = {"Muon": Muon}
    kind = own.get(name) or getattr(torch.optim, name)
    optimizer = kind(module.parameters(), **keywords)
    if not schedule:
        return optimizer, None
    kind = getattr(torch.optim.lr_scheduler, str(schedule.pop("name")))
    return optimizer, kind(optimizer, **schedule)


def plain(settings: DownpourSettings, *, task: TaskSpec) -> dict[str, torch.Tensor]:
    return reference(settings, task=task)


@pytest.mark.parametrize("every", [1, 2, 10])
@pytest.mark.parametrize("host", ["host-0", ""])
def test_one_replica_whose_epochs_are_one_batch_is_plain_training(every: int, host: str) -> None:
    """A push that ended an epoch did not wait for the fetch before it, as no more was dealt then.

    What came of that fetch replaced the local step that was in the push: the next gradient was that
    of the parameters before it.
    """
    n, n_epochs = 12, 20
    train = msgspec.structs.replace(TASK.train, arguments={"width": 40, "n_samples": n})
    task = msgspec.structs.replace(TASK, train=train, test=None)
    settings = DownpourSettings(
        loss=task.loss,
        batch_size=n,
        rule=ADD,
        inner={"name": "SGD", "lr": 0.5},
        exchange=ExchangePolicy(every=every, send="delta"),
        order="dealt",
    )
    stop = StopTable(epochs=n_epochs)
    cluster = JobCluster(stop=stop, task=task, settings=settings, n_replicas=1, host=host)
    assert cluster.run() is None
    alone = msgspec.structs.replace(settings, order=None, max_steps=n_epochs)
    expected = plain(alone, task=task)
    for name, value in cluster.saved().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.each_value
@td.both_data_paths
@pytest.mark.parametrize(("every", "n_shards"), [(1, 1), (4, 1), (4, 2), (4, 5), (64, 3)])
def test_one_blocking_replica_is_plain_training_to_the_bit(
    every: int, n_shards: int, host: str
) -> None:
    """With momentum and a schedule that go on over exchanges, for any number of shards."""
    settings = job(every, blocking=True, max_steps=33)
    cluster = td.Cluster(td.LEARNING, settings, host=host, n_shards=n_shards)
    cluster.run()
    assert td.same(cluster.values(), plain(settings, task=td.LEARNING))
    counters = cluster.counters(0)
    assert counters.pushes == counters.fetches == -(-33 // every)
    assert counters.local_steps == counters.gradients_pushed == 33
    assert counters.inner_lost == 0


@pytest.mark.each_value
@td.both_data_paths
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_follows_the_equations_of_its_paper(name: str, host: str) -> None:
    """Three replicas in rounds, or one where they do not wait, against one plain process."""
    table = {"preset": name, "loss": td.LEARNING.loss, "batch_size": 4, "max_steps": 12}
    settings = msgspec.convert(expand(table), DownpourSettings)
    exchange = settings.exchange
    every = 4 if exchange.every in {24, 64} else exchange.every  # three rounds, not one
    every = every if exchange.send == "delta" else 1
    # Of a codec, the sum of what was sent and what is held back is that of no codec.
    weight = "mean" if exchange.weight == "sum" and exchange.round else exchange.weight
    fetch = None if isinstance(exchange.fetch, Int4) else exchange.fetch
    ends = Round() if exchange.staleness == 0 else exchange.round  # of as many steps each
    exchange = msgspec.structs.replace(
        exchange, every=every, push=None, fetch=fetch, route="server", weight=weight, round=ends
    )
    # Threads in turn take their small batches one after the other: see `worker/test_lockfree`.
    settings = msgspec.structs.replace(settings, blocking=True, exchange=exchange, lockfree=None)
    is_round = exchange.round is not None and exchange.staleness == 0
    n_replicas = 3 if is_round else 1
    cluster = td.Cluster(td.LEARNING, settings, n_replicas=n_replicas, n_shards=2, host=host)
    cluster.run()
    expected = reference(settings, task=td.LEARNING, n_replicas=n_replicas)
    start = td.drawn(td.LEARNING)
    for key, value in cluster.values().items():
        if exchange.numbers == "bfloat16":  # rounded: most of the way is the same
            off = torch.linalg.vector_norm(value - expected[key])
            assert off < 0.1 * torch.linalg.vector_norm(expected[key] - start[key])
        else:
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=2e-6)
    if is_round:
        assert cluster.status("shard-0")["pushes_applied"] == 3 * -(-12 // cast("int", every))


@pytest.mark.each_value
@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("send", ["gradient", "delta"])
def test_averaging_after_every_step_is_sgd_on_the_union_of_the_batches(
    send: Literal["gradient", "delta"], n_shards: int
) -> None:
    """E5 and E6 (PA-2): the mean of steps from the same values is a step on their mean gradient."""
    exchange = ExchangePolicy(send=send, staleness=0, round=Round(), weight="mean")
    rate = 0.1
    settings = msgspec.structs.replace(
        job(1, max_steps=30),
        exchange=exchange,
        inner={"name": "SGD", "lr": rate} if send == "delta" else None,
        rule=ADD if send == "delta" else SGD(learning_rate=rate),
    )
    cluster = td.Cluster(td.LEARNING, settings, n_replicas=3, n_shards=n_shards)
    cluster.run()
    union = msgspec.structs.replace(
        settings, exchange=ExchangePolicy(), inner=None, rule=SGD(learning_rate=rate)
    )
    expected = reference(union, task=td.LEARNING, n_replicas=3)
    for name, value in cluster.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_every_step_with_plain_sgd_is_sequential_sgd() -> None:
    """E7; the anchor is subtracted and added, so up to one rounding a step."""
    settings = job(1, inner={"name": "SGD", "lr": 0.1}, blocking=True, max_steps=45)
    cluster = td.Cluster(td.LEARNING, settings)
    cluster.run()
    sequential = td.plain(td.downpour(blocking=True, max_steps=45), task=td.LEARNING)
    for name, value in cluster.values().items():
        torch.testing.assert_close(value, sequential[name], rtol=1e-5, atol=1e-6)


@pytest.mark.each_value
@td.both_data_paths
@pytest.mark.parametrize("every", [1, 2, 5, 64])
def test_without_waiting_a_lone_replica_is_plain_training_up_to_rounding(
    every: int, host: str
) -> None:
    """A fetch in the middle of local steps neither drops nor repeats one."""
    settings = job(every, inner={"name": "SGD", "lr": 0.1, "momentum": 0.9}, max_steps=40)
    cluster = td.Cluster(td.LEARNING, settings, host=host, n_shards=2)
    cluster.run()
    expected = plain(settings, task=td.LEARNING)
    for name, value in cluster.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)


@pytest.mark.each_value
@td.both_data_paths
@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("blocking", [True, False])
def test_pushes_are_the_sum_of_all_local_steps(
    every: int, n_shards: int, host: str, *, blocking: bool
) -> None:
    """E2: three replicas that do not wait for each other."""
    settings = counting(every, max_steps=17, blocking=blocking)
    cluster = td.Cluster(td.COUNTING, settings, n_replicas=3, n_shards=n_shards, host=host)
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -td.gradient_sum(cluster))


@td.both_data_paths
@given(
    seed=st.integers(0, 2**32 - 1),
    every=st.integers(1, 4),
    at=st.floats(0.0, 0.002),  # the run takes some 2 ms
    after_actions=st.none() | st.integers(0, 4),
    drop=st.floats(0.0, 0.2),
    duplicate=st.floats(0.0, 0.2),
    pause=st.floats(0.0, 0.002),
)
@settings(max_examples=settings().max_examples // 3)
def test_each_local_step_counts_once_despite_kills_and_lost_messages(
    host: str,
    seed: int,
    every: int,
    at: float,
    after_actions: int | None,
    drop: float,
    duplicate: float,
    pause: float,
) -> None:
    faults: Sequence[Fault] = (
        Kill(at=at, role=Address("replica-0"), restart_after=0.01, after_actions=after_actions),
        Pause(at=pause, role=Address("shard-0"), seconds=0.005),
        Drop(probability=drop),
        Duplicate(probability=duplicate, seconds_max=2.0),
        Delay(probability=0.1, seconds_max=0.5, overtaken=True),
    )
    cluster = td.Cluster(
        td.COUNTING, counting(every, max_steps=9), n_replicas=2, host=host, seed=seed, faults=faults
    )
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -td.gradient_sum(cluster))


@given(
    seed=st.integers(0, 2**32 - 1),
    every=st.integers(1, 3),
    at=st.floats(0.0, 0.002),  # the run takes some 2 ms
    after_actions=st.none() | st.integers(0, 4),
    drop=st.floats(0.0, 0.2),
)
@settings(max_examples=settings().max_examples // 2)
def test_what_a_killed_replica_holds_back_is_there_when_it_returns_if_durable(
    seed: int, every: int, at: float, after_actions: int | None, drop: float
) -> None:
    """E2 over a kill, with a codec that sends a third: saved before each push."""
    exchange = ExchangePolicy(send="delta", every=every, push=TopK(share=0.3), durable=True)
    job = msgspec.structs.replace(counting(every, max_steps=9), exchange=exchange)
    kill = Kill(at=at, role=Address("replica-0"), restart_after=0.01, after_actions=after_actions)
    faults: Sequence[Fault] = (kill, Drop(probability=drop))
    cluster = td.Cluster(td.COUNTING, job, n_replicas=2, host="", seed=seed, faults=faults)
    cluster.run()
    # The last push is of bfloat16, which these whole numbers fit.
    assert torch.equal(cluster.values()["weight"], -td.gradient_sum(cluster))


def test_what_cannot_be_saved_is_pushed_all_the_same() -> None:
    exchange = ExchangePolicy(send="delta", every=2, push=TopK(share=0.3), durable=True)
    job = msgspec.structs.replace(counting(2, max_steps=9), exchange=exchange)
    faults = (DiskFull(at=0.0, seconds=1e9),)
    cluster = td.Cluster(td.COUNTING, job, n_replicas=2, host="", faults=faults)
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -td.gradient_sum(cluster))
    assert any("is not saved" in report.text for _, report in cluster.cluster.reports)


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_replica_pushes_what_it_has_when_a_round_waits_for_it(seed: int) -> None:
    """E2 with fewer local steps of one: each still counts once, and nobody waits for its eight."""
    seconds = {}
    for early in (False, True):
        ends = Round(quorum=0.5, grace_seconds=10.0, early=early)
        exchange = ExchangePolicy(
            send="delta", every=8, staleness=0, round=ends, weight="samples", push=TopK(share=0.3)
        )
        job = msgspec.structs.replace(counting(8, max_steps=40), exchange=exchange)
        slow = Slow(at=0.0, role=Address("replica-0"), factor=8.0, seconds=1e9)
        cluster = td.Cluster(
            td.COUNTING, job, n_replicas=3, host="", seed=seed, faults=(slow,), flops_per_second=1e6
        )
        cluster.run(but=["replica-0"])
        seconds[early] = cluster.ended_at
        counters = cluster.counters(0)
        assert counters.pushes == 5
        assert counters.gradients_pushed < 10 if early else counters.gradients_pushed == 40
    assert seconds[True] < 0.3 * seconds[False]


@pytest.mark.parametrize("seed", seeds(8, of=12))
def test_ranks_of_a_split_replica_push_each_local_step_once(seed: int) -> None:
    n_machines = 2 + seed % 3
    names = member_names("replica-0", n_machines)
    group = Group(
        td.COUNTING,
        counting(1 + seed % 4, max_steps=30),
        inputs=(500,),
        n_machines=n_machines,
        plan_seed=seed,
        host="host-0" if seed % 2 else "",
        seed=seed,
        faults=faults_of(seed, names) if seed > 3 else (),
    )
    start = group.first_values()["weight"]
    group.run()
    programs = [group.replica(name).program for name in group.machines]
    (position,) = {one.pushed for one in programs if one.pushed is not None}
    assert position is not None
    assert 120 <= position <= 240
    expected = torch.zeros(500)
    dataset = build_dataset(td.COUNTING.train)
    settings = msgspec.structs.replace(group.settings, max_steps=position)
    n_left = position
    for indices in td._batches(settings, n_samples=len(dataset)):
        if n_left <= 0:
            break
        n_left -= len(indices)
        expected += torch.stack([dataset[i][0] for i in indices]).sum(0)  # type: ignore[index]
    torch.testing.assert_close(group.values()["weight"], start - expected, rtol=0, atol=0)


def test_a_split_replica_trains_like_a_whole_one() -> None:
    settings = job(4, blocking=True, max_steps=21)
    group = Group(td.LEARNING, settings, inputs=(40,), n_machines=3, n_shards=2)
    group.run()
    expected = plain(settings, task=td.LEARNING)
    for name, value in group.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_computing_goes_on_while_a_push_and_a_fetch_travel() -> None:
    seconds = {}
    for blocking in (True, False):
        cluster = td.Cluster(td.LEARNING, job(4, max_steps=80, blocking=blocking), host="")
        cluster.run()
        seconds[blocking] = cluster.ended_at
        assert cluster.counters(0).fetches > 8
    assert seconds[False] < 0.8 * seconds[True]


@pytest.mark.parametrize(("flops_per_second", "every"), [(1e7, 4), (1e10, 8)])
def test_the_steps_between_exchanges_are_fitted_to_the_link(
    flops_per_second: float, every: int
) -> None:
    settings = job("auto", max_steps=1000)
    cluster = td.Cluster(td.LEARNING, settings, host="", flops_per_second=flops_per_second)
    cluster.run()
    counters = cluster.counters(0)
    assert 0.9 * every <= counters.gradients_pushed / counters.pushes <= 1.1 * every


def test_a_restarted_replica_counts_the_lost_state_and_keeps_its_place_in_the_schedule() -> None:
    """The rate follows the position in the data; without momentum a kill then changes no bit."""
    inner = {"name": "SGD", "lr": 0.1, "schedule": ADAMW["schedule"]}
    settings = job(4, inner=inner, blocking=True, max_steps=20)
    undisturbed = td.Cluster(td.LEARNING, settings)
    undisturbed.run()
    assert undisturbed.counters(0).inner_lost == 0
    kill = Kill(at=0.6 * undisturbed.ended_at, role=Address("replica-0"), restart_after=0.01)
    cluster = td.Cluster(td.LEARNING, settings, faults=[kill])
    cluster.run()
    assert cluster.counters(0).inner_lost == 1
    n_steps = int(cluster.status("replica-0")["samples"]) // 4
    assert n_steps > 20  # each incarnation takes 20
    expected = plain(msgspec.structs.replace(settings, max_steps=n_steps), task=td.LEARNING)
    assert td.same(cluster.values(), expected)


# --- bfloat16 ---


def rounding(settings: DownpourSettings) -> DownpourSettings:
    exchange = msgspec.structs.replace(settings.exchange, numbers="bfloat16")
    return msgspec.structs.replace(settings, exchange=exchange)


def test_bfloat16_gives_the_same_bits_for_any_number_of_shards() -> None:
    settings = rounding(job(4, blocking=True, max_steps=33))
    found = []
    for n_shards in (1, 2, 5):
        cluster = td.Cluster(td.LEARNING, settings, host="", n_shards=n_shards)
        cluster.run()
        found.append(cluster.values())
    assert td.same(found[0], found[1])
    assert td.same(found[0], found[2])
    exact = plain(settings, task=td.LEARNING)
    assert not td.same(found[0], exact)
    for name, value in found[0].items():
        torch.testing.assert_close(value, exact[name], rtol=0.05, atol=0.02)


def test_fetches_of_bfloat16_change_nothing_in_shared_memory() -> None:
    settings = job(4, blocking=True, max_steps=33)
    exchange = msgspec.structs.replace(settings.exchange, fetch="bfloat16")
    settings = msgspec.structs.replace(settings, exchange=exchange)
    cluster = td.Cluster(td.LEARNING, settings, n_shards=2)
    cluster.run()
    assert td.same(cluster.values(), plain(settings, task=td.LEARNING))


@pytest.mark.parametrize("seed", range(4))
def test_no_step_is_lost_in_bfloat16_despite_faults(seed: int) -> None:
    """Local steps are small integers, which bfloat16 holds exactly."""
    cluster = td.Cluster(
        td.COUNTING,
        rounding(counting(1 + seed, max_steps=9)),
        n_replicas=2,
        host="",
        seed=seed,
        faults=(
            Kill(at=0.003 * seed, role=Address("replica-0"), restart_after=0.01),
            Drop(probability=0.1),
            Duplicate(probability=0.2, seconds_max=2.0),
        ),
    )
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -td.gradient_sum(cluster))


def test_ranks_of_a_split_replica_send_bfloat16_too() -> None:
    settings = rounding(counting(3, max_steps=12))
    n_bytes = []
    for one in (settings, counting(3, max_steps=12)):
        group = Group(td.COUNTING, one, inputs=(500,), n_machines=2, plan_seed=0, host="", seed=0)
        group.run()
        n_bytes.append([group.replica(name).status()[1]["bytes_out"] for name in group.machines])
    assert [2 * a for a in n_bytes[0]] == n_bytes[1]


# ----------------------------------------------------------------- the end of a job


def ended(
    exchange: ExchangePolicy, *, rule: UpdateRule = ADD, host: str, pause: float = 0.0
) -> torch.Tensor:
    """Return the values after four replicas were held after two steps, and then stopped."""
    settings = msgspec.structs.replace(counting(64, max_steps=10), exchange=exchange, rule=rule)
    cluster = td.Cluster(td.COUNTING, settings, n_replicas=4, host=host, await_begin=True)
    cluster.cluster.run(until=1.0)
    for name in cluster.replicas:
        cluster.tell(name, StartTraining(samples=8))
    cluster.cluster.run(until=2.0)
    assert [cluster.counters(r).local_steps for r in range(4)] == [2, 2, 2, 2]
    for name in cluster.replicas:
        cluster.tell(name, Stop(reason="all samples are trained"))
        cluster.wait(pause)
    cluster.cluster.run(until=9.0)
    assert cluster.status("shard-0")["pushes_applied"] == 4
    return cluster.values()["weight"]


@pytest.mark.parametrize("quorum", [1.0, 0.75])
def test_the_last_steps_of_held_replicas_are_one_round(quorum: float) -> None:
    """Each was a round of its own: a replica that is held has left, so that nobody waits for it.

    So momentum moved the parameters four times in place of once at the end of a job. With preset
    `diloco` the held-out loss of a character model went from 2.2 to 4.5 by that.
    """
    one = ExchangePolicy(
        every=64,
        send="delta",
        staleness=0 if quorum == 1.0 else None,
        round=Round(quorum=quorum, grace_seconds=0.1),
        weight="mean",
    )
    found = ended(one, rule=Momentum(learning_rate=0.5), host="")
    total = ended(ExchangePolicy(every=64, send="delta"), host="")
    assert torch.equal(8 * found, total)  # half of the mean, once


@td.both_data_paths
@pytest.mark.parametrize("pause", [0.0, 1.0])
def test_the_last_steps_count_as_if_nobody_had_left(pause: float, host: str) -> None:
    """They counted 1/4 + 1/3 + 1/2 + 1 where replicas ended one after the other, or even 4."""
    mean = ended(ExchangePolicy(every=64, send="delta", weight="mean"), host=host, pause=pause)
    total = ended(ExchangePolicy(every=64, send="delta"), host=host, pause=pause)
    assert torch.equal(4 * mean, total)
