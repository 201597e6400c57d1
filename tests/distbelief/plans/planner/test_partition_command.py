"""`distbelief partition`, as its users call it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result
from typing_extensions import override

from distbelief.cli.main import app
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.plan import load
from tests.distbelief.plans.planner.requests import know_host, known_figures


HERE = "tests.distbelief.plans.planner.test_partition_command"
ARGUMENTS = ("--input", "3x16x16", "--batch", "16", "--loss", "cross_entropy")
WHOLE = [f"--pin={layer}=whole" for layer in ("0", "1", "2", "3", "loss")]


FIGURES = known_figures(jitter=0.1)


@pytest.fixture(autouse=True)
def _known_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know_host(FIGURES, tmp_path / "cache", monkeypatch)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10)
    )


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 10))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 5)
        self.register_buffer("order", torch.arange(5).flip(0), persistent=False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.table(self.order)
        return y


def linear() -> nn.Module:
    return nn.Linear(2048, 10)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)
        self.b = nn.Linear(5, 4)

    @override
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


class Branching(nn.Module):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Doubled(torch.autograd.Function):
    @staticmethod
    @override
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    @override
    def backward(_context: object, *gradients: torch.Tensor) -> torch.Tensor:
        return 3 * gradients[0]


class Custom(nn.Module):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = Doubled.apply(x)  # type: ignore[no-untyped-call]
        assert isinstance(result, torch.Tensor)
        return result


def number() -> int:
    return 5


def call(*arguments: str, name: str = "net") -> Result:
    return CliRunner().invoke(app, ["partition", f"{HERE}:{name}", *arguments])


def test_the_table_has_a_row_for_each_number_of_machines() -> None:
    result = call(*ARGUMENTS, "--machines", "1,2,4")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    rows = [row for row in rows if len(row) > 2 and row[0].isdigit() and row[1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert "assumed figures of cluster 'rack-10g'" in result.stdout
    assert result.stderr.startswith("capturing the model\n")  # progress from the first second


def test_json_is_all_that_is_on_standard_output() -> None:
    result = call(*ARGUMENTS, "--machines", "1,2", "--json")
    content = json.loads(result.stdout)
    assert [row["machines"] for row in content["rows"]] == [1, 2]
    assert content["parameters"] == sum(p.numel() for p in net().parameters())
    assert all(row["fits"] for row in content["rows"])


def test_layers_are_measured_for_other_machines_too() -> None:
    result = call(*("--input", "6:50", "--machines", "1,2", "--profile", "--json"), name="words")
    content = json.loads(result.stdout)
    said = content["remarks"][-1]
    assert said.startswith("Costs: layer efficiency measured on this host on ")
    assert "machines of cluster 'rack-10g' (assumed)" in said


def test_a_plan_is_written_and_fits_the_model_it_was_made_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = call(*ARGUMENTS, "--machines", "2", "--out", str(path))
    assert result.exit_code == 0, result.output
    plan = load(path)
    graph = capture(net(), [InputSpec(shape=(3, 16, 16))])
    graph = append_loss(graph, "cross_entropy")
    cluster = load_cluster("rack-10g")
    plan.check(graph, batch=16, loss="cross_entropy", cluster=cluster)
    assert plan.model == f"{HERE}:net"
    assert plan.predicted is not None
    assert plan.predicted.bound_seconds <= plan.predicted.step_seconds


def test_a_buffer_that_is_not_saved_is_a_constant_of_the_plan(tmp_path: Path) -> None:
    """Positions of BERT: ranks looked for them in the weights, and --verify failed."""
    path = tmp_path / "plan.json"
    arguments = ("--input", "5x5", "--machines", "1", "--out", str(path))
    result = call(*arguments, name="Positions")
    assert result.exit_code == 0, result.output
    assert list(load(path).captured_graph().tensors) == ["table.weight"]


def test_picture_timeline_and_explanation(tmp_path: Path) -> None:
    picture, timeline = tmp_path / "plan.png", tmp_path / "step.json"
    result = call(
        *(*ARGUMENTS, "--machines", "2", "--explain", "1"),
        *("--picture", str(picture), "--timeline", str(timeline)),
    )
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(timeline.read_bytes())
    assert events
    assert "it follows 0" in result.stdout
    assert "chosen" in result.stdout


def test_what_does_not_fit_is_shown_and_is_a_failure(tmp_path: Path) -> None:
    cluster = tmp_path / "tiny.toml"
    cluster.write_text(
        '[[machines]]\ncount = 2\nflops = "1 GFLOP/s"\nmemory_rate = "1 GB/s"\n'
        'bandwidth = "1 Gbit/s"\nmemory = "10 kB"\n'
    )
    result = call(*ARGUMENTS, "--machines", "1,2", "--cluster", str(cluster))
    assert result.exit_code == 1, result.output
    assert "machine 0 needs" in result.stdout
    assert "this plan does not fit" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [
        ((), "net", "name the function that makes it and the shape"),
        (("--input", "5", "--machines", "two"), "net", "has no numbers of machines"),
        (("--input", "5"), "number", "returned 5, not an nn.Module"),
        (("--input", "5"), "missing", "has no 'missing'"),
        (("--input", "5"), "Branching", "depends on the values of its data"),
        (("--input", "5"), "Custom", "torch.autograd.Function"),
        (("--input", "3x16x16", "--loss", "croos"), "net", "there is no loss 'croos'"),
        ((*ARGUMENTS, "--cluster", "rak-10g"), "net", "rack-10g"),
        ((*ARGUMENTS, "--machines", "33"), "net", "has 32 machines, but 33 are requested"),
        (
            (*ARGUMENTS, "--cluster", "here", "--machines", "20001"),
            "net",
            "machines = 20001 for cluster 'here': use 1 to 20000",
        ),
        ((*ARGUMENTS, "--pin", "3"), "net", "pins nothing"),
        ((*ARGUMENTS, "--pin", "fc=whole"), "net", "there is no such layer"),
        ((*ARGUMENTS, "--pin", "3=rows:2"), "net", "on 8 machines: use"),
        ((*ARGUMENTS, "--pin", "targets=whole"), "net", "pin the layers that read it"),
        ((*ARGUMENTS, "--pin", "0=whole@9"), "net", "whole@0 to whole@7"),
        (("--input", "3x16x16", "--pin", "loss=whole"), "net", "there are 0, 1, 2, 3"),
        ((*ARGUMENTS, "--explain", "conv"), "net", "no layer 'conv' to explain"),
        ((*ARGUMENTS, "--batch", f"{10**18}"), "net", "with a batch of 1e+18: use a smaller batch"),
        ((*ARGUMENTS, "--batch", f"{10**30}"), "net", "with a batch of 1e+30: use a smaller batch"),
        (("--input", f"3x{10**11}x{10**11}"), "net", "has more than 1e+12 elements"),
        (("--input", f"3x{10**30}"), "net", "has more than 1e+12 elements"),
        (("--input", "3x17x16"), "net", "(3x2176 and 2048x10). Is the shape of the"),
        (("--input", "2048:50"), "linear", "It gets integers: embed them"),
        (("--input", "6"), "words", "(--input 128:30000)"),
        (("--input", "5", "--loss", "mse"), "Two", "the model returned 0, 1: return one"),
        (
            (*ARGUMENTS, "--machines", "2", "--exactly", *WHOLE),
            "net",
            "uses exactly 2 machines, only 1",
        ),
    ],
)
def test_a_mistake_is_one_message(arguments: tuple[str, ...], name: str, message: str) -> None:
    result = call(*arguments, name=name)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert "planning" not in result.stderr or "--exactly" in arguments
