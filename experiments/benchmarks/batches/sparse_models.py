"""Lasso by scheduled coordinate descent: beside celer, with two workers, by other schedules."""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import numpy as np
from scipy import sparse

import distbelief
from experiments.benchmarks.measuring.measurement import interleaved
from sandblaster.strads import kernels
from sandblaster.strads.columns import Csc
from sandblaster.strads.descent import Block, Descent, Report, Solution
from sandblaster.strads.kernels import Floats
from sandblaster.strads.losses import Squares
from sandblaster.strads.program import Pushed, run


GAP: Final = 1e-6  # relative to |y|^2 / (2 n)
EXACT: Final = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    x: Csc
    y: Floats
    w: Floats  # that the targets are made of

    @classmethod
    def of(cls, n: int, p: int, *, per_column: int, n_used: int) -> "Problem":
        rng = np.random.default_rng(0)
        rows = np.sort(rng.integers(0, n, (p, per_column), np.int32), axis=1).ravel()
        starts = (per_column * np.arange(p + 1)).astype(np.int32)  # celer takes no others
        x: Csc = sparse.csc_array((rng.standard_normal(len(rows)), rows, starts), shape=(n, p))
        x.sum_duplicates()
        w = np.zeros(p)
        signs = rng.choice([-1.0, 1.0], n_used)
        w[rng.choice(p, n_used, replace=False)] = signs * (1 + rng.random(n_used))
        f = cast("Floats", x @ w)
        return cls(x, f + 0.1 * f.std() * rng.standard_normal(n), w)

    @property
    def largest_alpha(self) -> float:
        products = cast("Floats", self.x.T @ self.y)
        return float(np.abs(products).max()) / len(self.y)

    def objective(self, w: Floats, alpha: float) -> float:
        rest = self.y - self.x @ w
        return float(rest @ rest / (2 * len(rest)) + alpha * np.abs(w).sum())

    def program(self, alpha: float, **options: Any) -> Descent:  # noqa: ANN401 -- of the program
        options = {"centred": False, "tolerance": GAP, **options}
        return Descent(self.x, self.y, Squares(), alphas=[alpha], **options)

    def solved(self, alpha: float, **options: Any) -> Solution:  # noqa: ANN401 -- as above
        return run(self.program(alpha, **options))[0][0]


def problems(*, small: bool) -> dict[str, Problem]:
    if small:
        return {"small": Problem.of(200, 1000, per_column=20, n_used=10)}
    return {
        "small": Problem.of(2000, 20_000, per_column=20, n_used=100),
        "large": Problem.of(100_000, 1_000_000, per_column=10, n_used=1000),
    }


def lasso(*, small: bool) -> dict[str, float]:
    kernels.best()
    figures: dict[str, float] = {}
    theirs = _celer()
    for name, problem in problems(small=small).items():
        for share in (10, 50):
            alpha, key = problem.largest_alpha / share, f"lasso_{name}_{share}"
            if theirs is not None:
                theirs(problem, alpha, GAP)  # loaded, and its data in memory
            contestants = {"ours": lambda p=problem, a=alpha: _timed(lambda: _weights(p, a, GAP))}
            if theirs is not None:
                contestants["celer"] = lambda p=problem, a=alpha: _timed(lambda: theirs(p, a, GAP))
            found = interleaved(contestants, n_rounds=2 if small else 5)
            seconds = {one: median(s for s, _ in turns) for one, turns in found.items()}
            w = _weights(problem, alpha, EXACT)
            least = problem.objective(w, alpha)
            figures[f"{key}_seconds"] = seconds["ours"]
            excess = {
                one: problem.objective(turns[0][1], alpha) / least - 1
                for one, turns in found.items()
            }
            figures[f"{key}_excess"] = excess["ours"]
            figures[f"{key}_missed"] = float(((problem.w != 0) & (w == 0)).sum())
            text = f"{key}: {seconds['ours']:.3f} s, {np.count_nonzero(w)} of {len(w)} used"
            if theirs is not None:
                figures[f"{key}_over_celer"] = seconds["ours"] / seconds["celer"]
                exact = problem.objective(theirs(problem, alpha, EXACT), alpha)
                figures[f"{key}_objective_difference"] = least / exact - 1
                text += (
                    f"; celer {seconds['celer']:.3f} s, ratio {figures[f'{key}_over_celer']:.2f}"
                )
                text += f"; objective over celer's {least / exact - 1:.1e}"
            print(text, flush=True)
    return figures


def _weights(problem: Problem, alpha: float, tolerance: float) -> Floats:
    w = np.zeros(problem.x.shape[1])
    found = problem.solved(alpha, tolerance=tolerance, max_iterations=1000)
    w[found.ids] = found.values
    return w


def _celer() -> Callable[[Problem, float, float], Floats] | None:
    try:
        from celer import Lasso  # noqa: PLC0415 -- a peer, not installed with the package
    except ImportError:
        print("celer is not installed: pip install celer")
        return None

    def solve(problem: Problem, alpha: float, tolerance: float) -> Floats:
        # Its gap is relative to |y|^2 / n.
        model = Lasso(alpha=alpha, tol=tolerance / 2, fit_intercept=False, max_iter=1000)
        coefficients: Floats = model.fit(problem.x, problem.y).coef_
        return coefficients

    return solve


def _timed(work: Callable[[], Floats]) -> tuple[float, Floats]:
    begun = time.process_time()
    found = work()
    return time.process_time() - begun, found


# --- workers ---


def workers(*, small: bool) -> dict[str, float]:
    """Return one worker's seconds over two workers', with as many blocks."""
    kernels.best()
    name, problem = list(problems(small=small).items())[-1]
    alpha = problem.largest_alpha / 50
    print(f"workers: {name}, 8 blocks")

    def threads(n: int) -> float:
        program = problem.program(alpha, n_blocks=8)
        begun = time.perf_counter()
        run(program, workers=n)
        return time.perf_counter() - begun

    counts = {f"{n} threads": lambda n=n: threads(n) for n in (1, 2)}
    found = {one: median(turns) for one, turns in interleaved(counts, n_rounds=3).items()}
    figures = {"threads_gain": found["1 threads"] / found["2 threads"]}
    figures["threads_bound"] = _bound(problem.program(alpha, n_blocks=8))
    with tempfile.TemporaryDirectory() as folder:
        sparse.save_npz(Path(folder) / "x.npz", problem.x, compressed=False)
        np.save(Path(folder) / "y.npy", problem.y)
        for n in (1, 2):
            found[f"job of {n}"] = _job(Path(folder), alpha, n)
    figures["job_gain"] = found["job of 1"] / found["job of 2"]
    figures |= {f"{one.replace(' ', '_')}_seconds": seconds for one, seconds in found.items()}
    for one, value in figures.items():
        print(f"  {one} {value:.3f}", flush=True)
    return figures


def _bound(program: Descent) -> float:
    """Return what two workers could gain at best: by the processor time of the tasks."""
    alone, push, load = [0.0], program.push, program.load
    spent, every = list[float](), list[float]()

    def timed_push(*arguments: Any) -> Pushed[Report]:  # noqa: ANN401 -- those of push
        begun = time.thread_time()
        pushed = push(*arguments)
        spent.append(time.thread_time() - begun)
        return pushed

    def timed_load(block: int) -> Block:
        begun = time.thread_time()
        loaded = load(block)
        spent.append(time.thread_time() - begun)
        return loaded

    def watch(_: object) -> None:
        every.extend(spent)
        alone[0] += max(sum(spent) / 2, *spent)
        spent.clear()

    watched = cast("Any", program)
    watched.push, watched.load = timed_push, timed_load
    begun = time.thread_time()
    run(program, watch=watch)
    whole = time.thread_time() - begun
    return whole / (whole - sum(every) + alone[0])


def _job(folder: Path, alpha: float, replicas: int) -> float:
    """Return the seconds from the first round to the last one."""
    files = {"x": str(folder / "x.npz"), "y": str(folder / "y.npy")}
    options = {"alpha": alpha, "n_blocks": 8, "tol": GAP, "fit_intercept": False}
    job: Mapping[str, object] = {
        "model": {"factory": "sandblaster.strads.jobs:lasso", "arguments": {**files, **options}},
        "data": {"train": {"factory": "sandblaster.strads.jobs:samples", "arguments": files}},
        # Rows are dense, where they are evaluated.
        "algorithm": {"name": "sandblaster", "method": "strads", "loss": "mse", "portion": 8},
        "cluster": {"replicas": replicas, "shards": 1},
        "output": {"directory": str(folder / f"run-{replicas}")},
    }
    done = distbelief.train(job, show=False)
    assert not done.exit_code, done.summary.error
    seconds = done.summary.training_seconds
    assert seconds is not None
    return seconds


# --- schedules ---


def schedule(*, small: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, problem in problems(small=small).items():
        alpha = problem.largest_alpha / 10
        least = problem.solved(alpha, tolerance=EXACT, max_iterations=1000).objective
        one, sixteen = (problem.solved(alpha, n_blocks=n, gather=0.0) for n in (1, 16))
        robin = problem.solved(alpha, schedule="round_robin", max_iterations=1000)
        figures[f"blocks_16_over_1_{name}"] = sixteen.n_updates / one.n_updates
        figures[f"robin_over_priority_{name}"] = _updates(robin, least) / _updates(one, least)
        print(
            f"schedule, {name}: {one.n_updates} updates in {one.n_rounds} rounds; 16 blocks "
            f"{sixteen.n_updates} in {sixteen.n_rounds}; to 1e-6 of the minimum, priority "
            f"{_updates(one, least)}, round robin {_updates(robin, least)}",
            flush=True,
        )
    return figures


def _updates(found: Solution, least: float) -> int:
    """Return the updates until the objective is within 1e-6 of its minimum."""
    below = np.flatnonzero(found.objectives <= least * (1 + 1e-6))
    return int(found.updates[below[0]]) if len(below) else found.n_updates
