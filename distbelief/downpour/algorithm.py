"""Downpour SGD as a job knows it: the [algorithm] table, its roster, its roles.

Downpour SGD (Dean et al. 2012, section 4.1): every model replica trains on its own part
of the data, and fetches from and pushes to the shards of a parameter server without
waiting for the others.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, final

import msgspec

from distbelief.data.subset import DataShard
from distbelief.downpour.config import DownpourConfig
from distbelief.downpour.replica import ModelReplica
from distbelief.downpour.steps import Trainer
from distbelief.errors import JobError, LocalProtocolError
from distbelief.parameter_server.client import ClientConfig, ParameterClient
from distbelief.parameter_server.copies import copies_of_all, copy_names, shard_of
from distbelief.parameter_server.initial import shard_values, shard_values_from
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.shard import ParameterServerShard, ShardConfig
from distbelief.parameter_server.update_rules import UpdateRule
from distbelief.roles import Address, Role
from distbelief.runtime import trial
from distbelief.runtime.evaluator import Evaluator, EvaluatorConfig
from distbelief.runtime.local_model import LocalModel
from distbelief.runtime.task import (
    BuildContext,
    RosterEntry,
    build_dataset,
    build_loss,
    build_metric,
    build_model,
    metric_name,
)
from distbelief.runtime.weights import reader
from distbelief.vectors import Vector


class DownpourSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Table [algorithm] of a job with name = "downpour".

    Attributes:
        loss: torch's name of it, or an import path (see `runtime.losses`).
        batch_size: Samples of one step of one replica.
        rule: How the shards apply a push, for example
            { name = "adagrad", learning_rate = 0.02 }.
        n_fetch: Steps between fetches (in all experiments of the paper: 1).
        n_push: Steps between pushes (in all experiments of the paper: 1).
        blocking: Fetch only once every push is applied: with one replica, plain SGD.
        warm_start_steps: Steps of replica 0 alone, before the supervisor releases the
            others.
        local_learning_rate: Of a replica's own steps between fetches, before the
            rule's schedule. By default the rule's; to be stated if n_fetch > 1 and the
            rule is adaptive.
        clip_norm: Upper bound of each mini-batch gradient's 2-norm; None: no bound.
        max_steps: Steps after which each replica ends by itself; None: told to.
        non_finite_limit: Gradients in a row with NaN or Inf, each skipped and named,
            before a replica gives up.
        seed: Of the order of samples and of the model's own randomness (dropout).
    """

    loss: str
    batch_size: int
    rule: UpdateRule
    n_fetch: int = 1
    n_push: int = 1
    blocking: bool = False
    warm_start_steps: int = 0
    local_learning_rate: float | None = None
    clip_norm: float | None = None
    max_steps: int | None = None
    non_finite_limit: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be run, by name and value.

        Raises:
            ValueError: which msgspec turns into an error that names the table.
        """
        if self.warm_start_steps < 0:
            raise ValueError(
                f"warm_start_steps is {self.warm_start_steps}; use 0 or more"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; use 0 or more")
        if self.local_learning_rate is not None and not (
            0.0 < self.local_learning_rate < math.inf
        ):
            raise ValueError(
                f"local_learning_rate is {self.local_learning_rate}; use a number "
                "above 0, or leave it out"
            )
        if self.rule.adaptive and self.n_fetch > 1 and self.local_learning_rate is None:
            raise ValueError(
                f"n_fetch is {self.n_fetch} and rule {self.rule.name!r} adapts its "
                "rate on the shards; between fetches a replica takes plain SGD steps, "
                "whose rate only you can choose: give local_learning_rate, or use "
                "n_fetch = 1"
            )
        self.of_replica()  # checks the rest

    def of_replica(self) -> DownpourConfig:
        """Return what a replica needs to know of it."""
        return DownpourConfig(
            batch_size=self.batch_size,
            n_fetch=self.n_fetch,
            n_push=self.n_push,
            blocking=self.blocking,
            learning_rate=self.rule.learning_rate,
            local_learning_rate=self.local_learning_rate,
            schedule=self.rule.schedule,
            clip_norm=self.clip_norm,
            max_steps=self.max_steps,
            non_finite_limit=self.non_finite_limit,
            seed=self.seed,
        )


@final
class DownpourAlgorithm:
    """What the entry point names: config struct, roster, and how to build each role.

    Attributes:
        name: As in the job file.
        config: Struct of the [algorithm] table, less its `name`.
        fields: Figures it reports besides samples, loss and metric.
    """

    name: Final = "downpour"
    config: Final = DownpourSettings
    fields: Final = ("staleness_mean", "staleness_p95", "staleness_max", "pushes_lost")

    def roster(
        self,
        config: DownpourSettings,
        *,
        n_replicas: int,
        n_shards: int,
        shard_copies: int = 1,
        evaluates: bool = True,
    ) -> list[RosterEntry]:
        """Return the roles of a job: shards first, since all others need them.

        Args:
            config: The [algorithm] table.
            n_replicas: Model replicas, each with its own part of the data.
            n_shards: Parameter server shards.
            shard_copies: Processes that keep each shard.
            evaluates: Whether there is a test set, and so an evaluator.
        """
        del config  # the paper's roles do not depend on it
        shards = [
            RosterEntry(name=name, kind="shard")
            for k in range(n_shards)
            for name in copy_names(k, shard_copies)
        ]
        replicas = [
            RosterEntry(name=f"replica-{r}", kind="replica") for r in range(n_replicas)
        ]
        evaluator = [RosterEntry(name="evaluator", kind="evaluator")]
        return shards + replicas + (evaluator if evaluates else [])

    def build(
        self, name: str, *, config: DownpourSettings, context: BuildContext
    ) -> Role:
        """Return the role of this name, in the process that is to run it.

        Builds the model and the data where the role needs them, which may take long;
        starts nothing.

        Raises:
            JobError: the model or the data cannot be built.
            LocalProtocolError: no such role in this roster.
        """
        kind, _, index = name.partition("-")
        match kind:
            case "shard" if name in _shards(context):
                return _shard(name, config=config, context=context)
            case "replica" if _within(index, context.n_replicas):
                return _replica(int(index), config=config, context=context)
            case "evaluator" if not index:
                return _evaluator(context)
            case _:
                raise LocalProtocolError(
                    f"no role {name!r} in a job of {context.n_shards} shards and "
                    f"{context.n_replicas} replicas"
                )


DOWNPOUR: Final = DownpourAlgorithm()


def _shard(name: str, *, config: DownpourSettings, context: BuildContext) -> Role:
    layout = _layout(context)
    index = int(shard_of(name).removeprefix("shard-"))
    return ParameterServerShard(
        ShardConfig(
            index=index,
            layout=layout,
            rule=config.rule,
            name=name,
            waits_for_lead=context.shard_copies > 1,
        ),
        memory=context.memory,
        initialise=_initialise(index, layout, context),
    )


def _initialise(
    index: int, layout: Layout, context: BuildContext
) -> Callable[[], Vector]:
    path, initials, seed = (
        context.initial_file,
        context.initials,
        context.task.model.seed,
    )

    def initialise() -> Vector:
        if path is not None:
            return shard_values_from(layout, index, reader(path, layout))
        return shard_values(layout, index, initials, seed=seed)

    return initialise


def _replica(index: int, *, config: DownpourSettings, context: BuildContext) -> Role:
    task = context.task
    dataset = build_dataset(task.train)
    data_shard = DataShard(
        len(dataset),
        replica_index=index,
        n_replicas=context.n_replicas,
        seed=config.seed,
    )
    module = build_model(task.model)
    module.train()
    # A job overshoots its end by what is not reported yet; the supervisor hears at most
    # 200 reports a second of all replicas together.
    of_replica = replace(
        config.of_replica(), progress_seconds=max(0.05, 0.005 * context.n_replicas)
    )
    trainer = Trainer(
        LocalModel(module),
        dataset,
        loss=build_loss(task),
        names=trial.Names(model=task.model.factory, loss=task.loss, data="data.train"),
        clip_norm=config.clip_norm,
        always_check=of_replica.checks_every_gradient,
        seed=(config.seed, index),
    )
    return ModelReplica(
        of_replica,
        client=_client(context, pushes=True),
        trainer=trainer,
        data_shard=data_shard,
        await_begin=context.await_begin,
    )


def _evaluator(context: BuildContext) -> Role:
    task = context.task
    if task.test is None:
        raise JobError(
            "an evaluator needs held-out data: give [data.test], or do without it"
        )
    return Evaluator(
        EvaluatorConfig(subset=context.evaluation_subset, seed=context.seed),
        client=_client(context, pushes=False),
        model=LocalModel(build_model(task.model)),
        dataset=build_dataset(task.test, table="data.test"),
        loss=build_loss(task),
        metric=build_metric(task),
        names=trial.Names(
            model=task.model.factory,
            loss=task.loss,
            data="data.test",
            metric=metric_name(task),
        ),
    )


def _client(context: BuildContext, *, pushes: bool) -> ParameterClient:
    shards, second_copies = copies_of_all(context.n_shards, context.shard_copies)
    return ParameterClient(
        ClientConfig(pushes=pushes),
        layout=_layout(context),
        shards=shards,
        memory=context.memory,
        second_copies=second_copies,
    )


def _shards(context: BuildContext) -> set[Address]:
    """Return the names of all copies of all shards."""
    shards, second_copies = copies_of_all(context.n_shards, context.shard_copies)
    return {*shards, *second_copies}


def _layout(context: BuildContext) -> Layout:
    if context.layout is None:
        raise LocalProtocolError("Downpour's roles need the layout of the parameters")
    if context.layout.n_shards != context.n_shards:
        raise LocalProtocolError(
            f"a layout of {context.layout.n_shards} shards in a job of "
            f"{context.n_shards}"
        )
    return context.layout


def _within(index: str, count: int) -> bool:
    return index.isdecimal() and int(index) < count
