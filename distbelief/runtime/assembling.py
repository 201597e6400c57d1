"""Machines of a plan, put together in the process that is to run one.

No process builds the whole net: a machine has its program, and memory for the regions
that it keeps. Their values come from the shards. What the machines compute for is the
algorithm's affair; those that evaluate are the same for all algorithms.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import msgspec
import torch
from torch import nn

from distbelief.errors import LocalProtocolError
from distbelief.graph.layer import LayerGraph
from distbelief.parameter_server.client.client import ClientConfig, ParameterClient
from distbelief.parameter_server.copies.copies import copies_of_all
from distbelief.parameter_server.layout.selection import Selection
from distbelief.program.compilation import Compiled, compile_plan
from distbelief.program.plan import Plan, load
from distbelief.runtime.common_roles import layout_of
from distbelief.runtime.evaluator import EvaluatorConfig, held_out
from distbelief.runtime.execution.dataflow import dataflow
from distbelief.runtime.execution.execution import Execution, Seed, mean_over_samples
from distbelief.runtime.execution.inference import inference_of, model_output
from distbelief.runtime.execution.operations import Dataflow
from distbelief.runtime.machine.courier import Courier
from distbelief.runtime.machine.course import Course, MeasuringCourse
from distbelief.runtime.machine.duty import Duty
from distbelief.runtime.machine.leading import Leader
from distbelief.runtime.machine.machine import Machine, MachineConfig
from distbelief.runtime.machine.machine_names import EVALUATORS, Place, member_names, place_of
from distbelief.runtime.machine.measuring import Judge, Measuring
from distbelief.runtime.machine.portions import PortionReader, PortionsAhead
from distbelief.runtime.machine.stepping import Stepping
from distbelief.runtime.task.capturing import capture_for
from distbelief.runtime.task.samples import Sample
from distbelief.runtime.task.task import BuildContext, TaskSpec, build_loss, build_metric


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

    @classmethod
    def of(cls, name: str, context: BuildContext) -> "Split":
        """Return how a job's plan splits its model, for the role of this name.

        Raises:
            LocalProtocolError: nobody told that role what the data are like.
        """
        assert context.plan is not None
        if context.sample is None:
            raise LocalProtocolError(f"{name} is not told what the data are like")
        captured = capture_for(context.task, context.sample)
        return cls(
            plan=load(context.plan),
            graph=captured.graph,
            modules=captured.modules,
            device=context.device,
        )


def place_in(name: str, *, context: BuildContext, split: Split) -> Place:
    """Return which machine of a job is called so.

    Raises:
        LocalProtocolError: none is.
    """
    place = place_of(name)
    n_machines = split.plan.cluster.n_machines
    if place is None or place.machine >= n_machines:
        raise LocalProtocolError(f"no machine {name!r} in a plan for {n_machines}")
    is_replica = place.replica is not None and place.replica < context.n_replicas
    if place.group != EVALUATORS and not is_replica:
        raise LocalProtocolError(f"no machine {name!r} in a job of {context.n_replicas} replicas")
    return place


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Makings:
    """What machines for different duties have each of its own."""

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
    seed_gradient: Seed = mean_over_samples


def assemble(place: Place, split: Split, makings: Makings) -> Machine:
    """Return a machine of this group, made of these."""
    flow, course = makings.flow, makings.course
    n_machines = split.plan.cluster.n_machines
    couriers = _couriers(place, flow, n_machines)
    return Machine(
        MachineConfig(
            group=place.group, machine=place.machine, n_machines=n_machines, plan=split.fingerprint
        ),
        client=makings.client,
        stepping=Stepping(
            Execution(
                flow,
                dtype=makings.dtype,
                modules=split.modules,
                device=split.device,
                seed_gradient=makings.seed_gradient,
            ),
            couriers=couriers,
            course=course,
            micro_batches=makings.micro_batches,
            training=makings.training,
            seed=makings.seed,
        ),
        couriers=couriers,
        course=course,
        portions=PortionsAhead(makings.reader, course),
        duty=makings.duty,
        shapes=[region.shape for _, region in flow.items],
        leader=makings.leader if place.machine == 0 else None,
    )


def evaluating_machine(place: Place, *, context: BuildContext, split: Split) -> Machine:
    """Return a machine of those that evaluate."""
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
    dtype = dtype_of(context)
    client = client_of(flow, context, pushes=False)
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
        judge=_judge(task, context.sample),
    )
    leader = Leader(n_machines, plan=split.fingerprint, limit=0)
    leader.begin(0.0)
    return assemble(
        place,
        split,
        Makings(
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


def client_of(flow: Dataflow, context: BuildContext, *, pushes: bool) -> ParameterClient:
    """Return a client of the shards that hold what a machine keeps."""
    layout = layout_of(context)
    shards, second_copies = copies_of_all(context.n_shards, context.shard_copies)
    return ParameterClient(
        ClientConfig(pushes=pushes),
        layout=layout,
        shards=shards,
        memory=context.memory,
        second_copies=second_copies,
        selection=Selection.of(layout, flow.items),
    )


def dtype_of(context: BuildContext) -> torch.dtype:
    """Return the type of the parameters."""
    is_double = layout_of(context).dtype.itemsize == 8
    return torch.float64 if is_double else torch.float32


def _couriers(place: Place, flow: Dataflow, n_machines: int) -> dict[int, Courier]:
    names = member_names(place.group, n_machines)
    peers = {peer for _, peer in (*flow.sent, *flow.received)}
    return {peer: Courier(names[peer]) for peer in sorted(peers)}


def _judge(task: TaskSpec, sample: Sample | None) -> Judge:
    loss, metric = build_loss(task), build_metric(task, sample)

    def judge(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        return float(loss(outputs, targets)), float(metric(outputs, targets))

    return judge
