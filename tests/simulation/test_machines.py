"""Model-parallel replicas on a simulated cluster: machines die, wait, and go on."""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from distbelief.data.dataset import read_batch
from distbelief.data.subset import DataShard
from distbelief.graph.capture import InputSpec
from distbelief.parameter_server.rules.update_rules import SGD
from distbelief.roles import Address
from distbelief.runtime.machine.course import TrainingCourse
from distbelief.runtime.machine.machine_names import machine_name
from distbelief.runtime.task.task import (
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
)
from distbelief.simulation.faults import Delay, Drop, Duplicate, Fault, Kill, Pause
from tests.simulation.groups import Group
from tests.simulation.test_downpour import downpour


HERE = "tests.simulation.test_machines"
N_SEEDS = int(os.environ.get("MACHINE_SEEDS", "12"))


# ------------------------------------------------ gradients that depend on data alone


def counting_net(*, width: int = 200) -> nn.Module:
    """Each sample's gradient is its inputs, whole numbers, for each of three rows."""
    return nn.Linear(width, 3, bias=False)


def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum() + 0.0 * targets.sum()


COUNTING = TaskSpec(
    model=ModelSpec(
        factory=f"{HERE}:counting_net", arguments={"width": 200}, initial="seed"
    ),
    train=DataSpec(
        factory="tests.simulation.test_downpour:counting_data",
        arguments={"width": 200},
    ),
    loss=f"{HERE}:total",
)


def counted(position: int) -> torch.Tensor:
    """Return the sum of the gradients of all samples up to this one, exactly."""
    dataset = build_dataset(COUNTING.train)
    course = TrainingCourse(
        DataShard(len(dataset), replica_index=0, n_replicas=1, seed=0), batch_size=4
    )
    course.start(0)
    whole = torch.zeros(200)
    step = 0
    while (chosen := course.batch(step)).position < position:
        inputs, _ = read_batch(dataset, [int(i) for i in chosen.indices])
        whole += inputs.sum(0)
        step += 1
    assert chosen.position == position, (chosen.position, position)
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
                fault: Fault = Kill(
                    at=at, role=role, restart_after=seconds, after_actions=after
                )
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


@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_every_sample_counts_once_whatever_dies_or_is_late(seed: int) -> None:
    n_machines = 2 + seed % 3
    names = [machine_name(0, m) for m in range(n_machines)]
    n_push = 1 + seed // 3 % 2
    settings = downpour(
        max_steps=30, loss=COUNTING.loss, rule=SGD(learning_rate=1.0), n_push=n_push
    )
    faults = faults_of(seed, names)
    group = Group(
        COUNTING,
        settings,
        inputs=[InputSpec(shape=(200,))],
        n_machines=n_machines,
        plan_seed=seed,
        host="host-0" if seed % 2 else "",
        seed=seed,
        faults=faults,
    )
    group.run()
    duties = [group.machine(name)._duty for name in group.machines]
    pushed = {duty.pushed for duty in duties if duty.pushed is not None}
    assert len(pushed) == 1, pushed
    (position,) = pushed
    if not any(isinstance(fault, Kill) and fault.role == names[0] for fault in faults):
        assert position == 120  # and no step that is taken again counts twice
    assert 120 <= position <= 240, position  # who leads, dies, and counts anew
    start = group.first_values()["weight"]
    expected = start - counted(position).expand(3, 200).reshape(-1)
    torch.testing.assert_close(group.values()["weight"], expected, rtol=0, atol=2e-4)
