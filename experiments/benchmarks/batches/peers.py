"""What `sandblaster` is compared with: scipy, torch.optim.LBFGS, Vowpal Wabbit.

Each minimises the same objective in one process with as many threads as the job has
replicas, and tells when it first was at the target, and after how many evaluations.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import numpy as np
import torch
from scipy.optimize import minimize as scipy_minimize

from experiments.benchmarks.batches.problems import Doubles, Objective


VW_HOME = "/tmp/peers/vw"
"""pip install --target /tmp/peers/vw vowpalwabbit"""

_VW = """
import json, sys, time
from vowpalwabbit import Workspace
folder, width, l2, passes, threads = sys.argv[1:]
begun = time.perf_counter()
vw = Workspace(
    f"--bfgs --loss_function logistic --l2 {l2} --passes {passes} --noconstant --quiet "
    f"--holdout_off --termination 1e-12 -k --cache_file {folder}/cache -b 18 "
    f"-d {folder}/data.txt"
)
seconds = time.perf_counter() - begun
weights = [vw.get_weight_from_name(f"{j}", "f") for j in range(int(width))]
print(json.dumps([seconds, weights]))
"""


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a contestant came to.

    Attributes:
        loss: The best.
        seconds: Until it was at the target; None: it never was.
        n_evaluations: Likewise.
        error: Why there is no more, if there is not.
    """

    loss: float
    seconds: float | None
    n_evaluations: int | None
    error: str | None = None


@final
class Watched:
    """An objective that notes when it first is at a target."""

    def __init__(self, objective: Objective, target: float) -> None:
        self._objective = objective
        self._target = target
        self._begun = time.perf_counter()
        self.best = np.inf
        self.seconds: float | None = None
        self.n_evaluations: int | None = None

    def __call__(self, point: Doubles) -> tuple[float, Doubles]:
        """Return loss and gradient."""
        loss, gradient = self._objective(point)
        self.note(loss)
        return loss, gradient

    def note(self, loss: float) -> None:
        """An evaluation has ended."""
        self.best = min(self.best, loss)
        if loss <= self._target and self.seconds is None:
            self.seconds = time.perf_counter() - self._begun
            self.n_evaluations = self._objective.n_evaluations

    @property
    def outcome(self) -> Outcome:
        """What it came to."""
        return Outcome(loss=self.best, seconds=self.seconds, n_evaluations=self.n_evaluations)


def optimum(objective: Objective, *, small: bool) -> float:
    """Return the least loss that scipy finds: as exactly as it can, if not small."""
    n_max = 60 if small else 5000
    options = {"maxiter": n_max, "maxfun": 2 * n_max, "ftol": 0.0, "gtol": 1e-11}
    found = scipy_minimize(  # type: ignore[call-overload]  # its stub wants *args
        objective, objective.initial, jac=True, method="L-BFGS-B", options=options
    )
    return float(found.fun)


def by_scipy(objective: Objective, target: float) -> Outcome:
    """Let scipy's L-BFGS-B minimise it."""
    watched = Watched(objective, target)
    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-9}
    scipy_minimize(  # type: ignore[call-overload]  # as above
        watched, objective.initial, jac=True, method="L-BFGS-B", options=options
    )
    return watched.outcome


def by_torch(objective: Objective, target: float) -> Outcome:
    """Let torch.optim.LBFGS minimise it, with its Wolfe line search."""
    watched = Watched(objective, target)
    optimizer = torch.optim.LBFGS(
        objective.net.parameters(),
        max_iter=2000,
        max_eval=4000,
        history_size=10,
        tolerance_grad=1e-9,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        loss = objective.backward()
        watched.note(loss)
        return loss

    optimizer.step(closure)
    return watched.outcome


def by_vowpal_wabbit(
    objective: Objective, target: float, *, data: tuple[torch.Tensor, torch.Tensor], l2: float
) -> Outcome:
    """Let Vowpal Wabbit's BFGS minimise a logistic loss; it reads text.

    Its l2 is of the sum of losses. It says nothing on the way: it is run again with
    more passes, until it is at the target, and the time of the last run is told.
    """
    inputs, targets = data
    environment = {**os.environ, "PYTHONPATH": VW_HOME}
    best, width = np.inf, inputs.shape[1]
    with TemporaryDirectory() as folder:
        _write_text(Path(folder) / "data.txt", inputs, targets)
        for passes in (5, 10, 20, 40, 80):
            arguments = [folder, str(width), str(l2 * len(inputs)), str(passes), "2"]
            ended = subprocess.run(
                [sys.executable, "-P", "-c", _VW, *arguments],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )
            if ended.returncode:
                why = (ended.stderr.strip().splitlines() or ["it failed"])[-1]
                return Outcome(loss=best, seconds=None, n_evaluations=None, error=why)
            seconds, weights = json.loads(ended.stdout)
            loss, _ = objective(np.array(weights, dtype=np.float64))
            best = min(best, loss)
            if loss <= target:
                return Outcome(loss=best, seconds=seconds, n_evaluations=passes)
    return Outcome(loss=best, seconds=None, n_evaluations=None)


def _write_text(path: Path, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    with path.open("w") as file:
        for row, label in zip(inputs.tolist(), targets.tolist(), strict=True):
            values = " ".join(f"{j}:{value:.8g}" for j, value in enumerate(row))
            file.write(f"{label:g} |f {values}\n")
