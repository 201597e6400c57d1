"""Downpour SGD as a job knows it: the [algorithm] table, its roster, its roles.

Downpour SGD (Dean et al. 2012, section 4.1): every model replica trains on its own part
of the data, and fetches from and pushes to the shards of a parameter server without
waiting for the others.
"""

import math
from dataclasses import replace
from typing import Final, final

import msgspec

from distbelief.data.subset import DataShard
from distbelief.downpour.config import DownpourConfig
from distbelief.downpour.replica import ModelReplica
from distbelief.downpour.steps import Trainer
from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.update_rules import UpdateRule
from distbelief.roles import Role
from distbelief.runtime import trial
from distbelief.runtime.assembling import Split
from distbelief.runtime.common_roles import (
    build_client,
    build_evaluator,
    build_shard,
    evaluator_entries,
    replica_entries,
    shard_entries,
    shard_names,
)
from distbelief.runtime.local_model import LocalModel
from distbelief.runtime.machine_names import place_of
from distbelief.runtime.task import (
    BuildContext,
    RosterEntry,
    build_loss,
    build_model,
)


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
        n_machines: int | None = None,
    ) -> list[RosterEntry]:
        """Return the roles of a job: shards first, since all others need them.

        Args:
            config: The [algorithm] table.
            n_replicas: Model replicas, each with its own part of the data.
            n_shards: Parameter server shards.
            shard_copies: Processes that keep each shard.
            evaluates: Whether there is a test set, and so an evaluator.
            n_machines: Machines of each replica and of the evaluator, by whose plan
                they are split; None if they are not.
        """
        del config  # the paper's roles do not depend on it
        return [
            *shard_entries(n_shards, shard_copies),
            *replica_entries(n_replicas, n_machines),
            *(evaluator_entries(n_machines) if evaluates else []),
        ]

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
        if context.plan is not None and place_of(name) is not None:
            return _machine(name, config=config, context=context)
        match kind:
            case "shard" if name in shard_names(context):
                return build_shard(name, rule=config.rule, context=context)
            case "replica" if _within(index, context.n_replicas):
                return _replica(int(index), config=config, context=context)
            case "evaluator" if not index:
                return build_evaluator(context)
            case _:
                raise LocalProtocolError(
                    f"no role {name!r} in a job of {context.n_shards} shards and "
                    f"{context.n_replicas} replicas"
                )


DOWNPOUR: Final = DownpourAlgorithm()


def _replica(index: int, *, config: DownpourSettings, context: BuildContext) -> Role:
    task = context.task
    dataset = context.train_data()
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
        client=build_client(context, pushes=True),
        trainer=trainer,
        data_shard=data_shard,
        await_begin=context.await_begin,
    )


def _machine(name: str, *, config: DownpourSettings, context: BuildContext) -> Role:
    """Return one machine of a replica, or of the evaluator, by the job's plan."""
    # Imported here, for it needs what this module defines.
    from distbelief.downpour.machines import build_machine  # noqa: PLC0415

    split = Split.of(name, context)
    return build_machine(name, config=config, context=context, split=split)


def _within(index: str, count: int) -> bool:
    return index.isdecimal() and int(index) < count
