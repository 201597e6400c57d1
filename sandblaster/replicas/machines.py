"""The machines of model-parallel replicas of Sandblaster, for the process of each."""

import torch

from distbelief.parameter_server.layout.layout import Layout
from distbelief.parameter_server.layout.selection import Selection
from distbelief.roles import Role
from distbelief.runtime.assembling import Makings, Split, assemble, evaluating_machine, place_in
from distbelief.runtime.common_roles import layout_of
from distbelief.runtime.execution.operations import Dataflow
from distbelief.runtime.machine.leading import Leader
from distbelief.runtime.machine.machine_names import EVALUATORS, Place, member_names
from distbelief.runtime.replica_parts import replica_parts
from distbelief.runtime.task.task import BuildContext
from sandblaster.config import SandblasterSettings
from sandblaster.replicas.foreman import Foreman
from sandblaster.replicas.part_sums import Keeping, PartSums
from sandblaster.replicas.replica import ReplicaConfig
from sandblaster.replicas.samples import Samples
from sandblaster.replicas.set_course import SetCourse
from sandblaster.replicas.split_replica import SplitReplica


def build_machine(
    name: str, *, config: SandblasterSettings, context: BuildContext, split: Split
) -> Role:
    """Return the role of this name: "replica-R.M", "evaluator" or "evaluator.M".

    Raises:
        JobError: the data cannot be built, or the plan is not for this job.
        LocalProtocolError: no such machine.
    """
    place = place_in(name, context=context, split=split)
    if place.group == EVALUATORS:
        return evaluating_machine(place, context=context, split=split)
    return _summing_machine(place, config=config, context=context, split=split)


def _summing_machine(
    place: Place, *, config: SandblasterSettings, context: BuildContext, split: Split
) -> SplitReplica:
    n_machines = split.plan.cluster.n_machines
    batch = "portion", config.portion
    parts = replica_parts(place, context=context, split=split, batch=batch)
    flow, n_examples = parts.flow, len(parts.dataset)
    cutting = config.cutting(n_examples=n_examples, n_replicas=context.n_replicas)
    samples = Samples(n_examples, seed=config.order_seed)
    course = SetCourse(samples, portion_size=cutting.portion_size)
    of_replica = ReplicaConfig(cutting=cutting)
    foreman = None
    if place.machine == 0:
        foreman = Foreman(
            of_replica, course=course, n_machines=n_machines, await_begin=context.await_begin
        )
    sums = PartSums(
        _keeping(flow, layout_of(context), parts.dtype),
        client=parts.client,
        course=course,
        foreman=foreman,
    )
    leader = Leader(n_machines, plan=split.fingerprint, limit=0)
    leader.begin(0.0)
    machine = assemble(
        place,
        split,
        Makings(
            flow=flow,
            dtype=parts.dtype,
            client=parts.client,
            course=course,
            reader=parts.reader,
            duty=sums,
            leader=leader,
            training=True,
            micro_batches=split.plan.micro_batches,
            seed=(config.seed, 0),  # the same in all replicas: so are their sums
            seed_gradient=_sum_over_samples,
        ),
    )
    return SplitReplica(
        machine,
        names=member_names(place.group, n_machines),
        course=course,
        sums=sums,
        foreman=foreman,
        retry_seconds=of_replica.retry_seconds,
    )


def _keeping(flow: Dataflow, layout: Layout, dtype: torch.dtype) -> Keeping:
    selection = Selection.of(layout, flow.items)
    kinds = [spec.kind for spec in selection.tensors]
    return Keeping(
        sizes=[region.n_elements for _, region in flow.items],
        buffers=[item for item, kind in enumerate(kinds) if kind == "buffer"],
        counts=flow.counts,
        shards=selection.shards,
        dtype=dtype,
    )


def _sum_over_samples(layer: str, output: torch.Tensor, n_samples: int) -> torch.Tensor:
    """Return the gradient of the sum over all samples of the step."""
    del layer, n_samples
    return output.new_ones(()).expand_as(output)
