"""Forecasts of a run's loss beside curves whose end is known, and what is not told."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.config.job import Job
from distbelief.dashboard.outlook import (
    CannotTellError,
    Point,
    curve_of,
    gain_of_more,
    loss_at,
    outlook,
    samples_until,
)
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.job.run.metrics_file import Measurement, MetricsFile
from distbelief.simulation.forecast.placed_cluster import HostCosts
from distbelief.simulation.forecast.prepare import Preparation
from distbelief.simulation.forecast.run import run_simulated
from distbelief.supervisor.view import JobView, RoleView
from sandblaster.optimizers.termination import Reason
from tests.distbelief.simulation.forecast.jobs import SANDBLASTER, TEXT, small


RING = (
    "algorithm.exchange={staleness=0, round={}, weight='mean', route='ring'}",
    "algorithm.rule={name='sgd', learning_rate=0.1}",
    "cluster.shards=1",
)


def power_law(x: float) -> float:
    return float(0.3 + 2.0 * (1.0 + x / 500.0) ** -0.9)


def curve(n: int, *, noise: float = 0.02, seed: int = 0) -> list[Point]:
    random = np.random.default_rng(seed)
    samples = [500.0 * (k + 1) for k in range(n)]
    return [(x, power_law(x) * float(np.exp(noise * random.normal()))) for x in samples]


def test_intervals_hold_the_end_of_a_curve_of_the_same_form() -> None:
    held, random = 0, np.random.default_rng(7)
    for seed in range(20):
        low, middle, high = loss_at(30_000.0, curve(20, seed=seed))
        held += low <= power_law(30_000.0) * float(np.exp(0.02 * random.normal())) <= high
        assert high - low < middle
    assert held >= 16


def test_the_time_to_a_value_lies_about_where_the_curve_has_it() -> None:
    (low, middle, high), reached = samples_until(0.4, curve(20, noise=0.005))
    true = 500.0 * ((2.0 / 0.1) ** (1 / 0.9) - 1.0)  # 0.3 + 2 (1 + x / 500)^-0.9 = 0.4
    assert low <= true <= high
    assert middle == pytest.approx(true, rel=0.3)
    assert reached > 0.9
    assert samples_until(0.05, curve(20, noise=0.005))[1] < 0.2


def test_places_that_were_measured_again_or_out_of_order_change_nothing() -> None:
    """The last subset and the whole of held-out data are measured at one place, for example."""
    points = curve(20)
    again = [*points[10:], *points[:10], *[(points[-1][0], 9.0)] * 3, points[-1]]
    assert loss_at(30_000.0, again) == loss_at(30_000.0, points)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (curve(5), "5 measurements, and 8 are needed"),
        ([], "0 measurements"),
        ([(100.0 * k, 5.0 - 0.1 * k) for k in range(1, 15)], "in a line"),
        ([(100.0 * k, 1.0 + (k - 4) ** 2 / 20) for k in range(1, 15)], "does not fall any more"),
        ([(100.0 * k, 1.0 - 0.1 * k) for k in range(1, 15)], "finite number above 0"),
        # Regressions: warnings of numpy, and NaN.
        ([(100.0 * k, 1e300 / k) for k in range(1, 15)], "finite number above 0"),
        ([(100.0, 1.0 / k) for k in range(1, 15)], "1 measurement, and 8 are needed"),
    ],
)
def test_what_the_curve_does_not_say_is_not_told(points: list[Point], said: str) -> None:
    with pytest.raises(CannotTellError, match=said):
        loss_at(2000.0, points)


def test_nothing_is_told_of_a_far_future() -> None:
    with pytest.raises(CannotTellError, match="too far ahead"):
        loss_at(1e6, curve(20))


def test_more_replicas_bring_nothing_where_the_shards_are_busy() -> None:
    assert gain_of_more(0.0, 4, n_more=2)[0] == pytest.approx(1.5)
    low, high = gain_of_more(0.97, 16, n_more=2)
    assert low == pytest.approx(1.0, abs=0.02)
    assert high == 18 / 16
    light, _ = gain_of_more(0.1, 4, n_more=2)
    heavy, _ = gain_of_more(0.5, 4, n_more=2)
    assert 1.0 < heavy < light < 1.5


def a_run(n: int) -> tuple[JobView, list[Measurement]]:
    points = curve(n, noise=0.01)
    rows = [
        Measurement(time=x / 100.0, samples=int(x), held_out_loss=loss, metric=0.9)
        for x, loss in points
    ]
    counters = {"spent_computing": 8.0, "spent_waiting for shard-0": 2.0}
    roles = tuple(
        RoleView(name=f"replica-{k}", state="computing", counters=counters) for k in (0, 1)
    )
    view = JobView(samples=rows[-1].samples, total_samples=3 * rows[-1].samples, roles=roles)
    return view, rows


CLUSTER = """
latency = "60 us"
[[machines]]
count = 14
flops = "20 kFLOP/s"
memory_rate = "10 MB/s"
bandwidth = "1 Mbit/s"
"""


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("n", "wish", "parts"),
    [
        (2, (), "a batch has 12 parts to share"),  # six each, then three
        (8, ("algorithm.portion=6",), "a batch has 8 parts to share"),  # one each, then none
        pytest.param(
            *(1, ("algorithm.portion=6", "cluster.partitions=2"), "a batch has 8 parts to share"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_two_more_replicas_of_a_batch_method_do_what_a_simulation_has(
    n: int, wish: tuple[str, ...], parts: str, tmp_path: Path
) -> None:
    """+25 % were told of eight replicas that shared eight parts, +100 % of two for +47 %."""
    text = SANDBLASTER.replace("iterations = 3", "iterations = 12\ntolerance = 0.0")
    jobs = [small(f"cluster.replicas={k}", *wish, text=text) for k in (n, n + 2)]
    (before, views), (after, _) = simulated(tmp_path, *jobs)
    assert before.samples == after.samples
    rows = [Measurement.of(view) for view in views]
    told = outlook(small(*wish, text=text), before, rows)
    assert (told.n_replicas, told.parts) == (n, parts)
    assert told.two_more is not None
    low, high = told.two_more
    gain = before.training_seconds / after.training_seconds
    assert 0.9 * low < gain < 1.1 * high < 1.25 * low


def simulated(
    folder: Path, *jobs: Job, cluster: str = CLUSTER
) -> Iterator[tuple[JobView, list[JobView]]]:
    (folder / "rack.toml").write_text(cluster)
    with Preparation() as preparation:
        for job in jobs:
            hosts = HostCosts(str(folder / "rack.toml"), machines=14, measures=False)
            host, views = hosts.hosting(job, tell=lambda _: None), list[JobView]()
            prepared = host.formed(preparation.stage(job))
            yield run_simulated(prepared, host, seed=0, tell=views.append).view, views


@pytest.mark.untraced
@pytest.mark.parametrize(("n", "bandwidth"), [(2, "1 Gbit/s"), (4, "1 Mbit/s")])
def test_two_more_replicas_bring_no_more_than_the_busiest_shard_serves(
    n: int, bandwidth: str, tmp_path: Path
) -> None:
    """Two that push beside their steps do not wait: +100 % were told of them, for +68 %."""
    wishes = [(f"cluster.replicas={k}", "stop.samples=1000") for k in (n, n + 2)]
    jobs = [small(*wish) for wish in wishes]
    cluster = CLUSTER.replace("1 Mbit/s", bandwidth)
    (before, views), (after, _) = simulated(tmp_path, *jobs, cluster=cluster)
    rows = [Measurement.of(view) for view in views]
    told = outlook(small(), msgspec.structs.replace(before, total_samples=None), rows)
    assert told.two_more is not None
    assert told.busy is not None
    low, high = told.two_more
    gain = before.training_seconds / after.training_seconds
    assert 0.95 * low < gain < 1.02 * high
    assert high < 0.95 * (n + 2) / n


def test_two_more_replicas_get_no_more_than_what_is_left_to_deal() -> None:
    view, rows = a_run(20)
    for n_left, most in ((0, 1.0), (4, 1.0), (8, 1.0), (12, 2.0), (400, 2.0)):
        of_it = msgspec.structs.replace(view, total_samples=view.samples + n_left)
        found = outlook(small(), of_it, rows)  # four samples are a batch
        assert found.two_more is not None
        assert found.two_more[1] == most
        assert found.parts == ("" if n_left >= 12 else f"{n_left // 4} batches are left to deal")


def test_a_run_that_its_stop_rules_have_ended_goes_on_with_a_later_end() -> None:
    """A time "with --resume" was told of it, and +0 % of two more, as 0 batches were left."""
    view, rows = a_run(20)
    view = msgspec.structs.replace(view, total_samples=view.samples, progress=1.0)
    found = outlook(small("stop.loss=0.4"), view, rows, ended=True)
    assert found.done
    assert found.seconds is not None
    assert found.two_more is not None
    assert found.two_more[1] == 2.0
    assert not outlook(small(), view, rows).done


def test_a_run_that_its_patience_or_its_method_has_ended_needs_a_later_end_too() -> None:
    """A time "with --resume" was told of it, and the resumed run ended at once."""
    view, rows = a_run(20)
    view = msgspec.structs.replace(view, evaluations_without_gain=3)
    assert outlook(small("stop.patience=3"), view, rows, ended=True).done
    assert not outlook(small("stop.patience=4"), view, rows, ended=True).done
    batch = small(text=SANDBLASTER)
    for reason in (Reason.MAX_ITERATIONS, Reason.CONVERGED_GRADIENT):
        counters = {"reason": float([*Reason].index(reason))}
        role = RoleView(name="coordinator", state="", counters=counters)
        for told in (reason.sentence, "Ctrl+C"):
            ended = msgspec.structs.replace(view, roles=(role,), stop_reason=told)
            assert outlook(batch, ended, rows, ended=True).done == (told != "Ctrl+C")


def test_the_rate_is_that_of_the_replicas_there_are() -> None:
    """That of a run that was resumed with others was a mean over both."""
    view, rows = a_run(20)
    late = [msgspec.structs.replace(row, time=100.0 + (row.time - 90.0) / 4) for row in rows[17:]]
    rows = [*rows[:17], *late]
    counters = {"spent_computing": late[-1].time - 100.0 - 1e-3}
    role = RoleView(name="replica-0", state="", counters=counters)
    view = msgspec.structs.replace(view, seconds=late[-1].time, roles=(role,))
    assert outlook(small(), view, rows).rate == pytest.approx(400.0)


def test_the_last_evaluation_of_an_ended_run_lowers_no_rate() -> None:
    view, rows = a_run(20)
    rows.append(msgspec.structs.replace(rows[-1], time=rows[-1].time + 500.0))
    view = msgspec.structs.replace(view, seconds=rows[-1].time)
    assert outlook(small(), view, rows, ended=True).rate == pytest.approx(100.0)
    view = msgspec.structs.replace(view, roles=())
    assert outlook(small(), view, rows).rate < 20.0  # nobody trains, and it has not ended


def test_waiting_for_samples_is_no_time_that_more_replicas_share() -> None:
    """Replicas that had to wait until more samples were dealt were told +100 % by two."""
    view, rows = a_run(20)
    counters = {"spent_computing": 1.0, "spent_waiting for more samples": 9.0}
    roles = [RoleView(name=f"replica-{k}", state="", counters=counters) for k in range(4)]
    found = outlook(small(), msgspec.structs.replace(view, roles=(*roles,)), rows)
    assert found.exchange == pytest.approx(0.9)
    assert found.two_more is not None
    assert found.two_more[0] < 1.05


def test_of_shards_the_busiest_counts_and_a_round_has_no_bound_of_theirs() -> None:
    view, rows = a_run(20)
    counters = [
        {"spent_applying": 5.0, "spent_copying": 1.0, "spent_serving": 4.0, "spent_saving": 90.0},
        {"spent_applying": 1.0, "spent_serving": 9.0, "seconds_handling": 7.0},
    ]
    shards = [RoleView(name=f"shard-{k}", state="", counters=one) for k, one in enumerate(counters)]
    view = msgspec.structs.replace(view, total_samples=None, roles=(*view.roles, *shards))
    found = outlook(small("cluster.replicas=2"), view, rows)
    assert found.busy == pytest.approx(0.7)
    assert found.two_more is not None
    low, high = found.two_more
    assert 1.0 < low < 1.0 / 0.7
    assert high == 2.0  # pushes take half of the time of a shard; a copy serves several fetches
    of_round = small("algorithm.exchange={staleness=0, round={}, weight='mean'}")
    in_round = outlook(of_round, view, rows).two_more
    assert in_round is not None
    assert in_round[0] > low
    older = RoleView(name="shard-1", state="", counters={"clock": 7.0})
    view = msgspec.structs.replace(view, roles=(*view.roles[:-1], older))
    assert outlook(small(), view, rows).busy is None


def test_ranks_are_no_replicas_and_wait_for_each_other() -> None:
    """Two replicas of two ranks were four, so two more were half as many again."""
    view, rows = a_run(20)
    inside = {"spent_computing": 2.0, "spent_waiting for shard-0": 2.0}
    roles = [
        RoleView(
            name=f"replica-{k}.{rank}",
            state="",
            counters={**(inside if rank else {}), f"spent_waiting for replica-{k}.{1 - rank}": 4.0},
        )
        for k in (0, 1)
        for rank in (0, 1)
    ]
    found = outlook(small(), msgspec.structs.replace(view, roles=(*roles,)), rows)
    assert (found.n_replicas, found.exchange) == (2, 0.25)
    assert found.two_more is not None
    assert found.two_more[1] == 2.0


@pytest.mark.parametrize(
    ("wish", "text", "why"),
    [
        (RING, TEXT, "with each replica a ring has more to send"),
        ((), SANDBLASTER, "no two evaluations of the loss have ended"),
        (("algorithm.warm_start={samples=8, batch_size=4, rule={name='sgd', learning_rate=0.1}}",),
         SANDBLASTER, "nor of a job with a warm start"),
    ],
)  # fmt: skip
def test_where_more_replicas_are_not_told_of_it_says_why(
    wish: tuple[str, ...], text: str, why: str
) -> None:
    """Of a ring, where all wait for all, two more replicas were told to double the speed."""
    view, rows = a_run(20)
    found = outlook(small(*wish, text=text), view, rows)
    assert found.two_more is None
    assert why in found.more_not_told


def test_of_the_first_second_nothing_is_told_of_more_replicas() -> None:
    """+100 % were told of a run that had failed after a tenth of a second."""
    view, rows = a_run(20)
    roles = tuple(replace(role, counters={"spent_computing": 0.3}) for role in view.roles)
    found = outlook(small(), msgspec.structs.replace(view, roles=roles), rows)
    assert found.two_more is None
    assert "less than a second" in found.more_not_told


def test_the_outlook_of_a_run_has_its_end_its_target_and_two_more_replicas() -> None:
    view, rows = a_run(20)
    found = outlook(small("stop.loss=0.43"), view, rows)
    assert found.rate == pytest.approx(100.0)
    assert found.loss_at_end is not None
    assert found.loss_at_end[0] <= power_law(30_000.0) <= found.loss_at_end[2]
    assert found.target == "loss 0.43"
    assert found.seconds is not None
    assert found.exchange == pytest.approx(0.2)
    assert found.two_more is not None
    assert 1.0 < found.two_more[0] < found.two_more[1] == 2.0
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


def test_a_run_that_has_just_begun_says_that_it_cannot_tell() -> None:
    view, rows = a_run(3)
    view = msgspec.structs.replace(view, samples_per_second=50.0)
    assert outlook(small(), view, rows[:1]).rate == 50.0
    found = outlook(small("stop.accuracy=0.95"), view, rows)
    assert found.not_told.startswith("cannot tell: 3 measurements")
    assert found.loss_at_end is None
    assert found.target == "accuracy 0.95"
    assert found.two_more is not None


def test_of_a_target_it_says_of_what_nothing_can_be_told() -> None:
    """Of an accuracy at rest, that the loss does not fall, above the loss that it will have."""
    view, rows = a_run(20)
    lacks = [0.1 - 0.06 * abs(10 - k) / 10 for k in range(20)]
    rows = [
        msgspec.structs.replace(row, metric=0.8 + lack)
        for row, lack in zip(rows, lacks, strict=True)
    ]
    found = outlook(small("stop.accuracy=0.95"), view, rows)
    assert found.not_told == "accuracy 0.95: cannot tell: the accuracy does not rise any more"
    assert found.loss_at_end is not None


def test_a_run_that_has_diverged_is_not_told_to_reach_its_target() -> None:
    """NaN is null in metrics.jsonl: the curve was that of the time before."""
    view, rows = a_run(20)
    nan = [Measurement(time=300.0, samples=30_000, metric=0.1, metrics={"accuracy": 0.1})]
    found = outlook(small("stop.loss=0.43"), view, [*rows, *nan])
    assert "not all that was measured is a finite number" in found.not_told
    assert found.seconds is found.loss_at_end is None


def test_a_value_that_was_shown_again_is_one_point() -> None:
    rows = [
        Measurement(time=float(k), samples=100 * k, held_out_loss=loss)
        for k, loss in enumerate([None, 2.0, 2.0, 1.5], start=1)
    ]
    assert curve_of(rows) == [(200.0, 2.0), (400.0, 1.5)]


def test_another_evaluation_with_the_same_accuracy_is_another_point() -> None:
    rows = [
        Measurement(time=float(k), samples=100 * k, held_out_loss=loss, metric=0.75)
        for k, loss in enumerate([2.0, 2.0, 1.5], start=1)
    ]
    assert curve_of(rows, "metric") == [(100.0, 0.25), (300.0, 0.25)]


def test_a_target_that_was_reached_is_no_forecast() -> None:
    view, rows = a_run(20)
    found = outlook(small("stop.loss=0.9"), view, rows, ended=True)
    assert found.met == next(r.time for r in rows if (r.held_out_loss or 9.0) <= 0.9)
    assert found.seconds is None
    assert outlook(small("stop.accuracy=0.9"), view, rows[:3]).met == rows[0].time


def test_without_held_out_data_the_loss_is_that_of_training() -> None:
    view, rows = a_run(20)
    rows = [msgspec.structs.replace(r, loss=r.held_out_loss, held_out_loss=None) for r in rows]
    job = small("stop.loss=0.43")
    job = msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, test=None))
    found = outlook(job, view, rows)
    assert (found.n_points, found.held_out) == (20, False)
    assert found.seconds is not None


def test_a_metric_that_is_no_share_has_a_target_and_no_forecast() -> None:
    view, rows = a_run(20)
    view = msgspec.structs.replace(view, metric_name="F1")
    found = outlook(small("stop.accuracy=0.95"), view, rows)
    assert found.target == "F1 0.95"
    assert found.not_told == "cannot tell: F1 is no loss and no accuracy"
    assert found.loss_at_end is not None


def test_the_command_says_what_it_forecasts_or_why_it_cannot(tmp_path: Path) -> None:
    def said(
        n: int, *wish: str, options: tuple[str, ...] = (), progress: float | None = None
    ) -> str:
        view, rows = a_run(n)
        view = msgspec.structs.replace(view, progress=progress)
        with RunDirectory.create(tmp_path / f"run-{n}") as run:
            run.write(run.job_file, small(*wish).to_toml())
            status = Status(name="small", pid=os.getpid(), written=0.0, view=view, ended=True)
            run.write_status(status)
            with MetricsFile(run.metrics_file) as file:
                for row in rows:
                    file.append(row)
        done = CliRunner().invoke(app, ["forecast", str(run.path), *options])
        assert done.exit_code == 0, done.output
        if not options:
            assert max(map(len, done.stdout.splitlines())) <= 80
            return done.stdout.replace("\n  ", " ")
        return done.stdout

    text = said(20, "stop.loss=0.43")
    assert "20 measurements of the held-out loss" in text
    assert "held-out loss at the end: 0.3" in text
    assert "loss 0.43: not reached, and the run has ended" in text
    assert "with --resume: in " in text
    assert "two more replicas, each on a machine like theirs: at most +" in text
    assert "how busy shards are is not known" in text
    assert "and less if links of shards are, which nothing counts" in text
    text = said(22, "stop.loss=0.4")
    assert re.search(r" % samples/s, so loss 0\.4 in \d+ s or later\. \+\d+ % \(\d+ s\) if", text)
    text = said(23, "stop.loss=0.4", progress=1.0)
    assert "with --resume and a later end in the job file: in " in text
    far = said(21, "stop.loss=0.01")
    assert "with --resume: not soon; 100 % of the curves need more than 10 times" in far
    assert "never" not in far
    assert "loss 0.5: reached after" in said(80, "stop.loss=0.5")
    text = said(3)
    assert "cannot tell: 3 measurements, and 8 are needed" in text
    assert "[stop] has no accuracy and no loss" in text
    assert msgspec.json.decode(said(12, options=("--json",)))["n_points"] == 12


def test_a_run_that_is_being_resumed_has_not_ended(tmp_path: Path) -> None:
    """Until the new supervisor writes its status, that of the former one says that it has ended."""
    view, rows = a_run(20)
    with RunDirectory.create(tmp_path / "run") as run:
        run.write(run.job_file, small("stop.loss=0.43").to_toml())
        former = Status(name="small", pid=os.getpid() + 1, written=0.0, view=view, ended=True)
        run.write_status(former)
        with MetricsFile(run.metrics_file) as file:
            for row in rows:
                file.append(row)
        told = CliRunner().invoke(app, ["forecast", str(run.path), "--json"]).stdout
        assert msgspec.json.decode(told)["ended"] is False
    told = CliRunner().invoke(app, ["forecast", str(run.path), "--json"]).stdout
    assert msgspec.json.decode(told)["ended"] is True


def stairs(n: int, *, seed: int) -> list[Point]:
    """Return a loss that falls to a hundredth, and rests now and then, as one of L-BFGS does."""
    random = np.random.default_rng(seed)
    falls = np.where(random.random(n) < 0.4, 0.25, 0.02) * random.uniform(0.5, 1.5, n)
    loss = 2.3 * np.exp(-np.cumsum(falls))
    return [*zip((100.0 * np.arange(1, n + 1)).tolist(), loss.tolist(), strict=True)]


def test_intervals_of_a_batch_method_hold_a_loss_that_falls_on() -> None:
    """Of 20 intervals of L-BFGS at two thirds of their runs, 13 held: others were too high."""
    told, held, held_before = 0, 0, 0
    for seed in range(30):
        points = stairs(40, seed=seed)
        samples, measured = points[-1]
        with suppress(CannotTellError):
            before = loss_at(samples, points[:26])
            low, _, high = loss_at(samples, points[:26], is_batch=True)
            told += 1
            held += low <= measured <= high
            held_before += before[0] <= measured <= before[2]
    assert told >= 20
    assert held >= 0.8 * told
    assert held_before < 0.5 * told
