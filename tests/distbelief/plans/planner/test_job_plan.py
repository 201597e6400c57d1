"""Plans of jobs: made, used or rejected. No process is started."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.core.memory import PrivateMemory
from distbelief.graph.graph import GraphError, LayerGraph
from distbelief.parameter_server.layout import Layout
from distbelief.plans import cluster_file
from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.compiler import compile_plan
from distbelief.plans.plan import Plan, load
from distbelief.plans.planner import job_plan
from distbelief.plans.planner.job_plan import cost_of, draw, plan_for_job
from distbelief.plans.step_cost import memory
from distbelief.task import task as task_module
from distbelief.task.data import Batch
from distbelief.task.forward import Sample
from distbelief.task.task import BuildContext, TaskSpec, capture_for, sample_of
from distbelief.task.validation import check_data, check_evaluation
from distbelief.worker.build import Split
from tests.distbelief.examples import a_sample


HERE = __name__

JOB = f"""
[model]
factory = "{HERE}:net"
initial = "seed"

[data.train]
factory = "{HERE}:Data"

[data.test]
factory = "{HERE}:Data"
arguments = {{ n = 7 }}

[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 8
rule = {{ name = "sgd", learning_rate = 0.1 }}

[cluster]
partitions = 2
machines = "rack-1g"

[stop]
epochs = 1
"""


def net(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))


class Data:
    """Samples of five numbers, or integers, with a label or a probability each."""

    def __init__(self, n: int = 20, width: int = 5, kind: str = "labels") -> None:
        self.n, self.width, self.kind = n, width, kind

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, object]:
        if self.kind == "soft":
            return torch.ones(self.width), torch.full((3,), 1 / 3)
        return torch.ones(self.width), index % 3


def job(*overrides: str) -> Job:
    return parse_job(JOB, path="job.toml", overrides=overrides)


def graph_of(a_job: Job) -> LayerGraph:
    return capture_for(a_job.task, check_data(a_job.task, a_job.batch_size)).graph


@pytest.fixture
def made(tmp_path: Path) -> Plan:
    return plan_for_job(job(), graph_of(job()), kept=tmp_path / "plan.json")


# ------------------------------------------------------------------------- the plan


def test_a_plan_is_made_and_saved(made: Plan, tmp_path: Path) -> None:
    assert made.cluster.n_machines == 2
    assert made.machines == [0, 1]  # all are used, as requested
    assert (made.batch, made.loss) == (8, "cross_entropy")
    assert load(tmp_path / "plan.json") == made
    draw(made, graph_of(job()), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_host_must_hold_a_rank_and_what_it_pushes_and_fetches(made: Plan) -> None:
    graph = graph_of(job())
    compiled = compile_plan(graph, made.placements, batch=made.batch, n_machines=2)
    once, twice = memory(compiled), memory(compiled, copies=2)
    cost = cost_of(made, job(), graph)
    assert made.micro_batches == 1
    assert cost.memory_bytes == max(twice) > max(once)
    assert made.predicted is not None
    assert cost.seconds == made.predicted.step_seconds


def test_ranks_read_the_graph_in_the_plan(
    made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To capture the model again takes each of them seconds."""
    graph = graph_of(job())
    monkeypatch.setattr(task_module, "capture", None)
    context = BuildContext(
        task=job().task,
        layout=Layout.of([], n_shards=1),
        n_replicas=1,
        n_shards=1,
        seed=0,
        memory=PrivateMemory(host=""),
        plan=str(tmp_path / "plan.json"),
        sample=a_sample((5,), labels=True),
    )
    assert Split.of(context).graph == graph
    # A plan without its graph, of an older version, gets it at the start of the next job.
    msgspec.structs.replace(made, captured=b"").save(tmp_path / "plan.json")
    with pytest.raises(GraphError, match="no layer graph"):
        Split.of(context)
    plan_for_job(job(), graph, kept=tmp_path / "plan.json")
    assert Split.of(context).graph == graph


def test_a_resumed_run_keeps_its_plan(made: Plan, tmp_path: Path) -> None:
    kept = tmp_path / "plan.json"
    marked = msgspec.structs.replace(made, model="marked")
    marked.save(kept)
    assert plan_for_job(job(), graph_of(job()), kept=kept).model == "marked"
    for change in ("cluster.partitions=3", "algorithm.batch_size=4"):
        marked.save(kept)
        other = plan_for_job(job(change), graph_of(job()), kept=kept)
        assert other.model == f"{HERE}:net", change


def test_a_damaged_plan_of_a_previous_run_is_replaced(tmp_path: Path) -> None:
    kept = tmp_path / "plan.json"
    kept.write_text("{}")
    assert plan_for_job(job(), graph_of(job()), kept=kept).batch == 8


def test_the_plan_of_the_user_is_used_unchanged(made: Plan, tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    made.save(given)
    wanted = job(f"cluster.plan={given}", "cluster.partitions=1")
    kept = tmp_path / "run" / "plan.json"
    kept.parent.mkdir()
    assert plan_for_job(wanted, graph_of(wanted), kept=kept) == made
    assert load(kept) == made


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("algorithm.batch_size=4", "the batch is 8 in the plan and 4 here"),
        ("algorithm.loss=nll", "the loss is 'cross_entropy' in the plan and 'nll' her"),
        ("model.arguments={width=7}", "the layer graph's fingerprint is"),
        ("cluster.partitions=3", "is for 2 machines, but partitions = 3: leave"),
        ("cluster.machines=rack-10g", "in the plan and 'rack-10g ("),
    ],
)
def test_a_plan_for_another_job_is_rejected(
    change: str, why: str, made: Plan, tmp_path: Path
) -> None:
    given = tmp_path / "given.json"
    made.save(given)
    wanted = job(f"cluster.plan={given}", change)
    with pytest.raises(JobError) as caught:
        plan_for_job(wanted, graph_of(wanted), kept=tmp_path / "plan.json")
    assert str(caught.value).startswith(f"[cluster] plan = '{given}'")
    assert why in str(caught.value)


def test_a_missing_plan_file_is_named(tmp_path: Path) -> None:
    wanted = job(f"cluster.plan={tmp_path}/no.json")
    with pytest.raises(JobError, match=r"\[cluster\] plan = '.*no\.json': cannot read"):
        plan_for_job(wanted, graph_of(wanted), kept=tmp_path / "plan.json")


def test_pins_are_respected(tmp_path: Path) -> None:
    wanted = job('cluster.pins=["0=inputs:2", "2=whole@1"]')
    plan = plan_for_job(wanted, graph_of(wanted), kept=tmp_path / "plan.json")
    assert plan.placements["2"].machines == (1,)
    assert plan.placements["0"].combine is not None


def test_an_impossible_pin_is_named(tmp_path: Path) -> None:
    wanted = job('cluster.pins=["0=rows:2"]')
    with pytest.raises(JobError, match=r"\[cluster\] partitions = 2, pins = .*'0' can"):
        plan_for_job(wanted, graph_of(wanted), kept=tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["cluster.pins=['0']"], "'0': write LAYER=SPLIT"),
        (["cluster.pins=['0=whole', '0=whole@1']"], "'0' twice"),
        (["cluster.pins=['0=whole']", "cluster.partitions=1"], "partitions = 1"),
        (["cluster.pins=['0=whole']", "cluster.plan=plan.json"], "and plan"),
    ],
)
def test_pins_that_pin_nothing_are_rejected(overrides: list[str], why: str) -> None:
    with pytest.raises(JobError) as caught:
        job(*overrides)
    assert why in str(caught.value)


def test_unknown_machines_are_rejected(tmp_path: Path) -> None:
    wanted = job("cluster.machines=mainframe")
    with pytest.raises(JobError, match=r"\[cluster\] machines = 'mainframe'"):
        plan_for_job(wanted, graph_of(job()), kept=tmp_path / "plan.json")


def test_machines_without_the_memory_are_rejected(tmp_path: Path) -> None:
    """`distbelief partition` reports it, but a job once started without a message."""
    file = Path(cluster_file.__file__).parent / "clusters" / "rack-1g.toml"
    small = tmp_path / "small.toml"
    small.write_text(file.read_text().replace('"64 GiB"', '"60 B"'))
    wanted = job(f"cluster.machines={small}")
    graph = graph_of(wanted)
    with pytest.raises(JobError, match=r"partitions = 2: no plan .* has 60 B\. Use"):
        plan_for_job(wanted, graph, kept=tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_machines_like_this_one_talk_over_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []
    rack = load_cluster("rack-1g")

    def here(n: int, *, network: object) -> object:
        asked.append(network)
        return rack.first(n)

    monkeypatch.setattr(job_plan, "here", here)
    wanted = job("cluster.machines=here")
    plan_for_job(wanted, graph_of(wanted), kept=tmp_path / "plan.json")
    assert asked == [job_plan.LOOPBACK]


# ----------------------------------------------------------------------- the samples


def test_what_a_sample_is_like() -> None:
    sample = sample_of(Data())
    assert sample == a_sample((5,), labels=True)
    assert str(sample) == "input [5] of numbers, target [] of whole numbers"


def test_probabilities_may_stand_for_labels() -> None:
    soft = job('data.train.arguments={kind="soft"}', 'data.test.arguments.kind="soft"')
    graph = graph_of(soft)
    assert graph["targets"].shape == (3,)
    assert not graph["targets"].is_integer


def test_test_data_of_another_kind_are_rejected() -> None:
    task = job("data.test.arguments.width=4").task
    with pytest.raises(JobError, match=r"\[data.train\] are input \[5\].*\[4\]"):
        check_data(task, 8)


def test_without_test_data_there_is_nothing_to_compare() -> None:
    task = msgspec.structs.replace(job().task, test=None)
    assert check_data(task, 8) == sample_of(Data())


class Drawn(Data):
    """Random samples: drawn when the data set is made, or at each read."""

    def __init__(self, n: int = 20, *, anew: bool = False, numpy: bool = True) -> None:
        super().__init__(n)
        self.anew, self.numpy = anew, numpy
        self.noise = self.draw()

    def draw(self) -> torch.Tensor:
        if self.numpy:
            return torch.from_numpy(np.random.random((self.n, 5)))  # noqa: NPY002
        return torch.rand(self.n, 5)

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, object]:
        noise = self.draw() if self.anew else self.noise
        return noise[index].nan_to_num() if index else noise[0] * torch.nan, index % 3


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize(
    ("anew", "when"), [(True, "it is read"), (False, f"{HERE}:Drawn is called")]
)
def test_samples_drawn_at_random_are_rejected(
    anew: bool,  # noqa: FBT001
    numpy: bool,  # noqa: FBT001
    when: str,
) -> None:
    """Each rank reads for itself, one the inputs and another the targets.

    On one host they are forked from one process, so numpy drew the same on each, until one was
    killed: after its restart it drew from the beginning, and computed with other samples than the
    rest, to the end of the run. Accuracy fell from 97.8 % to 59.2 %, without a message.
    """
    arguments = f"{{ anew = {str(anew).lower()}, numpy = {str(numpy).lower()} }}"
    task = job(f'data.train={{factory = "{HERE}:Drawn", arguments = {arguments}}}').task
    with pytest.raises(JobError, match=rf"\[data.train\] sample 1 .*{when}, .*seed"):
        check_data(task, 8)
    assert check_data(task, 8, n_readers=1) == a_sample((5,), labels=True)


class Scaled(nn.Module):
    """Has a buffer that is persistent or not."""

    table: torch.Tensor

    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("table", torch.ones(3), persistent=saved)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * self.table
        return y


def test_a_buffer_that_is_not_saved_is_a_constant_of_the_graph() -> None:
    """Position tables are often not persistent, which is fine in one process.

    Shards hold persistent tensors only, so the rank that needed the table failed at its start with
    "the layout has no tensor 'table'".
    """
    saved, unsaved = (
        job(f"model.factory={HERE}:Scaled", f"model.arguments={{ saved = {word} }}").task
        for word in ("true", "false")
    )
    assert "table" in capture_for(saved, sample_of(Data())).graph.tensors
    assert "table" not in capture_for(unsaved, sample_of(Data())).graph.tensors


def looking_net() -> nn.Module:
    """Return a net with more dropout in deeper layers, like stochastic depth."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(rate)) for rate in rates]
    return nn.Sequential(*layers, nn.Linear(5, 3))


def reading_net() -> nn.Module:
    layer = nn.Linear(5, 3)
    return nn.Sequential(layer, nn.Dropout(abs(float(layer.weight.sum().item())) % 1.0))


def test_a_constructor_that_reads_values_gets_a_hint() -> None:
    """The message once was only: Tensor.item() cannot be called on meta tensors."""
    task = job(f"model.factory={HERE}:looking_net").task
    assert capture_for(task, sample_of(Data())).graph.outputs
    task = job(f"model.factory={HERE}:reading_net").task
    with pytest.raises(JobError, match=r"item\(\).*meta.*\. A partitioned model .*in Python"):
        capture_for(task, sample_of(Data()))


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def test_a_custom_loss_of_labels_is_captured_with_the_model() -> None:
    task: TaskSpec = msgspec.structs.replace(job().task, loss=f"{HERE}:own_loss")
    graph = capture_for(task, sample_of(Data())).graph
    assert graph["targets"].is_integer
    assert not any("module" in layer.options for layer in graph.layers)


def unequal_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = own_loss(outputs, targets)
    return loss if loss > 0 else -loss


def test_a_custom_loss_with_a_branch_is_computed_whole_for_a_short_reason() -> None:
    """Torch's own message has many lines about symbols."""
    task: TaskSpec = msgspec.structs.replace(job().task, loss=f"{HERE}:unequal_loss")
    reason = capture_for(task, sample_of(Data())).graph["loss"].whole
    assert "it depends on the values of its data (an `if`, a loop, `.item()`)" in reason
    assert "guard" not in reason


class OnlyLoss(nn.Module):
    """Returns its loss and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    @override
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(x), labels)


def test_a_model_that_returns_only_its_loss_can_be_split() -> None:
    """Its check for evaluation asked for other outputs."""
    task = job(f"model.factory={HERE}:OnlyLoss", "algorithm.loss=model").task
    tensors = {"x": torch.zeros(2, 5), "labels": torch.zeros(2, dtype=torch.int64)}
    sample = Sample.of(Batch(tensors, tensors))
    assert len(capture_for(task, sample).graph.outputs) == 1
    check_evaluation(task, sample)


class TwoMinds(nn.Module):
    """Scores in training, probabilities in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if self.training else y.softmax(1)


def test_a_model_with_a_different_evaluation_mode_gets_no_plan() -> None:
    """By the plan, `predict` and the evaluator would compute what it trains with."""
    check_evaluation(job().task, sample_of(Data()))
    task = job(f"model.factory={HERE}:TwoMinds").task
    with pytest.raises(JobError, match=r"TwoMinds computes.*line \d+.*--whole"):
        check_evaluation(task, sample_of(Data()))
