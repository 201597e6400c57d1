"""Pictures of scheduled variables, for the tutorial: the schedule, and what it is worth.

    python -m experiments.figures.variables [FOLDER]        # docs/images

schedule.png    which of 24 variables, in four blocks, are updated in which round of one pass
descent.png     the objective of a Lasso over its updates, scheduled and not

Columns are correlated in groups, whose variables are in different blocks: three by 0.8 in the first
picture, eight by 0.5 in the second. Others hardly depend on each other.
"""

import sys
from pathlib import Path
from typing import Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sandblaster.strads import plan
from sandblaster.strads.columns import Columns
from sandblaster.strads.descent import Descent, Solution
from sandblaster.strads.kernels import Floats
from sandblaster.strads.losses import Squares
from sandblaster.strads.program import run


IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
COLOURS: Final = ("tab:blue", "tab:orange", "tab:green", "tab:red")
N_BLOCKS: Final = 4


def columns_of_groups(n_groups: int, size: int, correlation: float) -> Floats:
    """Return columns of which each depends on those of its group: (4000, size * n_groups)."""
    rng = np.random.default_rng(0)
    common = np.tile(rng.standard_normal((4000, n_groups)), size)
    own = rng.standard_normal(common.shape)
    columns: Floats = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
    return columns


def draw_schedule() -> Figure:
    x = columns_of_groups(8, 3, 0.8)
    everything = np.arange(x.shape[1])
    whole = Columns.of(x, range(x.shape[1]), centred=True).some(everything)
    sizes, blocks = plan.correlations(whole), everything * N_BLOCKS // len(everything)
    bound = 0.5
    rounds = plan.rounds(sizes, blocks, bound, np.full(len(everything), -1))
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1, 2])
    _grid(left, np.zeros_like(rounds), blocks, "unscheduled: all at once")
    _grid(right, rounds, blocks, f"scheduled: interference of other blocks at most {bound:g}")
    left.set_ylabel("variable")
    return figure


def _grid(axes: Axes, rounds: "np.ndarray", blocks: "np.ndarray", title: str) -> None:
    for variable, (one, block) in enumerate(zip(rounds.tolist(), blocks.tolist(), strict=True)):
        axes.barh(variable, 0.9, left=one - 0.45, height=0.85, color=COLOURS[block])
    for block in range(N_BLOCKS):
        middle = float(np.flatnonzero(blocks == block).mean())
        axes.text(-0.65, middle, f"block {block}", rotation=90, va="center", ha="right")
    axes.set_xlim(-1.1, max(rounds.max(), 1) + 0.6)
    axes.set_xticks(range(int(rounds.max()) + 1))
    axes.set_xlabel("round")
    axes.set_title(title, fontsize="medium")
    axes.invert_yaxis()


def draw_descent() -> Figure:
    x = columns_of_groups(50, 8, 0.5)
    w = np.zeros(x.shape[1])
    w[::13] = 1.0
    y = x @ w + 0.1 * np.random.default_rng(1).standard_normal(len(x))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    least = solution(x, y, "priority", 0.05, 1e-12).objective
    contestants = {
        "scheduled, priority": solution(x, y, "priority", 0.05, 1e-8),
        "scheduled, in turn": solution(x, y, "round_robin", 0.05, 1e-8),
        "unscheduled, 16 blocks at once": solution(x, y, "round_robin", np.inf, 1e-8),
    }
    for name, found in contestants.items():
        axes.plot(found.updates, np.maximum(found.objectives - least, 1e-9), label=name)
    axes.set(yscale="log", xlabel="updates of single variables", ylim=(1e-8, 1e4))
    axes.set_xlim(0, 5_000)
    axes.set_ylabel("objective above its minimum")
    axes.legend()
    return figure


def solution(
    x: Floats,
    y: Floats,
    schedule: Literal["priority", "round_robin"],
    interference: float,
    tolerance: float,
) -> Solution:
    program = Descent(
        x, y, Squares(), alphas=[0.02], n_blocks=16, centred=False, schedule=schedule,
        interference=interference, max_iterations=75, tolerance=tolerance, gather=0.0,
    )  # fmt: skip
    return run(program)[0][0]


def main(folder: Path = IMAGES) -> None:
    draw_schedule().savefig(folder / "schedule.png", dpi=120)
    draw_descent().savefig(folder / "descent.png", dpi=120)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
