"""The machines of model-parallel replicas of Downpour, for the process of each."""

from dataclasses import replace

from distbelief.data.subset import DataShard
from distbelief.downpour.config import DownpourConfig
from distbelief.downpour.part_steps import PartTrainer
from distbelief.downpour.settings import DownpourSettings
from distbelief.downpour.training import Training
from distbelief.roles import Role
from distbelief.runtime.assembling import Makings, Split, assemble, evaluating_machine, place_in
from distbelief.runtime.machine.course import TrainingCourse
from distbelief.runtime.machine.leading import Leader
from distbelief.runtime.machine.machine_names import EVALUATORS, Place
from distbelief.runtime.replica_parts import replica_parts
from distbelief.runtime.task.task import BuildContext


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
    return _training_machine(place, config=config, context=context, split=split)


def _training_machine(
    place: Place, *, config: DownpourSettings, context: BuildContext, split: Split
) -> Role:
    assert place.replica is not None
    batch = "batch_size", config.batch_size
    parts = replica_parts(place, context=context, split=split, batch=batch)
    flow = parts.flow
    data_shard = DataShard(
        len(parts.dataset),
        replica_index=place.replica,
        n_replicas=context.n_replicas,
        seed=config.seed,
    )
    course = TrainingCourse(data_shard, batch_size=config.batch_size)
    of_replica = _of_replica(config, context)
    n_machines = split.plan.cluster.n_machines
    duty = Training(
        of_replica,
        client=parts.client,
        trainer=PartTrainer(
            of_replica,
            sizes=[region.n_elements for _, region in flow.items],
            trained=flow.trained,
            counts=flow.counts,
            dtype=parts.dtype,
            n_machines=n_machines,
        ),
        await_begin=context.await_begin,
    )
    leader = Leader(
        n_machines, plan=split.fingerprint, steps_max=of_replica.max_steps, n_steps=course.n_steps
    )
    if not context.await_begin:
        leader.begin(0.0)
    return assemble(
        place,
        split,
        Makings(
            flow=flow,
            dtype=parts.dtype,
            client=parts.client,
            course=course,
            reader=parts.reader,
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
