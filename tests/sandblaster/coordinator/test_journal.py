"""Where a run resumes, given what shards and coordinator hold."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from distbelief.core.errors import StorageError
from distbelief.protocol import CheckpointRecord
from distbelief.protocol.role import Snapshot
from sandblaster.coordinator.journal import CheckpointEntry, Journal


def entry(savepoint: int, *, goal: str = "") -> CheckpointEntry:
    state, samples = f"state {savepoint}", 10 * savepoint
    return CheckpointEntry(
        savepoint=savepoint,
        iteration=savepoint + 2,
        offset=2,
        samples=samples,
        goal=goal,
        state=state,
    )


def journal(
    *savepoints: int, base_clocks: tuple[int, ...] | None = (0, 0), goal: str = ""
) -> Journal:
    written = Journal(None, goal=goal)
    written.base_clocks = base_clocks
    for savepoint in savepoints:
        written.write(entry(savepoint, goal=goal))
    return written


def held(text: str) -> Sequence[CheckpointRecord]:
    """Return records of "31 (28) (0)": savepoint 31 whole, of the others the parameters."""
    return [
        CheckpointRecord(savepoint=int(word.strip("()")), whole="(" not in word, clock=0)
        for word in text.split()
    ]


@pytest.mark.parametrize(
    ("shards", "written", "savepoint", "whole"),
    [
        (["31", "31"], [31], 31, True),
        (["30 31", "30 31"], [30], 30, True),
        (["30 31", "30 31"], [30, 31], 31, True),
        (["31 (28)", "(28)"], [28, 31], 28, False),
        (["31 (0)", "(0)"], [31], 0, False),
        (["31 (31)", "31 (31)"], [], 31, False),
        (["30 31", "30"], [30, 31], 30, True),
        (["(0)", "(0)"], [], 0, False),
    ],
)
def test_a_run_resumes_from_the_newest_shared_savepoint(
    shards: list[str], written: list[int], savepoint: int, *, whole: bool
) -> None:
    resume_point = journal(*written).choose([held(text) for text in shards])
    assert (resume_point.savepoint, resume_point.whole) == (savepoint, whole)
    if savepoint in written:
        assert resume_point.entry == entry(savepoint)


def test_what_another_goal_has_left_is_a_point_and_no_more() -> None:
    """A run that had converged was resumed with another l2, and was done at once."""
    written = journal(28, 31, goal="l2 = 0")
    written.checkpointed(28)
    snapshot = written.snapshot(incarnation=1)
    same = Journal(snapshot, goal="l2 = 0").choose([held("31")] * 2)
    assert (same.savepoint, same.whole, same.has_other_goal) == (31, True, False)
    changed = Journal(snapshot, goal="l2 = 1")
    other = changed.choose([held("31")] * 2)
    assert (other.savepoint, other.whole, other.has_other_goal) == (31, False, True)
    assert other.entry is not None
    assert other.entry.iteration == 33

    changed.write(entry(40, goal="l2 = 1"))
    assert changed.choose([held("40 (28)")] * 2).whole
    back = changed.choose([held("28 (28)")] * 2)  # a shard has lost what came after
    assert (back.savepoint, back.whole) == (28, False)


def test_shards_without_a_shared_savepoint_are_listed() -> None:
    with pytest.raises(StorageError, match=r"shard 0: \[31\]; shard 1: \[28\]"):
        journal(28, 31).choose([held("31"), held("(28)")])


def test_initial_values_at_another_clock_do_not_match() -> None:
    """A shard that restarts from before the run began has other parameters."""
    written = journal(31, base_clocks=(0, 5))
    with pytest.raises(StorageError, match="shard 1: none"):
        written.choose([held("31 (0)"), held("(0)")])
    assert journal(base_clocks=None).choose([held("(0)")]).savepoint == 0


def test_what_is_written_down_comes_back() -> None:
    written = journal(28, 30, 31)
    written.checkpointed(28)
    written.confirm(31)
    snapshot = written.snapshot(incarnation=1)
    restored = Journal(snapshot)
    assert (restored.on_disk, restored.base_clocks) == (28, (0, 0))
    assert restored.choose([held("31 28"), held("31 28")]).savepoint == 31
    assert restored.choose([held("28"), held("28")]).whole
    assert not restored.choose([held("30"), held("30")]).whole  # forgotten
    assert restored.snapshot(incarnation=2).label > snapshot.label


def test_a_run_with_damaged_newest_snapshots_resumes_with_its_history() -> None:
    """Three snapshots are kept of each shard; of the older two no state was left."""
    written = journal(0)
    for savepoint in range(10, 60, 10):
        written.write(entry(savepoint))
        written.checkpointed(savepoint)
    written = Journal(written.snapshot(incarnation=1))
    for savepoint in (30, 40, 50):
        resume_point = written.choose([held(f"{savepoint} ({savepoint})")] * 2)
        assert resume_point.whole
        assert resume_point.entry == entry(savepoint)
    assert not written.choose([held("20 (20)")] * 2).whole


@pytest.mark.parametrize(
    ("label", "facts"),
    [
        ("1", {}),
        ("1", {"cuts": "{"}),
        ("one", {"cuts": '{"entries":[],"on_disk":0,"base_clocks":null}'}),
    ],
)
def test_a_damaged_journal_is_refused(label: str, facts: dict[str, str]) -> None:
    with pytest.raises(StorageError, match="of the coordinator cannot be read"):
        Journal(Snapshot(label=label, arrays={}, facts=facts))


def test_a_finished_run_resumes_from_its_published_point() -> None:
    written = journal(31)
    written.end(
        (7, 8),
        CheckpointEntry(savepoint=0, iteration=33, offset=2, samples=330, state=""),
        savepoint=0,
    )
    written = Journal(written.snapshot(incarnation=1))

    def at(*clocks: int) -> list[list[CheckpointRecord]]:
        return [[CheckpointRecord(savepoint=0, whole=False, clock=clock)] for clock in clocks]

    ended = written.choose(at(7, 8))
    assert ended.entry is not None
    assert (ended.savepoint, ended.whole, ended.entry.iteration) == (0, False, 33)
    assert written.choose(at(0, 0)).entry is None  # where all began
    assert written.choose([held("31"), held("31")]).savepoint == 31  # with its history
    with pytest.raises(StorageError, match="share no savepoint"):
        written.choose(at(7, 0))


def test_shards_that_have_not_saved_the_last_end_resume_from_the_one_before() -> None:
    """The journal is on disk first: of shards that are killed before they are, nothing fitted."""
    written = journal(31)

    def at(*clocks: int) -> list[list[CheckpointRecord]]:
        return [[CheckpointRecord(savepoint=0, whole=False, clock=clock)] for clock in clocks]

    for n in range(1, 6):
        written.end((n, 2 * n), replace(entry(0), iteration=n), savepoint=0)
        written = Journal(written.snapshot(incarnation=n))
    with pytest.raises(StorageError, match="share no savepoint"):
        written.choose(at(5, 8))
    for clocks in ((5, 10), (3, 6), (3, 6)):  # and of the ends after it nothing is left
        chosen = written.choose(at(*clocks)).entry
        assert chosen is not None
        assert chosen.iteration == clocks[0]
    for clocks in ((5, 10), (2, 4)):
        with pytest.raises(StorageError, match="share no savepoint"):
            written.choose(at(*clocks))


def test_the_savepoint_with_which_a_session_has_ended_keeps_its_entry() -> None:
    """Shards save it then. The next session confirms newer ones, of which no disk knows."""
    written, earlier = journal(31), CheckpointRecord(savepoint=0, whole=False, clock=1)
    written.end((1, 1), entry(0), savepoint=31)  # of which the shards had saved the values
    written.write(entry(40))
    written.end((2, 2), entry(0), savepoint=40)
    for session in range(50, 100, 10):
        written = Journal(written.snapshot(incarnation=session))
        assert written.choose([[*held("40"), earlier]] * 2).entry == entry(40)
        for newer in range(session, session + 5):
            written.write(entry(newer))
            written.confirm(newer)
        written.end((2, 2), entry(0), savepoint=session + 4)  # and then they are killed
