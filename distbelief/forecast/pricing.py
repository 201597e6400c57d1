"""Priced jobs: no gradient of the net is computed, times and bytes are as if it were.

The job's roles run on a small stand-in (`stand_in`), and what they do and send is
multiplied by how much larger the job's own net is (`simulation.scales`). So thousands
of machines fit into a small one. What is learnt means nothing: accuracies and times to
a target are not to be had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import msgspec

from distbelief.data.dataset import read_batch
from distbelief.errors import JobError
from distbelief.forecast.hosting import Hosting
from distbelief.forecast.outcome import Outcome
from distbelief.forecast.staging import StagedJob, Staging
from distbelief.job.configuration.sections import DataTables, Job
from distbelief.job.directory.summary import DataFacts
from distbelief.parameter_server.layout.layout import Layout
from distbelief.roles import Address
from distbelief.runtime.task.task import DataSpec, ModelSpec
from distbelief.simulation.faults import Fault
from distbelief.simulation.options import ClusterOptions
from distbelief.simulation.scales import Scale, block_bytes_for, scales_for
from distbelief.simulation.world import Builder


_HOME: Final = "distbelief.forecast.stand_in"
_LEARNT: Final = frozenset({"gradient_norm", "step_length"})
"""Figures of an algorithm's own that tell what is learnt, and not what it takes."""

_WIDTH_PER_SHARD: Final = 64
"""Elements of a tensor that cannot be divided between shards."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PricedHosting:
    """The machines of a job, on which a stand-in costs what the job would.

    Attributes:
        hosting: The machines.
        large: The job itself.
    """

    hosting: Hosting
    large: StagedJob

    def n_needed(self, staged: StagedJob) -> int:
        """Return how many machines a job takes."""
        return self.hosting.n_needed(staged)

    def options(self, staged: StagedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        """Return what the simulation is to be told of machines, links and scales.

        Raises:
            JobError: the cluster cannot hold the job.
        """
        options = self.hosting.options(self.large, faults=faults)
        small, large = staged.layout, self.large.layout
        scale = self._scale(staged)
        names = {n: scale.flops for n, kind in staged.kinds.items() if kind != "shard"}
        return replace(
            options,
            scales=scales_for(small, large, names, data_bytes=scale.data_bytes),
            block_bytes=block_bytes_for(small, large),
            codec=False,
            trace="order",
        )

    def builders(self, staged: StagedJob) -> dict[Address, Builder]:
        """Return how to build the roles of a job, with the costs that were measured."""
        return self.hosting.builders(staged, scale=self._scale(staged))

    def _scale(self, staged: StagedJob) -> Scale:
        """Return by what the work of all but shards is multiplied, lane by lane."""
        return Scale(
            flops=n_parameters(self.large) / n_parameters(staged),
            data_bytes=_bytes_of_sample(self.large) / _bytes_of_sample(staged),
        )


def stand_in_for(large: StagedJob, staging: Staging) -> StagedJob:
    """Return the job with a small task in place of its own.

    Raises:
        JobError: its replicas are split, or it would never end without a target.
    """
    job = large.job
    if job.cluster.is_split:
        raise JobError(
            "--priced: replicas that are split over machines are priced by `distbelief "
            "partition`: leave [cluster] partitions, plan and device out, or --priced"
        )
    stop = msgspec.structs.replace(job.stop, accuracy=None, loss=None)
    if stop.is_empty and not job.stop.is_empty:
        raise JobError(
            "--priced: nothing is learnt, so no target of [stop] is ever reached: give "
            "epochs, samples or seconds"
        )
    width = _WIDTH_PER_SHARD * job.cluster.shards
    facts = large.answer.task
    assert facts.train is not None
    return staging.stage(
        msgspec.structs.replace(
            job,
            model=ModelSpec(factory=f"{_HOME}:net", arguments={"width": width}),
            data=DataTables(
                train=_data(facts.train, width),
                test=None if facts.test is None else _data(facts.test, width),
            ),
            algorithm=msgspec.structs.replace(job.algorithm, loss="cross_entropy"),
            evaluation=msgspec.structs.replace(job.evaluation, metric=None),
            stop=stop,
        )
    )


def n_parameters(staged: StagedJob) -> int:
    """Return how many parameters a job's net has; a step takes operations of each."""
    found = staged.answer.task.n_parameters
    assert found, "a net without parameters is refused when it is tried out"
    return found


def as_of(large: StagedJob, small: StagedJob, outcome: Outcome) -> Outcome:
    """Return what came of a stand-in as that of the job it stands for.

    Args:
        large: The job.
        small: The stand-in.
        outcome: Its own: bytes counted by its shards, and figures of what it learnt.
    """
    figures = {k: v for k, v in outcome.figures.items() if k not in _LEARNT}
    scale = _n_bytes(large.layout) / _n_bytes(small.layout)
    return msgspec.structs.replace(
        outcome,
        metric_name=large.answer.metric_name,
        metric=None,
        held_out_loss=None,
        loss=None,
        history=(),
        figures=figures,
        pushed_bytes=round(outcome.pushed_bytes * scale),
        fetched_bytes=round(outcome.fetched_bytes * scale),
    )


def _n_bytes(layout: Layout) -> int:
    sizes = (layout.shard_size(k) for k in range(layout.n_shards))
    return sum(sizes) * layout.dtype.itemsize


def check_learns_nothing(job: Job, *, suggests: bool) -> None:
    """Refuse to look for the shortest time to a target where none is learnt.

    Raises:
        JobError: it says what to leave out.
    """
    if suggests and (job.stop.accuracy is not None or job.stop.loss is not None):
        raise JobError(
            "--priced: nothing is learnt, so the time to the target of [stop] is "
            "unknown: leave --priced out, or the target"
        )


def _bytes_of_sample(staged: StagedJob) -> int:
    """Return the bytes of input and target of a sample, which a batch has read."""
    parts = read_batch(staged.datasets["data.train"], [0])
    return max(1, sum(part.nbytes for part in parts))


def _data(facts: DataFacts, width: int) -> DataSpec:
    return DataSpec(
        factory=f"{_HOME}:data", arguments={"n_samples": facts.n_samples, "width": width}
    )
