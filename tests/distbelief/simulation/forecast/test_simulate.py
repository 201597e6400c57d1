"""Jobs in virtual time: metrics, sweeps, the command line, and user errors."""

import errno
import json
import os
import signal
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import distbelief
from distbelief.cli.main import app
from distbelief.cli.options import FAILED, MISTAKEN
from distbelief.config.job import Job
from distbelief.core.errors import JobError, StorageError
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.simulation.forecast.simulate import (
    Forecast,
    SimulationRequest,
    run_request,
    simulate,
)
from distbelief.simulation.forecast.sweep import SHORT, Variant, axes_of
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.simulation.forecast.jobs import SANDBLASTER, TEXT, small, written
from tests.elsewhere import answers


RACK = """
latency = "60 us"
[[machines]]
count = 6
flops = "200 kFLOP/s"
memory_rate = "10 MB/s"
bandwidth = "1 Gbit/s"
memory = "1 GiB"
"""


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rack.toml").write_text(RACK)


def forecast(job: Job | Path, *, sweep: tuple[str, ...] = (), **wish: object) -> Forecast:
    asked = SimulationRequest(
        job=job,
        axes=tuple(axes_of(sweep)),
        measures=False,
        **{"cluster": "rack.toml", **wish},  # type: ignore[arg-type]  # by name
    )
    return run_request(asked, console=Console(quiet=True))


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def test_a_run_has_all_figures_and_its_seed_gives_it_again() -> None:
    (variant,) = forecast(small()).variants
    (run,) = variant.outcomes
    assert run.error is None
    assert run.samples >= 120
    assert run.step == run.samples // 4
    assert run.step_seconds == pytest.approx(2 * run.training_seconds / run.step)
    assert run.staleness_mean is not None
    assert run.bytes_in > 0 < run.bytes_out
    assert {"replica", "shard", "evaluator"} == set(run.utilisation)
    assert run.traffic["replica - shard"] > run.bytes_in
    assert run.n_machines == 5
    assert run.machine_hours == pytest.approx(5 * run.seconds / 3600)
    again = forecast(small()).variants[0].outcomes[0]
    assert again == run
    other = forecast(small(), seeds=(1,)).variants[0].outcomes[0]
    assert other.digest != run.digest


def test_sandblaster_runs_in_virtual_time_too() -> None:
    (variant,) = forecast(small(text=SANDBLASTER)).variants
    (run,) = variant.outcomes
    assert run.error is None
    assert run.figures["iteration"] >= 1
    assert run.staleness_mean is None
    assert "coordinator" in run.utilisation


def test_the_time_to_a_target_is_reported_if_it_was_reached() -> None:
    often = ("evaluation.every=0.1 s", "stop.samples=4000")
    (easy,) = forecast(small("stop.accuracy=0.01", *often)).variants
    assert easy.outcomes[0].target_seconds == easy.outcomes[0].training_seconds
    (hard,) = forecast(small("stop.loss=-1.0")).variants
    assert hard.outcomes[0].target_seconds is None


@pytest.mark.untraced
def test_a_target_met_by_the_last_measurement_was_reached() -> None:
    """A job shorter than [evaluation] every ended at 95 %, and never came to 50 %.

    So `--suggest` said that none of the configurations reaches the target.
    """
    job = small("evaluation.every=1 h", "stop.accuracy=0.001")
    run = forecast(job).variants[0].outcomes[0]
    assert run.stop_reason == "120 samples done"
    assert run.metric is not None
    assert run.metric >= 0.001
    assert run.target_seconds == run.training_seconds
    missed = forecast(small("evaluation.every=1 h", "stop.accuracy=1.0"))
    assert missed.variants[0].outcomes[0].target_seconds is None


def longer(folder: Path) -> Path:
    """In a job of a fraction of a second, the replica that comes first is dealt all samples."""
    return written(folder, text=TEXT.replace("samples = 120\n", "samples = 600\n"))


def test_a_sweep_runs_every_combination_with_every_seed(tmp_path: Path) -> None:
    found = forecast(longer(tmp_path), sweep=("replicas=1,2", "shards=1,2"), seeds=(0, 1))
    assert [variant.n_machines for variant in found.variants] == [3, 4, 4, 5]
    assert all(len(variant.outcomes) == 2 for variant in found.variants)
    assert found.variants[3].spreads["samples_per_second"].n == 2
    one, two = found.variants[0].spreads, found.variants[2].spreads
    assert two["samples_per_second"].p50 > one["samples_per_second"].p50


def test_python_gives_values_as_python_has_them() -> None:
    """Words "12" were the values 1 and 2; True, None and rules were no values at all."""
    found = simulate(
        small(),
        cluster="rack.toml",
        counted=True,
        overrides={"stop.samples": 40},
        sweep={
            "algorithm.blocking": (each for each in [True]),
            "cluster.replicas": np.arange(1, 2),
            "algorithm.rule": [distbelief.SGD(learning_rate=0.25)],
        },
    )
    job = found.variants[0].job
    assert (job.stop.samples, job.cluster.replicas) == (40, 1)
    assert isinstance(job.algorithm, DownpourSettings)
    assert job.algorithm.blocking is True
    assert job.algorithm.rule == distbelief.SGD(learning_rate=0.25)
    wrong: list[object] = ["12", 3, []]
    for values in wrong:
        with pytest.raises(JobError, match=r"sweep\['replicas'\] is .*; give a list of values"):
            simulate(small(), cluster="rack.toml", sweep={"replicas": values})  # type: ignore[dict-item] # wrong


def test_a_job_may_be_tables_as_for_train() -> None:
    """They were "no path": `train` took them, and `simulate` did not."""
    tables = tomllib.loads(TEXT)
    limit = tables.pop("stop")
    wish = {"cluster": "rack.toml", "counted": True}
    found = simulate(tables, overrides={"stop.samples": 40}, sweep={"replicas": [1, 2]}, **wish)  # type: ignore[arg-type] # by name
    assert [v.job.cluster.replicas for v in found.variants] == [1, 2]
    whole = simulate(tables | {"stop": limit}, **wish)  # type: ignore[arg-type] # by name
    assert whole.variants[0].outcomes == forecast(small()).variants[0].outcomes
    with pytest.raises(JobError, match=r"job: there is no table \[stop\]"):
        simulate(tables)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"sweep": {"replicas": [0, 2]}}, "^sweep cluster.replicas=0: "),
        ({"sweep": {"width": [1]}}, "^sweep width=1: write TABLE.KEY"),
        ({"machines": 9}, "^cluster rack.toml: "),
        ({"suggest": True}, "^suggest needs a number of machines: add for example machines 16"),
        ({"seeds": 0}, "^seeds 0: use 1 to"),
        ({"trace": "none/t.json"}, "^trace none/t.json cannot be written"),
    ],
)
def test_from_python_messages_name_arguments_and_no_flags(
    wish: dict[str, object], said: str
) -> None:
    with pytest.raises(JobError, match=said) as told:
        simulate(small(), **{"cluster": "rack.toml", "counted": True, **wish})  # type: ignore[arg-type] # by name
    assert "--" not in str(told.value)


@pytest.mark.soak
def test_a_suggestion_keeps_within_its_machines(tmp_path: Path) -> None:
    found = forecast(longer(tmp_path), suggests=True, machines=4)
    assert found.best is not None
    assert found.best.n_machines <= 4
    assert found.best.settings["cluster.replicas"] == "3"
    assert {v.n_machines for v in found.variants if v.outcomes} <= {2, 3, 4}


def test_a_suggestion_for_one_machine_says_what_the_least_is(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="uses so few; use at least 2"):
        forecast(written(tmp_path), suggests=True, machines=1)


def test_a_suggestion_leaves_out_what_the_memory_does_not_hold(tmp_path: Path) -> None:
    """One shard takes 4 kB, each of two a half of it; the replica has its 4 kB."""
    machines = RACK[RACK.index("[[machines]]") :]
    large = RACK.replace("count = 6", "count = 1")
    Path("rack.toml").write_text(large + machines.replace("1 GiB", "3 kB"))
    sweep = ("shards=1,2", "replicas=1")
    found = forecast(written(tmp_path), suggests=True, machines=4, sweep=sweep)
    assert found.best is not None
    assert found.best.settings["cluster.shards"] == "2"
    (left_out,) = [v.left_out for v in found.variants if v.left_out is not None]
    assert "cannot hold" in left_out


def test_a_sweep_that_does_not_fit_says_so_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a row took too many machines, and what had been run was lost."""
    monkeypatch.delattr("distbelief.simulation.forecast.run.run_simulated")
    with pytest.raises(JobError, match=r"with replicas 40: .* the job needs 41"):
        forecast(written(tmp_path), sweep=("replicas=1,40",))


@pytest.mark.untraced
def test_on_machines_that_are_lost_now_and_then_roles_are_restarted() -> None:
    Path("spot.toml").write_text(RACK + '[failures]\nmean_time = "10 s"\naway = "1 s"\n')
    job = small("stop.seconds=6", "stop.samples=100000000", "algorithm.batch_size=24")
    (variant,) = forecast(job, cluster="spot.toml").variants
    assert variant.outcomes[0].restarts > 0


class Pandas:
    """Stands for the module: rows are shown as they come."""

    DataFrame = tuple


def test_a_forecast_of_a_job_object_is_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of one sweep, one for each seed, as the command line has them."""
    job, place = small(), tmp_path / "t.json"
    found = simulate(job, cluster="rack.toml", sweep={"replicas": [1, 2]}, seeds=2, counted=True)
    rows = found.rows()
    assert [(row["cluster.replicas"], row["seed"]) for row in rows] == [
        (1, 0), (1, 1), (2, 0), (2, 1),  # numbers: rows by text put 10 before 2
    ]  # fmt: skip
    (alone,) = forecast(job, seeds=(1,)).variants[0].outcomes  # it has two replicas
    assert rows[3]["step_seconds"] == alone.step_seconds
    assert rows[3]["stop_reason"] == alone.stop_reason
    curve = alone.rows()
    assert curve[-1]["samples"] == alone.samples
    assert {"seconds", "loss", "metric"} < curve[0].keys()
    axes = found.plot().axes[0]
    assert [line.get_label() for line in axes.lines] == ["replicas 1", "replicas 2"]
    axes = found.variants[1].plot().axes[0]
    assert axes.get_title() == "replicas 2"
    assert [line.get_label() for line in axes.lines] == ["seed 0", "seed 1"]
    training, held_out = alone.plot().axes[0].lines
    last = [(row["seconds"], row["held_out_loss"]) for row in curve if row["held_out_loss"]][-1]
    assert [*last] in np.asarray(held_out.get_xydata()).tolist()
    assert {*np.asarray(training.get_ydata())} <= {row["loss"] for row in curve}
    assert rows[3]["held_out_loss"] == alone.held_out_loss is not None
    told = f"{Variant.rows.__doc__}{SHORT.values()}"
    assert [name for name in rows[0] if not hasattr(alone, name) and name not in told] == []
    assert "2 variants" in repr(found)
    assert len(repr(found)) < 200 > len(repr(found.variants[0])) > len(repr(alone))
    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    assert found.to_pandas() == tuple(rows)
    assert found.variants[0].to_pandas() == tuple(rows[:2])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(JobError, match="needs pandas: pip install pandas; or use the rows"):
        alone.to_pandas()
    simulate(job, cluster="rack.toml", counted=True, trace=place)
    assert json.loads(place.read_bytes())["traceEvents"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cluster": "rack-1"}, "--cluster rack-1: there is no cluster .*Did you mean 'rack-1g'?"),
        ({"machines": 7}, "has 6 machines, but 7 are requested"),
        ({"machines": 0}, "--machines 0: use 1 or more"),
        ({"suggests": True}, "--suggest needs a number of machines"),
        ({"suggests": True, "machines": 6, "trace": Path("t")}, "needs a single configuration"),
        ({"seeds": ()}, "--seeds 0: use 1 to"),
        ({"sweep": ("replicas=0,2",)}, r"--sweep cluster.replicas=0: .*replicas = 0"),
        ({"seeds": (-1, 0)}, "--seed -1: use 0 or more"),
        ({"trace": Path("none/t.json")}, "--trace none/t.json cannot be written"),
    ],
)
def test_a_request_that_cannot_be_met_is_reported_in_one_sentence(
    change: dict[str, object], said: str
) -> None:
    with pytest.raises(JobError, match=said):
        forecast(small(), **change)  # type: ignore[arg-type]  # by name


def test_machines_that_the_user_leaves_out_are_not_the_clusters() -> None:
    """Of six it said "cluster 'rack' has 2 machines": as many as --machines named."""
    with pytest.raises(JobError, match="--machines 2: the job needs 3: one") as told:
        forecast(small(), machines=2)
    assert "or raise --machines" in str(told.value)
    assert "has 2 machines" not in str(told.value)


WAN = """
latency = "1 ms"
[[machines]]
count = 2
region = "eu"
price = 0.3
flops = "200 kFLOP/s"
memory_rate = "10 MB/s"
bandwidth = "1 Gbit/s"
upload = "100 Mbit/s"

[[machines]]
count = 3
region = "us"
price = 0.1
join = "2 s"
preemptions = { mean_time = "5 s", away = "1 s" }
flops = "200 kFLOP/s"
memory_rate = "10 MB/s"
bandwidth = "1 Gbit/s"

[[machines]]
region = "eu"
flops = "200 kFLOP/s"
memory_rate = "10 MB/s"
bandwidth = "1 Gbit/s"

[latencies]
"eu-us" = "40 ms"
"""


def test_spot_machines_of_another_region_are_paid_while_they_are_there() -> None:
    Path("wan.toml").write_text(WAN)
    wish = ("cluster.replicas=5", "cluster.placement=here", "stop.seconds=12")
    job = small(*wish, "stop.samples=100000000", "algorithm.batch_size=24")
    (variant,) = forecast(job, cluster="wan.toml").variants
    (run,) = variant.outcomes
    assert run.error is None
    assert run.restarts > 1
    assert run.price is not None
    whole = (2 * 0.3 + 3 * 0.1) * run.seconds / 3600
    late = 3 * 0.1 * 2 / 3600
    assert 0.7 * whole < run.price < whole - late
    assert any(one.kind == "card" for one in run.resources)


def test_a_machine_that_comes_late_does_not_lose_its_roles_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After half an hour its roles "had been building" since their launch: they were killed."""
    config = PreparedJob.config
    monkeypatch.setattr(
        PreparedJob, "config", lambda self: replace(config(self), build_seconds_max=1.0)
    )
    Path("rack.toml").write_text(RACK + 'join = "5 s"\n')
    (late,) = forecast(small("cluster.placement=here", "stop.samples=400")).variants
    assert "joins after 5 s, and the job waits for replica-0 there" in late.warnings[0]
    (run,) = late.outcomes
    assert run.seconds > 5.0
    assert run.restarts == 0


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ((), 'machine 2 leaves, and shard-0 is there, which .* placement = "here"'),
        (("cluster.placement=here",), "all machines with replicas have left after 3 s"),
    ],
)
def test_a_job_whose_machines_leave_for_good_does_not_wait_for_ever(
    wish: tuple[str, ...], said: str
) -> None:
    leaves = RACK.replace("count = 6", 'count = 5\nleave = "3 s"') + RACK.partition("\n\n")[0][
        RACK.index("[[machines]]") :
    ].replace("count = 6", "count = 1")
    Path("rack.toml").write_text(leaves)
    replicas = 5 if wish else 2
    job = small(*wish, f"cluster.replicas={replicas}", "stop.samples=100000000")
    with pytest.raises(JobError, match=said):
        forecast(job)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ('join = "1000 d"', "machine 5 is away for 1,000.0 days after 0 s, .* waits for shard-1"),
        ('preemptions = { mean_time = "1 s", away = "30 d" }', "30.0 days after .* for shard-1"),
    ],
)
def test_a_job_does_not_wait_for_days_for_a_machine(key: str, said: str) -> None:
    """The heartbeats of 1,000 days were simulated, one by one, for 40 hours."""
    head, machines = RACK[: RACK.index("[[")], RACK[RACK.index("[[") :]
    counts = ("5", f"1\n{key}", "1")
    rows = [machines.replace("count = 6", f"count = {n}") for n in counts]
    Path("rack.toml").write_text(head + "".join(rows))
    wish = ("cluster.replicas=4", "stop.seconds=60", "stop.samples=100000")
    with pytest.raises(JobError, match=said):
        forecast(small(*wish))
    assert not forecast(small("cluster.replicas=6", "cluster.placement=here")).variants[0].failure


def test_a_job_ends_after_so_many_steps_of_all_replicas() -> None:
    run = forecast(small("stop.samples=1000", "stop.steps=9")).variants[0].outcomes[0]
    assert run.stop_reason == "9 steps done"
    assert run.samples == 36
    with pytest.raises(JobError, match=r"\[stop\] steps = 9: under a coordinator"):
        forecast(small("stop.steps=9", text=SANDBLASTER))


def test_each_row_of_a_sweep_says_what_limits_it_and_what_one_more_brings(tmp_path: Path) -> None:
    found = forecast(longer(tmp_path), sweep=("replicas=1,2",))
    for variant in found.variants:
        limit = variant.limit
        assert limit is not None
        assert (limit.resource, limit.more) == ("processors of replicas", "one more replica")
        assert limit.share > 0.5
        assert limit.gain is not None
        assert limit.gain > 0.1
    slow = RACK.replace('bandwidth = "1 Gbit/s"', 'bandwidth = "100 kbit/s"')
    Path("rack.toml").write_text(slow)
    (variant,) = forecast(written(tmp_path), sweep=("replicas=2",)).variants
    assert variant.limit is not None
    assert variant.limit.resource.startswith("cards of")
    assert variant.limit.more == "a second card"
    assert variant.limit.gain is not None
    assert variant.limit.gain > 0.05


def test_one_more_split_replica_has_a_machine_for_each_rank(tmp_path: Path) -> None:
    """The ranks were those of the row's replicas (an IndexError, as in a sweep of replicas).

    And it had one machine more, so that the job did not fit where none was to spare.
    """
    Path("rack.toml").write_text(RACK.replace("count = 6", "count = 3"))
    text = TEXT.replace("shards = 2", "shards = 1\npartitions = 2").replace('"spread"', '"here"')
    (variant,) = forecast(written(tmp_path, text=text), sweep=("replicas=1",)).variants
    assert variant.limit is not None
    assert (variant.limit.more, variant.limit.why_not) == ("one more replica", "")


def test_settings_that_a_job_never_comes_to_are_told() -> None:
    def warnings(*wish: str) -> str:
        return " ".join(forecast(small(*wish)).variants[0].warnings)

    assert warnings() == ""
    rounds = ("algorithm.preset=local", "algorithm.rule={name='sgd', learning_rate=1.0}")
    assert "they exchange nothing before the end" in warnings(*rounds, "stop.samples=40")
    assert "they exchange nothing" not in warnings(*rounds)  # each epoch ends an exchange
    assert "some replicas train nothing" in warnings("stop.samples=4")
    assert "only the last evaluation comes" in warnings("evaluation.every=500 steps")
    assert "the first and the last evaluation alone" in warnings(
        "stop.seconds=1", "evaluation.every=2 s"
    )


SWITCH = '[[switches]]\nmachines = "0-9"\nbandwidth = "1 Gbit/s"\n'
TRACE = '[trace]\nfile = "spot.csv"\n'


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (RACK.replace("1 GiB", "1 kB"), "machine-4 of cluster 'bad' cannot hold supervisor"),
        (RACK.replace("count = 6", "count = 2"), "has 2 machines, and the job needs 3: one for"),
        (RACK + SWITCH, "a switch is for machines 0 to 9: use 0 to 5"),
        (RACK.replace('"10 MB/s"', '"-10 MB/s"'), '"-10 MB/s" is no quantity'),
        (RACK.replace('latency = "60 us"', "latency = -1.0"), "latency = -1.0"),
        (RACK.replace('bandwidth = "1 Gbit/s"\n', ""), "lacks the key 'bandwidth'"),
        (RACK + TRACE, "ends early: it covers 0.01 of"),
    ],
)
def test_a_cluster_that_cannot_be_is_one_clear_message(
    tmp_path: Path, cluster: str, said: str
) -> None:
    """Nothing is run, and nothing but the message is told."""
    Path("bad.toml").write_text(cluster)
    Path("spot.csv").write_text("0.001,0,1\nend,0.01\n")
    job = str(written(tmp_path))
    result = command("simulate", job, "--cluster", "bad.toml", "--counted")
    assert result.exit_code == MISTAKEN
    told = " ".join(result.output.split())
    assert said in told
    assert told.count("bad.toml") <= 1  # "--cluster bad.toml: bad.toml: ..."
    assert "Traceback" not in told
    assert len(result.output.strip().splitlines()) <= 4


SPLIT = ("cluster.replicas=1", "cluster.partitions=2", "stop.samples=40")


def digests() -> list[str]:
    """Return what the traces of two small jobs come to, and how far they learn."""
    return _digests(small(), small(text=SANDBLASTER))


def digests_if_split() -> list[str]:
    """Likewise, of a replica that is split over two machines."""
    return _digests(small(*SPLIT))


def _digests(*jobs: Job) -> list[str]:
    found = []
    for job in jobs:
        (variant,) = forecast(job).variants
        (outcome,) = variant.outcomes
        found += [outcome.digest, str(outcome.loss)]
    return found


@pytest.mark.timeout(180)
def test_a_trace_is_the_same_whatever_the_hash_seed() -> None:
    """The supervisor and all its roles, here and in a fresh process, bit for bit."""
    there = answers("tests.distbelief.simulation.forecast.test_simulate", "t.digests()")
    assert there == digests()


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_so_is_that_of_a_split_replica() -> None:
    module = "tests.distbelief.simulation.forecast.test_simulate"
    assert answers(module, "t.digests_if_split()") == digests_if_split()


def test_from_python_it_is_one_name() -> None:
    assert distbelief.simulate is simulate


def test_from_python_a_key_is_swept_once_as_well(tmp_path: Path) -> None:
    """By its short name and its long one: two rows, both of the second value."""
    sweep = {"replicas": [1], "cluster.replicas": [2]}
    with pytest.raises(JobError, match=r"cluster\.replicas is given twice"):
        simulate(written(tmp_path), cluster="rack.toml", sweep=sweep)


# ------------------------------------------------------------------ the command line


def test_the_command_prints_a_table_and_where_figures_are_from(tmp_path: Path) -> None:
    job = str(written(tmp_path))
    result = command("simulate", job, "--cluster", "rack.toml", "--counted", "--trace", "t.json")
    assert result.exit_code == 0, result.output
    assert "small on rack" in result.output
    assert "samples/s" in result.output
    assert "memory rate" in result.output
    assert "counted, not measured" in result.output
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"replica-0", "shard-1", "compute", "data"} <= names
    assert any(event["name"] == "replica:step" for event in events)


def test_a_timeline_that_ends_early_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long run it held the beginning, and nobody said so."""
    monkeypatch.setattr("distbelief.simulation.forecast.run.N_SPANS_MAX", 10)
    options = ("--cluster", "rack.toml", "--counted", "--trace", "t.json")
    result = command("simulate", str(written(tmp_path)), *options)
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 10
    assert "t.json; it ends early: " in result.output


def test_a_timeline_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    """The table of a long run was lost, and the hint was to go on with --resume."""
    options = ("--cluster", "rack.toml", "--counted", "--trace", "/dev/full")
    result = command("simulate", str(written(tmp_path)), *options)
    assert result.exit_code == FAILED
    assert "samples/s" in result.stdout
    assert "counted, not measured" in result.stdout
    assert "timeline of the first run" not in result.stdout
    assert "--trace /dev/full: cannot write the timeline: No space" in result.stderr
    assert "--resume" not in result.stderr


def test_a_full_disk_is_found_out_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_nothing(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.delattr("distbelief.simulation.forecast.run.run_simulated")
    monkeypatch.setattr(os, "fsync", write_nothing)
    with pytest.raises(StorageError, match=r"--trace t\.json: cannot .* No space left"):
        forecast(small(), trace=Path("t.json"))
    assert not list(Path().glob("t.json*"))


def test_in_a_pipe_a_line_ends_where_its_text_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a split replica that of messages was broken within a figure: "5.1", "kB"."""
    monkeypatch.setattr("distbelief.cli.run_simulate.WIDTH", 80)
    result = command("simulate", str(written(tmp_path)), "--cluster", "rack.toml", "--counted")
    lines = result.output.splitlines()
    (messages,) = [line for line in lines if line.startswith("messages: ")]
    assert len(messages) > 80
    assert "shard - supervisor" in messages


def test_the_command_prints_json_and_nothing_else(tmp_path: Path) -> None:
    job = str(written(tmp_path))
    arguments = ("--cluster", "rack.toml", "--counted", "--sweep", "replicas=1,2")
    result = command("simulate", job, *arguments, "--json")
    content = json.loads(result.stdout)
    assert [v["settings"] for v in content["variants"]] == [
        {"cluster.replicas": "1"},
        {"cluster.replicas": "2"},
    ]
    assert content["constants"]


@pytest.mark.untraced
def test_chaos_prints_its_timeline(tmp_path: Path) -> None:
    text = SANDBLASTER  # whose minute is played through quickly
    result = command("chaos", str(written(tmp_path, text=text)), "--seed", "5")
    assert result.exit_code == 0, result.output
    assert "To repeat this run exactly" in result.output
    as_json = command("chaos", str(tmp_path / "small.toml"), "--seed", "5", "--json")
    assert json.loads(as_json.stdout)["seed"] == 5


@pytest.mark.parametrize("name", ["simulate", "chaos"])
def test_sigterm_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Folders of whoever was ended in the midst of it had piled up in /tmp."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    seen: list[int] = []

    def interrupted(_preparation: Preparation, _job: Job) -> None:
        seen.append(len(list(temporary.iterdir())))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # the signal ends it

    monkeypatch.setattr(Preparation, "stage", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    options = ["--cluster", "rack.toml", "--counted"] if name == "simulate" else []
    result = command(name, str(written(tmp_path)), *options)
    assert result.exit_code == 143
    assert seen == [1]
    assert not list(temporary.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["simulate", "chaos"])
def test_without_a_job_the_user_is_told_how_to_name_one(name: str) -> None:
    result = command(name)
    assert result.exit_code == MISTAKEN
    assert f"distbelief {name} speech.toml" in result.output
