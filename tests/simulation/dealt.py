"""Jobs whose data are dealt, where each sample leaves its mark on every shard.

The model has one weight per sample, in rows of which each shard holds some; the gradient of a
sample adds 1 to its weights. So they are how often each shard has applied each sample.

ExactlyOnceBySample   what a shard says that it has applied is what its values show, at every moment
NoSampleLost          when the job ends, that is all of it, and so are the last checkpoints

After the job's end nobody trains a sample again. So the last checkpoint of a shard may lack samples
if a fault hit the last copy that had all before they were saved: then it has what the newest
checkpoint of that moment had, at least.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

from distbelief.config.job import StopTable
from distbelief.core.spans import Spans
from distbelief.data import dealt_samples
from distbelief.parameter_server.config import copy_names, shard_of
from distbelief.parameter_server.optimizers import SGD, UpdateRule
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy, Round
from distbelief.parameter_server.shard import Shard
from distbelief.roles.role import SUPERVISOR, Address
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Fault
from distbelief.supervisor.scheduler import ShutdownStage
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec
from distbelief.worker.config import DownpourSettings
from distbelief.worker.member import JobMember
from tests.simulation.jobs import EXAMPLES, JobCluster
from tests.simulation.random_faults import random_faults


T = TypeVar("T")
Life = tuple[Address, int]  # a process: its role and incarnation

N_ROWS = 6


@cache
def _dealt(start: int, stop: int, n_samples: int) -> np.ndarray:
    return dealt_samples(start, stop, n_samples=n_samples, seed=0)


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
        cluster: Callable[..., JobCluster] = JobCluster,
    ) -> None:
        self.n_samples = n_samples
        self._bad = list(bad)
        self.total = int(np.ceil(n_epochs * n_samples))
        self._everything = Spans([(0, self.total)])
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
        self.job = cluster(
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
        # Copies of each shard that have all samples; the last ones, if there are none now.
        self._whole: dict[Address, set[Life]] = {shard: set() for shard in self.job.shards}
        # Shards without such a copy after the end: what was saved at that moment.
        self.fell_back: dict[Address, Spans] = {}
        self.struck: set[Life] = set()  # those that faults have hit
        self.job.simulation.observe(self._look)

    def expected(self, applied: Spans, shard: int) -> np.ndarray:
        """Return what the values of a shard show if these positions are applied."""
        counts = np.zeros(self.n_samples)
        for start, stop in applied:
            for first in range(start - start % self.n_samples, stop, self.n_samples):
                begin, end = max(first, start), min(first + self.n_samples, stop)
                samples = _dealt(begin, end, self.n_samples)
                np.add.at(counts, samples, 1.0)
        counts[self._bad] = 0.0
        rows = np.tile(counts, N_ROWS)
        values = np.zeros(self.job.layout.shard_size(shard))
        for one in self.job.layout.segments(shard):
            values[one.offset :][: one.stop - one.start] = rows[one.start : one.stop]
        return values

    @property
    def is_over(self) -> bool:
        """Whether nobody trains any more."""
        return self.job.supervisor.shutdown.stage is not ShutdownStage.RUN

    def _look(self, happening: HandledEvent) -> None:
        member = happening.role
        shard = member.role if isinstance(member, JobMember) else None
        if isinstance(shard, Shard) and shard._ready:
            self._look_at(shard, happening)
        if self.is_over and self.job.simulation.is_alive(SUPERVISOR):
            self._look_for_copies()

    def _look_at(self, shard: Shard, happening: HandledEvent) -> None:
        values = shard._values
        if values._n_held is None and values.applied == self._everything:
            life = happening.name, happening.incarnation
            self._whole[shard_of(happening.name)].add(life)
        if shard._work is not None or shard._backup is not None:
            return
        if not shard._serves or shard._stopped_by is not None:
            return
        found = values.vector.copy()
        # A shard that falls back later stays so; a former primary may only be cut off (seed 479).
        if not self.is_over and self._leads(happening):
            self._newest[shard._config.index] = found
        before = self._last.get(shard._config.name)
        if before is not None and before[0] == values.applied and (before[1] == found).all():
            return
        self.n_looks += 1
        self._last[shard._config.name] = values.applied, found
        self._check(happening.name, values.applied, found, shard._config.index)

    def _leads(self, happening: HandledEvent) -> bool:
        supervisor = self.job.supervisor
        record = supervisor.members.get(happening.name)
        is_now = record is not None and record.incarnation == happening.incarnation
        return is_now and record is not None and supervisor.failover.is_primary(record)

    def _check(self, name: str, applied: Spans, found: np.ndarray, index: int) -> None:
        wrong = found - self.expected(applied, index)
        assert not wrong.any(), f"{name} has {applied}, its values show {wrong}"

    def _look_for_copies(self) -> None:
        """Note which shards have neither a copy nor a checkpoint with all samples."""
        counted = {(one.name, one.incarnation) for one in self.job.supervisor.members}
        alive = {(n, self.job.simulation.incarnation(n)) for n in self.job.simulation.alive}
        for shard, lives in self._whole.items():
            if lives & counted & alive:
                lives.intersection_update(counted, alive)
            elif shard not in self.fell_back:
                applied, _ = self._saved(shard)
                if applied != self._everything:
                    self.fell_back[shard] = applied

    def _saved(self, shard: Address) -> tuple[Spans, np.ndarray]:
        """Return what the newest checkpoint of a shard has, and its values."""
        snapshot = self.job.simulation.disk.newest(shard)
        if snapshot is None:
            return Spans(), np.zeros(0)
        applied = Spans.from_wire(json.loads(snapshot.facts.get("applied", "[]")))
        return applied, snapshot.arrays["values"]

    def run(self) -> None:
        """Run to the end; every sample has counted once per epoch, on every shard."""
        assert self.job.run() is None
        self.check_end(Spans([(0, self.total)]))

    def check_end(self, expected: Spans) -> None:
        for index in range(len(self.job.shards)):
            missing = self.expected(expected, index) - self._newest[index]
            assert not missing.any(), f"shard {index} lacks {missing}"

    def check_saved(self) -> None:
        """Look at the last checkpoints."""
        for index, shard in enumerate(self.job.shards):
            applied, values = self._saved(shard)
            self._check(f"the checkpoint of {shard}", applied, values, index)
            lost = self.fell_back.get(shard, self._everything) - applied
            assert not lost, f"the checkpoint of {shard} lacks {lost}"
            # A restored shard may still get, and save, what it had lost (seed 7827).
            last = self._whole[shard] - self.struck
            assert applied == self._everything or not last, f"{last} ended with samples not saved"


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
