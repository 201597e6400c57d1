"""A run whose snapshots are damaged does not begin anew, unless it is told to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distbelief.core.errors import StorageError
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.resume import read_previous_run, start_from_scratch
from distbelief.protocol.role import Snapshot
from tests.distbelief.job.run.test_reshard import Run, damage, job


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.train(run.take_up(job()), 40, 52)
    return run


def path(run: Run, shard: str, label: str = "00001") -> Path:
    return run.directory.snapshots / shard / f"{label}.safetensors"


def refusal(run: Run) -> str:
    """Return why the run does not go on; nothing of it has changed."""
    before = run.files()
    with pytest.raises(StorageError, match="--from-scratch") as caught:
        run.take_up(job())
    assert run.files() == before
    return str(caught.value)


@pytest.mark.parametrize("damaged", [("shard-0", "shard-1"), ("shard-1",)])
def test_a_run_with_a_damaged_shard_names_the_files(run: Run, damaged: tuple[str, ...]) -> None:
    """It began anew without a word on the screen, and exited with 0.

    If others were whole, only this one began anew, and all data were read again.
    """
    for shard in damaged:
        damage(path(run, shard))
    text = refusal(run)
    for shard in ("shard-0", "shard-1"):
        assert (f"{path(run, shard)} (" in text) == (shard in damaged)


def remove_one(run: Run) -> None:
    """Remove what one shard saved; the others have saved a second time."""
    run.train(run.take_up(job()), 60, 62)
    for file in (run.directory.snapshots / "shard-1").iterdir():
        file.unlink()


def remove_all(run: Run) -> None:
    run.directory.snapshots.rename(run.directory.path / "elsewhere")


@pytest.mark.parametrize("remove", [remove_one, remove_all])
def test_what_is_gone_is_missed(run: Run, remove: Callable[[Run], None]) -> None:
    remove(run)
    assert str(run.directory.snapshots) in refusal(run)


def test_from_scratch_keeps_what_was_saved(run: Run) -> None:
    damage(path(run, "shard-0"))
    run.directory.metrics_file.write_text("{}\n")
    files = [path(run, shard) for shard in ("shard-0", "shard-1")]
    contents = [file.read_bytes() for file in files]
    told = start_from_scratch(job(), run.directory)
    aside = run.directory.path / "aside-1"
    assert told == f"starting from scratch; earlier files are in {aside}"
    resumed = run.take_up(job(3, 2))  # with other numbers, too
    assert resumed.previous.before.samples == {}
    assert resumed.previous.missing == ("shard-0", "shard-1", "shard-2")
    kept = [aside / file.relative_to(run.directory.path) for file in files]
    assert [file.read_bytes() for file in kept] == contents
    assert (aside / "metrics.jsonl").read_text() == "{}\n"
    assert not run.directory.metrics_file.exists()
    start_from_scratch(job(), run.directory)
    assert (run.directory.path / "aside-2").is_dir()
    assert [file.read_bytes() for file in kept] == contents


def test_a_damaged_journal_of_a_coordinator_is_named_with_a_way_on(run: Run) -> None:
    """The method began anew, and counted from 0, without a word."""
    store = CheckpointStore(run.directory.snapshots, report=pytest.fail)
    store.save("coordinator", Snapshot(label="000000000001", arrays={}, facts={}))
    journal = path(run, "coordinator", "000000000001")
    damage(journal)

    def read() -> int:
        previous = read_previous_run(run.directory, store, n_shards=2, coordinator="coordinator")
        return len(previous.restored)

    with pytest.raises(StorageError) as caught:
        read()
    assert str(journal) in str(caught.value)
    assert f"Or move {journal.parent} away: then the run resumes" in str(caught.value)
    journal.parent.rename(run.directory.path / "elsewhere")
    assert read() == 2


@pytest.mark.parametrize("content", ["", "{", '{"name": "x"}', "\0" * 40])
def test_what_was_lost_before_a_damaged_status_is_unknown_not_none(run: Run, content: str) -> None:
    run.directory.status_file.write_text(content)
    resumed = run.take_up(job())
    before = resumed.previous.before
    assert resumed.previous.restored == {"shard-0": "00001", "shard-1": "00001"}
    assert before.samples == {"replica-0": 40, "replica-1": 52}
    assert (before.view.seconds, before.view.pushes_lost) == (0.0, None)
    (told,) = resumed.notes
    assert told.startswith(f"{run.directory.status_file} is damaged")
    assert told.endswith("time, steps and lost pushes of previous sessions are unknown")
