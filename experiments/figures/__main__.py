"""The figures of Dean et al. 2012, from simulations, beside its published points.

    python -m experiments.figures speedup                   # Figure 3: a step of one replica
    python -m experiments.figures search [--run]            # settings of Figures 4 and 5
    python -m experiments.figures methods [--run]           # Figure 4: accuracy against time
    python -m experiments.figures crossings [--run]         # Figure 5: time to one accuracy
    python -m experiments.figures STUDY [--run]             # of `studies`

They draw, or print, what is kept in experiments/figures/results. With --run, what is missing is
run first; `--only NAME` runs a part. All runs of one seed begin from one warm start.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from rich.console import Console

from distbelief.config.job import Job
from distbelief.job.display.progress import WaitProgress
from distbelief.simulation.forecast.prepare import Preparation
from distbelief.simulation.forecast.run import FinishedRun, run_simulated
from experiments.figures.courses import (
    SEARCH_SEED,
    SEARCHED,
    STOP_AT,
    Course,
    Simulate,
    best,
    check_warm_starts,
    composed,
    course_of,
    find_pace,
    kept_course,
    pace,
    run,
    setting_of,
    show,
    tries_of,
)
from experiments.figures.entries import FIGURE_4, FIGURE_5, LEARNER, Entry, ScaledMachines
from experiments.figures.findings import crossing_lines, order_lines
from experiments.figures.speedup import COUNTS, NETS, speed_ups
from experiments.figures.studies import STUDIES, tell


ENTRIES: Final = {"search": SEARCHED, "methods": FIGURE_4, "crossings": FIGURE_5}


@dataclass(frozen=True, slots=True)
class Runs:
    preparation: Preparation  # keeps what the jobs of one seed have in common
    console: Console
    progress: WaitProgress

    @contextmanager
    def one(self, what: str) -> Iterator[Simulate]:
        """Begin a run; yield what simulates its job, and shows its progress."""

        def simulate(job: Job, machines: ScaledMachines, seed: int) -> FinishedRun:
            prepared, tell = self.preparation.stage(job), self.progress.tell
            return run_simulated(prepared, machines, seed=seed, tell=tell)

        self.progress.begin(what)
        yield simulate
        self.progress.end()

    def print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)


@contextmanager
def running(n_runs: int) -> Iterator[Runs]:
    console = Console(soft_wrap=True)
    with Preparation() as preparation, WaitProgress(console, n_runs=n_runs) as progress:
        yield Runs(preparation, console, progress)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; --only must be part of a label."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.figures", description=(__doc__ or "").split("\n", 1)[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("speedup", *ENTRIES):
        command = commands.add_parser(name)
        command.add_argument("--only", default="", help='part of a label, such as "[20]"')
        if name != "speedup":
            command.add_argument("--run", action="store_true", help="run what is missing")
        if name in ("methods", "crossings"):
            command.add_argument("--seeds", type=int, default=5, help="0 to so many less one")
    for name, (what, _) in STUDIES.items():
        command = commands.add_parser(name, help=f"a study: {what}")
        command.add_argument("--run", action="store_true", help="run what is missing")
        command.set_defaults(only="")
    options = parser.parse_args(arguments)
    labels = [entry.label for entry in ENTRIES.get(options.command, ())] or list(NETS)
    if not any(options.only in label for label in labels):
        known = ", ".join(dict.fromkeys(labels))
        parser.error(f"--only {options.only!r} is part of no label: there are {known}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    match options.command:
        case "speedup":
            _speed_up(options.only)
        case "search":
            _search(options)
        case study if study in STUDIES:
            tell(study, runs=options.run)
        case _:
            _draw(options)


def _draw(options: argparse.Namespace) -> None:
    entries = ENTRIES[options.command]
    orders = options.command == "methods"
    with running(options.seeds * len(entries)) as runs:
        courses = gather(entries, options, runs)
        for line in order_lines(courses) if orders else crossing_lines(courses):
            runs.print(line)
    if courses:
        from experiments.figures.drawing import draw_crossings, draw_methods  # noqa: PLC0415 -- slow

        (draw_methods if orders else draw_crossings)(courses)


def gather(entries: Sequence[Entry], options: argparse.Namespace, runs: Runs) -> list[Course]:
    if options.only and not options.run:
        runs.print("--only chooses what --run runs; all that is kept is drawn")
    settings: dict[Entry, float] = {}
    for entry in entries:
        setting = setting_of(entry)
        if setting is None:
            runs.print(f"{entry.label}: no setting yet: run experiments.figures search")
        else:
            settings[entry] = setting
    for entry in entries:
        paced = pace(entry) if entry.kind == "l-bfgs" else None
        if paced is not None:
            runs.print(f"{entry.label}: its pace was measured on {paced.measured}")
    courses: list[Course] = []
    for seed in range(options.seeds):
        for entry, setting in settings.items():
            known = _kept(entry, setting, seed)
            if known is None and options.run and options.only in entry.label:
                known = _run(entry, setting, seed, runs)
            if known is None:
                runs.print(f"{entry.label} seed {seed}: not run with these settings yet")
            else:
                courses.append(known)
    check_warm_starts(courses)
    return courses


def _kept(entry: Entry, setting: float, seed: int) -> Course | None:
    if entry.kind == "l-bfgs":
        return composed(entry, setting=setting, seed=seed)
    return kept_course(entry, setting=setting, seed=seed)


def _run(entry: Entry, setting: float, seed: int, runs: Runs) -> Course | None:
    with runs.one(f"{entry.label}, seed {seed}") as simulate:
        if entry.kind == "l-bfgs":
            course_of(LEARNER, simulate, setting=setting, seed=seed)
            find_pace(entry, simulate)
            return _kept(entry, setting, seed)
        found = course_of(entry, simulate, setting=setting, seed=seed)
    show(found, runs.print)
    return found


def _search(options: argparse.Namespace) -> None:
    entries = [entry for entry in SEARCHED if options.only in entry.label]
    with running(len(entries)) as runs:

        def attempt(entry: Entry, setting: float) -> Course:
            with runs.one(f"{entry.label}, {setting:g}") as simulate:
                return run(entry, simulate, setting=setting, seed=SEARCH_SEED, stop_at=STOP_AT)

        for entry in entries:
            tries = tries_of(entry, attempt if options.run else None)
            for each in tries:
                mark = "*" if each.setting == best(tries) else " "
                at = each.target_seconds
                when = "never" if at is None else f"{at:,.0f} s"
                runs.print(
                    f"{mark} {entry.label:26} {each.setting:<7g} at the target: {when};"
                    f" {each.held_out:.1%} after {each.seconds:,.0f} s"
                )


def _speed_up(only: str) -> None:
    torch.set_num_threads(1)
    found = []
    for name in [name for name in NETS if only in name]:
        found += speed_ups(name)
        for each in found[-len(COUNTS) :]:
            print(
                f"{each.net:12} {each.machines:4} machines, {each.used:3} used: "
                f"{each.seconds[1]:.4g} s, {each.speed_up:.2f}x, evenly {each.even:.2f}x",
                flush=True,
            )
    from experiments.figures.drawing import draw_speed_up  # noqa: PLC0415 -- slow

    draw_speed_up(found)


if __name__ == "__main__":
    main()
