"""Builds the coordinator and the replicas of a job, in the processes that run them."""

import json
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from distbelief.data.subset import DataShard
from distbelief.downpour.replica import ModelReplica
from distbelief.downpour.settings import DownpourSettings
from distbelief.downpour.steps import Trainer
from distbelief.errors import JobError
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.copies.copies import copies_of_all
from distbelief.roles import Role
from distbelief.runtime.common_roles import build_client, layout_of
from distbelief.runtime.task import trial
from distbelief.runtime.task.local_model import LocalModel
from distbelief.runtime.task.task import BuildContext, build_loss, build_model
from sandblaster.config import SandblasterSettings
from sandblaster.coordination.coordinator import Coordinator
from sandblaster.coordination.coordinator_config import CoordinatorConfig
from sandblaster.methods.any_method import AnyMethod
from sandblaster.replicas.replica import ReplicaConfig, SandblasterReplica
from sandblaster.replicas.samples import Samples
from sandblaster.replicas.sums import summed
from sandblaster.replicas.warm_start import WarmStartReplica


WINDOW_SETS_MIN: Final = 64
"""Sets that may be dealt beyond the oldest unfinished one: everybody has one to compute
and one to go on with, however many replicas there are."""


_FREE: Final = frozenset(
    {
        "gradient_tolerance",
        "value_tolerance",
        "value_iterations",
        "n_iterations_max",
        "n_evaluations_max",
        "rounding",
        "n_history",
        "sufficient_decrease",
        "curvature",
    }
)
"""Settings of methods that a run may change when it goes on."""


def build_coordinator(config: SandblasterSettings, *, context: BuildContext) -> Role:
    """Return the coordinator.

    Raises:
        JobError: a batch would be larger than the data.
    """
    n_examples = _n_examples(context)
    if config.batch_size is not None and config.batch_size > n_examples:
        raise JobError(
            f"[algorithm] batch_size = {config.batch_size}, but [data.train] has "
            f"{n_examples} samples: use fewer, or leave batch_size out, for all of them"
        )
    shards, _ = copies_of_all(context.n_shards, 1)
    rounding = float(np.finfo(layout_of(context).dtype).eps) / 2.0
    return Coordinator(
        CoordinatorConfig(
            cutting=config.cutting(n_examples=n_examples, n_replicas=context.n_replicas),
            window_sets=max(WINDOW_SETS_MIN, 2 * context.n_replicas),
            backups=config.backups,
            n_warm=0 if config.warm_start is None else context.n_replicas,
            await_begin=context.await_begin,
            goal=goal_of(config.chosen(), loss=context.task.loss),
        ),
        method=msgspec.structs.replace(config.chosen(), rounding=rounding),
        shards=shards,
        n_examples=n_examples,
    )


def goal_of(method: AnyMethod, *, loss: str) -> str:
    """Return what must be the same for a method to go on from what it had written down.

    Tolerances and bounds may change, and how much of a history is remembered.
    """
    fields: dict[str, object] = msgspec.to_builtins(method)
    kept = {name: value for name, value in fields.items() if name not in _FREE}
    return json.dumps({"loss": loss, **kept}, sort_keys=True)


def build_replica(config: SandblasterSettings, *, index: int, context: BuildContext) -> Role:
    """Return a replica: all are alike, but for their part in a warm start."""
    task = context.task
    dataset = context.train_data()
    module = build_model(task.model)
    module.train()
    model = LocalModel(module)
    names = trial.Names(model=task.model.factory, loss=task.loss, data="data.train")
    trainer = Trainer(
        model,
        dataset,
        loss=summed(build_loss(task)),
        names=names,
        clip_norm=None,
        always_check=False,  # sums are looked at instead, once for each set
        seed=(config.seed, 0),
    )
    n_examples = len(dataset)
    client = build_client(context, pushes=True)
    replica = SandblasterReplica(
        ReplicaConfig(cutting=config.cutting(n_examples=n_examples, n_replicas=context.n_replicas)),
        client=client,
        trainer=trainer,
        samples=Samples(n_examples, seed=config.order_seed),
        await_begin=context.await_begin,
    )
    if config.warm_start is None:
        return replica
    settings = config.warm_start.downpour(
        loss=task.loss, seed=config.seed, n_replicas=context.n_replicas
    )
    first = build_first_part(settings, index=index, client=client, model=model, context=context)
    return WarmStartReplica(downpour=first, sandblaster=replica, await_begin=context.await_begin)


def build_first_part(
    settings: DownpourSettings,
    *,
    index: int,
    client: ParameterClient,
    model: LocalModel,
    context: BuildContext,
) -> ModelReplica:
    """Return what a replica is in a warm start: one of Downpour, of these things."""
    task, dataset = context.task, context.train_data()
    names = trial.Names(model=task.model.factory, loss=task.loss, data="data.train")
    config = settings.of_replica()
    assert config.max_steps is not None
    # Of all its lives: what one that is over has done need not be done again.
    n_samples = config.max_steps * config.batch_size
    config = replace(config, max_steps=None, max_samples=n_samples)
    trainer = Trainer(
        model,
        dataset,
        loss=build_loss(task),
        names=names,
        clip_norm=config.clip_norm,
        always_check=config.checks_every_gradient,
        seed=(config.seed, index),
    )
    data_shard = DataShard(
        len(dataset), replica_index=index, n_replicas=context.n_replicas, seed=config.seed
    )
    return ModelReplica(
        config,
        client=client,
        trainer=trainer,
        data_shard=data_shard,
        await_begin=True,  # of the coordinator
    )


def _n_examples(context: BuildContext) -> int:
    if context.n_train is not None:
        return context.n_train
    return len(context.train_data())
