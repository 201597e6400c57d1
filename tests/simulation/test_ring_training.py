"""Replicas that train over a ring, against one process, and after deaths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from typing_extensions import override

from distbelief.config.job import StopTable
from distbelief.parameter_server.rules import UpdateRule
from distbelief.protocol.role import Address
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault, Kill
from distbelief.task.task import ModelSpec
from tests.distbelief.examples import Frames
from tests.simulation.jobs import TASK, Direct, JobCluster, seeds
from tests.simulation.random_faults import random_faults
from tests.simulation.ring_jobs import RING, RULES, EqualBits, drawn, job, settings_of
from tests.simulation.ring_training_variants import VARIANTS
from tests.simulation.scene import Check
from tests.simulation.variants import assert_noticed


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_e9_two_replicas_get_the_bits_that_rounds_at_the_shards_give(rule: UpdateRule) -> None:
    """E9: preset horovod with route = "server" gives the same."""
    ring = job(settings_of(rule), n_replicas=2, n_shards=2)
    ring.finish()
    settings = replace(ring.settings, exchange=replace(RING, route="server"), max_steps=12)
    server = Direct(ring.task, settings, n_replicas=2, n_shards=2)
    server.run_until(lambda: all(name in server.cluster.halted for name in server.replicas))
    assert_same(ring.values(), server.values())


@pytest.mark.each_value
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize(("n_replicas", "n_shards"), [(1, 1), (2, 1), (3, 2)])
def test_e9_shards_end_with_the_bits_of_one_process_that_sums_in_ring_order(
    rule: UpdateRule, n_replicas: int, n_shards: int
) -> None:
    run = job(settings_of(rule), n_replicas=n_replicas, n_shards=n_shards)
    run.finish()
    assert_same(run.values(), run.expected())


@pytest.mark.parametrize("seed", seeds(6, of=30))
def test_hv3_after_deaths_all_have_the_same_bits_and_few_steps_are_done_again(seed: int) -> None:
    """HV-3: at most as many as lie between two commits."""
    run = drawn(seed)
    run.finish()
    run.bits.check_few_are_done_again(run.settings.exchange.commit_every)
    last = max(run.bits.found)
    assert last[1] >= 30
    values = run.values()
    ended = run.values_of(run.model)
    ended.restore(np.frombuffer(run.bits.found[last], run.layout.dtype), last[1])
    for name, tensor in values.items():
        assert torch.equal(tensor, run.model.named_tensors()[name].detach().reshape(-1)), name


def test_all_replicas_die_and_go_on_from_the_shards_without_the_state_of_the_rule() -> None:
    run = job(settings_of(RULES[3]), n_replicas=3, n_steps=40)
    run.run_until(lambda: max(run.bits.found, default=(0, 0))[1] >= 18)
    for name in run.replicas:
        run.cluster.inject(Kill(at=run.now, role=name, restart_after=0.05))
    run.wait(0.01)
    before = max(run.bits.found)[1]
    run.finish()
    steps = [step for generation, step in sorted(run.bits.found) if generation > 4]
    assert 0 < before - steps[0] <= 2 * 4  # the shards' last commit may be one older
    assert steps[-1] == 40
    said = [report.text for _, report in run.cluster.reports]
    assert [text for text in said if "state of the rule begins anew at step" in text]


def test_buffers_are_the_mean_of_all_replicas_and_counters_count_on() -> None:
    run = job(settings_of(), n_replicas=3)
    model = ModelSpec(factory="tests.simulation.test_buffers:counting", initial="seed")
    run.task = replace(run.task, model=model)
    run.finish()
    found = run.values()
    assert found["net.1.num_batches_tracked"].item() == 12
    assert found["threes"].item() == 36
    assert found["table"].tolist() == [7, 7, 7]
    assert found["mask"].tolist() == [1, 1]
    assert_same(found, run.expected())


def test_a_gradient_with_nan_is_left_out_and_the_others_count() -> None:
    """The mean is of those that are finite; nobody stands still."""
    run = job(settings_of(RULES[0]), n_replicas=2, n_steps=15)
    train = replace(TASK.train, factory="tests.simulation.test_ring_training:spoilt_frames")
    run.task = replace(run.task, train=train)
    run.finish()
    skipped = [int(run.status(name)["non_finite"]) for name in run.replicas]
    assert sum(skipped) > 0
    assert all(bool(value.isfinite().all()) for value in run.values().values())
    assert max(run.bits.found)[1] == 15


def spoilt_frames(*, width: int, n_samples: int) -> Frames:
    frames = Frames(width=width, n_samples=n_samples)
    frames.inputs[7] = math.nan
    return frames


@dataclass(eq=False)
class RingCluster(JobCluster):
    bits: EqualBits = field(default_factory=EqualBits, init=False)

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        return (self.bits,)


def cluster(*, n_replicas: int = 3, seed: int = 0, faults: Sequence[Fault] = ()) -> RingCluster:
    return RingCluster(
        stop=StopTable(samples=600),
        settings=settings_of(),
        n_replicas=n_replicas,
        seed=seed,
        faults=faults,
    )


def test_a_job_trains_over_a_ring_and_ends_with_equal_replicas() -> None:
    run = cluster()
    assert run.run() is None
    assert run.n_samples >= 600
    assert not any("warning" in text for text in run.messages)


@pytest.mark.parametrize("seed", seeds(3, of=6))
def test_hv3_a_job_goes_on_when_a_replica_dies_and_takes_it_in_again(seed: int) -> None:
    run = cluster(seed=seed)
    run.wait(0.1)
    run.train(100)
    run.cluster.inject(Kill(at=run.now, role=run.replicas[seed % 3]))
    assert run.run() is None
    assert run.n_samples >= 600
    assert run.restarts(run.replicas[seed % 3]) == 1


@pytest.mark.parametrize("seed", seeds(4, of=400))
def test_a_job_ends_well_whatever_fails(seed: int) -> None:
    """Deaths, silences and bad links of replicas and shards; bits agree at every step."""
    names = [Address(name) for name in ("replica-0", "replica-1", "replica-2", "shard-0")]
    faults = random_faults(seed, names, horizon=4.0, intensity=0.5, restarts=False)
    run = cluster(seed=seed, faults=faults)
    assert run.run() is None
    assert run.n_samples >= 600
    run.bits.check_few_are_done_again(4)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert_noticed(name, VARIANTS, lambda seed: drawn(seed).finish())
