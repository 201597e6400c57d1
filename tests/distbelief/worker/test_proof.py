"""Split models that compute something else than one process are found before the start.

A fault is planted by a forward that computes one thing, and another while it is captured: as a
wrong rule would make it, whatever the rules of today are. Or by an operator that computes something
else.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.data import TensorDataset
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.graph.operator import OPERATORS, Call
from distbelief.plans.cluster import uniform
from distbelief.plans.plan import plan_for
from distbelief.plans.step_graph import statistics_of
from distbelief.task.data import Dataset, read_batch
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec, capture_for, sample_of
from distbelief.worker import proof as proofs
from distbelief.worker.proof import IncomparableError, Proof
from tests.distbelief.plans.planner.plans import MACHINE
from tests.distbelief.plans.plans import random_plan


pytestmark = pytest.mark.untraced

HERE = __name__
Change = Callable[["Planted", torch.Tensor], torch.Tensor]


def proof_for(
    model: str,
    dataset: Dataset,
    *,
    loss: str = "cross_entropy",
    batch: int = 8,
    dtype: torch.dtype = torch.float32,
    **arguments: object,
) -> Proof:
    task = TaskSpec(
        model=ModelSpec(factory=f"{HERE}:{model}", arguments=arguments),
        train=DataSpec(factory=f"{HERE}:images"),
        loss=loss,
    )
    sample = sample_of(dataset)
    graph = capture_for(task, sample).graph
    plan = plan_for(
        graph,
        random_plan(graph, np.random.default_rng(3), n_machines=2),
        batch=batch,
        loss=loss,
        cluster=uniform("two", MACHINE, 2, latency=0.0),
        micro_batches=1 if statistics_of(graph) else 2,
    )
    return Proof(task=task, plan=plan, graph=graph, sample=sample, dtype=dtype)


def checked(model: str, dataset: Dataset, options: dict[str, Any] | None = None) -> str:
    proof = proof_for(model, dataset, **options or {})
    return proof.check(
        [read_batch(dataset, [i % len(dataset) for i in range(n)]) for n in proof.sizes]
    )


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(12, *shape, generator=torch.Generator().manual_seed(1))


LABELS = torch.arange(12) % 3


def images(*shape: int) -> TensorDataset:
    return TensorDataset(noise(*shape), LABELS)


def energy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.flatten(1) ** 2).mean() + 0 * targets.float().mean()


# --- planted faults ---


@final
class Planted(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.written, self.captured = FAULTS[fault]
        self.n_calls = 0
        self.kept: torch.Tensor | None = None

    @override
    def forward(self, x: torch.Tensor) -> object:
        h = self.one(x)
        h = self.captured(self, h) if isinstance(x, FakeTensor) else self.written(self, h)
        return self.two(h)


def _hooked(_: "Planted", h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda gradient: 2 * gradient)
    return h


def _counted(module: "Planted", h: torch.Tensor) -> torch.Tensor:
    module.n_calls += 1
    return h * module.n_calls


def _kept(module: "Planted", h: torch.Tensor) -> torch.Tensor:
    before, module.kept = module.kept, h.detach().mean()
    return h if before is None else h + before


def _nothing(_: "Planted", h: torch.Tensor) -> torch.Tensor:
    return h


FAULTS: dict[str, tuple[Change, Change]] = {
    "pooling without channels": (
        lambda _, h: (
            functional.adaptive_avg_pool2d(h.view(-1, 4, 2), (4, 1)).repeat(1, 1, 2).flatten(1)
        ),
        lambda _, h: functional.adaptive_avg_pool1d(h.view(-1, 1, 8), 4).repeat(1, 1, 2).flatten(1),
    ),
    "adaptive max pooling": (
        lambda _, h: functional.adaptive_max_pool1d(h.view(-1, 1, 8), 4).flatten(1).repeat(1, 2),
        lambda _, h: functional.adaptive_avg_pool1d(h.view(-1, 1, 8), 4).flatten(1).repeat(1, 2),
    ),
    "a hook on a tensor is dropped": (_hooked, _nothing),
    "a counter is frozen": (_counted, _nothing),
    "what a step keeps is lost": (_kept, _nothing),
    "fake quantisation is dropped": (
        lambda _, h: torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127),
        _nothing,
    ),
    "a cast to a narrow type is dropped": (lambda _, h: h.to(torch.bfloat16).float(), _nothing),
    "torch.where by sample": (
        lambda _, h: torch.where(torch.arange(h.shape[0])[:, None] < 2, h, 2 * h),
        lambda _, h: 2 * h,
    ),
    "index_fill by sample": (lambda _, h: h.index_fill(0, torch.tensor([0]), 0.0), _nothing),
}

FIRST = {
    "a hook on a tensor is dropped": "outputs agree, and the gradient of 'one",
    "a counter is frozen": "differs in the second step",
    "what a step keeps is lost": "differs in the second step",
}


def planted(fault: str) -> nn.Module:
    return Planted(fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_each_kind_is_found(fault: str) -> None:
    """All of them once trained another model without a word, up to 105 % off."""
    with pytest.raises(JobError, match="would compute something else than one process") as caught:
        checked("planted", images(8), {"fault": fault})
    assert FIRST.get(fault, "is the first that differs, by") in str(caught.value)
    assert "Use one process per replica (partitions = 1)" in str(caught.value)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def test_a_wrong_running_average_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(OPERATORS["running_average"])
    right = kind.compute
    monkeypatch.setattr(kind, "compute", lambda self, call: 1.01 * right(self, call))
    with pytest.raises(JobError, match=r"the buffer '1\.running_(mean|var)' differs"):
        checked("normed", images(8))


@pytest.mark.parametrize(("kind", "name"), [("convolution", "0"), ("pool", "2")])
def test_the_first_layer_that_differs_is_named(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = type(OPERATORS[kind])
    right: Callable[[Any, Call], torch.Tensor] = operator.compute
    monkeypatch.setattr(operator, "compute", lambda self, call: 1.01 * right(self, call))
    with pytest.raises(JobError, match=rf"layer '{name}' \({kind}\) is the first that differs"):
        checked("pictures", images(1, 8, 8))


def test_a_step_that_fails_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, call: Call) -> torch.Tensor:
        raise ValueError(f"bad {call.layer.kind}")

    monkeypatch.setattr(type(OPERATORS["pool"]), "compute", fail)
    with pytest.raises(JobError, match=r"would fail in a step: .*bad pool.*partitions = 1"):
        checked("pictures", images(1, 8, 8))


# --- right models ---


def pictures() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)),
    )


def deep() -> nn.Module:
    """Many kinks, and statistics of few samples: rounding shows."""
    layers = [(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(20)]
    return nn.Sequential(*(part for parts in layers for part in parts), nn.Linear(32, 3))


class Last(nn.Module):
    @override
    def forward(self, given: tuple[torch.Tensor, object]) -> torch.Tensor:
        return given[0][:, -1]


def recurrent() -> nn.Module:
    """A small layer is computed whole, and draws dropout of its own."""
    return nn.Sequential(nn.LSTM(4, 5, 2, dropout=0.4, batch_first=True), Last(), nn.Linear(5, 3))


@final
class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)
        self.last = nn.Linear(8, 3)

    @override
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        found = self.layer(x, src_mask=causal, src_key_padding_mask=mask)
        scores: torch.Tensor = self.last(found.mean(1))
        return scores


@final
class Applied(nn.Module):
    """A function between two layers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.one, self.two, self.name = nn.Linear(8, 8), nn.Linear(8, 3), name

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(RIGHT[self.name](self.one(x)))
        return found


RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "noise": lambda h: h + 0.1 * torch.randn_like(h),
    "floats": lambda h: h.float() * torch.ones(8, dtype=torch.float32),
    "the smallest number": lambda h: h / (h.norm(dim=1, keepdim=True) + torch.finfo(h.dtype).eps),
    "a choice": lambda h: h * (h == h.amax(1, keepdim=True)),
    "huge numbers": lambda h: torch.where(h < 0, torch.finfo(h.dtype).min, h).softmax(1),
}


@final
class Mixed(nn.Module):
    """Parameters of two precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 3)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.one(x.to(self.one.weight.dtype)).to(x.dtype))
        return found


@final
class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    @override
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@final
class Turned(nn.Module):
    """Multiplies by complex numbers of its own, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)
        self.turns: torch.Tensor
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.one(x).unflatten(1, (4, 2)))
        scores: torch.Tensor = self.two(torch.view_as_real(pairs * self.turns).flatten(1))
        return scores


def applied(name: str) -> nn.Module:
    return Applied(name)


def doubles() -> nn.Module:
    return normed().double()


def words() -> nn.Module:
    frozen = nn.Linear(12, 4).requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), frozen, nn.Tanh(), nn.Linear(4, 3))


MASKS = torch.arange(5).expand(12, 5) > torch.arange(12)[:, None] % 4 + 1
MASKED = [({"x": x, "mask": m}, y) for x, m, y in zip(noise(5, 8), MASKS, LABELS, strict=True)]
WITH_LOSS = [{"x": x, "labels": y} for x, y in zip(noise(8), LABELS, strict=True)]


@pytest.mark.parametrize(
    ("model", "dataset", "options", "but"),
    [
        ("pictures", images(1, 8, 8), {}, ""),
        ("normed", images(8), {}, ""),
        ("normed", images(8), {"batch": 1000}, ""),
        ("deep", images(32), {}, ""),
        ("recurrent", images(6, 4), {}, ", but for random numbers"),
        ("Masked", MASKED, {}, ""),
        ("Mixed", images(8), {}, ""),
        ("Turned", images(8), {}, ""),
        ("WithLoss", WITH_LOSS, {"loss": "model"}, ""),
        ("pictures", images(1, 8, 8), {"loss": f"{HERE}:energy"}, ""),
        ("doubles", images(8), {"dtype": torch.float64}, ""),
        ("words", TensorDataset(torch.arange(36).view(12, 3) % 7, LABELS), {}, ""),
        *(
            ("applied", images(8), {"name": name}, ", but for random numbers" * (name == "noise"))
            for name in RIGHT
        ),
    ],
)
def test_a_right_plan_is_not_refused(
    model: str, dataset: Dataset, options: dict[str, Any], but: str
) -> None:
    assert checked(model, dataset, options) == but


def test_other_random_numbers_are_told() -> None:
    with pytest.raises(IncomparableError, match="rrelu"):
        checked("random", images(8))


def random() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 3))


def test_what_has_no_float64_is_compared_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "ROUNDED", 0.0)  # of float32, which alone never suffices then

    def refuse(_: object) -> nn.Module:
        raise RuntimeError("no float64")

    monkeypatch.setattr(nn.Module, "double", refuse)
    assert checked("normed", images(8)) == ""


def test_steps_are_bounded_by_what_a_sample_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proof_for("pictures", images(1, 8, 8), batch=100)
    assert proof.sizes == (100, 75)
    monkeypatch.setattr(proofs, "FLOPS_MAX", 1.0)
    proof = proof_for("pictures", images(1, 8, 8), batch=100)
    assert proof.sizes == (4, 3)
