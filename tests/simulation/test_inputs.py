"""Models of several inputs and outputs, whole and split, against one plain loop of torch."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.protocol import Evaluate, EvaluationDone
from distbelief.protocol.role import SUPERVISOR, Received
from distbelief.task.data import BatchCursor, DataShard, read_batch
from distbelief.task.losses import loss_function
from distbelief.task.task import (
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
    build_model,
    sample_of,
)
from tests.simulation.groups import Group
from tests.simulation.test_downpour import Cluster, downpour, drawn, same


HERE = "tests.simulation.test_inputs"
N_SAMPLES, N_WORDS, N_CLASSES, LENGTH = 40, 11, 3, 5


class Output(OrderedDict[str, object]):
    """Fields by name or key, as the outputs of many public models."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in self:
            return cast("torch.Tensor", self[name])
        raise AttributeError(name)


@dataclass
class Scored:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    cache: object = None


class Tagger(nn.Module):
    """Words, numbers and a mask of padding; outputs in the form asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(N_WORDS, 8)
        self.mix = nn.Linear(3, 8)
        self.attend = nn.Linear(8, 1)
        self.head = nn.Linear(8, N_CLASSES)
        self.unread = nn.Linear(8, 64)

    @override
    def forward(
        self,
        words: torch.Tensor,
        numbers: torch.Tensor,
        mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> object:
        hidden = torch.tanh(self.embed(words) + self.mix(numbers))
        weights = self.attend(hidden).squeeze(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, -1e9)
        pooled = (hidden * weights.softmax(-1).unsqueeze(-1)).sum(1)
        logits = self.head(pooled)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        match self.form:
            case "object":
                return Output(loss=loss, logits=logits, hidden=hidden, more=self.unread(pooled))
            case "dataclass":
                return Scored(logits, (hidden, self.unread(pooled)))
            case "tuple":
                return (logits, hidden, None) if loss is None else (loss, logits, hidden)
            case "of the batch":  # no sample is first, and sums are over all samples
                return {"logits": logits.t(), "size": hidden.square().mean()}
            case _:
                return logits


def tagger(*, form: str = "") -> nn.Module:
    return Tagger(form)


class Items:
    """The same samples, in the form asked for."""

    def __init__(self, form: str, *, at_once: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.words = torch.randint(N_WORDS, (N_SAMPLES, LENGTH), generator=generator)
        self.numbers = torch.rand(N_SAMPLES, LENGTH, 3, generator=generator)
        self.mask = torch.rand(N_SAMPLES, LENGTH, generator=generator) < 0.6
        self.mask[:, 0] = True
        self.labels = torch.randint(N_CLASSES, (N_SAMPLES,), generator=generator)
        self.shares = torch.rand(N_SAMPLES, generator=generator)
        self.form = form
        if at_once:
            self.__class__ = _ItemsAtOnce

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> object:
        return self.item(index)

    def item(self, index: object) -> object:
        words, numbers, mask, labels, shares = (
            tensor[index]  # type: ignore[index] # a number or several
            for tensor in (self.words, self.numbers, self.mask, self.labels, self.shares)
        )
        named = {"words": words, "numbers": numbers, "mask": mask}
        match self.form:
            case "entries":
                return named | {"labels": labels}
            case "weighted entries":
                return {"share": shares, "wanted": labels} | named
            case "keywords":
                return named, labels
            case "positions":
                return (words, numbers, mask), labels
            case _:
                return named, {"wanted": labels, "share": shares}


class _ItemsAtOnce(Items):
    def __getitems__(self, indices: list[int]) -> object:
        return self.item(indices)


def weighted(outputs: Output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    each = functional.cross_entropy(outputs.logits, batch["wanted"], reduction="none")
    return (each * batch["share"]).mean() + 0.1 * outputs.hidden.square().mean()


def of_fields(outputs: Scored, targets: dict[str, torch.Tensor]) -> torch.Tensor:
    scores = outputs.logits.log_softmax(-1).gather(1, targets["wanted"].unsqueeze(1)).squeeze(1)
    return -(scores * targets["share"]).sum() / len(scores) + outputs.hidden[0].abs().mean()


def of_the_batch(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"].t(), labels) + outputs["size"]


def share_right(outputs: object, batch: dict[str, torch.Tensor]) -> float:
    logits = cast("Output", outputs).logits
    return float((logits.argmax(1) == batch["wanted"]).float().mean())


def task(form: str, items: str, loss: str, *, at_once: bool = False) -> TaskSpec:
    data = DataSpec(factory=f"{HERE}:Items", arguments={"form": items, "at_once": at_once})
    metric = f"{HERE}:share_right" if items == "weighted entries" else None
    if form == "of the batch":
        metric = "loss"
    return TaskSpec(
        model=ModelSpec(factory=f"{HERE}:tagger", arguments={"form": form}, initial="seed"),
        train=data,
        test=data,
        loss=loss,
        metric=metric,
    )


TASKS = [
    task("object", "entries", "model"),
    task("object", "weighted entries", f"{HERE}:weighted"),
    task("dataclass", "keywords", "cross_entropy"),
    task("dataclass", "pairs", f"{HERE}:of_fields", at_once=True),
    task("tuple", "entries", "model", at_once=True),
    task("tensor", "positions", "cross_entropy"),
]


def plain(task: TaskSpec, first: dict[str, torch.Tensor], *, steps: int = 12) -> nn.Module:
    """Train from these flat values by one loop of torch."""
    module = build_model(task.model)
    for name, parameter in module.named_parameters():
        parameter.data.copy_(first[name].view_as(parameter))
    trained = [p for name, p in module.named_parameters() if not name.startswith("unread")]
    optimizer = torch.optim.SGD(trained, lr=0.1, fused=True)
    cursor = BatchCursor(DataShard(N_SAMPLES, replica_index=0, n_replicas=1, seed=0))
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, task, cursor.batch(4 * step, 4).tolist()).backward()
        optimizer.step()
    return module


def loss_of(module: nn.Module, task: TaskSpec, indices: list[int]) -> torch.Tensor:
    # Not by `Batch.run`, which is tested here.
    items = read_batch(build_dataset(task.train), indices)
    given, loss = items.inputs, loss_function(task.loss)
    assert isinstance(given, dict | tuple)
    if isinstance(given, tuple):
        return loss(module(*given), items.targets)
    keywords = {k: v for k, v in given.items() if k not in {"share", "wanted"}}
    return loss(module(**keywords), items.targets)


def named(task: TaskSpec) -> str:
    items = task.train.arguments["form"]
    return f"{task.model.arguments['form']}, {items}, {task.loss.removeprefix(HERE)}"


@pytest.mark.parametrize(
    "task", [*TASKS, task("of the batch", "keywords", f"{HERE}:of_the_batch")], ids=named
)
def test_a_whole_replica_trains_any_model_to_the_bit(task: TaskSpec) -> None:
    cluster = Cluster(task, downpour(loss=task.loss, blocking=True, max_steps=12))
    cluster.run()
    expected = plain(task, drawn(task))
    found = cluster.values()
    assert same(found, {name: p.detach().view(-1) for name, p in expected.named_parameters()})
    cluster.tell("evaluator", Evaluate(request=1, whole=True))
    cluster.wait(1.0)
    check_evaluation(cluster.cluster.sent_to(SUPERVISOR), task, expected)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.soak), 1])
@pytest.mark.parametrize("task", TASKS, ids=named)
def test_a_split_replica_trains_like_one_process(task: TaskSpec, seed: int) -> None:
    sample = sample_of(build_dataset(task.train))
    settings = downpour(loss=task.loss, blocking=True, max_steps=12)
    group = Group(task, settings, inputs=sample, n_machines=2 + seed, plan_seed=seed)
    first = group.first_values()
    group.run()
    expected, found = plain(task, first), group.values()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name].view_as(parameter), parameter.detach())
    assert not torch.equal(found["embed.weight"], first["embed.weight"])
    # What neither the loss nor a metric may read is in no rank's program.
    layers = [layer.name for layer in group.split.graph.layers]
    assert any(name.startswith("unread") for name in layers) == (task.metric is not None)


@pytest.mark.parametrize("task", TASKS, ids=named)
def test_ranks_evaluate_like_one_process(task: TaskSpec) -> None:
    sample = sample_of(build_dataset(task.train))
    settings = downpour(loss=task.loss)
    group = Group(task, settings, inputs=sample, n_machines=2, group="evaluator")
    group.cluster.run(until=1.0)
    group.tell("evaluator", Evaluate(request=1, whole=True))
    group.cluster.run(until=5.0)
    check_evaluation(group.cluster.sent_to(SUPERVISOR), task, plain(task, drawn(task), steps=0))


def check_evaluation(heard: Sequence[Received], task: TaskSpec, module: nn.Module) -> None:
    (answer,) = [e.message for e in heard if isinstance(e.message, EvaluationDone)]
    everything = list(range(N_SAMPLES))
    with torch.no_grad():
        loss = float(loss_of(module, task, everything))
    assert answer.loss == pytest.approx(loss, rel=1e-5)
    items = cast("Items", build_dataset(task.train))
    if task.metric == "loss" or (task.metric is None and task.loss != "cross_entropy"):
        assert answer.metric == answer.loss
        return
    scorer = Tagger("tensor")
    scorer.load_state_dict(module.state_dict())
    with torch.no_grad():
        logits = scorer(items.words, items.numbers, items.mask)
    right = (logits.argmax(1) == items.labels).float().mean()
    assert answer.metric == pytest.approx(float(right))
