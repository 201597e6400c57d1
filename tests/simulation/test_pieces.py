"""Data in pieces on some hosts: each row counts once, also when hosts die, leave or join."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from typing_extensions import override

from distbelief.config.job import StopTable
from distbelief.core.spans import Spans
from distbelief.parameter_server.rules import SGD
from distbelief.protocol.role import SUPERVISOR, Address
from distbelief.simulation.faults import Drop, Fault, Kill, Pause, Slow
from distbelief.supervisor.dealer import Dealer
from distbelief.task.data import DataSource, pieces_of
from distbelief.task.task import DataSpec, build_dataset
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.examples import Frames
from tests.simulation.dealt import DealtJob, pieces_job_of
from tests.simulation.jobs import EXAMPLES, TASK, JobCluster, seeds
from tests.simulation.test_downpour import same
from tests.simulation.test_resumed_jobs import restored, session_after


REPLICAS = [Address(f"replica-{r}") for r in range(3)]
ROWS = [40, 4, 0, 9, 17]
PLACES = [[0, 1, 2], [1, 3], [3, 4, 0]]  # each on one or two of three hosts


def job_of(**options: Any) -> DealtJob:  # noqa: ANN401 -- those of `DealtJob`
    own: dict[str, Any] = {"pieces": ROWS, "places": PLACES}
    return DealtJob(**own | options)


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_every_row_of_an_epoch_counts_once(batch_size: int) -> None:
    job_of(batch_size=batch_size, n_push=2, n_epochs=2, fetches=batch_size == 4).run()


def test_a_batch_of_pieces_that_all_read_spans_them() -> None:
    job = job_of(places=(), pieces=[1] * 30, n_replicas=1, batch_size=10)
    job.run()
    assert job.job.view.step == 3 * 3


def test_each_replica_reads_what_lies_on_its_host() -> None:
    """With pieces of 1 : 10 the others idle; the reader itself asserts that a piece is there."""
    job = job_of(pieces=[5, 50, 0], places=[[0], [1], [2]], n_epochs=4)
    job.run()
    assert [job.job.samples(name) for name in REPLICAS] == [20, 200, 0]


def test_hosts_without_pieces_fetch_some() -> None:
    job = job_of(pieces=[12] * 10, places=[range(10), [], []], fetches=True)
    job.run()
    assert all(job.job.samples(name) > 60 for name in REPLICAS)


@pytest.mark.parametrize(
    "faults",
    [
        [Kill(at=2.0, role=REPLICAS[1])],
        [Kill(at=2.0 + 0.1 * n, role=name) for n, name in enumerate(REPLICAS)],
        [Kill(at=2.0, role=REPLICAS[0], after_actions=1)],  # between two shards
        [Pause(at=2.0, role=REPLICAS[2], seconds=5.0)],  # taken for dead, and goes on
        [Slow(at=1.0, role=REPLICAS[0], factor=10.0, seconds=20.0)],
        [Drop(probability=0.3, between=(SUPERVISOR, name)) for name in REPLICAS],
        [Kill(at=2.5, role=Address("shard-0"))],
    ],
    ids=["one", "all", "between shards", "taken for dead", "slow", "words lost", "shard"],
)
def test_what_a_lost_replica_has_not_pushed_is_dealt_again(faults: Sequence[Fault]) -> None:
    fetches = len(faults) > 1
    job = job_of(n_epochs=5, faults=faults, fetches=fetches, n_push=2, snapshot_every=1e3)
    job.run()
    assert job.job.view.samples == 5 * sum(ROWS)


LEFT_OUT = [Kill(at=1.2 + 0.8 * n, role=REPLICAS[0]) for n in range(5)]


@pytest.mark.soak
def test_another_host_trains_the_pieces_of_one_that_is_left_out() -> None:
    places = [PLACES[0], [1, 2, 3], PLACES[2]]
    job = job_of(places=places, n_epochs=8, faults=LEFT_OUT)
    job.run()
    assert any("left out" in message for message in job.job.messages)
    assert not any("no host" in message for message in job.job.messages)


def test_a_piece_that_nobody_has_ends_the_job_once_all_others_are_done(tmp_path: Path) -> None:
    """It says so at once, goes on with the others, and resumes where a host has it."""
    places = [[0, 1], [1, 3], [3, 4]]
    job = job_of(places=places, n_epochs=5, faults=LEFT_OUT)
    error = job.job.run()
    assert error == (
        "no host has piece 'piece-000', and all others are done: resume where one has them, or "
        "give the object of [data.train] fetch(piece)"
    )
    assert any("no host that takes part has piece 'piece-000'" in m for m in job.job.messages)
    assert job.job.view.samples >= 2 * (sum(ROWS) - ROWS[0])
    options, store = session_after(job.job, tmp_path)
    again = job_of(places=PLACES, n_epochs=5, session=options)
    restored(again.job, store)
    again.run()
    assert again.job.view.samples == 5 * sum(ROWS)


def test_a_run_goes_on_inside_an_epoch_with_other_replicas_and_places(tmp_path: Path) -> None:
    job = job_of(n_epochs=5)
    job.job.run_until(lambda: job.job.n_samples > 2.5 * sum(ROWS))
    job.job.interrupt()
    assert job.job.run() == "interrupted"
    options, store = session_after(job.job, tmp_path)
    again = job_of(n_epochs=5, session=options, n_replicas=2, places=[[0, 1], [2, 3, 4]])
    restored(again.job, store)
    again.run()
    assert sum(again.job.samples(name) for name in REPLICAS[:2]) < 4 * sum(ROWS)


def test_a_split_replica_reads_what_all_its_ranks_have() -> None:
    rows = [4, 8, 0, 12]
    job = job_of(pieces=rows, places=[[0, 1], [3]], n_replicas=2, n_ranks=2)
    job.run()
    assert [job.job.samples(f"{name}.0") for name in REPLICAS[:2]] == [3 * 12, 3 * 12]


def test_a_replica_counts_its_schedule_in_pushes_that_end_with_pieces() -> None:
    task = job_of()._pieces
    assert task is not None
    pieces = pieces_of(build_dataset(task.train))
    assert pieces is not None
    placed = replace(pieces, is_placed=True)
    settings = DownpourSettings(loss="mse", batch_size=10, rule=SGD(learning_rate=1.0))
    assert settings.epochs(sum(ROWS), pieces).n_pushes == 7
    assert settings.epochs(sum(ROWS), placed).n_pushes == 4 + 1 + 1 + 2


# --- one blocking replica: the bits of data without pieces


class BySampler(torch.utils.data.Sampler[int]):
    """The order of data in pieces."""

    def __init__(self, source: DataSource) -> None:
        self.source, self.epoch = source, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.source)

    @override
    def __iter__(self) -> Iterator[int]:
        order = self.source.order
        assert order is not None
        return iter(order(self.epoch, np.arange(len(self.source)), 0).tolist())


def loader_of(*, rows: Sequence[int], width: int) -> object:
    arguments = {"rows": rows, "width": width}
    spec = DataSpec(factory=f"{EXAMPLES}:frames_in_pieces", arguments=arguments)
    source = DataSource.of(build_dataset(spec))
    frames: Any = Frames(n_samples=sum(rows), width=width)
    return torch.utils.data.DataLoader(frames, batch_size=4, sampler=BySampler(source))


def saved_by(factory: str, **arguments: object) -> dict[str, torch.Tensor]:
    train = DataSpec(factory=factory, arguments={"width": 40, **arguments})
    settings = DownpourSettings(
        loss=TASK.loss, batch_size=4, rule=SGD(learning_rate=0.05), blocking=True, order="dealt"
    )
    job = JobCluster(
        stop=StopTable(epochs=3), settings=settings, task=replace(TASK, train=train), n_replicas=1
    )
    assert job.run() is None
    return job.saved()


def test_one_piece_has_the_bits_of_a_data_set_without_pieces() -> None:
    plain = saved_by(f"{EXAMPLES}:frames", n_samples=60)
    assert same(saved_by(f"{EXAMPLES}:frames_in_pieces", rows=[0, 60]), plain)


def test_several_pieces_have_the_bits_of_a_sampler_in_their_order() -> None:
    rows = [13, 30, 0, 17]
    plain = saved_by(f"{__name__}:loader_of", rows=rows)
    assert same(saved_by(f"{EXAMPLES}:frames_in_pieces", rows=rows), plain)


# --- any job


@pytest.mark.parametrize("seed", seeds(4, of=1000))
def test_each_row_counts_once_under_any_faults(seed: int) -> None:
    job = pieces_job_of(seed)
    assert job.job.run() is None
    job.check_end(Spans([(0, job.total)]))


def test_a_dealer_that_ignores_places_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Dealer, "_positions", lambda self, _name, _pieces: Spans([(0, self._limit)])
    )
    error = job_of().job.run()
    assert error is not None
    assert "does not lie on this host, and the object has no fetch(piece)" in error
