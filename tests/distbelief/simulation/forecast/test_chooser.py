"""The chooser: what it compares by, where it looks, and what it finds beside brute force."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from distbelief.config.algorithms import facts_of
from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.simulation.forecast.chooser import (
    AS_GIVEN,
    N_TRIED_MAX,
    best_of,
    cost_by,
    counts,
    front_of,
    undecided,
    usual_axes,
)
from distbelief.simulation.forecast.forecast_report import suggestion
from distbelief.simulation.forecast.run import Trial, with_outcomes
from distbelief.simulation.forecast.simulate import SimulationRequest, run_request, simulate
from distbelief.simulation.forecast.sweep import Outcome, Variant, axes_of
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.simulation.forecast.jobs import TEXT, small, written
from tests.distbelief.simulation.forecast.test_sweep import a_variant, an_outcome


RACK = """
latency = "60 us"
[[machines]]
count = 6
flops = "200 kFLOP/s"
memory_rate = "10 MB/s"
bandwidth = "1 Mbit/s"
price = 0.5
"""

Ends = Callable[[Job], Outcome]
LONG = 99.0  # seconds of a whole run; short ones have fewer


def priced(name: str, rate: float, price: float, *, seconds: float | None = None) -> Variant:
    outcome = msgspec.structs.replace(an_outcome(rate=rate, target_seconds=seconds), price=price)
    return a_variant(name, outcome, target=seconds is not None)


def test_the_suggestion_has_the_most_samples_per_second() -> None:
    slow, fast = a_variant("1", an_outcome(rate=10.0)), a_variant("2", an_outcome())
    large = a_variant("9", an_outcome(rate=1e6), n_machines=11)
    assert best_of([slow, fast, large], n_machines=10) is fast


def test_with_a_target_the_suggestion_gets_there_first() -> None:
    def reached(*seconds: float | None) -> list[Outcome]:
        return [an_outcome(target_seconds=each) for each in seconds]

    early = a_variant("1", *reached(5.0, 6.0, None), target=True)
    late = a_variant("2", *reached(7.0, 7.0, 7.0), target=True)
    rarely = a_variant("4", *reached(1.0, None, None), target=True)
    assert best_of([late, rarely, early], n_machines=3) is early
    with pytest.raises(JobError, match=r"none of 1 configurations reaches the target"):
        best_of([rarely], n_machines=3)


def test_of_two_runs_the_suggestion_takes_the_median_that_the_table_shows() -> None:
    """It took the slower one: the row in green had the larger time to the target."""
    fast = [an_outcome(target_seconds=each) for each in (5.0, 9.0)]
    slow = [an_outcome(target_seconds=each) for each in (7.0, 8.0)]
    variants = [a_variant("1", *slow, target=True), a_variant("2", *fast, target=True)]
    assert best_of(variants, n_machines=3) is variants[1]


def test_a_configuration_that_fails_is_not_suggested_however_fast_it_was() -> None:
    """Of a job that dies early the first samples per second may be the most."""
    fails = a_variant("8", an_outcome(rate=1e6), an_outcome(error="no shard left"))
    holds = a_variant("1", an_outcome(rate=10.0))
    assert best_of([fails, holds], n_machines=3) is holds
    with pytest.raises(JobError, match=r"none of 1 .* completes: no shard left"):
        best_of([fails], n_machines=3)


def test_a_suggestion_that_nothing_holds_says_why() -> None:
    lacking = Variant(settings={}, job=small(), n_machines=3, left_out="machine-0 cannot hold it")
    with pytest.raises(JobError, match=r"none of 1 .* fits; machine-0 cannot hold it"):
        best_of([lacking], n_machines=3)


def test_a_suggestion_looks_at_as_many_shards_as_there_are_machines() -> None:
    """Shards were at most a quarter of the machines: 4 x 4 on ten was 11 % faster than 4 x 2."""
    assert counts(10) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert counts(30) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 29, 30]
    replicas, shards, placement = usual_axes(small(), 10, learns=False)
    assert replicas.values[-1] == "9"
    assert shards.values == tuple(map(str, range(1, 11)))
    assert placement.values == ("spread", "here", "beside replicas")


def test_what_changes_how_a_job_learns_is_searched_with_a_target_alone() -> None:
    """The fastest job is the one that exchanges nothing, whatever it learns."""

    def axes(*wish: str, learns: bool = True) -> dict[str, tuple[str, ...]]:
        found = usual_axes(small(*wish), 4, learns=learns)
        return {axis.key.removeprefix("algorithm."): axis.values for axis in found[3:]}

    local = ("algorithm.preset=local", "algorithm.rule={name='sgd', learning_rate=1.0}")
    assert axes(*local, learns=False) == {}
    assert axes(*local)["exchange.every"] == ("16", "32", "64", "128", "256")
    seldom = (*local, "algorithm.exchange.every=1000000")
    assert axes(*seldom)["exchange.every"][2:] == ("1000000", "2000000", "4000000")  # no 1e+06
    found = axes("algorithm.n_push=2")
    assert found["n_push"] == ("2", "4", "8", "16")
    assert found["exchange.push"][0] == AS_GIVEN
    ring = ("algorithm.preset=horovod", "algorithm.rule={name='sgd', learning_rate=0.1}")
    assert axes(*ring) == {"exchange.route": ("server", "ring")}
    rounds = ("algorithm.exchange.staleness=3", "algorithm.exchange.weight=mean")
    assert axes(*rounds)["exchange.staleness"] == ("0", "3", "7")


def test_variants_are_compared_by_time_by_loss_or_by_price() -> None:
    fast, cheap = priced("8", 200.0, 4.0), priced("1", 100.0, 1.0)
    for by, best in (("time", fast), ("price", cheap)):
        assert best_of([fast, cheap], n_machines=9, by=by) is best
    first, late = priced("8", 1.0, 4.0, seconds=5.0), priced("1", 1.0, 1.0, seconds=9.0)
    assert best_of([first, late], n_machines=9) is first
    assert best_of([first, late], n_machines=9, by="price") is late
    assert cost_by("price")(late) == 1.0
    low, none = (
        a_variant("2", msgspec.structs.replace(an_outcome(), held_out_loss=loss, loss=0.1))
        for loss in (0.5, math.nan)
    )
    assert cost_by("loss")(low) == 0.5
    assert cost_by("loss")(none) == math.inf
    with pytest.raises(JobError, match="has a finite loss"):
        best_of([none], n_machines=9, by="loss")


def test_a_run_that_diverges_is_not_suggested_however_fast_it_is() -> None:
    """Without a target nobody looked at the loss: the most replicas were the best."""
    fast = msgspec.structs.replace(an_outcome(rate=1e6), loss=math.nan)
    diverges, holds = a_variant("64", fast), a_variant("2", an_outcome(rate=10.0))
    for by in ("time", "price"):
        assert best_of([diverges, holds], n_machines=9, by=by) is holds
        assert front_of([diverges, holds]) == (holds,)
        with pytest.raises(JobError, match=r"none of 1 .* has a finite loss: use a lower learning"):
            best_of([diverges], n_machines=9, by=by)


def test_of_machines_that_cost_nothing_the_fastest_are_suggested() -> None:
    slow, fast = priced("1", 100.0, 0.0), priced("8", 200.0, 0.0)
    assert best_of([slow, fast], n_machines=9, by="price") is fast


def test_the_front_has_what_nothing_beats_in_time_and_in_price() -> None:
    found = [priced("8", 200.0, 4.0), priced("4", 150.0, 5.0), priced("1", 100.0, 1.0)]
    fails = a_variant("9", an_outcome(rate=1e9, error="no shard left"))
    assert front_of([*found[::-1], fails]) == (found[0], found[2])


def test_one_failed_run_of_three_keeps_a_configuration_off_the_front() -> None:
    """Its median was that of the runs that completed: the front named what may fail."""
    fails = a_variant("8", an_outcome(rate=1e6), an_outcome(rate=1e6), an_outcome(error="silent"))
    holds = a_variant("1", an_outcome(rate=10.0))
    assert front_of([fails, holds]) == (holds,)
    assert undecided(holds, [fails, holds], by="time") == []


def test_what_the_seeds_do_not_tell_apart_is_named() -> None:
    def of(name: str, *rates: float) -> Variant:
        return a_variant(name, *(an_outcome(rate=rate) for rate in rates))

    best, close, far = of("4", 90, 100, 110), of("3", 85, 88, 95), of("1", 10, 11, 12)
    assert undecided(best, [best, close, far], by="time") == [close]
    lines = suggestion(best, [best, close, far], front=(), by="time")
    assert lines == [
        "suggested, by time:",
        "--set cluster.replicas=4",
        "3 seeds do not tell it from: replicas 3",
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rack.toml").write_text(RACK)
    written(tmp_path, text=TEXT.replace("samples = 120\n", "seconds = 0.6\n"))
    return tmp_path


@pytest.mark.untraced
@pytest.mark.parametrize("seconds", [0.2, pytest.param(0.6, marks=pytest.mark.soak)])
def test_the_search_finds_what_brute_force_finds(folder: Path, seconds: float) -> None:
    def request(**wish: object) -> SimulationRequest:
        return SimulationRequest(
            job=folder / "small.toml",
            cluster="rack.toml",
            machines=5,
            measures=False,
            seeds=(0,),
            overrides=(f"stop.seconds={seconds}",),
            **wish,  # type: ignore[arg-type]  # by name
        )

    quiet = Console(quiet=True)
    found = run_request(request(suggests=True), console=quiet)
    assert found.best is not None
    assert len(found.best.outcomes) == 1
    assert found.best in found.front
    axes = tuple(axes_of(["replicas=2,3,4", "shards=1,3,5"]))
    swept = run_request(request(axes=axes), console=quiet).variants
    assert cost_by("time")(found.best) <= 1.05 * min(map(cost_by("time"), swept))


def suggested(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ends: Ends, *wish: str
) -> Mapping[str, str]:
    """Return what is suggested where the runs end as `ends` says, without a simulation."""

    def run(self: Trial, *, seed: int, **_: object) -> object:
        outcome = ends(self.job.job)
        return SimpleNamespace(outcome=msgspec.structs.replace(outcome, seed=seed))

    monkeypatch.setattr(Trial, "run", run)
    found = simulate(
        folder / "small.toml",
        overrides=[f"stop.seconds={LONG}", *wish],
        machines=5,
        cluster="rack.toml",
        suggest=True,
        counted=True,
    )
    assert found.best is not None
    return found.best.settings


def test_where_all_starts_fail_the_search_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 combinations nine completed, and none of the five with which the search began."""
    n_short = 0

    def ends(job: Job) -> Outcome:
        nonlocal n_short
        n_short += job.stop.seconds != LONG
        holds = job.cluster.n_replicas == 2 and job.cluster.shards >= 3
        return an_outcome(rate=job.cluster.shards, error=None if holds else "shard-0 is silent")

    found = suggested(folder, monkeypatch, ends)
    assert (found["cluster.replicas"], found["cluster.shards"]) == ("2", "5")
    assert n_short <= N_TRIED_MAX + 1  # one for the formula


def presets_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> tuple[Mapping[str, str], str]:
    """Return what is suggested to a job that local steps help, and what is said of presets."""

    def run(self: Trial, *, seed: int, **_: object) -> object:
        policy = facts_of(self.job.job).policy
        assert policy is not None
        seconds = 5.0 + (policy.send == "gradient") + (policy.every != 64)
        n_bytes = {"replica - shard": 1e6 / float(str(policy.every))}
        outcome = an_outcome(rate=self.job.job.cluster.n_replicas, target_seconds=seconds)
        return SimpleNamespace(outcome=msgspec.structs.replace(outcome, seed=seed, traffic=n_bytes))

    monkeypatch.setattr(Trial, "run", run)
    text = TEXT.replace('rule = { name = "adagrad", learning_rate = 0.05 }', rule)
    found = simulate(
        written(folder, text=text),
        overrides=[f"stop.seconds={LONG}", "stop.loss=0.1"],
        machines=5,
        cluster="rack.toml",
        suggest=True,
        counted=True,
    )
    assert found.best is not None
    return found.best.settings, " ".join(found.notes)


def test_with_a_target_presets_are_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were tried with `--sweep algorithm.preset=...` alone."""
    settings, notes = presets_of(folder, monkeypatch, 'preset = "downpour"')
    assert settings["algorithm.preset"] in {"local", "diloco", "decoupled-diloco", "sparseloco"}
    # Settings of the job's own axes would be in the preset's place.
    assert settings["algorithm.n_push"] == settings["algorithm.exchange.numbers"] == AS_GIVEN
    assert notes.startswith("presets: 15 priced; tried, the fastest: ")
    assert settings["algorithm.preset"] in notes


def test_a_preset_that_would_misuse_the_rule_of_the_job_is_left_out_with_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule for gradients, kept with local steps, would take sums of steps for gradients."""
    rule = 'rule = { name = "sgd", learning_rate = 0.05 }'
    settings, notes = presets_of(folder, monkeypatch, rule)
    assert settings["algorithm.preset"] in {AS_GIVEN, "horovod", "strom", "poseidon", "adam-2014"}
    left_out = notes.partition("presets left out, as the job's own [algorithm] rule")[2]
    assert {"local", "diloco", "ssp", "hogwild"} <= {*left_out.replace(",", "").split()}


def test_presets_of_a_job_that_gives_every_key_are_refused(tmp_path: Path) -> None:
    """A `Job`, or the file of a run, has all: "horovod" had no ring, without a word."""
    as_run = tmp_path / "job.toml"
    as_run.write_text(small().to_toml())
    for job in (small(), as_run, small().to_tables()):
        with pytest.raises(JobError, match="this job has every key of"):
            simulate(job, cluster="rack-1g", sweep={"algorithm.preset": ["horovod", "strom"]})


def test_runs_that_end_before_their_first_exchange_say_so() -> None:
    """Of [stop] seconds nobody knew before: the best, by time, was what exchanged nothing."""
    local = ("algorithm.preset=local", "algorithm.rule={name='sgd', learning_rate=1.0}")
    variant = msgspec.structs.replace(a_variant("2", an_outcome()), job=small(*local))
    for step, n_pushes, warned in ((64, 2, True), (126, 0, True), (128, 2, False), (64, 3, False)):
        run = msgspec.structs.replace(an_outcome(), step=step, pushes_applied=n_pushes)
        told = with_outcomes(variant, [run]).warnings
        assert ["exchange nothing before the end" in text for text in told] == [True] * warned
    # A run of one step for two replicas was told to "use every = 1 or fewer".
    run = msgspec.structs.replace(an_outcome(), step=1, pushes_applied=1)
    assert not with_outcomes(a_variant("2", an_outcome()), [run]).warnings


def test_short_runs_have_no_warm_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica trained all of a short run, and the search went by chance."""
    steps = set[tuple[bool, int]]()

    def ends(job: Job) -> Outcome:
        assert isinstance(job.algorithm, DownpourSettings)
        is_whole = job.stop.steps is None and job.stop.seconds == LONG
        steps.add((is_whole, job.algorithm.warm_start_steps))
        return an_outcome(rate=job.cluster.n_replicas)

    suggested(folder, monkeypatch, ends, "algorithm.warm_start_steps=500")
    assert steps == {(False, 0), (True, 500)}


def test_where_whole_runs_of_the_best_fail_others_are_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that falls silent after ten seconds is none the worse in a short run."""

    def ends(job: Job) -> Outcome:
        n, is_whole = job.cluster.n_replicas, job.stop.seconds == LONG
        return an_outcome(rate=n, error="shard-0 is silent" if is_whole and n > 1 else None)

    assert suggested(folder, monkeypatch, ends)["cluster.replicas"] == "1"


def test_a_run_that_is_refused_is_a_failure_of_its_configuration_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that leaves for good with a shard ended the whole search."""

    def ends(job: Job, *, holds: bool = True) -> Outcome:
        if not holds or job.cluster.placement == "spread":
            raise JobError("machine 3 leaves, and shard-0 is there")
        return an_outcome(rate=job.cluster.n_replicas)

    found = suggested(folder, monkeypatch, ends)
    assert found["cluster.placement"] != "spread"
    assert found["cluster.replicas"] == "4"
    with pytest.raises(JobError, match=r"none of .* fits; machine 3 leaves"):
        suggested(folder, monkeypatch, lambda job: ends(job, holds=False))


def test_a_suggestion_that_cannot_be_made_says_what_is_missing(tmp_path: Path) -> None:
    job = written(tmp_path)
    for wish, said in (
        ({"by": "loss"}, r"give \[stop\] seconds"),
        ({"by": "luck"}, "^by luck: use time, loss, price"),
        ({"by": "price", "suggest": False}, ": add suggest"),
    ):
        asked = {"suggest": True, "machines": 4, "cluster": "rack-1g", **wish}
        with pytest.raises(JobError, match=said):
            simulate(job, **asked)  # type: ignore[arg-type]  # by name
