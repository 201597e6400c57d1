"""Rounds in flight against a plain loop that keeps every version of the tables."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distbelief.core.errors import JobError, SettingError
from distbelief.parameter_server.rows import STALENESS_MAX, Values
from sandblaster import LatentDirichletAllocation
from sandblaster.strads.jobs import lasso
from sandblaster.strads.program import Flight, Pushed, run
from sandblaster.strads.topics import Block, Sample, Topics
from tests.sandblaster.strads.mixing import Mixing
from tests.sandblaster.strads.test_topics import corpus, topics


def plain(program: Mixing, staleness: int, n_flights: int) -> tuple[list[float], dict[str, Values]]:
    """Return what `run` has to return: round t takes the tables after round t - 1 - staleness."""
    versions = [{name: table.copy() for name, table in program.tables.items()}]
    found: list[float] = []
    for flight in range(n_flights):
        first, reports = len(versions) - 1, list[float]()
        for tasks in program.rounds(flight, found[-1] if found else 0.0):
            old = versions[max(first, len(versions) - 1 - staleness)]
            after = {name: table.copy() for name, table in versions[-1].items()}
            pushed = [
                program.push(
                    task.block,
                    task.argument,
                    {name: old[name][rows] for name, rows in task.takes.items()},
                )
                for task in tasks
            ]
            for name, table in after.items():
                _add(table, [one.adds[name] for one in pushed], divides=name == "pairs")
            versions.append(after)
            reports += [float(one.report[0]) for one in pushed]
        found.append(float(np.sin([one * k for k, one in enumerate(reports)]).sum()))
    return found, versions[-1]


def _add(table: Values, adds: list[tuple[object, Values]], *, divides: bool) -> None:
    sums: dict[int, Values] = {}
    for rows, values in adds:
        for row, value in zip(np.arange(len(table))[rows], values, strict=True):  # type: ignore[call-overload] # rows
            sums[row] = sums[row] + value if row in sums else value
    for row, total in sums.items():
        if divides:
            divisor = total[1] + 0.5
            table[row] = [total[0] / divisor, divisor]
        else:
            table[row] += total


@given(
    staleness=st.integers(0, 4),
    n_rounds=st.integers(1, 7),
    workers=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=40, deadline=None)
def test_a_round_takes_what_a_fixed_number_of_rounds_before_have_left(
    staleness: int, n_rounds: int, workers: int, seed: int
) -> None:
    program = Mixing(staleness=staleness, n_rounds=n_rounds, n_flights=2, seed=seed)
    found, tables = run(program, workers=workers)
    expected, after = plain(program, staleness, 2)
    assert found == expected
    assert {name: table.tobytes() for name, table in tables.items()} == {
        name: table.tobytes() for name, table in after.items()
    }


def test_another_staleness_is_another_result() -> None:
    results = [run(Mixing(staleness=staleness))[0][-1] for staleness in range(3)]
    assert len(set(results)) == 3


# --- topics ---


@pytest.mark.parametrize("staleness", [1, 3])
def test_st4_counts_of_words_are_exact_and_sums_have_the_block_s_own_changes(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task takes its words as all earlier turns left them; sums lack those of others."""
    program = topics(corpus(), 4, n_blocks=3, max_iter=6, staleness=staleness)
    words = program.tables["words"].reshape(-1, 4).copy()  # with all that was added
    own = [np.zeros(4) for _ in range(3)]  # of each block: topics of its tokens
    n_checked = 0
    sample = Topics._sample

    def checked(
        self: Topics, block: Block, argument: Sample, taken: Mapping[str, Values]
    ) -> Pushed[Values]:
        nonlocal n_checked
        pushed = sample(self, block, argument, taken)
        assert taken["words"].tobytes() == words.reshape(-1)[self._rows(argument.bucket)].tobytes()
        rows, added = pushed.adds["words"]
        words.reshape(-1)[rows] += added
        mine = own[block.first_held_out]
        mine += pushed.adds["sums"][1]
        assert mine.min() >= 0
        n_checked += 1
        return pushed

    load = Topics.load

    def numbered(self: Topics, block: int) -> Block:
        loaded = load(self, block)
        loaded.first_held_out = block  # nothing is held out
        return loaded

    monkeypatch.setattr(Topics, "_sample", checked)
    monkeypatch.setattr(Topics, "load", numbered)
    learned, tables = run(program)
    assert len(learned.scores) == 6
    assert n_checked == 7 * 3 * 3 * (staleness + 1)
    assert tables["words"].tobytes() == words.tobytes()
    assert (words.sum(axis=0) == tables["sums"]).all()


def test_st4_the_same_bits_for_any_workers_with_turns_in_flight() -> None:
    counts = corpus(n_documents=24)
    found = [
        LatentDirichletAllocation(3, n_blocks=4, max_iter=9, tol=-1.0, staleness=2, workers=n).fit(
            counts
        )
        for n in (1, 2, 4)
    ]
    assert len({one.components_.tobytes() for one in found}) == 1
    assert len({tuple(one.scores_) for one in found}) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"staleness": -1}, "staleness is -1; use a whole number, 0 or more"),
        ({"staleness": 0.5}, "staleness is 0.5; use a whole number, 0 or more"),
        ({"staleness": 9}, f"staleness is 9; use 0 to {STALENESS_MAX}"),
        ({"staleness": 8, "n_blocks": 5}, "45 buckets, and X has 40 words; use less of either"),
    ],
)
def test_a_staleness_that_cannot_be_is_refused(options: dict[str, object], text: str) -> None:
    model = LatentDirichletAllocation(3, **options)  # type: ignore[arg-type] # wrong ones
    with pytest.raises(SettingError, match=text):
        model.fit(corpus(n_documents=24))


def test_few_words_are_fewer_blocks() -> None:
    counts = corpus(n_documents=24)
    assert LatentDirichletAllocation(3, staleness=8).program(counts).n_blocks == 4


def test_a_flight_has_bounds() -> None:
    with pytest.raises(SettingError, match=f"staleness is 9; use 0 to {STALENESS_MAX}"):
        Flight(rounds=[], staleness=9)


def test_a_program_whose_objective_could_rise_has_no_staleness(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.zeros(3))
    with pytest.raises(JobError, match="staleness is of topics: rounds of other programs"):
        lasso("x.npy", str(tmp_path / "y.npy"), staleness=1)
