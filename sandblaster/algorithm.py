"""Sandblaster as an algorithm of a job: its [algorithm] table, roster and roles.

A coordinator runs a batch method on the shards by commands, and assigns chunks of the batch
to the replicas (Dean et al. 2012, section 4.2).
"""

from collections.abc import Mapping
from typing import Final, final

from distbelief.config.job import ClusterTable, Verdict
from distbelief.errors import JobError, LocalProtocolError
from distbelief.parameter_server.optimizers import SGD
from distbelief.roles.role import Role
from distbelief.task.task import BuildContext, RosterEntry
from distbelief.worker import build as wb
from distbelief.worker.group import group_rank_of
from sandblaster.build import build_coordinator, build_rank, build_replica
from sandblaster.chunks import COORDINATOR
from sandblaster.config import SandblasterSettings
from sandblaster.coordinator.workers import SHARES
from sandblaster.optimizers.termination import Reason


_NO_RULE: Final = SGD(learning_rate=1.0)
"""Rule of shards without a warm start: it is never applied, since only sums are pushed."""


@final
class SandblasterAlgorithm:
    """The object of the entry point: settings, roster, and how to build each role."""

    name: Final = "sandblaster"
    config: Final = SandblasterSettings  # of the [algorithm] table, without its `name`
    fields: Final = (  # metrics it reports besides samples, loss and metric
        "iteration",
        "evaluations",
        "gradient_norm",
        "step_length",
        "wasted",
        "backups",
        *(f"{name}_share" for name in SHARES),
    )
    ends_by_itself: Final = True  # a method has its own bounds

    def check_cluster(self, cluster: ClusterTable, config: SandblasterSettings) -> None:
        """Refuse a [cluster] table on which it cannot run."""
        if cluster.shard_copies > 1:
            raise JobError(
                f"[cluster] shard_copies = {cluster.shard_copies}: algorithm "
                '"sandblaster" cannot replicate its vectors: write shard_copies = 1'
            )
        if cluster.is_split and config.warm_start is not None:
            raise JobError(
                "[algorithm.warm_start] needs replicas of one process: remove it or [cluster] "
                'partitions, plan and device; or train with algorithm "downpour" before, and set '
                "[model] initial to its model.safetensors"
            )

    def roster(
        self,
        config: SandblasterSettings,
        *,
        n_replicas: int,
        n_shards: int,
        shard_copies: int = 1,
        evaluates: bool = True,
        n_machines: int | None = None,
    ) -> list[RosterEntry]:
        """Return the roles of a job: shards first, since all others need them.

        Each replica and the evaluator have `n_machines` ranks; None: not model-parallel.
        """
        del config  # all methods have the same
        return [
            *wb.shard_entries(n_shards, shard_copies),
            RosterEntry(name=COORDINATOR, kind="coordinator"),
            *wb.replica_entries(n_replicas, n_machines),
            *(wb.evaluator_entries(n_machines) if evaluates else []),
        ]

    def build(self, name: str, *, config: SandblasterSettings, context: BuildContext) -> Role:
        """Return the role of this name, in the process that runs it."""
        if context.plan is not None and group_rank_of(name) is not None:
            split = wb.Split.of(context)
            return build_rank(name, config=config, context=context, split=split)
        kind, _, index = name.partition("-")
        match kind:
            case "shard" if name in wb.shard_names(context):
                warm_start = config.warm_start
                rule = _NO_RULE if warm_start is None else warm_start.rule
                return wb.build_shard(name, rule=rule, context=context)
            case "replica" if index.isdecimal() and int(index) < context.n_replicas:
                return build_replica(config, index=int(index), context=context)
            case "coordinator" if not index:
                return build_coordinator(config, context=context)
            case "evaluator" if not index:
                return wb.build_evaluator(context)
            case _:
                raise LocalProtocolError(
                    f"no role {name!r} in a job of {context.n_shards} shards and "
                    f"{context.n_replicas} replicas"
                )

    def verdict(self, counters: Mapping[str, float]) -> Verdict:
        """Return the outcome of a job, by the last counters of the coordinator."""
        reason = reason_of(counters)
        # A search that never found a better point has failed. After some iterations it means
        # that single precision allows no more.
        is_lost = reason is Reason.LINE_SEARCH_FAILED and counters.get("iteration", 0.0) < 1
        failed = is_lost or reason in {Reason.NOT_FINITE, Reason.NO_FINITE_TRIAL}
        return Verdict(reason=reason.sentence, failed=failed)


SANDBLASTER: Final = SandblasterAlgorithm()


def reason_of(counters: Mapping[str, float]) -> Reason:
    """Return why the coordinator with these last counters ended."""
    index = counters.get("reason", -1.0)
    reasons = list(Reason)
    return reasons[int(index)] if 0 <= index < len(reasons) else Reason.STOPPED
