"""The roles that every algorithm with a parameter server has, and their names."""

from collections.abc import Callable
from typing import Literal

from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.client.client import ClientConfig, ParameterClient
from distbelief.parameter_server.copies.copies import copies_of_all, copy_names, shard_of
from distbelief.parameter_server.layout.initial import shard_values, shard_values_from
from distbelief.parameter_server.layout.layout import Layout
from distbelief.parameter_server.rules.update_rules import UpdateRule
from distbelief.parameter_server.shard import ParameterServerShard, ShardConfig
from distbelief.roles import Address, Role
from distbelief.runtime.evaluator import Evaluator, EvaluatorConfig
from distbelief.runtime.machine.machine_names import EVALUATORS, member_names
from distbelief.runtime.task import trial
from distbelief.runtime.task.local_model import LocalModel
from distbelief.runtime.task.samples import sample_of
from distbelief.runtime.task.task import (
    BuildContext,
    RosterEntry,
    build_loss,
    build_metric,
    build_model,
    metric_name,
)
from distbelief.runtime.task.weights import reader
from distbelief.vectors import Vector


def shard_entries(n_shards: int, shard_copies: int = 1) -> list[RosterEntry]:
    """Return the shards' part of a roster."""
    return [
        RosterEntry(name=name, kind="shard")
        for k in range(n_shards)
        for name in copy_names(k, shard_copies)
    ]


def replica_entries(n_replicas: int, n_machines: int | None) -> list[RosterEntry]:
    """Return the replicas' part; `n_machines`: of each, by whose plan it is split."""
    groups = [f"replica-{r}" for r in range(n_replicas)]
    if n_machines is None:
        return [RosterEntry(name=group, kind="replica") for group in groups]
    return [m for g in groups for m in _group(g, "replica", n_machines)]


def evaluator_entries(n_machines: int | None) -> list[RosterEntry]:
    """Return the evaluator's part, likewise."""
    return _group(EVALUATORS, "evaluator", 1 if n_machines is None else n_machines)


def _group(group: str, kind: Literal["replica", "evaluator"], n_machines: int) -> list[RosterEntry]:
    """Return the machines that compute one model; the first leads them."""
    leader, *others = member_names(group, n_machines)
    machines = [RosterEntry(name=name, kind="machine") for name in others]
    return [RosterEntry(name=leader, kind=kind), *machines]


def shard_names(context: BuildContext) -> set[Address]:
    """Return the names of all copies of all shards."""
    shards, second_copies = copies_of_all(context.n_shards, context.shard_copies)
    return {*shards, *second_copies}


def build_shard(name: str, *, rule: UpdateRule, context: BuildContext) -> Role:
    """Return the shard of this name."""
    layout = layout_of(context)
    index = int(shard_of(name).removeprefix("shard-"))
    return ParameterServerShard(
        ShardConfig(
            index=index,
            layout=layout,
            rule=rule,
            name=name,
            waits_for_lead=context.shard_copies > 1,
        ),
        memory=context.memory,
        initialise=_initialise(index, layout, context),
    )


def _initialise(index: int, layout: Layout, context: BuildContext) -> Callable[[], Vector]:
    path, initials, seed = (context.initial_file, context.initials, context.task.model.seed)

    def initialise() -> Vector:
        if path is not None:
            return shard_values_from(layout, index, reader(path, layout))
        return shard_values(layout, index, initials, seed=seed)

    return initialise


def build_evaluator(context: BuildContext) -> Role:
    """Return the evaluator.

    Raises:
        JobError: there is nothing to evaluate on.
    """
    task = context.task
    dataset = context.test_data()
    sample = sample_of(dataset, table="data.test")
    return Evaluator(
        EvaluatorConfig(subset=context.evaluation_subset, seed=context.seed),
        client=build_client(context, pushes=False),
        model=LocalModel(build_model(task.model)),
        dataset=dataset,
        loss=build_loss(task),
        metric=build_metric(task, sample),
        names=trial.Names(
            model=task.model.factory,
            loss=task.loss,
            data="data.test",
            metric=metric_name(task, sample),
        ),
    )


def build_client(context: BuildContext, *, pushes: bool) -> ParameterClient:
    """Return a client of all shards."""
    shards, second_copies = copies_of_all(context.n_shards, context.shard_copies)
    return ParameterClient(
        ClientConfig(pushes=pushes),
        layout=layout_of(context),
        shards=shards,
        memory=context.memory,
        second_copies=second_copies,
    )


def layout_of(context: BuildContext) -> Layout:
    """Return the layout of the parameters on the shards.

    Raises:
        LocalProtocolError: there is none, or it is of another number of shards.
    """
    if context.layout is None:
        raise LocalProtocolError("these roles need the layout of the parameters")
    if context.layout.n_shards != context.n_shards:
        raise LocalProtocolError(
            f"a layout of {context.layout.n_shards} shards in a job of {context.n_shards}"
        )
    return context.layout
