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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from distbelief.config.job import StopTable
from distbelief.core.spans import Span, Spans, in_part, of_part
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import copy_names, shard_of
from distbelief.protocol.role import SUPERVISOR, Address
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Fault
from distbelief.supervisor.shutdown import ShutdownStage
from distbelief.task.data import DataSource, dealt_samples
from distbelief.task.task import (
    Captured,
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
    capture_task,
    sample_of,
)
from distbelief.worker.build import Split, kept_by
from distbelief.worker.downpour_settings import DownpourSettings, LockFree
from distbelief.worker.group import rank_name
from distbelief.worker.member import JobMember
from tests.distbelief.plans.plans import random_plan
from tests.simulation import groups
from tests.simulation.jobs import EXAMPLES, JobCluster
from tests.simulation.random_faults import random_faults


T = TypeVar("T")
Life = tuple[Address, int]  # a process: its role and incarnation

N_ROWS = 6


@cache
def _dealt(start: int, stop: int, n_samples: int) -> np.ndarray:
    return dealt_samples(start, stop, n_samples=n_samples, seed=0)


def task_of(
    n_samples: int, bad: Sequence[int], *, is_split: bool, is_stream: bool = False
) -> TaskSpec:
    model, loss = ("Tally", "minus_mean") if is_split else ("Counts", "minus_sum")
    return TaskSpec(
        model=ModelSpec(
            factory=f"{EXAMPLES}:{model}",
            arguments={"n_samples": n_samples, "n_rows": N_ROWS},
            initial="module",
        ),
        train=DataSpec(
            factory=f"{EXAMPLES}:{'numbered_stream' if is_stream else 'Numbered'}",
            arguments={"n_samples": n_samples, "bad": list(bad)},
        ),
        loss=f"{EXAMPLES}:{loss}",
    )


def task_in_pieces(
    task: TaskSpec, rows: Sequence[int], here: Sequence[int] | None = None, *, fetches: bool = False
) -> TaskSpec:
    """Return the task with data in pieces of so many rows; None are here: all can be read."""
    arguments = {"rows": [*rows], "here": here, "fetches": fetches}
    bad = {"bad": task.train.arguments["bad"]}
    train = DataSpec(factory=f"{EXAMPLES}:numbered_pieces", arguments=arguments | bad)
    return msgspec.structs.replace(task, train=train)


@cache
def split_of(n_samples: int, n_ranks: int, batch_size: int, seed: int) -> Split:
    """Return how ranks share a model, any way that is legal: some may hold nothing."""
    captured = _captured(n_samples)
    stream = np.random.default_rng([seed, n_ranks])
    return groups.split_of(
        captured,
        random_plan(captured.graph, stream, n_machines=n_ranks),
        n_machines=n_ranks,
        batch=batch_size,
        loss=f"{EXAMPLES}:minus_mean",
        micro_batches=min(int(stream.integers(1, 3)), batch_size),
    )


@cache
def _captured(n_samples: int) -> Captured:
    task = task_of(n_samples, (), is_split=True)
    return capture_task(task, sample_of(build_dataset(task.train)))


class DealtJob:
    """A job of some epochs, or of `samples`, under faults."""

    def __init__(
        self,
        *,
        n_samples: int = 50,
        n_epochs: float = 3.0,
        batch_size: int = 4,
        n_push: int = 1,
        max_steps: int | None = None,
        n_replicas: int = 3,
        n_shards: int = 2,
        shard_copies: int = 1,
        bad: Sequence[int] = (),
        epoch_share: float = 1.0,
        rule: UpdateRule | None = None,
        exchange: ExchangePolicy = DOWNPOUR,
        inner: dict[str, object] | None = None,
        lockfree: LockFree | None = None,
        snapshot_every: float = 1.0,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        session: Mapping[str, Any] = {},  # of a resumed run (`test_resumed_jobs`)
        cluster: Callable[..., JobCluster] = JobCluster,
        n_ranks: int = 1,  # of each replica; then all batches are of one size
        is_stream: bool = False,  # the data are
        pieces: Sequence[int] = (),  # rows of each, if the data are in pieces
        places: Sequence[Sequence[int]] = (),  # pieces of each replica; none: all read all
        fetches: bool = False,
    ) -> None:
        n_samples = sum(pieces) or n_samples
        self.n_samples = n_samples
        self._is_stream = is_stream
        self._bad = list(bad)
        self.total = int(np.ceil(n_epochs * n_samples))
        assert n_ranks == 1 or not (n_samples % batch_size or self.total % batch_size)
        task = task_of(n_samples, bad, is_split=n_ranks > 1, is_stream=is_stream)
        self._pieces = task_in_pieces(task, pieces) if pieces else None
        if self._pieces is not None:
            task = self._pieces
            every = [task_in_pieces(task, pieces, here, fetches=fetches) for here in places]
            tasks = {
                name: one
                for r, one in enumerate(every)
                for name in (f"replica-{r}", *(rank_name(r, m) for m in range(n_ranks)))
            }
            session = {**session, "tasks": tasks}
            task = every[0] if every else task
        # The loss of a split model is a mean.
        rule = rule or SGD(learning_rate=1.0 if n_ranks == 1 else float(batch_size))
        split = None
        if n_ranks > 1:
            split = partial(split_of, n_samples, n_ranks, batch_size, seed)
            session = {**session, "split": split}
        settings = DownpourSettings(
            loss=task.loss,
            batch_size=batch_size,
            n_push=n_push,
            max_steps=max_steps,
            rule=rule,
            exchange=exchange,
            inner=inner,
            lockfree=lockfree,
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
        # Of each shard: the ranks that push to it, and what each of them pushes.
        self._parts: list[dict[int, np.ndarray]] = [
            {0: np.ones(self.job.layout.shard_size(k), np.bool_)} for k in range(n_shards)
        ]
        if split is not None:
            self._parts = [self._parts_of(k, split()) for k in range(n_shards)]
        self._everything = [self._of_parts([(0, self.total)], k) for k in range(n_shards)]
        self.n_looks = 0
        # What a primary has applied, and its values: by copy, and by shard.
        self._last: dict[str, tuple[Spans, np.ndarray]] = {}
        self._newest: dict[int, np.ndarray] = {}
        # Copies of each shard that have all samples; the last ones, if there are none now.
        self._whole: dict[Address, set[Life]] = {shard: set() for shard in self.job.shards}
        # Shards without such a copy after the end: what was saved at that moment.
        self.fell_back: dict[Address, Spans] = {}
        self.struck: set[Life] = set()  # those that faults have hit
        self.job.cluster.observe(self._look)

    def _parts_of(self, shard: int, split: Split) -> dict[int, np.ndarray]:
        layout, found = self.job.layout, {}
        for rank in range(split.plan.cluster.n_machines):
            held = {spec.name: np.zeros(spec.shape, np.bool_) for spec in layout.tensors}
            for name, region in kept_by(rank, split, layout).items:
                held[name][region.slices] = True
            mask = self._on_shard(shard, [held[spec.name].ravel() for spec in layout.tensors])
            if mask.any():
                found[rank] = mask > 0.0
        return found

    def _of_parts(self, spans: Iterable[Span], shard: int) -> Spans:
        return Spans(of_part(span, rank) for span in spans for rank in self._parts[shard])

    def expected(self, applied: Spans, shard: int) -> np.ndarray:
        """Return what the values of a shard show if these positions are applied."""
        values = np.zeros(self.job.layout.shard_size(shard))
        for rank, mask in self._parts[shard].items():
            values[mask] = self._expected(in_part(applied, rank), shard)[mask]
        return values

    def _expected(self, applied: Spans, shard: int) -> np.ndarray:
        counts = np.zeros(self.n_samples)
        for start, stop in applied:
            for first in range(start - start % self.n_samples, stop, self.n_samples):
                begin, end = max(first, start), min(first + self.n_samples, stop)
                samples = np.arange(begin, end) - first
                if self._pieces is not None:
                    order = DataSource.of(build_dataset(self._pieces.train)).order
                    assert order is not None
                    samples = order(first // self.n_samples, samples, 0)
                elif not self._is_stream:
                    samples = _dealt(begin, end, self.n_samples)
                np.add.at(counts, samples, 1.0)
        counts[self._bad] = 0.0
        # Of a tensor the samples are the second dimension, or of an embedding the first.
        rows = [
            np.tile(counts, N_ROWS) if spec.shape[0] == N_ROWS else np.repeat(counts, N_ROWS)
            for spec in self.job.layout.tensors
        ]
        return self._on_shard(shard, rows)

    def _on_shard(self, shard: int, tensors: Sequence[np.ndarray]) -> np.ndarray:
        values = np.zeros(self.job.layout.shard_size(shard))
        for one in self.job.layout.segments(shard):
            tensor = tensors[one.tensor_index]
            values[one.offset :][: one.stop - one.start] = tensor[one.start : one.stop]
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
        dealer = self.job.supervisor.allowances.dealer
        if happening.name == SUPERVISOR and dealer is not None:
            dealer.validate()
        if self.is_over and self.job.cluster.is_alive(SUPERVISOR):
            self._look_for_copies()

    def _look_at(self, shard: Shard, happening: HandledEvent) -> None:
        values = shard.values
        everything = self._everything[shard._config.index]
        if values._n_held is None and values.applied == everything:
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
        alive = {(n, self.job.cluster.incarnation(n)) for n in self.job.cluster.alive}
        for shard, lives in self._whole.items():
            if lives & counted & alive:
                lives.intersection_update(counted, alive)
            elif shard not in self.fell_back:
                applied, _ = self._saved(shard)
                if applied != self._everything[self.job.shards.index(shard)]:
                    self.fell_back[shard] = applied

    def _saved(self, shard: Address) -> tuple[Spans, np.ndarray]:
        """Return what the newest checkpoint of a shard has, and its values."""
        snapshot = self.job.cluster.disk.newest(shard)
        if snapshot is None:
            return Spans(), np.zeros(self.job.layout.shard_size(self.job.shards.index(shard)))
        applied = Spans.from_wire(json.loads(snapshot.facts.get("applied", "[]")))
        return applied, snapshot.arrays["values"]

    def run(self) -> None:
        """Run to the end; every sample has counted once per epoch, on every shard."""
        assert self.job.run() is None
        self.check_end(Spans([(0, self.total)]))

    def check_end(self, expected: Spans) -> None:
        for index in range(len(self.job.shards)):
            wanted = self.expected(self._of_parts(expected, index), index)
            missing = wanted - self._newest[index]
            assert not missing.any(), f"shard {index} lacks {missing}"

    def check_saved(self) -> None:
        """Look at the last checkpoints."""
        for index, shard in enumerate(self.job.shards):
            applied, values = self._saved(shard)
            self._check(f"the checkpoint of {shard}", applied, values, index)
            everything = self._everything[index]
            lost = self.fell_back.get(shard, everything) - applied
            assert not lost, f"the checkpoint of {shard} lacks {lost}"
            # A restored shard may still get, and save, what it had lost (seed 7827).
            last = self._whole[shard] - self.struck
            assert applied == everything or not last, f"{last} ended with samples not saved"


class Drawn:
    """Choices of a job that a seed stands for."""

    def __init__(self, seed: int, family: int) -> None:
        self.seed, self.stream = seed, np.random.default_rng([seed, family])

    def pick(self, *choices: T) -> T:
        return choices[int(self.stream.integers(len(choices)))]

    def faults(self, roles: Iterable[str], n_shards: int, copies: int) -> tuple[Fault, ...]:
        """Draw faults of these roles and of all copies of the shards."""
        shards = (name for k in range(n_shards) for name in copy_names(k, copies))
        names = [*map(Address, roles), *shards]
        intensity = self.pick(0.3, 0.7, 1.0)
        return random_faults(self.seed, names, horizon=4.0, intensity=intensity, restarts=False)


def exchange_of(pick: Callable[..., Any]) -> dict[str, Any]:
    sgd = {"inner": {"name": "SGD", "lr": 1.0}}
    options: dict[str, Any] = pick(
        {},
        {},
        {"n_push": pick(2, 3)},
        {"exchange": ExchangePolicy(staleness=pick(0, 1, 2))},
        {"exchange": ExchangePolicy(staleness=0, round=Round(quorum=pick(1.0, 0.5)))},
        {"exchange": ExchangePolicy(every=pick(1, 2, 3), send="delta"), **sgd},
        {"exchange": ExchangePolicy(every="auto", send="delta"), **sgd},
    )
    return options


def job_of(seed: int) -> DealtJob:
    """Return a job with everything drawn from the seed: its numbers, its exchange, its faults."""
    drawn = Drawn(seed, 0xDEA1)
    pick = drawn.pick
    n_replicas, n_shards, copies = pick(1, 2, 3, 4), pick(1, 2, 3), pick(1, 2)
    options = exchange_of(pick)
    return DealtJob(
        faults=drawn.faults((f"replica-{r}" for r in range(n_replicas)), n_shards, copies),
        n_samples=pick(17, 50, 65),
        n_epochs=pick(2, 4, 5.5),
        batch_size=pick(1, 4, 8),
        n_replicas=n_replicas,
        n_shards=n_shards,
        shard_copies=copies,
        snapshot_every=pick(0.7, 1.5),
        seed=seed,
        is_stream=pick(False, False, True),  # noqa: FBT003 -- choices, no arguments
        **options,
    )


def pieces_job_of(seed: int) -> DealtJob:
    """Return a job whose data are in pieces on some hosts, with everything drawn from the seed."""
    drawn = Drawn(seed, 0x91EC)
    pick, draw = drawn.pick, drawn.stream.integers
    n_replicas, n_shards, copies = pick(1, 2, 3, 4), pick(1, 2, 3), pick(1, 1, 2)
    n_pieces, fetches = pick(1, 2, 3, 6), pick(True, False)  # noqa: FBT003 -- a choice
    rows = [pick(0, 1, 5, 8, 13, 40) for _ in range(n_pieces)]
    rows[0] += not sum(rows)
    places: list[list[int]] = [[] for _ in range(n_replicas)]
    for piece in range(n_pieces):
        # Without fetch each is on two hosts, as far as there are so many.
        n_hosts = int(draw(0, n_replicas + 1)) if fetches else min(2, n_replicas)
        for host in drawn.stream.permutation(n_replicas)[:n_hosts]:
            places[host].append(piece)
    return DealtJob(
        faults=drawn.faults((f"replica-{r}" for r in range(n_replicas)), n_shards, copies),
        n_epochs=pick(2, 4, 5.5),
        batch_size=pick(1, 4, 8),
        n_replicas=n_replicas,
        n_shards=n_shards,
        shard_copies=copies,
        snapshot_every=pick(0.7, 1.5),
        seed=seed,
        pieces=rows,
        places=places if pick(True, True, True, False) else (),  # noqa: FBT003 -- a choice
        fetches=fetches,
        **exchange_of(pick),
    )


def split_job_of(seed: int) -> DealtJob:
    """Return a job whose replicas have ranks, with everything drawn from the seed."""
    drawn = Drawn(seed, 0x5917)
    pick = drawn.pick
    n_replicas, n_ranks, batch_size = pick(1, 2, 3), pick(2, 3), pick(1, 2, 4, 8)
    n_shards, copies = pick(1, 2, 3), pick(1, 1, 2)
    sgd = {"rule": SGD(learning_rate=1.0), "inner": {"name": "SGD", "lr": float(batch_size)}}
    options: dict[str, Any] = pick(
        {},
        {},
        {"n_push": pick(2, 3)},
        {"exchange": ExchangePolicy(every=pick(1, 2, 3), send="delta"), **sgd},
        {"exchange": ExchangePolicy(every="auto", send="delta"), **sgd},
    )
    names = [rank_name(r, m) for r in range(n_replicas) for m in range(n_ranks)]
    return DealtJob(
        faults=drawn.faults(names, n_shards, copies),
        n_samples=pick(16, 48),
        n_epochs=pick(2, 4, 5.5),
        batch_size=batch_size,
        n_replicas=n_replicas,
        n_ranks=n_ranks,
        n_shards=n_shards,
        shard_copies=copies,
        snapshot_every=pick(0.7, 1.5),
        seed=seed,
        **options,
    )
