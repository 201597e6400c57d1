"""The ranks of a replica and of the evaluator: results, status, and rejected messages."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief import protocol as wire
from distbelief.core.errors import JobError, LocalProtocolError, RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import PartialView
from distbelief.parameter_server.rules import SGD, UpdateRule
from distbelief.parameter_server.schedules import Cosine
from distbelief.protocol.role import SUPERVISOR, Address, Computed, Received, Role, Send, Started
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Kill, Pause
from distbelief.task.data import DataShard
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec, build_dataset, build_model
from distbelief.worker.batches import TrainingPlan
from distbelief.worker.build import build_rank
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.evaluator import held_out
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.group import rank_name
from distbelief.worker.replica import Replica
from distbelief.worker.training import Training
from tests.simulation.groups import FRAMES, Group
from tests.simulation.test_downpour import LEARNING, both_data_paths, downpour, plain


HERE = "tests.distbelief.worker.test_build"
EXAMPLES = "tests.distbelief.examples"
SIMULATED = "tests.simulation.test_downpour"


def learning(task: TaskSpec = LEARNING, **options: object) -> Group:
    """Return a replica; options that are no keys of [algorithm] are those of the group."""
    keys = DownpourSettings.__struct_fields__
    settings = {key: value for key, value in options.items() if key in keys}
    others = {key: value for key, value in options.items() if key not in keys}
    others = {"n_machines": 2, "plan_seed": 1} | others
    made = msgspec.structs.replace(downpour(), **settings)
    return Group(task, made, inputs=FRAMES, **others)  # type: ignore[arg-type]


def task_of(data: str = "", model: str = "") -> TaskSpec:
    """Return the task with data and model of these functions."""
    task = LEARNING
    if data:
        arguments: dict[str, object] = {"width": 40, "n_samples": 40}
        train = DataSpec(factory=f"{HERE}:{data}", arguments=arguments)
        task = msgspec.structs.replace(task, train=train)
    if model:
        factory = model if ":" in model else f"{HERE}:{model}"
        spec = ModelSpec(factory=factory, initial="seed")
        task = msgspec.structs.replace(task, model=spec)
    return task


def sequential(group: Group, *, task: TaskSpec = LEARNING) -> dict[str, torch.Tensor]:
    """Return all tensors after plain SGD in one process, in float64."""
    settings = group.settings
    module = build_model(task.model).double()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    drawn = group.first_values()
    for name, tensor in tensors.items():
        tensor.data.copy_(drawn[name].view_as(tensor))
    dataset = build_dataset(LEARNING.train)
    course = TrainingPlan(
        DataShard(len(dataset), replica_index=0, n_replicas=1, seed=0),
        batch_size=settings.batch_size,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=settings.rule.learning_rate)
    course.start(0)
    for step in range(settings.max_steps or 0):
        samples = [dataset[int(i)] for i in course.batch(step).indices]
        inputs, targets = torch.utils.data.default_collate(samples)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs.double()), targets).backward()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        optimizer.step()
    return {name: tensor.detach().view(-1) for name, tensor in tensors.items()}


def compare(
    group: Group, expected: Mapping[str, torch.Tensor], *, rtol: float, atol: float
) -> None:
    """Run the group; compare its values."""
    group.run()
    for name, value in group.values().items():
        wanted = expected[name].to(value.dtype)
        torch.testing.assert_close(value, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("n_machines", "n_shards", "micro_batches"),
    [(1, 1, 1), (2, 1, 2), (3, 2, 1), (5, 2, 3), (8, 1, 1)],
)
def test_one_replica_with_blocking_calls_is_sequential_sgd(
    n_machines: int, n_shards: int, micro_batches: int
) -> None:
    group = learning(
        blocking=True,
        max_steps=18,
        n_machines=n_machines,
        plan_seed=n_machines,
        n_shards=n_shards,
        micro_batches=micro_batches,
        dtype="float64",
    )  # more than one pass
    compare(group, sequential(group), rtol=1e-12, atol=1e-14)
    # Regression: one rank's push made another's stale by one, 0.5 of two ranks on average.
    assert [group.status(shard)["staleness_max"] for shard in group.shards] == ([0.0] * n_shards)


@pytest.mark.parametrize(("n_fetch", "n_push"), [(3, 1), (1, 3), (2, 2), (3, 2)])
def test_fetches_and_pushes_are_those_of_the_paper(n_fetch: int, n_push: int) -> None:
    group = learning(
        overwrite_local_steps=True,
        blocking=True,
        max_steps=8,
        n_fetch=n_fetch,
        n_push=n_push,
        n_machines=3,
    )
    compare(group, plain(group.settings, task=LEARNING), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("n_fetch", "n_push"), [(1, 2), (1, 10), (2, 5), (5, 2), (10, 1), (10, 10)]
)
def test_one_replica_alone_is_sequential_sgd_however_seldom_it_fetches_and_pushes(
    n_fetch: int, n_push: int
) -> None:
    """Regression: a fetch overwrote the local steps whose gradients were not pushed yet."""
    group = learning(max_steps=23, n_fetch=n_fetch, n_push=n_push, n_machines=3, dtype="float64")
    compare(group, sequential(group), rtol=1e-11, atol=1e-13)


@pytest.mark.each_value
@pytest.mark.parametrize(("n", "blocking"), [(1, True), (4, True), (1, False)])
@pytest.mark.parametrize("n_machines", [1, 3])
def test_running_statistics_are_those_of_one_process(
    n_machines: int, n: int, *, blocking: bool
) -> None:
    task = task_of(model=f"{SIMULATED}:normal_net")
    group = learning(
        task,
        blocking=blocking,
        max_steps=9,
        n_fetch=n,
        n_push=n,
        n_machines=n_machines,
        plan_seed=4,
        dtype="float64",
        n_shards=2,
    )
    if blocking:
        compare(group, sequential(group, task=task), rtol=1e-10, atol=1e-12)
    else:  # gradients of older parameters
        group.run()
    assert group.values()["1.num_batches_tracked"].item() == 9


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(("n_fetch", "n_push"), [(2, 2), (3, 1), (1, 3)])
def test_local_steps_follow_the_schedule(
    n_fetch: int, n_push: int, *, overwrite: bool, host: str
) -> None:
    """Regression: they ran ahead of it, as a shard's clock rises with the push of each rank."""
    group = learning(
        rule=SGD(learning_rate=0.5, schedule=Cosine(n_pushes=12)),
        n_fetch=n_fetch,
        n_push=n_push,
        blocking=True,
        overwrite_local_steps=overwrite,
        max_steps=11,
        n_shards=2,
        host=host,
    )
    compare(group, plain(group.settings, task=LEARNING), rtol=1e-5, atol=1e-6)


class PartlyUsed(nn.Module):
    """A model that leaves a layer out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(width, 6), nn.Linear(width, 6)
        self.last = nn.Linear(6, 2)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(x).tanh())
        return output


def partly_used(*, width: int = 40) -> nn.Module:
    return PartlyUsed(width)


class Choosing(PartlyUsed):
    """A model that is computed whole, as it looks at its data to choose a layer."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() < 1e9 else self.last(self.unused(x))


def choosing(*, width: int = 40) -> nn.Module:
    return Choosing(width)


@both_data_paths
@pytest.mark.parametrize("n_push", [1, 2])
@pytest.mark.parametrize("model", ["partly_used", "choosing"])
def test_what_gets_no_gradient_stays_as_it_is(n_push: int, host: str, model: str) -> None:
    """Regression: weight decay and momentum moved it, of whole models, and of a module that a rank
    computes whole.

    With n_push = 1 gradients go into the push during the backward pass.
    """
    rule = msgspec.convert({"name": "AdamW", "lr": 0.05, "weight_decay": 0.5}, UpdateRule)
    how = {"rule": rule, "n_push": n_push, "n_fetch": n_push, "local_learning_rate": 0.05}
    group = learning(task_of(model=model), max_steps=6, host=host, **how)
    before = group.first_values()
    group.run()
    moved = [name for name, value in group.values().items() if not torch.equal(value, before[name])]
    assert sorted(moved) == ["first.bias", "first.weight", "last.bias", "last.weight"]


def big_data(*, width: int, n_samples: int) -> list[object]:
    """One sample is infinite."""
    sizes = [torch.inf if i == 17 else 1.0 for i in range(n_samples)]
    return [(torch.full((width,), size), torch.tensor(0)) for size in sizes]


@pytest.mark.parametrize("n_push", [1, 2])
def test_running_statistics_of_a_step_that_is_skipped_are_skipped(n_push: int) -> None:
    task = task_of("big_data", f"{SIMULATED}:normal_net")
    group = learning(task, blocking=True, max_steps=10, n_push=n_push, n_fetch=5, n_machines=1)
    group.run()
    for name, value in group.values().items():
        assert bool(value.isfinite().all()), name
    assert group.values()["1.num_batches_tracked"].item() <= 9


def test_a_rank_connects_only_to_the_shards_that_hold_its_part() -> None:
    group = learning(max_steps=3, n_machines=3, plan_seed=2, n_shards=4)
    asked: dict[str, set[str]] = {name: set() for name in group.machines}

    def note(happening: HandledEvent) -> None:
        for action in happening.actions:
            if isinstance(action, Send) and happening.name in asked:
                asked[happening.name].add(action.receiver)

    group.cluster.observe(note)
    group.run()
    few = False
    for machine, name in enumerate(group.machines):
        flow = dataflow(group.split.compiled(), machine)
        holds = PartialView(group.layout, flow.items).shards
        shards = {receiver for receiver in asked[name] if receiver.startswith("shard")}
        assert shards == {f"shard-{k}" for k in holds}
        few |= len(shards) < 4
    assert few  # or it would have shown nothing


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_ranks_send_the_bytes_that_the_plan_predicts(micro_batches: int) -> None:
    group = learning(max_steps=7, n_machines=3, micro_batches=micro_batches)
    group.run()
    once = {"parameter", "parameter_gradient"}
    predicted: Counter[tuple[int, int]] = Counter()
    for message in group.split.compiled().messages:
        n_times = 7 * (1 if message.kind in once else micro_batches)
        predicted[message.sender, message.receiver] += n_times * message.n_bytes
    for sender in range(3):
        figures = group.status(group.machines[sender])
        for receiver in range(3):
            assert figures.get(f"bytes_to_{receiver}", 0.0) == predicted[sender, receiver]


def state(group: Group, machine: int) -> str:
    return group.cluster.role(group.machines[machine]).status()[0]


def test_ranks_wait_for_start_and_name_the_missing_rank() -> None:
    late = Kill(at=0.0, role=rank_name(0, 2), restart_after=1.0)
    group = learning(max_steps=4, n_machines=3, await_begin=True, faults=[late])
    group.cluster.run(until=0.5)
    assert state(group, 0) == "waiting for replica-0.2"
    assert state(group, 1) == "waiting for replica-0.0"
    group.cluster.run(until=2.0)
    assert state(group, 0) == "waiting for begin"
    group.tell(group.machines[1], wire.StartTraining())  # not the leader
    group.cluster.run(until=3.0)
    assert not group.cluster.halted
    group.tell(group.machines[0], wire.StartTraining())
    group.run()
    progress = group.told(wire.Progress)
    assert progress[-1].samples == 16
    assert progress[-1].step == 4
    assert len(group.told(wire.Finished)) == 3


def test_ranks_take_no_step_beyond_the_allowed_samples() -> None:
    group = learning(max_steps=4, n_machines=3, await_begin=True)
    group.cluster.run(until=0.5)
    group.tell(group.machines[0], wire.StartTraining(samples=5))
    group.cluster.run(until=5.0)
    assert state(group, 0) == "waiting for more samples"
    assert group.told(wire.Progress)[-1].samples == 8
    assert group.status(group.machines[0])["samples_allowed"] == 5
    group.tell(group.machines[0], wire.StartTraining(samples=9))
    group.cluster.run(until=10.0)
    assert group.told(wire.Progress)[-1].samples == 12
    group.tell(group.machines[0], wire.StartTraining(samples=100))
    group.run()
    assert group.told(wire.Progress)[-1].samples == 16


def test_status_names_the_rank_that_is_waited_for() -> None:
    pause = Pause(at=0.004, role=rank_name(0, 1), seconds=2.0)
    group = learning(max_steps=60, faults=[pause])
    group.cluster.run(until=1.0)
    assert state(group, 0) == "waiting for replica-0.1"
    group.run()


def test_stop_ends_a_replica_without_a_step_limit() -> None:
    group = learning(max_steps=None, n_push=3, n_machines=3)
    group.cluster.run(until=0.02)
    for name in group.machines:
        group.tell(name, wire.Stop(reason="enough"))
    group.run()
    for name in group.machines:
        figures = group.status(name)
        assert figures["gradients_pushed"] == figures["gradients"]


@pytest.mark.parametrize(("n_machines", "clip_norm"), [(1, 0.05), (3, 0.05), (3, 1e9)])
def test_gradients_are_clipped_as_those_of_one_process(n_machines: int, clip_norm: float) -> None:
    group = learning(
        blocking=True,
        max_steps=8,
        clip_norm=clip_norm,
        n_machines=n_machines,
        plan_seed=n_machines,
        dtype="float64",
    )
    group.run()
    expected = sequential(group)
    group.settings = msgspec.structs.replace(group.settings, clip_norm=None)
    free = sequential(group)
    for name, value in group.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-13)
    differ = any(not torch.equal(free[name], expected[name]) for name in free)
    assert differ == (clip_norm < 1.0)


class RootNet(nn.Module):
    """The first layer's gradient is NaN where inputs are zero; the other layer's is finite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 8, bias=False)
        self.last = nn.Linear(8, 2)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        result: torch.Tensor = self.last(torch.sqrt(y * y))
        return result


def root_net(*, width: int = 40) -> nn.Module:
    return RootNet(width)


def zero_data(*, width: int, n_samples: int) -> list[object]:
    """Half of the samples are zeros, where a square root has no derivative."""
    return [
        (torch.full((width,), float(index % 8 > 3)), torch.tensor(0)) for index in range(n_samples)
    ]


@pytest.mark.parametrize("n_push", [1, 2])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(n_push: int) -> None:
    group = learning(
        task_of("zero_data", "root_net"),
        blocking=True,
        max_steps=6,
        n_push=n_push,
        batch_size=1,
        place=lambda layer: int(layer in {"last", "loss"}),
    )
    group.run()
    counted = [group.status(name) for name in group.machines]
    figures = [(each["gradients"], each["non_finite"]) for each in counted]
    assert figures[0] == figures[1]
    assert figures[0][1] > 0
    assert figures[0][0] > 0


def nan_data(*, width: int, n_samples: int) -> list[object]:
    bad = torch.full((width,), torch.nan)
    return [(bad, torch.tensor(0)) for _ in range(n_samples)]


@pytest.mark.parametrize("n_push", [1, 2])
def test_gradients_that_are_not_finite_end_the_job(n_push: int) -> None:
    group = learning(task_of("nan_data"), max_steps=60, n_push=n_push)
    group.cluster.run(until=5.0)
    errors = [error for error in group.cluster.halted.values() if error]
    assert errors
    assert all("10 gradients in a row were NaN" in error for error in errors)


def test_a_rank_without_parameters_reports_skipped_steps() -> None:
    """Regression: the rank that knew the loss kept no parameters and reported nothing."""
    group = learning(
        task_of("nan_data"),
        max_steps=6,
        non_finite_limit=100,
        place=lambda layer: int(layer == "loss"),
    )
    group.cluster.run(until=5.0)
    told = [str(report) for report in group.cluster.reports]
    assert len([text for text in told if "it is skipped" in text]) == 1
    counted = [group.status(name)["non_finite"] for name in group.machines]
    assert counted == [6, 6]


def one_bad_sample(*, width: int, n_samples: int) -> list[object]:
    good = torch.ones(width)
    data: list[object] = [(good, torch.tensor(0)) for _ in range(n_samples)]
    data[17] = (torch.full((width,), torch.inf), torch.tensor(0))
    return data


@pytest.mark.each_value
@pytest.mark.parametrize("apart", [("loss",), ("last", "loss"), ("first", "last")])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_bad_sample_is_named_on_whichever_rank_it_is_read(
    apart: Sequence[str], clip_norm: float | None
) -> None:
    """Regression: the reporting rank looked only at the inputs that it had read itself."""
    task = task_of("one_bad_sample", "root_net")
    group = learning(
        task, max_steps=20, clip_norm=clip_norm, place=lambda layer: int(layer in apart)
    )
    group.cluster.run(until=5.0)
    told = [str(report) for report in group.cluster.reports]
    skipped = [text for text in told if "it is skipped" in text]
    assert skipped
    assert all("[data.train] sample 17 has NaN or infinite" in each for each in skipped)


def test_ranks_with_different_plans_are_rejected() -> None:
    group, other = learning(), learning(plan_seed=2)
    group.split_of[group.machines[1]] = other.split
    group.cluster.run(until=1.0)
    error = group.cluster.halted[group.machines[1]]
    assert error is not None
    assert "start all ranks of a replica with one plan" in error


def test_a_failing_step_is_a_job_error() -> None:
    train = DataSpec(factory=f"{EXAMPLES}:frames", arguments={"width": 39, "n_samples": 40})
    group = learning(msgspec.structs.replace(LEARNING, train=train))
    group.cluster.run(until=1.0)
    errors = [error for error in group.cluster.halted.values() if error]
    assert any("inputs have shape [39]; the plan is for [40]" in e for e in errors)


@pytest.mark.parametrize("plan_seed", range(3))
def test_ranks_evaluate_like_one_process(plan_seed: int) -> None:
    group = learning(n_machines=plan_seed + 1, plan_seed=plan_seed, group="evaluator", n_shards=2)
    assert LEARNING.test is not None
    module = build_model(LEARNING.model)
    group.cluster.run(until=1.0)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.copy_(group.values()[name].view_as(tensor))
    dataset = build_dataset(LEARNING.test, table="data.test")
    indices, _ = held_out(50, subset=20)
    samples = [dataset[int(i)] for i in indices]
    inputs, targets = torch.utils.data.default_collate(samples)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(module(inputs), targets)
    group.tell("evaluator", wire.Evaluate(request=7, whole=False))
    group.tell("evaluator", wire.Evaluate(request=8, whole=False))
    group.cluster.run(until=2.0)
    if plan_seed:
        group.cluster.restart(group.machines[-1])
    group.tell("evaluator", wire.Evaluate(request=9, whole=True))
    group.cluster.run(until=5.0)
    group.tell("evaluator", wire.Evaluate(request=9, whole=True))
    group.cluster.run(until=6.0)
    answers = [
        event.message
        for event in group.cluster.sent_to(SUPERVISOR)
        if isinstance(event.message, wire.EvaluationDone)
    ]
    assert [answer.request for answer in answers] == [7, 8, 9, 9]
    assert [answer.n_samples for answer in answers] == [20, 20, 50, 50]
    assert answers[0].loss == pytest.approx(float(expected), rel=1e-5)
    assert 0.0 <= answers[0].metric <= 1.0
    for name in group.machines:
        group.tell(name, wire.Stop(reason="over"))
    group.run()


def build(group: Group, name: str, **changes: object) -> Role:
    settings = msgspec.structs.replace(group.settings, **changes)
    context = group.context(PrivateMemory())
    return build_rank(name, config=settings, context=context, split=group.split)


def test_a_plan_is_for_one_batch() -> None:
    group = learning()
    group.cluster.run(until=0.1)
    with pytest.raises(JobError, match="batch_size is 5, and the plan is for batches of 4"):
        build(group, "replica-0.0", batch_size=5)


@pytest.mark.parametrize("name", ["replica-0.2", "replica-1.0", "shard-0"])
def test_unknown_ranks_are_rejected(name: str) -> None:
    group = learning()
    group.cluster.run(until=0.1)
    with pytest.raises(LocalProtocolError, match=f"no rank '{name}' in a"):
        build(group, name)


def test_evaluators_need_held_out_data() -> None:
    group = learning(msgspec.structs.replace(LEARNING, test=None))
    group.cluster.run(until=0.1)
    with pytest.raises(JobError, match="an evaluator needs held-out data"):
        build(group, "evaluator.1")


def test_a_rank_rejects_messages_it_does_not_accept() -> None:
    group = learning()
    group.cluster.run(until=0.1)
    machine = group.replica(group.machines[1])
    machine._is_gone = False
    wrong: list[tuple[str, wire.Message]] = [
        ("replica-0.0", wire.HeartbeatAck()),
        ("replica-0.1", wire.StartGeneration(generation=1 << 40, plan="p")),
        ("stranger", wire.TransferAck(generation=1, taken=0)),
    ]
    for sender, message in wrong:
        event = Received(sender=Address(sender), incarnation=1, message=message)
        with pytest.raises(RemoteProtocolError, match="which is not for it"):
            machine.handle(event, 1.0)
    nobody = Computed(name="replica:dream")
    with pytest.raises(LocalProtocolError, match="unexpected result of work 'replica:dream'"):
        machine.handle(nobody, 1.0)
    broken = Computed(name="replica:step", error=ValueError("no"))
    with pytest.raises(JobError, match="step 10 failed: ValueError: no"):
        machine.handle(broken, 1.0)


def test_a_rank_that_starts_after_the_end_exits_on_stop() -> None:
    group = learning()
    group.cluster.run(until=5.0)
    name = group.machines[1]
    group.cluster.restart(name)
    group.cluster.run(until=6.0)
    assert state(group, 1) == "waiting for replica-0.0"
    group.tell(name, wire.Stop(reason="over"))
    group.cluster.run(until=60.0)
    assert group.cluster.halted[name] is None


def test_a_rank_rejects_what_the_leader_sent_earlier_or_too_early() -> None:
    group = learning()
    machine = build(group, "replica-0.1")
    machine.handle(Started(incarnation=1), 0.0)
    plan = group.split.fingerprint

    def lead(message: wire.Message) -> None:
        sender = Address("replica-0.0")
        machine.handle(Received(sender=sender, incarnation=1, message=message), 0.0)

    grant = wire.GrantSteps(generation=5, position=0, steps=2, is_last=False, ended=False)
    with pytest.raises(RemoteProtocolError, match="granted steps of generation 5 before it was"):
        lead(grant)
    lead(wire.StartGeneration(generation=5, plan=plan))
    with pytest.raises(RemoteProtocolError, match="granted steps of generation 5 before it was"):
        lead(grant)
    for early in (
        msgspec.structs.replace(grant, generation=4),
        wire.StartGeneration(generation=4, plan=plan),
    ):
        with pytest.raises(RemoteProtocolError, match="of generation 4, after generation 5 had"):
            lead(early)
    with pytest.raises(JobError, match=r"has plan q, replica-0\.1 has .*: start all ranks"):
        lead(wire.StartGeneration(generation=6, plan="q"))


def test_a_rank_is_not_ready_before_its_pushes_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the generation would begin before them, and their samples count twice."""
    applied = False
    monkeypatch.setattr(ParameterClient, "ready", True)
    monkeypatch.setattr(Training, "all_pushes_applied", property(lambda _: applied))
    group = learning()
    machine = build(group, "replica-0.1")
    machine.handle(Started(incarnation=1), 0.0)
    begins = wire.StartGeneration(generation=5, plan=group.split.fingerprint)

    def is_ready() -> bool:
        event = Received(sender=Address("replica-0.0"), incarnation=1, message=begins)
        sent = [a.message for a in machine.handle(event, 0.0) if isinstance(a, Send)]
        return any(isinstance(message, wire.RankReady) for message in sent)

    assert not is_ready()
    applied = True
    assert is_ready()


def test_a_late_grant_takes_back_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of the leader may come twice, and late."""
    monkeypatch.setattr(ParameterClient, "ready", True)
    group = learning()
    machine = build(group, "replica-0.1")
    machine.handle(Started(incarnation=1), 0.0)

    def lead(message: wire.Message) -> None:
        sender = Address("replica-0.0")
        machine.handle(Received(sender=sender, incarnation=1, message=message), 0.0)

    lead(wire.StartGeneration(generation=5, plan=group.split.fingerprint))
    for steps in (3, 1):
        lead(wire.GrantSteps(generation=5, position=0, steps=steps, is_last=False, ended=False))
        assert isinstance(machine, Replica)
        assert machine.course.allowed == 3
