"""Sweeps and suggestions, and what they reject."""

import msgspec
import pytest
from rich.console import Console

from distbelief.core.errors import JobError
from distbelief.simulation.forecast.forecast_report import remarks_on, table_of
from distbelief.simulation.forecast.sweep import (
    Axis,
    Outcome,
    Spread,
    Variant,
    axes_of,
    combinations,
    reached_at,
)
from distbelief.supervisor.view import JobView
from tests.distbelief.simulation.forecast.jobs import small


def an_outcome(
    *,
    rate: float | None = 100.0,
    target_seconds: float | None = None,
    seed: int = 0,
    error: str | None = None,
) -> Outcome:
    return Outcome(
        seed=seed,
        error=error,
        seconds=1.0,
        training_seconds=1.0,
        n_machines=3,
        samples=100,
        step=10,
        step_seconds=0.1,
        samples_per_second=rate,
        target_seconds=target_seconds,
        traffic={},
        utilisation={},
        machine_hours=0.0,
        restarts=0,
        n_messages=0,
        digest="",
    )


def a_variant(name: str, *outcomes: Outcome, n_machines: int = 3, target: bool = False) -> Variant:
    job = small("stop.accuracy=0.5") if target else small()
    return Variant(
        settings={"cluster.replicas": name}, job=job, n_machines=n_machines, outcomes=outcomes
    )


def test_an_axis_may_leave_out_the_table_of_a_usual_key() -> None:
    assert Axis.of("replicas=1, 2") == Axis(key="cluster.replicas", values=("1", "2"))
    assert Axis.of("n_push=5").key == "algorithm.n_push"
    assert Axis.of("stop.samples=7").key == "stop.samples"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replicas", "write TABLE.KEY=VALUE"),
        ("width=1,2", "write TABLE.KEY=VALUE"),
        ("replicas=1,,2", "write TABLE.KEY=VALUE"),
        ("replicas=1,2,1", "the value 1 is given twice"),
    ],
)
def test_what_is_no_axis_is_refused_with_an_example(text: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        Axis.of(text)


def test_a_value_may_have_commas_in_brackets() -> None:
    """Widths of hidden layers: "[64" and "128]" were two of four values."""
    axis = Axis.of("model.arguments.hidden=[64,128],[[1,2],3], []")
    assert axis.values == ("[64,128]", "[[1,2],3]", "[]")
    assert Axis.of("a.b={c = 1, d = 2},]").values == ("{c = 1, d = 2}", "]")


def test_text_in_quotes_is_one_value() -> None:
    """A file named "a,b" was two values."""
    assert Axis.of("""a.b="x,y",'z, ]'""").values == ('"x,y"', "'z, ]'")
    assert Axis.of("""a.b=["]", "x,y"],it's,7'""").values == ('["]", "x,y"]', "it's", "7'")
    assert Axis.named("every", ["10 min, or so", "1"]).values == ("10 min, or so", "1")


def test_all_combinations_are_run_the_last_axis_fastest() -> None:
    axes = axes_of(["replicas=1,2", "n_push=1,5"])
    assert [tuple(each.values()) for each in combinations(axes)] == [
        ("1", "1"),
        ("1", "5"),
        ("2", "1"),
        ("2", "5"),
    ]
    assert list(combinations([])) == [{}]


def test_too_many_combinations_are_refused_with_their_number() -> None:
    values = ",".join(map(str, range(1, 41)))
    with pytest.raises(JobError, match="1,600 combinations"):
        axes_of([f"replicas={values}", f"shards={values}"])


def test_how_many_runs_reach_the_target_is_reported_unless_all_do() -> None:
    """Of three runs two came nowhere, and the table had the time of the third alone."""
    console = Console(width=200)
    with console.capture() as capture:
        for seconds in ((5.0, None, None), (5.0, 5.0, None), (5.0, 7.0), (None,)):
            runs = [an_outcome(target_seconds=each) for each in seconds]
            console.print(table_of([a_variant("2", *runs, target=True)]))
    text = capture.get()
    assert "5.0 s, 1 of 3 runs" in text
    assert "5.0 s, 2 of 3 runs" in text
    assert text.count(" runs") == 2


def test_what_failed_or_was_left_out_is_reported_with_its_reason() -> None:
    """A sweep that ended with exit code 1 showed a table without a blemish."""
    fails = a_variant("8", an_outcome(), an_outcome(error="no shard left", seed=1))
    large = [Variant(settings={}, job=small(), n_machines=9, left_out="takes 9 machines")]
    assert remarks_on([fails, *2 * large]) == [
        "replicas 8, seed 1 failed: no shard left",
        "2 configurations left out: takes 9 machines",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0332, "33.2 ms"), (0.719, "719 ms"), (1.76, "1.76 s"), (12.0, "12 s")]
)
def test_a_step_is_reported_in_its_usual_unit(seconds: float, shown: str) -> None:
    """One of Sandblaster's took "1.76e+03 ms"."""
    outcome = msgspec.structs.replace(an_outcome(), step_seconds=seconds)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table_of([a_variant("2", outcome)]))
    assert shown in capture.get()


def test_a_spread_leaves_out_what_was_not_measured() -> None:
    found = Spread.of([3.0, None, 1.0, 2.0])
    assert found == Spread(p10=1.2, p50=2.0, p90=2.8, n=3)
    assert Spread.of([None]) is None


def test_a_metric_that_must_fall_has_reached_its_target_below_it() -> None:
    """A run that ended at an error of 0.9 had reached 0.1, at its end, and was suggested."""
    job = small("stop.accuracy=0.1")
    for metric, seconds in ((0.9, None), (0.1, 7.0)):
        view = JobView(phase="done", metric=metric, training_seconds=7.0)
        assert reached_at(job, view, higher_is_better=False) == seconds
