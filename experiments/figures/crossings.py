"""Figure 5: time to a fixed accuracy, against machines and against cores.

    python -m experiments.figures.crossings [--seeds 5] [--only NAME]

Three methods with four numbers of replicas each, all from the warm starts of Figure 4.
Each run is kept in experiments/figures/results and not run again; the figure is drawn
of all there are.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Final

from experiments.figures.methods import (
    ADAGRAD_RATE,
    FIXED_RATE,
    downpour,
    sandblaster,
)
from experiments.figures.scaled import Course, Method, course_of, kept, show


TARGET: Final = 0.25
SAMPLES_MAX: Final = 240_000
"""Trained on by Downpour, before it is taken to miss the target."""

BATCHES_MAX: Final = 15
"""Of all 65,536 samples, likewise of Sandblaster."""

FIXED: Final = (5, 10, 20, 40)
ADAPTIVE: Final = (10, 20, 50, 200)
BATCHED: Final = (100, 300, 1000, 2000)


def methods() -> Iterator[Method]:
    """Yield all configurations."""
    for replicas in FIXED:
        yield Method(
            name="Downpour",
            algorithm=downpour("sgd", FIXED_RATE),
            replicas=replicas,
            stop=f"samples = {SAMPLES_MAX}",
            every=1000.0 / replicas,
        )
    for replicas in ADAPTIVE:
        yield Method(
            name="Downpour + Adagrad",
            algorithm=downpour("adagrad", ADAGRAD_RATE),
            replicas=replicas,
            stop=f"samples = {SAMPLES_MAX}",
            every=1000.0 / replicas,
        )
    for replicas in BATCHED:
        yield Method(
            name="Sandblaster L-BFGS",
            algorithm=sandblaster(32),
            replicas=replicas,
            stop=f"samples = {BATCHES_MAX * 65_536}",
            every=50.0,
            haste=200.0,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="part of a method's name and number of replicas")
    parser.add_argument("--draw", action="store_true", help="what there is, no more")
    options = parser.parse_args(arguments)
    courses: list[Course] = []
    for seed in range(options.seeds):
        for method in methods():
            if options.only and options.only not in f"{method.name} {method.replicas}":
                continue
            if options.draw:
                known = kept(method, seed=seed, wanted="held_out")
                courses += [] if known is None else [known]
                continue
            found = course_of(method, seed=seed, target=TARGET, wanted="held_out")
            show([found])
            courses.append(found)
    from experiments.figures.drawing import draw_crossings  # noqa: PLC0415 -- slow

    draw_crossings(courses, target=TARGET)


if __name__ == "__main__":
    main()
