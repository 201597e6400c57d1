"""Model-parallel replicas on a simulated cluster: ranks die, wait and continue."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from distbelief.parameter_server.rules import SGD
from distbelief.protocol import Finished, Stop
from distbelief.protocol.role import Address, PeerLost
from distbelief.simulation.faults import Delay, Drop, Duplicate, Fault, Kill, Pause
from distbelief.task.data import DataShard, read_batch
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec, build_dataset
from distbelief.worker.batches import TrainingPlan
from distbelief.worker.group import rank_name
from tests.simulation.groups import Group
from tests.simulation.jobs import seeds
from tests.simulation.test_downpour import downpour


HERE = "tests.simulation.test_machines"


# ------------------------------------------------ gradients that depend on data alone


def counting_net(*, width: int = 200) -> nn.Module:
    """Return a model whose gradient is each sample's inputs (integers), for each of three rows."""
    return nn.Linear(width, 3, bias=False)


def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum() + 0.0 * targets.sum()


COUNTING = TaskSpec(
    model=ModelSpec(factory=f"{HERE}:counting_net", arguments={"width": 200}, initial="seed"),
    train=DataSpec(
        factory="tests.simulation.test_downpour:counting_data", arguments={"width": 200}
    ),
    loss=f"{HERE}:total",
)


def counted(position: int) -> torch.Tensor:
    """Return the exact sum of the gradients of all samples up to this position."""
    dataset = build_dataset(COUNTING.train)
    plan = TrainingPlan(
        DataShard(len(dataset), replica_index=0, n_replicas=1, seed=0), batch_size=4
    )
    plan.start(0)
    whole = torch.zeros(200)
    step = 0
    while (batch := plan.batch(step)).position < position:
        inputs = read_batch(dataset, [int(i) for i in batch.indices]).inputs
        assert isinstance(inputs, torch.Tensor)
        whole += inputs.sum(0)
        step += 1
    assert batch.position == position, (batch.position, position)
    return whole


def faults_of(seed: int, roles: Sequence[Address]) -> tuple[Fault, ...]:
    generator = np.random.default_rng(seed)
    found: list[Fault] = []
    for _ in range(int(generator.integers(1, 4))):
        role = roles[int(generator.integers(len(roles)))]
        at = float(generator.uniform(0.0, 0.015))
        seconds = float(generator.uniform(0.01, 1.0))
        match int(generator.integers(6)):
            case 0 | 1:
                after = int(generator.integers(3)) if generator.random() < 0.5 else None
                fault: Fault = Kill(at=at, role=role, restart_after=seconds, after_actions=after)
            case 2:
                fault = Pause(at=at, role=role, seconds=seconds)
            case 3:
                fault = Drop(probability=0.1, at=at, seconds=seconds)
            case 4:
                fault = Duplicate(probability=0.3, seconds_max=0.01, seconds=1.0)
            case _:
                fault = Delay(probability=0.3, seconds_max=0.02, overtaken=True, at=at)
        found.append(fault)
    return tuple(found)


@pytest.mark.parametrize("seed", seeds(5, of=100))
def test_every_sample_counts_once_despite_crashes_and_delays(seed: int) -> None:
    check_counts(seed, host="host-0" if seed % 2 else "")


@pytest.mark.parametrize("seed", seeds(5, of=100))
def test_every_sample_counts_once_where_ranks_share_memory(seed: int) -> None:
    group = check_counts(seed, host="host-0", tells_hosts=True)
    figures = [group.replica(name).status()[1] for name in group.machines]
    sent, shared = (sum(each[f"messages_{what}"] for each in figures) for what in ("out", "shared"))
    assert shared == sent


def check_counts(seed: int, *, host: str, tells_hosts: bool = False) -> Group:
    n_machines = 2 + seed % 3
    names = [rank_name(0, m) for m in range(n_machines)]
    n_push = 1 + seed // 3 % 2
    settings = downpour(
        max_steps=30, loss=COUNTING.loss, rule=SGD(learning_rate=1.0), n_push=n_push
    )
    faults = faults_of(seed, names)
    group = Group(
        COUNTING,
        settings,
        inputs=(200,),
        n_machines=n_machines,
        plan_seed=seed,
        host=host,
        tells_hosts=tells_hosts,
        seed=seed,
        faults=faults,
    )
    group.run()
    programs = [group.replica(name).program for name in group.machines]
    pushed = {program.pushed for program in programs if program.pushed is not None}
    assert len(pushed) == 1, pushed
    (position,) = pushed
    if not any(isinstance(fault, Kill) and fault.role == names[0] for fault in faults):
        assert position == 120  # no repeated step counts twice
    assert 120 <= position <= 240, position  # a restarted leader counts its own steps again
    start = group.first_values()["weight"]
    expected = start - counted(position).expand(3, 200).reshape(-1)
    torch.testing.assert_close(group.values()["weight"], expected, rtol=0, atol=2e-4)
    return group


# --------------------------------------------------- silent ranks at the end


def lost(name: str) -> PeerLost:
    """Return what the supervisor announces once it has given up a silent rank."""
    reason = "it has ended"
    return PeerLost(peer=Address(name), incarnation=1, reason=reason, for_good=True)


@pytest.mark.each_value
@pytest.mark.parametrize("silent", [0, 1, 2])
@pytest.mark.parametrize("at", [0.001, 0.01, 0.03])
def test_the_others_end_once_a_silent_rank_is_lost_for_good(silent: int, at: float) -> None:
    """Regression: they waited 40 s more for a paused rank, and for ever for a paused leader."""
    names = [rank_name(0, m) for m in range(3)]
    settings = downpour(max_steps=None, loss=COUNTING.loss, rule=SGD(learning_rate=1.0))
    group = Group(
        COUNTING, settings, inputs=(200,), faults=[Pause(at=at, role=names[silent], seconds=1e4)]
    )
    group.cluster.run(until=1.0)
    others = [name for name in names if name != names[silent]]
    for name in others:
        group.tell(name, Stop(reason="over"))
    group.cluster.run(until=2.0)
    for name in others:
        assert name not in group.cluster.halted
        group.cluster.post(name, lost(names[silent]))
    group.cluster.run(until=3.0)
    halted = group.cluster.halted
    assert {name: halted[name] for name in others} == dict.fromkeys(others)
    assert len(group.told(Finished)) == 2


def test_a_lost_peer_of_another_group_is_ignored() -> None:
    settings = downpour(max_steps=30, loss=COUNTING.loss, rule=SGD(learning_rate=1.0))
    group = Group(COUNTING, settings, inputs=(200,))
    group.cluster.run(until=0.001)
    for name in group.machines:
        group.cluster.post(name, lost("replica-1.0"))
    group.cluster.post(group.machines[2], lost(group.machines[1]))  # not a leader
    group.run()
