"""The work queue assigns what a plain one assigns that looks at everything."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, strategies as st

from distbelief.protocol import ChunkResult, WorkReport
from distbelief.roles.role import Address, Received, Seconds
from sandblaster.chunks import BatchRange, ChunkSizes
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.work_queue import EpochCounters, WorkQueue
from sandblaster.coordinator.workers import WorkerPool, WorkerState
from tests.sandblaster.coordinator.plain_work_queue import PlainWorkQueue


CHUNK_SIZES = ChunkSizes(mini_batch_size=4)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What each worker has."""

    n_members: int
    n_examples: int
    window_chunks: int
    backups: bool


Happening = tuple[str, int, float]  # what, to whom, a number from 0 to 1

HAPPENINGS: st.SearchStrategy[list[Happening]] = st.lists(
    st.tuples(
        st.sampled_from(
            ["computed"] * 6
            + ["staged"] * 4
            + ["folded"] * 2
            + ["time passes", "joins", "lost", "turnaround", "evaluation"]
        ),
        st.integers(0, 7),
        st.integers(0, 64).map(lambda n: n / 64),
    ),
    max_size=60,
)
SCENES = st.builds(
    Scene,
    n_members=st.integers(0, 8),
    n_examples=st.integers(1, 150),
    window_chunks=st.sampled_from([1, 3, 64]),
    backups=st.booleans(),
)


class Play:
    """What happens to one queue."""

    def __init__(self, kind: type[WorkQueue] | type[PlainWorkQueue], scene: Scene) -> None:
        self.kind = kind
        self.config = CoordinatorConfig(
            chunk_sizes=CHUNK_SIZES, window_chunks=scene.window_chunks, backups=scene.backups
        )
        self.pool = WorkerPool(self.config)
        self.counters = EpochCounters()
        self.n_examples = scene.n_examples
        self.now: Seconds = 100.0
        self.incarnation = 1
        for index in range(scene.n_members):
            self.join(index)
        self.begin()

    def begin(self) -> None:
        batch = BatchRange(first=0, n_examples=self.n_examples)
        self.pool.begin(epoch=1, evaluation=1, versions=(), batch=batch)
        self.queue = self.kind(self.config, pool=self.pool, batch=batch, counters=self.counters)

    def join(self, index: int) -> WorkerState | None:
        self.incarnation += 1
        report = WorkReport(epoch=0, version=0, evaluation=0, n_computed=0, results=())
        name = Address(f"replica-{index}")
        if self.pool.get(name) is not None:
            return None
        event = Received(sender=name, incarnation=self.incarnation, message=report)
        return self.pool.take_report(event, report, self.now)

    def happen(self, what: str, index: int, number: float) -> None:
        self.now += 1 / 128
        worker = self.pool.get(Address(f"replica-{index}"))
        match what:
            case "time passes":
                self.now += 8 * number
            case "joins":
                joined = self.join(index)
                if joined is not None:
                    self.queue.touch(joined)
            case "evaluation":
                self.begin()
            case "folded":
                sets, void = self.queue.commits.to_commit()
                self.queue.commits.committed(sets, void, self.now)
            case _:
                if worker is not None:
                    self.happen_to(worker, what, number)

    def happen_to(self, worker: WorkerState, what: str, number: float) -> None:
        granted = [copy for copy in worker.copies.values() if copy.commit_token]
        if what == "lost":
            self.pool.remove(worker.name, is_over=True)
            self.queue.lost(worker, self.now)
        elif what == "turnaround":
            worker.turnaround = number / 8
            self.queue.touch(worker)
        elif what == "computed" and worker.outstanding:
            self.now += number
            attempt = worker.outstanding[0].attempt
            # No two workers have one pace or lag: no rounding decides.
            seconds = 1.5 * number + 0.1 + 0.01 * worker.number
            self.says(worker, attempt, seconds=seconds, staged=False)
        elif what == "staged" and granted:
            self.says(worker, granted[0].attempt, seconds=1.0, staged=True)

    def says(self, worker: WorkerState, attempt: int, *, seconds: Seconds, staged: bool) -> None:
        result = ChunkResult(
            attempt=attempt, n_examples=4, loss=1.0, seconds=seconds, staged=staged
        )
        report = WorkReport(epoch=1, version=1, evaluation=1, n_computed=4, results=(result,))
        self.queue.take_report(worker, report, self.now)

    def assign(self) -> tuple[object, ...]:
        """Assign; return what each worker has."""
        self.queue.assign(self.now)
        told = [worker.name for worker in self.queue.changed()]
        has = {
            worker.name: [
                (copy.chunk_index, copy.attempt, copy.commit_token)
                for copy in worker.copies.values()
            ]
            for worker in self.pool
        }
        return told, has, self.queue.n_backups


@given(SCENES, HAPPENINGS)
def test_every_chunk_goes_to_the_worker_that_the_plain_queue_chooses(
    scene: Scene, happenings: Sequence[Happening]
) -> None:
    ours, plain = Play(WorkQueue, scene), Play(PlainWorkQueue, scene)
    assert ours.assign() == plain.assign()
    for happening in happenings:
        for play in (ours, plain):
            play.happen(*happening)
        assert ours.assign() == plain.assign(), happening
