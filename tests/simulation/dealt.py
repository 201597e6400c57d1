"""Jobs whose data are dealt, where each sample leaves its mark on every shard.

The model has one weight per sample, in rows of which each shard holds some; the gradient of a
sample adds 1 to its weights. So they are how often each shard has applied each sample. What a shard
says that it has applied must be what its values show, at every moment (`exactly once`), and in the
end all of it (`no sample lost`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from distbelief.config.job import StopTable
from distbelief.core.spans import Spans
from distbelief.data import dealt_samples
from distbelief.parameter_server.config import copy_names
from distbelief.parameter_server.optimizers import SGD, UpdateRule
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy, Round
from distbelief.parameter_server.shard import Shard
from distbelief.roles.role import Address
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Fault
from distbelief.supervisor.scheduler import ShutdownStage
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec
from distbelief.worker.config import DownpourSettings
from distbelief.worker.member import JobMember
from tests.simulation.jobs import EXAMPLES, JobCluster
from tests.simulation.random_faults import random_faults


T = TypeVar("T")

N_ROWS = 6


class DealtJob:
    """A job of some epochs, or of `samples`, under faults."""

    def __init__(
        self,
        *,
        n_samples: int = 50,
        n_epochs: float = 3.0,
        batch_size: int = 4,
        n_push: int = 1,
        n_replicas: int = 3,
        n_shards: int = 2,
        shard_copies: int = 1,
        bad: Sequence[int] = (),
        epoch_share: float = 1.0,
        rule: UpdateRule | None = None,
        exchange: ExchangePolicy = DOWNPOUR,
        inner: dict[str, object] | None = None,
        snapshot_every: float = 1.0,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        session: Mapping[str, Any] = {},  # of a resumed run (`test_resumed_jobs`)
    ) -> None:
        self.n_samples = n_samples
        self._bad = list(bad)
        self.total = int(np.ceil(n_epochs * n_samples))
        task = TaskSpec(
            model=ModelSpec(
                factory=f"{EXAMPLES}:Counts",
                arguments={"n_samples": n_samples, "n_rows": N_ROWS},
                initial="module",
            ),
            train=DataSpec(
                factory=f"{EXAMPLES}:Numbered", arguments={"n_samples": n_samples, "bad": list(bad)}
            ),
            loss=f"{EXAMPLES}:minus_sum",
        )
        settings = DownpourSettings(
            loss=task.loss,
            batch_size=batch_size,
            n_push=n_push,
            rule=rule or SGD(learning_rate=1.0),
            exchange=exchange,
            inner=inner,
            non_finite_limit=1000,
            order="dealt",
            epoch_share=epoch_share,
        )
        self.job = JobCluster(
            stop=StopTable(epochs=n_epochs),
            task=task,
            n_replicas=n_replicas,
            n_shards=n_shards,
            shard_copies=shard_copies,
            snapshot_every=snapshot_every,
            seed=seed,
            faults=faults,
            settings=settings,
            **session,
        )
        self.n_looks = 0
        # What a primary has applied, and its values: by copy, and by shard.
        self._last: dict[str, tuple[Spans, np.ndarray]] = {}
        self._newest: dict[int, np.ndarray] = {}
        self.job.simulation.observe(self._look)

    def expected(self, applied: Spans, shard: int) -> np.ndarray:
        """Return what the values of a shard show if these positions are applied."""
        counts = np.zeros(self.n_samples)
        for start, stop in applied:
            for first in range(start - start % self.n_samples, stop, self.n_samples):
                begin, end = max(first, start), min(first + self.n_samples, stop)
                samples = dealt_samples(begin, end, n_samples=self.n_samples, seed=0)
                np.add.at(counts, samples, 1.0)
        counts[self._bad] = 0.0
        rows = np.tile(counts, N_ROWS)
        values = np.zeros(self.job.layout.shard_size(shard))
        for one in self.job.layout.segments(shard):
            values[one.offset :][: one.stop - one.start] = rows[one.start : one.stop]
        return values

    def _look(self, happening: HandledEvent) -> None:
        member = happening.role
        shard = member.role if isinstance(member, JobMember) else None
        if not isinstance(shard, Shard) or shard._work is not None or not shard._ready:
            return
        if shard._backup is not None or not shard._serves or shard._stopped_by is not None:
            return
        if self.job.supervisor.shutdown.stage is not ShutdownStage.RUN:
            return  # a shard that falls back now stays so
        values = shard._values
        found = values.vector.copy()
        self._newest[shard._config.index] = found
        before = self._last.get(shard._config.name)
        if before is not None and before[0] == values.applied and (before[1] == found).all():
            return
        self.n_looks += 1
        self._last[shard._config.name] = values.applied, found
        wrong = found - self.expected(values.applied, shard._config.index)
        assert not wrong.any(), f"{happening.name} has {values.applied}, its values show {wrong}"

    def run(self) -> None:
        """Run to the end; every sample has counted once per epoch, on every shard."""
        assert self.job.run() is None
        self.check_end(Spans([(0, self.total)]))

    def check_end(self, expected: Spans) -> None:
        for index in range(len(self.job.shards)):
            missing = self.expected(expected, index) - self._newest[index]
            assert not missing.any(), f"shard {index} lacks {missing}"


def job_of(seed: int) -> DealtJob:
    """Return a job with everything drawn from the seed: its numbers, its exchange, its faults."""
    stream = np.random.default_rng([seed, 0xDEA1])

    def pick(*choices: T) -> T:
        return choices[int(stream.integers(len(choices)))]

    n_replicas, n_shards, copies = pick(1, 2, 3, 4), pick(1, 2, 3), pick(1, 2)
    options: dict[str, Any] = pick(
        {},
        {},
        {"n_push": pick(2, 3)},
        {"exchange": ExchangePolicy(staleness=pick(0, 1, 2))},
        {"exchange": ExchangePolicy(staleness=0, round=Round(quorum=pick(1.0, 0.5)))},
        {
            "exchange": ExchangePolicy(every=pick(1, 2, 3), send="delta"),
            "inner": {"name": "SGD", "lr": 1.0},
        },
    )
    replicas = [f"replica-{r}" for r in range(n_replicas)]
    roles = [*replicas, *(name for k in range(n_shards) for name in copy_names(k, copies))]
    faults = random_faults(
        seed,
        [Address(name) for name in roles],
        horizon=4.0,
        intensity=pick(0.3, 0.7, 1.0),
        restarts=False,
    )
    return DealtJob(
        n_samples=pick(17, 50, 65),
        n_epochs=pick(2, 4, 5.5),
        batch_size=pick(1, 4, 8),
        n_replicas=n_replicas,
        n_shards=n_shards,
        shard_copies=copies,
        snapshot_every=pick(0.7, 1.5),
        faults=faults,
        seed=seed,
        **options,
    )
