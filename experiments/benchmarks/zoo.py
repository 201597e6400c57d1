"""Which models of public libraries can be split, how well, and whether the results agree.

    pip install 'distbelief[zoo]'
    python experiments/benchmarks/zoo.py [--models gpt2 resnet18] [--stages capture plan verify]
        [--again] [--markdown] [--small]

Not in `make bench`: it needs an extra, and most of an hour.

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
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Final

import msgspec

from experiments.benchmarks.measuring import measurement
from experiments.zoo.measure import STAGES, Found
from experiments.zoo.models import MODELS


RESULTS: Final = Path(__file__).parents[1] / "zoo" / "results"
SMALL: Final = {"models": ["squeezenet"]}  # its results are not kept
_SECONDS_MAX: Final = 1200


def measured(name: str, stages: Sequence[str], *, folder: Path, again: bool) -> Found:
    """Return what was found for a model by stage; measure, in a process of its own, the rest."""
    path = folder / f"{name}.json"
    found: Found = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
    wanted = [stage for stage in stages if again or stage not in found]
    found = {stage: known for stage, known in found.items() if stage not in wanted}
    if wanted:
        command = [sys.executable, "-m", "experiments.zoo.measure", name, *wanted]
        with Popen(command, stdout=PIPE, stderr=DEVNULL, text=True) as process:
            assert process.stdout is not None
            timer = Timer(_SECONDS_MAX, process.kill)
            timer.start()
            for line in process.stdout:
                if line.startswith("{"):
                    found |= json.loads(line)
            timer.cancel()
        for stage in wanted:
            found.setdefault(stage, {"error": f"the process ended: {process.returncode}"})
        found = {stage: found[stage] for stage in STAGES if stage in found}
        folder.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return {stage: found[stage] for stage in stages if stage in found}


def row(found: Found) -> dict[str, str]:
    captured, planned, verified = (found.get(stage, {}) for stage in STAGES)
    cells = {}
    if "split_share" in captured:
        cells["split"] = f"{captured['split_share']:.1%}"
        cells["capture, s"] = f"{captured['capture_seconds']:.1f}"
    if "speed_ups" in planned:
        cells["plan, s"] = f"{planned['plan_seconds']:.1f}"
        cells["2, 4, 8 machines"] = ", ".join(f"{each:.2f}" for each in planned["speed_ups"])
    if "agrees" in verified:
        for word in ("outputs", "loss", "gradients"):
            plan, alone = verified[word]
            cells[word] = f"{plan:.0e} ({alone:.0e})"
        cells["bytes"] = "exact" if verified["bytes_exact"] else "differ"
        cells["agrees"] = "yes" if verified["agrees"] else "no"
        cells["agrees"] += " (float64)" if verified.get("double") else ""
        cells["verify, s"] = f"{verified['verify_seconds']:.0f}"
    return cells


def figures_of(found: Mapping[str, Found]) -> dict[str, float]:
    shares = [
        each["capture"].get("split_share", 0.0)
        for name, each in found.items()
        if "capture" in each and MODELS[name].kind != "other"
    ]
    plans = [each.get("plan", {}) for each in found.values()]
    return {
        "models": len(found),
        "accepted": sum("speed_ups" in each for each in plans),
        "agreeing": sum(bool(each.get("verify", {}).get("agrees")) for each in found.values()),
        "split_share_worst": min(shares, default=0.0),
        "plan_seconds_worst": max((each.get("plan_seconds", 0.0) for each in plans), default=0.0),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--again", action="store_true", help="measure what is known, too")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    options = measurement.options_of(parser, arguments, small=SMALL)
    found: dict[str, Found] = {}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.small else RESULTS
        for index, name in enumerate(options.models):
            print(f"{index + 1} of {len(options.models)}: {MODELS[name].title}", flush=True)
            found[name] = measured(name, options.stages, folder=folder, again=options.again)
            errors = [each["error"] for each in found[name].values() if each["error"]]
            print("   ", *row(found[name]).items(), *errors, flush=True)
    rows = {MODELS[name].title: row(each) for name, each in found.items()}
    columns = list(dict.fromkeys(key for cells in rows.values() for key in cells))
    if options.markdown:
        print("|", " | ".join(["model", *columns]), "|")
        print("|---" * (len(columns) + 1) + "|")
        for title, cells in rows.items():
            print("|", " | ".join([title, *(cells.get(key, "") for key in columns)]), "|")
    else:
        measurement.show("planned for a rack of 10 Gbit/s, run on two ranks", rows)
    measurement.conclude("zoo", figures_of(found))


if __name__ == "__main__":
    main()
