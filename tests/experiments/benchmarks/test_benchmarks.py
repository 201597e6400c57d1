"""Every benchmark in its least setting, so that none breaks unseen.

One had ended in a KeyError for weeks, and with it `make bench`: it read sentences, and
one of them had got a singular. What is looked at here is that a benchmark ends, and
that its figures are there; never how large they are.
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmarks import (
    async_peers,
    codecs,
    lockfree,
    many_clients,
    many_members,
    many_replicas,
    parameter_server,
    planner,
    programs,
    ray_hosts,
    simulation,
)
from experiments.benchmarks.async_peers import Entry
from experiments.benchmarks.network.hosts import obstacle
from tests.experiments.benchmarks.runs import FOLDER, figures_in, figures_of
from tests.processes.nursery import Forked


ROOT = FOLDER.parents[1]
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
NOT_AMONG_THEM = "Not in `make bench`: "

FIGURES: dict[str, set[str]] = {
    "forecast_of_loss": {"covered", "told", "runs", "width", "error"},
    "async_peers": {
        *("target_loss", "step_ms", "single_seconds", "ours_seconds", "ddp_seconds"),
        *("torch_rpc_seconds", "ours_over_best_peer", "ours_seconds_slowed"),
        "ours_over_best_peer_slowed",
    },
    "chaos": {
        *("throughput_kept", "acknowledged_lost", "applied_twice", "hangs", "faults"),
        *("chaos_pushes_per_second", "peace_pushes_per_second", "standstill_share"),
        "standstill_after_shard_fault_p50_seconds",
        "standstill_after_shard_fault_p95_seconds",
    },
    "cluster_chaos": {
        *("chaos_throughput_kept", "chaos_acknowledged_lost", "chaos_samples_not_once"),
        *("chaos_hangs", "chaos_faults"),
    },
    "codecs": {
        f"{codec}_{figure}"
        for codec in ("bfloat16", "int8", "int4", "top_k", "threshold_1_percent")
        for figure in ("push", "encode", "add", "bytes")
    },
    "culprits": {"named", "blamed", "named_processor"},
    "downpour": {
        *("downpour_bs8", "ddp_bs8", "downpour_bs8_over_kept"),
        *(
            f"{name}_bs8_{figure}"
            for name in ("alone", "kept", "downpour", "ddp")
            for figure in ("samples_per_second", "cpu_seconds_per_1000", "bytes")
        ),
    },
    "exchanges": {
        *("text_local_loss", "text_local_loss_alone", "straggler_downpour"),
        *("kill_steps", "kill_wait", "kill_wait_undisturbed"),
    },
    "hostile": {"throughput_kept", "kept_flood", "kept_burn"},
    "lan": {
        *("beyond_downpour", "beyond_worst", "shards_2", "forecast_error", "overlap_4"),
        *("plans_error", "plans_worst", "plans_within", "plans_rank"),
    },
    "links": {
        *(f"local_100mbit_share_{name}" for name in ("exchange", "downpour", "ddp")),
        *("local_100mbit_fewer_exchange", "ring_over_ddp_2", "ring_over_ddp_4"),
    },
    "lockfree": {
        f"{problem}_{contestant}_{figure}"
        for problem in ("dense", "small", "sparse")
        for contestant in ("lockfree", "locked", "in_torch")
        for figure in ("loss", "over_alone", "updates_per_second")
    },
    "many_clients": {
        *(f"growth_{message}" for message in ("push", "enter", "leave")),
        *("bytes_downpour", "pushes_per_second", "least_share"),
    },
    "many_members": {f"growth_{row}" for row in many_members.ROWS},
    "many_replicas": {
        *(
            f"{figure}_{preset}"
            for figure in ("micro", "goodput", "goodput_barrier_waits", "goodput_barrier_restarts")
            for preset in ("local", "diloco")
        ),
        "megabytes",
    },
    "model_parallel": {
        *("speech_bs64", "speech_bs256", "speech_bs256_over_two_threads", "image"),
        *("speech_bs64_apart", "speech_bs256_over_dtensor", "image_apart"),
        "speech_bs64_2_machines_bytes",
    },
    "page_cost": {"rate", "work", "page", "start"},
    "parameter_server": {
        *("shared_memory_over_floor", "push_over_floor", "fetch_over_copy"),
        *("shared_memory_over_copies", "tcp_over_zmq", "files_over_zmq", "files_over_torch_rpc"),
        *("tcp_over_zmq_cpu", "files_over_zmq_cpu"),
        *("peak_bytes_per_parameter", "bytes_per_parameter_expected"),
    },
    "planner": {
        *("speed_up_speech_1", "speed_up_speech_2", "seconds_table_speech"),
        *("speed_up_images_1", "speed_up_images_2", "seconds_table_images"),
        *("best_machines_speech", "seconds_2", "worst_over_search"),
        *("worst_over_even", "worst_over_whole_layer"),
    },
    "planner_against_runtime": {
        f"{figure}_speech" for figure in ("error", "rank", "regret", "plans", "void")
    },
    "ray_hosts": {*("start_over_local", "throughput_over_local", "ended_well", "away_seconds")},
    "programs": {
        *("lasso_small_10_seconds", "lasso_small_50_objective_difference"),
        *("threads_gain", "threads_bound", "job_gain", "blocks_16_over_1_small"),
        *("robin_over_priority_small", "topics_ours", "topics_over_gensim", "rmse_over_dense"),
        *("feedback_4_over_implicit", "simulated_over_data_parallel", "simulated_factors_gain"),
    },
    "readers": {
        *(f"{name}_{n}" for name in ("over_loader", "start") for n in (0, 1, 2)),
        *("gain_1", "gain_2"),
    },
    "sandblaster": {
        *("evaluations_over_scipy", "overhead", "straggler_over_ideal", "wasted"),
        "straggler_without_backup",
        *(f"minimize_{name}" for name in ("evaluations_over_scipy", "loss_over_scipy")),
        "minimize_start_seconds",
    },
    "simulation": {
        *("messages_per_second", "messages_per_second_priced", "messages_per_second_roles"),
        *("step_time_error", "samples_per_second_error"),
        *("staleness_error", "bytes_differ", "others"),
    },
    "suggest": {"within", "cases", "worst", "median"},
    "spark": {
        *("throughput_over_local", "throughput_over_distributor", "cpu_over_local"),
        *("start_seconds_spark", "start_seconds_local", "lines_spark", "lines_distributor"),
    },
    "zoo": {*("models", "accepted", "agreeing"), *("split_share_worst", "plan_seconds_worst")},
}
"""Of each benchmark, with `--small`: what it must tell."""


def test_benchmarks_read_data_not_sentences() -> None:
    """Words change, and whoever looks for them by a pattern is not told."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert "re" not in {name.name for name in node.names}, path


# ----------------------------------------------------------------------- make bench


def in_make_bench() -> list[str]:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^BENCHMARKS := (.*)$", makefile, re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_make_bench_has_every_benchmark_but_those_that_say_why_not() -> None:
    named = in_make_bench()
    assert len(named) == len(set(named))
    for name in SCRIPTS:
        told = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
        assert (NOT_AMONG_THEM in told) != (name in named), name
    assert set(named) < set(SCRIPTS)
    assert set(FIGURES) == set(SCRIPTS)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_benchmark_that_fails_stops_no_other_and_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in *bad*) exit 3;; esac\n')
    python.chmod(0o755)
    words = ["make", "--no-print-directory", "--old-file=.venv/dev", "bench"]
    words.append(f"BIN={tmp_path}")
    done = subprocess.run(
        [*words, "BENCHMARKS=bad_first good bad_second last"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    begun = ["== bad_first", "== good", "== bad_second", "== last"]
    assert done.stdout.splitlines() == begun
    assert "failed: bad_first bad_second" in done.stderr
    well = [*words, "BENCHMARKS=good last"]
    assert subprocess.run(well, cwd=ROOT, check=True).returncode == 0


# ------------------------------------------------------------------- they run, small


@pytest.mark.slow
def test_the_planner_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """It looked for '1 machines' among sentences, and there was '1 machine' only."""
    planner.main(["--small"])
    assert FIGURES["planner"] <= figures_in(capsys.readouterr().out, "planner").keys()


@pytest.mark.slow
def test_the_simulation_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    simulation.main(["--small", "--only", "speed", "large"])
    figures = figures_in(capsys.readouterr().out, "simulation")
    speeds = {key for key in FIGURES["simulation"] if key.startswith("messages")}
    parts = {key for key in figures if "_microseconds_" in key}
    assert {f"{method}_microseconds_driver" for method in ("downpour", "sandblaster")} < parts
    assert {*speeds, "driver_over_roles", "sandblaster_seconds"} == figures.keys() - parts


@pytest.mark.slow
def test_codecs_are_measured_and_their_bits_are_those_of_plain_c(
    capsys: pytest.CaptureFixture[str],
) -> None:
    codecs.main(["--small"])
    assert FIGURES["codecs"] <= figures_in(capsys.readouterr().out, "codecs").keys()


@pytest.mark.slow
def test_threads_without_locks_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockfree, "N_SMALL", 4)
    lockfree.main(["--small"])
    assert FIGURES["lockfree"] <= figures_in(capsys.readouterr().out, "lockfree").keys()


@pytest.mark.slow
def test_programs_are_measured_also_without_the_libraries_beside_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("celer", "tomotopy", "gensim", "implicit"):
        monkeypatch.setitem(sys.modules, name, None)
    programs.main(["--small", "--only", "lasso", "schedule", "factors", "simulated"])
    told = capsys.readouterr().out
    figures = figures_in(told, "programs")
    assert {"lasso_small_10_seconds", "robin_over_priority_small", "feedback_4"} <= figures.keys()
    assert {"rmse_over_dense", "simulated_over_data_parallel"} <= figures.keys()
    assert "simulated_topics_over_copies_1" in figures
    assert "celer is not installed: pip install celer" in told
    assert "implicit is not installed: pip install implicit" in told


@pytest.mark.soak
def test_messages_of_many_clients_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    many_clients.main(["--small", "--only", "messages"])
    figures = figures_in(capsys.readouterr().out, "many_clients")
    assert {"growth_push", "growth_enter", "growth_leave", "bytes_local"} <= figures.keys()


@pytest.mark.slow
def test_replicas_of_many_regions_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    many_replicas.main(["--small", "--losses", "--only", "local", "diloco"])
    figures = figures_in(capsys.readouterr().out, "many_replicas")
    assert FIGURES["many_replicas"] <= figures.keys()
    assert figures["failed_local"] == figures["failed_diloco"] == 0.0
    shares = ("goodput", "away", "start", "again", "cut", "waiting", "end", "unused")
    assert sum(figures[f"{name}_local"] for name in shares) == pytest.approx(1.0, abs=1e-3)
    assert all(figures[f"{name}_local"] >= 0.0 for name in shares[:-1])


@pytest.mark.slow
def test_messages_of_many_members_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    many_members.main(["--small"])
    figures = figures_in(capsys.readouterr().out, "many_members")
    assert FIGURES["many_members"] <= figures.keys()


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_parameter_server_is_measured(tmp_path: Path) -> None:
    others = [name for name in parameter_server.CONTESTANTS[1:] if name != "shared"]
    words = ["experiments/benchmarks/parameter_server.py", "--small", "--shards", "1"]
    with Forked([*words, "--without", *others], folder=ROOT, errors=tmp_path / "errors") as forked:
        output, _ = forked.communicate(timeout=150.0)
        assert forked.returncode == 0, output + (tmp_path / "errors").read_text()
    figures = figures_in(output, "parameter_server")
    ours = {"shared_push_ms", "shared_fetch_ms", "shared_memory_over_floor"}
    assert {*ours, "peak_bytes_per_parameter", "floor_update_ms"} <= figures.keys()
    assert figures["peak_bytes_per_parameter"] > 0.0  # its process was found


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_ends_and_its_figures_are_there(name: str) -> None:
    if name in {"cluster_chaos", "lan", "links"} and (why := obstacle()) is not None:
        pytest.skip(why)
    if name == "ray_hosts":
        pytest.importorskip("ray", reason="ray, an extra, is missing")
    if name == "spark":
        pytest.importorskip("pyspark", reason="pyspark, an extra, is missing")
    if name == "programs":
        pytest.importorskip("celer", reason="celer, an extra, is missing")
    if name == "zoo":
        pytest.importorskip("timm", reason="timm, an extra, is missing")
    figures = figures_of(name, "--small")
    assert FIGURES[name] <= figures.keys()


# ------------------------------------------------------- peers that are not installed


def test_an_asynchronous_peer_that_is_missing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    missing = Entry(name="nobody", module="nobody", distribution="nobody-0", install="nobody==1")
    options = async_peers._options(["--small"])
    rows = async_peers._rows([missing], options)
    plain = async_peers.Row(entry=async_peers.SINGLE, version="0")
    async_peers._report(plain, rows, target=2.5, step_seconds=0.01)
    told = capsys.readouterr().out
    assert told.count("nobody -: not installed: pip install nobody==1") == 2
    assert figures_in(told, "async_peers").keys() == {"target_loss", "step_ms"}


def test_without_ray_its_benchmark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", None)
    with pytest.raises(SystemExit, match=r"pip install 'distbelief\[ray\]'"):
        ray_hosts.main(["--small"])
