"""The training objective of one rank, step by step."""

from typing import cast

import numpy as np
import torch

from distbelief.execution.executor import StepResult
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.optimizers import SGD
from distbelief.worker.batches import BatchIndices, BatchSlice
from distbelief.worker.config import DownpourSettings
from distbelief.worker.training import Items, Trainer, TrainingObjective


class Client:
    """A client whose shards have the pushes of 8 samples."""

    samples = 8
    clocks = (2,)
    unacknowledged = 0
    can_push = ready = False


def test_a_rank_ahead_of_its_group_counts_no_gradient_twice() -> None:
    """The group begins where the rank that has pushed least left off."""
    config = DownpourSettings(loss="", batch_size=4, rule=SGD(learning_rate=0.1))
    items = Items(values=[torch.zeros(2)], trained=frozenset({0}))
    trainer = Trainer(items, config.policy, clip_norm=None, n_ranks=1, is_whole=False)
    client = cast("ParameterClient", Client())
    objective = TrainingObjective(config, client=client, trainer=trainer)
    objective.begin(0, 0.0)
    counted = []
    for step in range(4):
        batch = BatchIndices(position=4 * step, indices=np.arange(4))
        batch_slice = BatchSlice(generation=1, step=step, samples=batch)
        objective.open(step, batch, batch_slice)(0, torch.ones(2))
        found = StepResult(loss=4.0, averages={}, outputs=())
        objective.closed(objective.close(found), found, batch, 0.0)
        counted.append(objective.counters.gradients)
    assert counted == [0, 0, 1, 2]
    due = [objective.is_due]
    objective.drop()
    assert [*due, objective.is_due] == [True, False]
    assert objective.pushed == 8
