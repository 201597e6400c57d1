"""Sandblaster as an algorithm of a job: its [algorithm] table and roles.

A coordinator runs a batch method on the shards by commands, and assigns chunks of the batch
to the replicas (Dean et al. 2012, section 4.2).
"""

from collections.abc import Mapping
from functools import partial
from typing import Final, final

from distbelief.config.algorithms import Facts, Verdict
from distbelief.config.job import ClusterTable
from distbelief.core.errors import JobError
from distbelief.parameter_server.rules import SGD
from distbelief.protocol.role import Role
from distbelief.task.task import BuildContext
from distbelief.worker import build as wb
from sandblaster.build import (
    build_coordinator,
    build_rank,
    build_replica,
    check_model,
    shard_bounds,
)
from sandblaster.chunks import COORDINATOR
from sandblaster.coordinator.workers import SHARES
from sandblaster.optimizers.termination import Reason
from sandblaster.settings import BOUNDS, PROGRAM, SandblasterSettings


_N_VECTORS: Final = {
    "l-bfgs": (10, 1),
    "owl-qn": (15, 1),
    "conjugate-gradient": (9, 0),
    "gradient-descent": (9, 0),
    PROGRAM: (4, 0),
}
"""By method: vectors besides the history, with those that savepoints keep, and pairs per step of
the history. Counted in runs."""

_N_SUMS: Final = 6
"""Chunks that wait for their commit, and nodes of their tree. More where chunks are many."""

_N_BOUNDED: Final = 9
"""More with bounds."""

_NO_RULE: Final = SGD(learning_rate=1.0)
"""Rule of shards without a warm start: it is never applied, since only sums are pushed."""


@final
class SandblasterAlgorithm:
    """The object of the entry point: settings, and how to build each role."""

    coordinator: Final = COORDINATOR
    config: Final = SandblasterSettings  # of the [algorithm] table, without its `name`
    fields: Final = (  # metrics it reports besides samples, loss and metric
        "iteration",
        "evaluations",
        "gradient_norm",
        "step_length",
        "updates",
        "wasted",
        "backups",
        *(f"{name}_share" for name in SHARES),
    )

    def facts(self, config: SandblasterSettings) -> Facts:
        return Facts(
            loss=config.loss,
            batch_size=config.portion,
            seed=config.seed,
            n_vectors=n_vectors_of(config),
            warm_start_rule=None if config.warm_start is None else config.warm_start.rule,
            warm_start_samples=0 if config.warm_start is None else config.warm_start.samples,
            ends_by_itself=True,  # a method has its own bounds
            bounds=BOUNDS if config.method == PROGRAM else (),
            parts=None if config.method == PROGRAM else partial(_n_chunks, config),
            check=partial(check_model, config),
            verdict=verdict,
        )

    def settled(self, config: SandblasterSettings, cluster: ClusterTable) -> SandblasterSettings:
        """Return the config; JobError if this is no cluster for it."""
        if cluster.is_split and config.warm_start is not None:
            raise JobError(
                "[algorithm.warm_start] needs replicas of one process: remove it or [cluster] "
                'partitions and plan; or train with algorithm "downpour" before, and set '
                "[model] initial to its model.safetensors"
            )
        if config.method == PROGRAM and (cluster.is_split or cluster.is_on_device):
            raise JobError(
                f"[algorithm] method {PROGRAM!r} has workers of one process: remove [cluster] "
                "partitions, plan and device"
            )
        return config

    def build(self, name: str, *, config: SandblasterSettings, context: BuildContext) -> Role:
        """Return the role of this name, in the process that runs it."""
        rule = _NO_RULE if config.warm_start is None else config.warm_start.rule
        return wb.build_role(
            name,
            context=context,
            shard=lambda: wb.build_shard(
                name, rule=rule, context=context, constants=shard_bounds(config, name, context)
            ),
            replica=lambda index: build_replica(config, index=index, context=context),
            rank=lambda split: build_rank(name, config=config, context=context, split=split),
            coordinator=lambda: build_coordinator(config, context=context),
        )


def _n_chunks(config: SandblasterSettings, n_examples: int, n_replicas: int) -> int:
    sizes = config.chunk_sizes(n_examples=n_examples, n_replicas=n_replicas)
    return sizes.n_chunks(n_examples)


def n_vectors_of(config: SandblasterSettings) -> int:
    """Return about how many vectors a shard holds: named ones, savepoints' and sums of chunks."""
    n_kept, n_pairs = _N_VECTORS[config.method]
    n_bounds = 0 if config.bounds is None else _N_BOUNDED
    return n_kept + 2 * n_pairs * config.history + _N_SUMS + n_bounds


SANDBLASTER: Final = SandblasterAlgorithm()


def verdict(counters: Mapping[str, float]) -> Verdict:
    """Return the outcome of a job, by the last counters of the coordinator."""
    reason = reason_of(counters)
    # A search that never found a better point has failed. After some iterations it means that
    # single precision allows no more.
    is_lost = reason is Reason.LINE_SEARCH_FAILED and counters.get("iteration", 0.0) < 1
    failed = is_lost or reason in {Reason.NOT_FINITE, Reason.NO_FINITE_TRIAL, Reason.ROSE}
    return Verdict(reason=reason.sentence, failed=failed)


def reason_of(counters: Mapping[str, float]) -> Reason:
    """Return why the coordinator with these last counters ended."""
    index = counters.get("reason", -1.0)
    reasons = list(Reason)
    return reasons[int(index)] if 0 <= index < len(reasons) else Reason.STOPPED
