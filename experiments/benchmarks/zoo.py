"""Which models of public libraries can be split, how well, and whether the results agree.

    pip install 'distbelief[zoo]'
    python experiments/benchmarks/zoo.py [--models gpt2 resnet18] [--again] [--markdown]

Each model is captured and planned at its published size on cluster rack-10g, without its memory;
small, it runs on two ranks, every layer split that can be, and is compared with one process. What
was measured before is read from experiments/zoo/results, unless `--again` is given.

    models               of the table
    accepted             captured and planned
    agreeing             outputs, loss, gradients as in one process; bytes as predicted
    split_share_worst    of the arithmetic of a transformer or convolutional net, the share of
                         layers that can be split; the lowest
    plan_seconds_worst   processor seconds of capture and planning for 2, 4 and 8 machines
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from experiments.benchmarks.measuring import measurement
from experiments.zoo.models import MODELS


RESULTS: Final = Path(__file__).parents[1] / "zoo" / "results"
SMALL: Final = {"models": ["squeezenet"], "again": True}
_SECONDS_MAX: Final = 1200

Found = dict[str, Any]


def measured(name: str, *, again: bool) -> Found:
    """Return what was found for a model; measure it in a process of its own if need be."""
    path = RESULTS / f"{name}.json"
    if path.is_file() and not again:
        return dict(msgspec.json.decode(path.read_bytes()))
    command = [sys.executable, "-m", "experiments.zoo.measure", name]
    found: Found = {}
    try:
        run = subprocess.run(
            command, stdout=subprocess.PIPE, check=False, text=True, timeout=_SECONDS_MAX
        )
        lines, found["exit"] = run.stdout, run.returncode
    except subprocess.TimeoutExpired as error:
        lines = (error.stdout or b"").decode()
        found["error"] = f"took more than {_SECONDS_MAX} s"
    for line in lines.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    RESULTS.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return found


def row(found: Found) -> dict[str, str]:
    """Return the cells of a model."""
    cells: dict[str, str] = {"accepted": "yes" if found.get("accepted") else "no"}
    if "split_share" in found:
        cells["split"] = f"{found['split_share']:.1%}"
    if "speed_ups" in found:
        cells["2, 4, 8 machines"] = ", ".join(f"{each:.2f}" for each in found["speed_ups"])
        cells["capture, plan, s"] = (
            f"{found['capture_seconds']:.1f}, {found['plan_seconds']:.1f}"
        )
    if "agrees" in found:
        for word in ("outputs", "loss", "gradients"):
            plan, alone = found[word]
            cells[word] = f"{plan:.0e} ({alone:.0e})"
        cells["bytes"] = "exact" if found["bytes_exact"] else "differ"
        cells["agrees"] = "yes" if found["agrees"] else "no"
        cells["verify, s"] = f"{found['verify_seconds']:.0f}"
    return cells


def figures_of(found: Sequence[tuple[str, Found]]) -> dict[str, float]:
    shares = [
        each["split_share"]
        for name, each in found
        if "split_share" in each and MODELS[name].kind != "other"
    ]
    seconds = [each["capture_seconds"] + each["plan_seconds"] for _, each in found if "plan_seconds" in each]
    return {
        "models": len(found),
        "accepted": sum("plan_seconds" in each for _, each in found),
        "agreeing": sum(bool(each.get("agrees")) for _, each in found),
        "split_share_worst": min(shares, default=0.0),
        "plan_seconds_worst": max(seconds, default=0.0),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--again", action="store_true", help="measure what is known, too")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    options = measurement.options_of(parser, arguments, small=SMALL)
    found = []
    for index, name in enumerate(options.models):
        print(f"{index + 1} of {len(options.models)}: {MODELS[name].title}", flush=True)
        found.append((name, measured(name, again=options.again)))
        print(f"    {found[-1][1].get('error') or row(found[-1][1])}", flush=True)
    rows = {MODELS[name].title: row(each) for name, each in found}
    if options.markdown:
        columns = list(dict.fromkeys(key for cells in rows.values() for key in cells))
        print("|", " | ".join(["model", *columns]), "|")
        print("|---" * (len(columns) + 1) + "|")
        for title, cells in rows.items():
            print("|", " | ".join([title, *(cells.get(key, "") for key in columns)]), "|")
    else:
        measurement.show("split over two ranks, planned for a rack of 10 Gbit/s", rows)
    measurement.conclude("zoo", figures_of(found))


if __name__ == "__main__":
    main()
