"""Downpour SGD as a plug-in of the job system: its [algorithm] table, roster and roles.

Dean et al. 2012, section 4.1: every model replica trains on its own part of the data, and
fetches from and pushes to the shards of a parameter server without waiting for the others.
"""

from typing import Final, final

from distbelief.config.job import ClusterTable
from distbelief.errors import JobError, LocalProtocolError
from distbelief.roles.role import Role
from distbelief.task.task import BuildContext, RosterEntry
from distbelief.worker import build as roles
from distbelief.worker.config import DownpourSettings
from distbelief.worker.group import group_rank_of
from distbelief.worker.local_steps import OF_WHOLE_TENSORS


@final
class DownpourAlgorithm:
    """The object of the entry point."""

    name: Final = "downpour"  # as in the job file
    config: Final = DownpourSettings  # struct of the [algorithm] table, without its `name`
    # Metrics that it reports besides samples, loss and metric.
    fields: Final = ("staleness_mean", "staleness_p95", "staleness_max", "pushes_lost")

    def check_cluster(self, cluster: ClusterTable, config: DownpourSettings) -> None:
        """Raise JobError if the exchange does not fit the number of replicas, or their ranks."""
        inner = config.inner
        try:
            config.exchange.refuse(config.rule, inner=inner is not None, workers=cluster.replicas)
        except ValueError as error:
            raise JobError(f"[algorithm] {error}") from None
        if inner is not None and inner["name"] in OF_WHOLE_TENSORS and cluster.is_split:
            raise JobError(
                f"[algorithm] inner.name is {inner['name']!r}, whose steps depend on whole "
                "tensors, and [cluster] partitions or plan splits them: use another optimizer"
            )

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
        """Return the roles of a job: shards first, since all others need them."""
        del config  # the paper's roles do not depend on it
        return [
            *roles.shard_entries(n_shards, shard_copies),
            *roles.replica_entries(n_replicas, n_machines),
            *(roles.evaluator_entries(n_machines) if evaluates else []),
        ]

    def build(self, name: str, *, config: DownpourSettings, context: BuildContext) -> Role:
        """Return the role of this name, in its own process; may take long, starts nothing.

        JobError if the model or the data cannot be built; LocalProtocolError if the roster has no
        such role.
        """
        kind, _, index = name.partition("-")
        if context.plan is not None and group_rank_of(name) is not None:
            split = roles.Split.of(context)
            return roles.build_rank(name, config=config, context=context, split=split)
        match kind:
            case "shard" if name in roles.shard_names(context):
                return roles.build_shard(
                    name, rule=config.rule, policy=config.exchange, context=context
                )
            case "replica" if _within(index, context.n_replicas):
                return roles.build_replica(int(index), config=config, context=context)
            case "evaluator" if not index:
                return roles.build_evaluator(context)
            case _:
                raise LocalProtocolError(
                    f"no role {name!r} in a job of {context.n_shards} shards and "
                    f"{context.n_replicas} replicas"
                )


DOWNPOUR: Final = DownpourAlgorithm()


def _within(index: str, count: int) -> bool:
    return index.isdecimal() and int(index) < count
