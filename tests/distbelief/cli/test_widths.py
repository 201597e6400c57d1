"""What commands print on terminals of 80 and 120 columns: no line is cut, no word is broken."""

import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import typer
from rich.console import Console, RenderableType
from torch import nn
from typing_extensions import override

from distbelief.cli import run_simulate
from distbelief.cli.options import how_to_go_on, reported_errors, wide_console
from distbelief.cli.status import _show_why
from distbelief.config import presets
from distbelief.core.errors import JobError
from distbelief.graph.capture import InputSpec
from distbelief.job.display.screen import Screen
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.summary import final_table
from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.planner.planner import Request, planning_request
from distbelief.plans.planner.planning_result import PlanningResult, planning_result
from distbelief.simulation.forecast.placed_cluster import constants_of
from distbelief.simulation.forecast.simulate import Forecast
from distbelief.simulation.forecast.sweep import Limit, Variant
from distbelief.supervisor.view import RoleView
from tests.distbelief.dashboard import made_runs
from tests.distbelief.job.run.test_summary import a_summary
from tests.distbelief.simulation.forecast.jobs import small
from tests.distbelief.simulation.forecast.test_sweep import an_outcome


WIDTHS = [80, 120]


def screen_of(show: Callable[[Console], None], width: int) -> str:
    console = Console(
        file=io.StringIO(), width=width, height=60, force_terminal=True, color_system=None
    )
    show(console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def check(show: Callable[[Console], None], width: int) -> str:
    """Draw on a terminal of this width; all words must be those of a very wide one."""
    screen, wide = screen_of(show, width), screen_of(show, 1000)
    assert max(map(len, screen.splitlines())) <= width
    assert "…" not in screen
    told = "not shown for want of width:"  # which columns: their headings are in the wide one
    assert words(screen) <= words(f"{wide} {told}")
    return screen


def words(text: str) -> set[str]:
    return {word.strip(",") for word in text.split() if set(word) - set("─━╺╸▁▂▃▄▅▆▇█")}


def printing(*what: RenderableType) -> Callable[[Console], None]:
    return lambda console: console.print(*what, sep="\n")


@pytest.mark.parametrize("width", WIDTHS)
def test_train_and_status(width: int) -> None:
    view = made_runs.view(120, 4, n_hosts=3)
    table = final_table(a_summary(error="replica 1 died (signal 9) again and again"))
    check(printing(Screen(view, name="job", whole=True), table), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_ctrl_c(width: int) -> None:
    """It ends with the same table, which says why, and with a command that a shell takes."""
    view = msgspec.structs.replace(made_runs.view(120, 4, n_hosts=3), phase="interrupted")
    ended = msgspec.structs.replace(a_summary(), stop_reason="stopped by Ctrl+C")
    table = final_table(ended)
    screen = check(printing(Screen(view, name="job"), table), width)
    assert "ended: stopped by Ctrl+C" in screen
    command = how_to_go_on(Path("runs/the digits")).removeprefix("go on: ")
    assert shlex.split(command) == ["distbelief", "train", "--resume", "runs/the digits"]


@pytest.mark.parametrize(("columns", "width"), [(None, 200), ("90", 90)])
def test_tables_in_a_pipe_are_as_wide_as_columns_says(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of partition and simulate were 126 and 200 columns wide, whatever it said."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert wide_console(200).width == width


@pytest.fixture(scope="module")
def plan() -> PlanningResult:
    asked = Request(
        model="nets:a_net_with_a_long_name",
        inputs=[InputSpec(shape=(256,))],
        batch=64,
        loss="cross_entropy",
        counts=[1, 2, 4],
        cluster="rack-10g",
    )
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    return planning_result(planning_request(net, asked), asked.counts)


@pytest.mark.parametrize("width", WIDTHS)
def test_partition(plan: PlanningResult, width: int) -> None:
    check(plan.show, width)
    check(printing(plan.explain("0")), width)
    assert "comp/comms/sync/wait" in plan._repr_html_()


def a_variant(*settings: tuple[str, str], n_runs: int) -> Variant:
    outcome = msgspec.structs.replace(
        an_outcome(rate=123_456.0, target_seconds=71.0),
        traffic={"evaluator - shard": 1.1e6, "replica - shard": 6.7e9, "replica - supervisor": 8e3},
        utilisation={"shard": 0.02, "replica": 0.97, "evaluator": 0.0},
        stop_reason="2 epochs done",
    )
    limit = Limit(resource="processor machine-12", share=0.97, more="another replica", gain=0.37)
    return Variant(
        settings=dict(settings),
        job=small("stop.accuracy=0.5"),
        n_machines=120,
        outcomes=tuple(
            msgspec.structs.replace(outcome, seed=n, staleness_mean=n + 0.5, step_seconds=0.1 + n)
            for n in range(n_runs)
        ),
        limit=limit if settings else None,
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "keys", [(), ("cluster.replicas",), ("cluster.replicas", "algorithm.rule.learning_rate")]
)
def test_simulate(keys: tuple[str, ...], width: int) -> None:
    """At 80 columns its table was "machin…  st…  samples…"."""
    variants = tuple(a_variant(*((key, str(8 * n)) for key in keys), n_runs=3) for n in (1, 2))
    forecast = Forecast(
        job=small(),
        cluster="rack-1g, 120 machines",
        variants=variants if keys else variants[:1],
        constants=tuple(constants_of(load_cluster("rack-1g"))),
        best=variants[0] if keys else None,
    )
    screen = check(
        lambda console: run_simulate._print(forecast, console, n_seeds=3, by="time"), width
    )
    assert "123,456" in screen
    assert re.search(r"\d{5,}(\.\d+)? [A-Za-z]", screen) is None  # a raw constant


def test_presets() -> None:
    lines = presets.table().splitlines()
    assert max(map(len, lines)) <= 80


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", WIDTHS)
def test_why(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would help was cut in the middle of a word."""
    spent = {"spent_computing": 50.0, "spent_fetching": 40.0, "seconds_computing": 50.0}
    roles = tuple(RoleView(name=f"replica-{n}", state="computing", counters=spent) for n in (0, 1))
    view = msgspec.structs.replace(made_runs.view(), roles=roles)
    run = RunDirectory(made_runs.make(tmp_path / "run", shown=view, ended=True), lock=None)
    said = Terminal()
    monkeypatch.setattr("sys.stdout", said)
    monkeypatch.setenv("COLUMNS", str(width))
    _show_why(run, as_json=False)
    lines = said.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines).endswith("send fewer bytes, or use larger batches.")


@pytest.mark.parametrize("width", WIDTHS)
def test_errors(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/runs/" + 150 * "x" + ":"
    text = " ".join(["--keys and --hosts need an address to listen at:", *60 * ["listen"]])
    said = Terminal()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(typer.Exit), reported_errors(show_traceback=False):
        raise JobError(f"{text}\n{path} it stays in one piece")
    assert said.getvalue().split() == [*text.split(), path, *["it", "stays", "in", "one", "piece"]]
    assert all(len(line) <= width or line == path for line in said.getvalue().splitlines())
