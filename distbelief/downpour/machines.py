"""The machines of model-parallel replicas of Downpour, for the process of each."""

from dataclasses import replace

from distbelief.data.subset import DataShard
from distbelief.downpour.config import DownpourConfig
from distbelief.downpour.settings import DownpourSettings
from distbelief.downpour.training import Training
from distbelief.errors import JobError
from distbelief.roles import Role
from distbelief.runtime.assembling import (
    Makings,
    Split,
    assemble,
    client_of,
    dtype_of,
    evaluating_machine,
    place_in,
)
from distbelief.runtime.common_roles import layout_of
from distbelief.runtime.counting import with_counts
from distbelief.runtime.course import TrainingCourse
from distbelief.runtime.dataflow import dataflow
from distbelief.runtime.leading import Leader
from distbelief.runtime.machine_names import EVALUATORS, Place
from distbelief.runtime.portions import PortionReader
from distbelief.runtime.task import BuildContext


def build_machine(
    name: str, *, config: DownpourSettings, context: BuildContext, split: Split
) -> Role:
    """Return the role of this name: "replica-R.M", "evaluator" or "evaluator.M".

    Raises:
        JobError: the data cannot be built, or the plan is not for this job.
        LocalProtocolError: no such machine.
    """
    place = place_in(name, context=context, split=split)
    if place.group == EVALUATORS:
        return evaluating_machine(place, context=context, split=split)
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
        {spec.name for spec in layout_of(context).tensors},
    )
    dtype = dtype_of(context)
    client = client_of(flow, context, pushes=True)
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
            training=True,
            micro_batches=split.plan.micro_batches,
            seed=(config.seed, place.replica),
        ),
    )


def _of_replica(config: DownpourSettings, context: BuildContext) -> DownpourConfig:
    # The supervisor hears at most 200 reports a second of all replicas together.
    seconds = max(0.05, 0.005 * context.n_replicas)
    return replace(config.of_replica(), progress_seconds=seconds)
