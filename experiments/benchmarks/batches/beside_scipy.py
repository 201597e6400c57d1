"""`sandblaster.minimize` beside scipy: five problems, without bounds and within some.

Both begin at the same point of the same float64 objective and have the same tolerances; scipy runs
in this process, ours in four others.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
from scipy.optimize import Bounds, minimize as scipy_minimize
from torch import nn
from torch.nn import functional
from typing_extensions import override

import sandblaster
from distbelief.task.losses import Loss
from experiments.benchmarks.batches.problems import (
    Objective,
    digits_data,
    digits_net,
    logistic_data,
    logistic_loss,
    logistic_net,
)
from experiments.benchmarks.measuring import measurement


N_REPLICAS: Final = 2
N_SHARDS: Final = 2
GTOL: Final = 1e-5
FTOL: Final = 1e-9
NOT_SAME: Final = 1e-5  # of the loss: minima that differ by more are two


class Rosenbrock(nn.Module):
    """Its outputs are the residuals of the extended function, whatever its inputs are."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
        self.x = nn.Parameter(start.repeat(n // 2))

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        odd, even = self.x[0::2], self.x[1::2]
        return torch.cat([10.0 * (even - odd**2), 1.0 - odd]).expand(len(inputs), -1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    name: str
    net: Callable[[], nn.Module]
    data: tuple[torch.Tensor, torch.Tensor]
    loss: Loss
    bounds: Bounds
    l2: float = 0.0
    is_convex: bool = True  # then all minima are one


def problems(*, small: bool) -> list[Problem]:
    inputs, labels = logistic_data(400 if small else 4000, 50).tensors
    scales = torch.logspace(0.0, 1.0, 50, dtype=torch.float64)
    pixels, digits = digits_data().tensors
    rest = torch.randn(len(inputs), 1, generator=torch.Generator().manual_seed(1)).double()
    n = 4 if small else 20
    return [
        Problem(
            name="logistic regression",
            net=lambda: logistic_net(50),
            data=(inputs, labels),
            loss=logistic_loss,
            bounds=Bounds(-0.5, 0.5),
            l2=1e-4,
        ),
        Problem(
            name="condition 100",
            net=lambda: logistic_net(50),
            data=(inputs * scales, labels),
            loss=logistic_loss,
            bounds=Bounds(-0.1, 0.1),
            l2=1e-4,
        ),
        Problem(
            name="least squares",
            net=lambda: nn.Linear(50, 1).double(),
            data=(inputs * scales, labels[:, None] + rest),
            loss=functional.mse_loss,
            bounds=Bounds(0.0),
        ),
        Problem(
            name="a net on digits",
            net=lambda: digits_net(8),
            data=(pixels, digits),
            loss=functional.cross_entropy,
            bounds=Bounds(-0.5, 0.5),
            l2=1e-3,
            is_convex=False,
        ),
        Problem(
            name=f"Rosenbrock, {n} numbers",
            net=lambda: Rosenbrock(n),
            data=(torch.zeros(8, 1).double(), torch.zeros(8, n).double()),
            loss=functional.mse_loss,
            bounds=Bounds(-2.0, 0.5),
        ),
    ]


def beside_scipy(*, small: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    rows, starts, excesses = dict[str, dict[str, str]](), list[float](), list[float]()
    n_ours = n_scipy = 0
    for problem, bounds in ((p, b) for p in problems(small=small) for b in (None, p.bounds)):
        torch.manual_seed(0)
        net = problem.net()
        function = Objective(problem.net(), problem.data, loss=problem.loss, l2=problem.l2)
        function.net.load_state_dict(net.state_dict())
        options = {"maxiter": 1000, "gtol": GTOL, "ftol": FTOL}
        begun = time.perf_counter()
        theirs = scipy_minimize(  # type: ignore[call-overload]  # its stub wants *args
            function, function.initial, jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
        scipy_seconds, begun = time.perf_counter() - begun, time.perf_counter()
        ours = sandblaster.minimize(
            net,
            problem.loss,
            problem.data,
            bounds=bounds,
            options=options,
            l2=problem.l2,
            replicas=N_REPLICAS,
            shards=N_SHARDS,
        )
        seconds = time.perf_counter() - begun
        searching = ours.curve[-1]["seconds"] - ours.curve[0]["seconds"]
        starts.append(seconds - searching)
        excess = (ours.fun - theirs.fun) / max(abs(theirs.fun), NOT_SAME)
        excesses.append(excess if problem.is_convex else 0.0)
        n_ours += ours.nfev
        n_scipy += theirs.nfev
        rows[f"{problem.name}{'' if bounds is None else ', bounds'}"] = {
            "loss": f"{ours.fun:.6g}, {theirs.fun:.6g}",
            "evaluations": f"{ours.nfev}, {theirs.nfev}",
            "seconds": f"{seconds:.1f}, {scipy_seconds:.2f}",
            "to start and end": f"{seconds - searching:.1f}",
        }
    measurement.show("sandblaster.minimize, and scipy's L-BFGS-B", rows)
    return {
        "minimize_evaluations_over_scipy": n_ours / n_scipy,
        "minimize_loss_over_scipy": max(excesses),
        "minimize_start_seconds": median(starts),
    }
