"""The machines of model-parallel replicas, built for the process that is to run one.

No process builds the whole net: a machine has its program, and memory for the regions
that it keeps. Their values come from the shards.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import msgspec
import torch
from torch import nn

from distbelief.data.subset import DataShard
from distbelief.downpour.algorithm import DownpourSettings
from distbelief.downpour.config import DownpourConfig
from distbelief.downpour.training import Training
from distbelief.errors import JobError, LocalProtocolError
from distbelief.graph.layer import LayerGraph
from distbelief.parameter_server.client import ClientConfig, ParameterClient
from distbelief.parameter_server.copies import copies_of_all
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.selection import Selection
from distbelief.program.compilation import Compiled, compile_plan
from distbelief.program.plan import Plan
from distbelief.roles import Role
from distbelief.runtime.counting import with_counts
from distbelief.runtime.courier import Courier
from distbelief.runtime.course import Course, MeasuringCourse, TrainingCourse
from distbelief.runtime.dataflow import dataflow
from distbelief.runtime.duty import Duty
from distbelief.runtime.evaluator import EvaluatorConfig, held_out
from distbelief.runtime.execution import Execution
from distbelief.runtime.inference import inference_of, model_output
from distbelief.runtime.leading import Leader
from distbelief.runtime.machine import Machine, MachineConfig
from distbelief.runtime.machine_names import EVALUATORS, Place, member_names, place_of
from distbelief.runtime.measuring import Judge, Measuring
from distbelief.runtime.operations import Dataflow
from distbelief.runtime.portions import PortionReader, PortionsAhead
from distbelief.runtime.stepping import Stepping
from distbelief.runtime.task import (
    BuildContext,
    TaskSpec,
    build_loss,
    build_metric,
)


@final
@dataclass(frozen=True, kw_only=True)
class Split:
    """How a model is split.

    Attributes:
        plan: Who computes what.
        graph: Of the model, its loss last.
        modules: For layers that are computed whole; they may lie on the meta device.
        device: On which machines compute: "cpu", "cuda".
    """

    plan: Plan
    graph: LayerGraph
    modules: Mapping[str, nn.Module]
    device: str = "cpu"

    @property
    def fingerprint(self) -> str:
        """A hash of what all machines must have in common."""
        text = msgspec.json.encode(
            (self.plan.graph, self.plan.batch, self.plan.micro_batches)
        ) + msgspec.json.encode(self.plan.placements, order="sorted")
        return hashlib.sha256(text).hexdigest()[:16]

    def compiled(self) -> Compiled:
        """Return the plan compiled, for the samples of one micro-batch."""
        return compile_plan(
            self.graph,
            self.plan.placements,
            batch=-(-self.plan.batch // self.plan.micro_batches),
            n_machines=self.plan.cluster.n_machines,
        )


def build_machine(
    name: str, *, config: DownpourSettings, context: BuildContext, split: Split
) -> Role:
    """Return the role of this name: "replica-R.M", "evaluator" or "evaluator.M".

    Raises:
        JobError: the data cannot be built, or the plan is not for this job.
        LocalProtocolError: no such machine.
    """
    place = place_of(name)
    n_machines = split.plan.cluster.n_machines
    if place is None or place.machine >= n_machines:
        raise LocalProtocolError(f"no machine {name!r} in a plan for {n_machines}")
    if place.group == EVALUATORS:
        return _evaluating_machine(place, context=context, split=split)
    if place.replica is None or place.replica >= context.n_replicas:
        raise LocalProtocolError(
            f"no machine {name!r} in a job of {context.n_replicas} replicas"
        )
    _check(config, split)
    return _training_machine(place, config=config, context=context, split=split)


def _check(config: DownpourSettings, split: Split) -> None:
    if config.batch_size != split.plan.batch:
        raise JobError(
            f"[algorithm] batch_size is {config.batch_size}, and the plan is for "
            f"{split.plan.batch}: plan again, or use that"
        )


def _training_machine(
    place: Place, *, config: DownpourSettings, context: BuildContext, split: Split
) -> Role:
    assert place.replica is not None
    compiled = split.compiled()
    flow = with_counts(
        dataflow(compiled, place.machine, loss=split.graph.outputs[-1]),
        {spec.name for spec in _layout(context).tensors},
    )
    dtype = _dtype(context)
    client = _client(flow, context, pushes=True)
    dataset = context.train_data()
    data_shard = DataShard(
        len(dataset),
        replica_index=place.replica,
        n_replicas=context.n_replicas,
        seed=config.seed,
    )
    course = TrainingCourse(data_shard, batch_size=config.batch_size)
    reader = PortionReader(dataset, graph=split.graph, reads=flow.reads, dtype=dtype)
    of_replica = _of_replica(config, context)
    n_machines = split.plan.cluster.n_machines
    duty = Training(
        of_replica,
        client=client,
        sizes=[region.n_elements for _, region in flow.items],
        trained=flow.trained,
        counts=flow.counts,
        dtype=dtype,
        await_begin=context.await_begin,
        n_machines=n_machines,
    )
    leader = Leader(
        n_machines,
        plan=split.fingerprint,
        steps_max=of_replica.max_steps,
        n_steps=course.n_steps,
    )
    if not context.await_begin:
        leader.begin(0.0)
    return _machine(
        place,
        split,
        _Parts(
            flow=flow,
            dtype=dtype,
            client=client,
            course=course,
            reader=reader,
            duty=duty,
            leader=leader,
            training=True,
            micro_batches=split.plan.micro_batches,
            seed=(config.seed, place.replica),
        ),
    )


def _evaluating_machine(place: Place, *, context: BuildContext, split: Split) -> Role:
    task, plan, graph = context.task, split.plan, split.graph
    dataset = context.test_data()
    n_machines = plan.cluster.n_machines
    compiled = inference_of(
        graph,
        plan.placements,
        outputs=[model_output(graph)],
        batch=plan.batch,
        n_machines=n_machines,
    )
    outputs = frozenset(compiled.graph.outputs)
    flow = dataflow(compiled, place.machine, training=False, outputs=outputs)
    dtype = _dtype(context)
    client = _client(flow, context, pushes=False)
    config = EvaluatorConfig(subset=context.evaluation_subset, seed=context.seed)
    course = MeasuringCourse(held_out(len(dataset), config), chunk=plan.batch)
    reader = PortionReader(
        dataset,
        graph=graph,
        reads=flow.reads,
        dtype=dtype,
        keeps_targets=place.machine == 0,
        table="data.test",
    )
    duty = Measuring(
        client=client,
        sizes=[region.n_elements for _, region in flow.items],
        dtype=dtype,
        course=course,
        judge=_judge(task),
    )
    leader = Leader(n_machines, plan=split.fingerprint, limit=0)
    leader.begin(0.0)
    return _machine(
        place,
        split,
        _Parts(
            flow=flow,
            dtype=dtype,
            client=client,
            course=course,
            reader=reader,
            duty=duty,
            leader=leader,
            training=False,
            micro_batches=1,
            seed=(context.seed,),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a machine that trains and one that measures have each of its own."""

    flow: Dataflow
    dtype: torch.dtype
    client: ParameterClient
    course: Course
    reader: PortionReader
    duty: Duty
    leader: Leader
    training: bool
    micro_batches: int
    seed: tuple[int, ...]


def _machine(place: Place, split: Split, parts: _Parts) -> Machine:
    flow, course = parts.flow, parts.course
    n_machines = split.plan.cluster.n_machines
    couriers = _couriers(place, flow, n_machines)
    return Machine(
        MachineConfig(
            group=place.group,
            machine=place.machine,
            n_machines=n_machines,
            plan=split.fingerprint,
        ),
        client=parts.client,
        stepping=Stepping(
            Execution(
                flow, dtype=parts.dtype, modules=split.modules, device=split.device
            ),
            couriers=couriers,
            course=course,
            micro_batches=parts.micro_batches,
            training=parts.training,
            seed=parts.seed,
        ),
        couriers=couriers,
        course=course,
        portions=PortionsAhead(parts.reader, course),
        duty=parts.duty,
        shapes=[region.shape for _, region in flow.items],
        leader=parts.leader if place.machine == 0 else None,
    )


def _judge(task: TaskSpec) -> Judge:
    loss, metric = build_loss(task), build_metric(task)

    def judge(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        return float(loss(outputs, targets)), float(metric(outputs, targets))

    return judge


def _of_replica(config: DownpourSettings, context: BuildContext) -> DownpourConfig:
    # The supervisor hears at most 200 reports a second of all replicas together.
    seconds = max(0.05, 0.005 * context.n_replicas)
    return replace(config.of_replica(), progress_seconds=seconds)


def _couriers(place: Place, flow: Dataflow, n_machines: int) -> dict[int, Courier]:
    names = member_names(place.group, n_machines)
    peers = {peer for _, peer in (*flow.sent, *flow.received)}
    return {peer: Courier(names[peer]) for peer in sorted(peers)}


def _client(flow: Dataflow, context: BuildContext, *, pushes: bool) -> ParameterClient:
    layout = _layout(context)
    shards, second_copies = copies_of_all(context.n_shards, context.shard_copies)
    return ParameterClient(
        ClientConfig(pushes=pushes),
        layout=layout,
        shards=shards,
        memory=context.memory,
        second_copies=second_copies,
        selection=Selection.of(layout, flow.items),
    )


def _layout(context: BuildContext) -> Layout:
    if context.layout is None:
        raise LocalProtocolError("machines need the layout of the parameters")
    return context.layout


def _dtype(context: BuildContext) -> torch.dtype:
    is_double = _layout(context).dtype.itemsize == 8
    return torch.float64 if is_double else torch.float32
