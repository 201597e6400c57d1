"""Each row of the table of wishes runs as it stands, and does what it says."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file

from distbelief import ParameterServer
from tests.docs.wishes import COMING_FROM, PAGE, Row, program, rows_of, run, served


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("undrawn"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

N_WORKING_MIN: Final = 46

Of = Any  # what a row or its program has named


def trained(n_samples: int) -> Callable[[dict[str, Of]], bool]:
    """Whether `run` has trained so many samples, and its model differs from what it began with."""

    def check(of: dict[str, Of]) -> bool:
        values, before = of["run"].model.state_dict(), of["before"]
        assert not any(torch.equal(values[name], before[name]) for name in before if name in values)
        return bool(of["run"].summary.samples == n_samples)

    return check


def moved(of: dict[str, Of], name: str, start: str = "net") -> bool:
    value, before = of["run"].model.state_dict()[name], of[start].state_dict()[name]
    return not torch.equal(value, before)


def steps_of_evaluations(of: dict[str, Of]) -> list[int]:
    rows = [row for row in of["run"].metrics if row.get("held_out_loss") is not None]
    return [row["step"] for row in rows]


def same_bits(of: dict[str, Of]) -> bool:
    one, other = (run.model.state_dict() for run in of["runs"])
    return all(torch.equal(one[name], other[name]) for name in one)


def bounded_by_value(of: dict[str, Of]) -> bool:
    """Clipped by value, each element of the 10 pushes moves at most rate x bound."""
    values, before = of["run"].model.state_dict(), of["before"]
    bound = 10 * 0.1 * 0.01 + 1e-6
    return all(float((values[n] - before[n]).abs().max()) <= bound for n in before)


def clipped(of: dict[str, Of]) -> bool:
    """Each of the five pushes moves the values by at most rate x bound."""
    values, before = of["run"].model.state_dict(), of["before"]
    square = sum(float((values[name] - before[name]).square().sum()) for name in before)
    return bool(0.0 < square**0.5 <= 5 * 0.1 * 0.5 + 1e-5)


def averaged(of: dict[str, Of]) -> bool:
    x, y = of["held_out"]
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(of["run"].ema_model(x), y))
    return bool(of["run"].summary.held_out_loss == pytest.approx(loss, rel=1e-5))


def same_file(of: dict[str, Of]) -> bool:
    file = load_file(of["run"].directory / "model.safetensors")
    return all(torch.equal(of["net"].state_dict()[name], file[name]) for name in file)


def resumed(of: dict[str, Of]) -> bool:
    half = of["half"].summary
    return bool(40 < half.samples < 400 and of["run"].summary.samples == 400)


CHECKS: dict[str, Callable[[dict[str, Of]], object]] = {
    "any module, tensors in memory": trained(200),
    "a map-style data set": trained(200),
    "samples that are dictionaries, a loss from the model": lambda of: (
        of["run"].summary.samples == 200
    ),
    "a stream": trained(200),
    "a DataLoader, in its own order": trained(200),
    "a collate function, lengths that differ": lambda of: moved(of, "0.weight", "model"),
    "a weighted sampler, also with several workers": trained(200),
    "processes that read": trained(200),
    "random augmentation, the same bits again": same_bits,
    "each sample of an epoch once, with any number of workers": trained(199),
    "a part of the data": trained(40),
    "overfit on a few batches": trained(400),
    "a dry run on two batches": trained(40),
    "options of a loss": trained(200),
    "a loss of your own": lambda of: of["run"].summary.samples == 200,
    "running statistics of BatchNorm": lambda of: (
        of["run"].model[0].num_batches_tracked == 10 and moved(of, "0.running_mean", "normed")
    ),
    "start from some of the weights of a file": lambda of: (
        float((of["run"].model[0].weight - 1).detach().abs().max()) < 0.5
    ),
    "freeze a part": lambda of: not moved(of, "0.weight") and moved(of, "2.weight"),
    "shared weights stay shared": lambda of: of["run"].model[0].weight is of["run"].model[1].weight,
    "classes that a notebook's cell defines": lambda of: of["run"].summary.samples == 200,
    "compute in bfloat16": lambda of: (
        of["run"].model(of["x"]).dtype == torch.bfloat16
        and of["run"].model.net.weight.dtype == torch.float32
    ),
    "an optimizer of torch": trained(200),
    "groups with rates and decay of their own": trained(200),
    "warm-up and cosine": trained(600),
    "a scheduler of torch, in your own loop": lambda of: (
        of["gain"] > 0 and of["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1 / 2**5)
    ),
    "accumulate gradients": lambda of: trained(200)(of) and of["run"].summary.pushes_applied == 5,
    "clip by norm, also of the accumulated mean": clipped,
    "clip by value": bounded_by_value,
    "an average of the weights, evaluated during the run": averaged,
    "sparse gradients of an embedding": lambda of: moved(of, "0.weight", "bag"),
    "gradients that are NaN": lambda of: (
        all(bool(value.isfinite().all()) for value in of["run"].model.state_dict().values())
        and trained(200)(of)
    ),
    "many steps between exchanges": trained(200),
    "several metrics, and one that is no mean": lambda of: (
        {*of["run"].summary.metrics} == {"accuracy", "F1"}
    ),
    "evaluate every few steps": lambda of: len({*steps_of_evaluations(of)}) > 1,
    "end when nothing gets better": lambda of: "in 2 evaluations" in of["run"].summary.stop_reason,
    "keep the best values": lambda of: of["best"](of["x"]).shape == (200, 2),
    "a limit of time": lambda of: 0 < of["run"].summary.samples < 1e6,
    "a limit of steps": trained(100),
    "a callback; figures to TensorBoard, or another logger": lambda of: bool(of["writer"].figures),
    "the curve as a table": lambda of: of["rows"][-1]["samples"] == 200,
    "SIGTERM or Ctrl+C saves; go on in the middle of an epoch, no sample lost or repeated": resumed,
    "the weights as a file, for plain torch": same_file,
    "scikit-learn's conventions": lambda of: of["score"] > 0.5,
    "several processes that train, without a launcher": trained(200),
    "your own loop": lambda of: of["gain"] > 0,
    "local steps by any optimizer, in your own loop": lambda of: of["gain"] > 0,
    "what holds a run back": lambda of: bool(of["shown"].strip()),
}


# Of the page for those who come from elsewhere: what the other table does not run.
OF_OTHERS: dict[str, Callable[[dict[str, Of]], object]] = {
    "a DataLoader": trained(200),
    "workers of a loader": trained(200),
    "callbacks": lambda of: of["Notes"].seen == ["on_end"],
    "a seed": trained(200),
    "checkpoints by time": trained(200),
    "progress": trained(200),
    "LoRA": lambda of: of["run"].summary.samples == 200,
}

ROWS = rows_of(PAGE)
ROWS_OF_OTHERS = rows_of(COMING_FROM)
RUN_ABOVE = {row.code for row in ROWS}


@pytest.fixture(scope="module")
def server() -> Iterator[ParameterServer]:
    with served(PAGE) as server:
        yield server


# What they import takes seconds, or they run twice; other tests have most of them, too.
SLOW: Final = {
    *("a compiled model", "scikit-learn's conventions"),
    *("random augmentation, the same bits again", "local steps by any optimizer, in your own loop"),
    *("workers of a loader", "a seed", "checkpoints by time"),
}


def parameters(rows: list[Row]) -> list[ParameterSet]:
    return [
        pytest.param(row, id=row.wish, marks=pytest.mark.soak if row.wish in SLOW else ())
        for row in rows
    ]


@pytest.mark.parametrize("row", parameters(ROWS))
def test_a_wish_comes_true_or_is_refused_with_the_way(
    row: Row, request: pytest.FixtureRequest
) -> None:
    names = program(PAGE)
    if "server.address" in row.code:
        names["server"] = request.getfixturevalue("server")
    run(row, names, CHECKS.get(row.wish))


@pytest.mark.parametrize(
    "row", parameters([row for row in ROWS_OF_OTHERS if row.code not in RUN_ABOVE])
)
def test_what_users_of_other_libraries_have_works_here(row: Row) -> None:
    names = program(PAGE)
    if "peft." in row.code:
        names["peft"] = pytest.importorskip("peft", reason="peft is not installed")
    run(row, names, OF_OTHERS[row.wish])


def test_what_they_have_takes_three_lines_at_most_and_is_all_run() -> None:
    assert len(ROWS_OF_OTHERS) >= 30
    assert all(1 <= len(row.code.splitlines()) <= 3 for row in ROWS_OF_OTHERS)
    run_here = {row.wish for row in ROWS_OF_OTHERS if row.code not in RUN_ABOVE}
    assert run_here == OF_OTHERS.keys()


def test_there_are_fifty_wishes_of_which_few_are_refused() -> None:
    assert len(ROWS) == 50
    assert sum(row.refused is None for row in ROWS) >= N_WORKING_MIN
    assert {row.wish for row in ROWS if row.refused is None} == CHECKS.keys()
    for row in ROWS:
        assert len(row.code.splitlines()) <= 3, row.wish
        assert len(row.others) == 4, row.wish
        assert all(
            other.startswith(("yes", "no", "loop", "as DDP", "each")) for other in row.others
        )
