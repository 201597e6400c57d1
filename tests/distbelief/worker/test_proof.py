"""Split models that compute something else than one process are found before the start."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from typing_extensions import override

from distbelief.data import read_batch
from distbelief.errors import JobError
from distbelief.program.cluster import uniform
from distbelief.program.plan import plan_for
from distbelief.program.step_graph import statistics_of
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec, capture_for, sample_of
from distbelief.worker.proof import IncomparableError, Proof
from tests.distbelief.partition.plans import MACHINE
from tests.distbelief.program.plans import random_plan


HERE = __name__
BATCH = 8


def pairs(*shape: int, n: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, *shape, generator=generator)
    return TensorDataset(x, torch.randint(3, (n,), generator=generator))


def proof_of(model: str, *, loss: str = "cross_entropy", batch: int = BATCH, n_ranks: int = 2, sample=None) -> Proof:
    spec = ModelSpec(factory=f"{HERE}:{model}")
    task = TaskSpec(model=spec, train=DataSpec(factory=f"{HERE}:pairs"), loss=loss)
    graph = capture_for(task, sample).graph
    places = random_plan(graph, np.random.default_rng(3), n_machines=n_ranks)
    plan = plan_for(
        graph,
        places,
        batch=batch,
        loss=loss,
        cluster=uniform("two", MACHINE, n_ranks, latency=0.0),
        micro_batches=1 if statistics_of(graph) else 2,
    )
    return Proof(task=task, plan=plan, graph=graph, sample=sample, dtype=torch.float32)


def check(model: str, *shape: int, data=None, **options):
    dataset = data or pairs(*shape)
    proof = proof_of(model, sample=sample_of(dataset), **options)
    rng = np.random.default_rng(0)
    proof.check([read_batch(dataset, rng.integers(len(dataset), size=n).tolist()) for n in proof.sizes])


# models

def plain():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def pooled():
    return nn.Sequential(nn.Linear(8, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 3))


def max_pooled():
    return nn.Sequential(nn.Linear(8, 8), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4, 3))


def avg_pooled():
    return nn.Sequential(nn.Linear(8, 8), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.two(self.middle(self.one(x)))


class Hooked(Net):
    def middle(self, h):
        if h.requires_grad:
            h.register_hook(lambda g: 2 * g)
        return h


class Counting(Net):
    n = 0
    def middle(self, h):
        self.n += 1
        return h * (1 + 0.5 * (self.n % 2))


class Keeping(Net):
    h = None
    def middle(self, h):
        before, self.h = self.h, h.detach().mean()
        return h if before is None else h + before


class Casting(Net):
    def middle(self, h):
        return h.to(torch.bfloat16).float()


class Where(Net):
    def middle(self, h):
        return torch.where(torch.arange(h.shape[0])[:, None] < 2, h, 2 * h)


class Filled(Net):
    def middle(self, h):
        return h.index_fill(0, torch.tensor([0]), 0.0)


def quantised():
    from torch.ao import quantization as q
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    net.qconfig = q.get_default_qat_qconfig("fbgemm")
    return q.prepare_qat(net.train())


def normed():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


CASES = {
 "plain": (8,), "normed": (8,), "pooled": (8,8), "max_pooled": (8,8), "avg_pooled": (8, 8), "Hooked": (8,), "Counting": (8,), "Keeping": (8,), "Casting": (8,), "Where": (8,), "Filled": (8,), "quantised": (8,),
}

@pytest.mark.parametrize("model", CASES)
def test_it(model):
    try:
        check(model, *CASES[model])
    except JobError as e:
        print("REFUSED", model, type(e).__name__, e)
    else:
        print("PASSED", model)
