"""Runs `distbelief partition` and prints the result."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from distbelief.cli.options import wide_console
from distbelief.core.errors import JobError
from distbelief.graph.capture import InputSpec
from distbelief.graph.graph import GraphError
from distbelief.job.display.progress import status_line
from distbelief.job.launch.local import LocalLauncher
from distbelief.plans.planner import plan_report
from distbelief.plans.planner.planner import Request, planning_request
from distbelief.plans.planner.planning_result import planning_result
from distbelief.task.task import ModelSpec, build_on_meta


def run(
    asked: Request,
    *,
    explain: Sequence[str],
    out: Path | None,
    picture: Path | None,
    timeline: Path | None,
    as_json: bool,
    launcher: LocalLauncher | None,
) -> bool:
    """Plan and print; return whether the plan for the most machines fits.

    `explain` names layers whose candidates are shown. Files are of the plan for the most machines;
    with a launcher it is run and compared with one process: if its result is wrong, the plan does
    not fit.

    GraphError if the model cannot be captured, a pin is impossible, or a count is too high.
    StorageError if a file cannot be written.
    """
    console = wide_console(plan_report.WIDTH, stderr=as_json)
    # Wrong paths and layers are reported now, not after minutes of planning.
    for path in (out, picture, timeline):
        if path is not None and path.is_dir():
            raise GraphError(f"{path} is a directory: name a file in it")
        if path is not None and not path.parent.is_dir():
            raise GraphError(f"{path}: there is no directory {path.parent}: create it first")
    trial = None
    with console.status("") as status:
        notify = status_line(console, status)
        notify("capturing the model")
        model = build_on_meta(ModelSpec(factory=asked.model))  # without memory for its parameters
        planning = planning_request(model, asked, notify=notify)
        for layer in explain:
            plan_report.check_layer(planning.graph, layer)
        result = planning_result(
            planning, asked.counts, notify=lambda what: notify(f"planning: {what}")
        )
        explained = [result.explain(layer) for layer in explain]
        if launcher is not None:
            from distbelief.job.verify import verify  # noqa: PLC0415 -- start quickly

            trial = verify(
                result,
                lambda what: notify(f"running the plan: {what}"),
                factory=asked.model,
                loss=asked.loss,
                n_cores=len(os.sched_getaffinity(0)),
                launcher=launcher,
            )
    if as_json:
        tried = {} if trial is None else {"verified": trial.plain()}
        print(json.dumps({**result.plain(), **tried}))  # noqa: T201 -- the output of the command
    else:
        result.show(console)
        if trial is not None:
            trial.show(console)
    for table in explained:
        console.print(table)
    for path, write in ((out, result.save), (timeline, result.trace), (picture, result.draw)):
        if path is not None:
            write(path)
            console.print(f"written: {path}", markup=False, soft_wrap=True)
    return result.fits and (trial is None or trial.passed)


_INPUT: Final = re.compile(r"(\d+(?:x\d+)*)?(?::(\d+|bool))?")


def input_specs(texts: Sequence[str]) -> list[InputSpec] | dict[str, InputSpec]:
    """Return the inputs in texts like "3x200x200", or by keyword: "mask=128:bool"."""
    named = [text.rpartition("=") for text in texts]
    if all(name for name, _, _ in named):
        return {name.strip(): input_spec(shape) for name, _, shape in named}
    if any(name for name, _, _ in named):
        raise JobError(f"--input {', '.join(texts)}: name all inputs, as in ids=128:30000, or none")
    return [input_spec(text) for text in texts]


def input_spec(text: str) -> InputSpec:
    """Return the input that "3x200x200" means, or "128:30000" for integers below 30000."""
    match = _INPUT.fullmatch(text.strip())
    if match is None or not text.strip():
        raise JobError(
            f"--input {text!r} is not a shape: write the extents without the batch, like "
            "3x200x200; for integers also their number, like 128:30000; for a mask 128:bool"
        )
    shape = tuple(int(extent) for extent in (match[1] or "").split("x") if extent)
    if 0 in shape:
        raise JobError(f"--input {text!r} has an extent of 0: use 1 or more")
    if match[2] == "bool":
        return InputSpec(shape=shape, n_values=2, is_mask=True)
    return InputSpec(shape=shape, n_values=int(match[2]) if match[2] else None)


def counts(text: str) -> list[int]:
    """Return the numbers in "1,2,4,8"; raise JobError if there are none."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise JobError(f"--machines {text!r} has no numbers of machines: write for example 1,2,4,8")
    return found
