"""Figure 4: accuracy of training and held out against time, of five methods.

    python -m experiments.figures.methods [--seeds 5] [--only NAME]

All begin from one warm start per seed. Each run is kept in experiments/figures/results
and not run again; the figure is drawn of all there are.
"""

import argparse
from collections.abc import Sequence
from typing import Final

from experiments.figures.scaled import BATCH, Course, Method, course_of, kept, show


def downpour(rule: str, rate: float) -> str:
    """Return table [algorithm] of Downpour SGD."""
    return (
        f'name = "downpour"\nbatch_size = {BATCH}\n'
        f'rule = {{ name = "{rule}", learning_rate = {rate} }}'
    )


def sandblaster(portion: int) -> str:
    """Return table [algorithm] of Sandblaster L-BFGS."""
    return (
        f'name = "sandblaster"\nmethod = "l-bfgs"\nhistory = 10\nportion = {portion}\n'
        "portions_per_set = 1"
    )


SGD_RATE: Final = 0.1
FIXED_RATE: Final = 0.005
ADAGRAD_RATE: Final = 0.005
ADAGRAD_RATE_200: Final = 0.002

METHODS: Final = (
    Method(
        name="SGD",
        algorithm=downpour("sgd", SGD_RATE),
        replicas=1,
        stop="samples = 60_000",
        every=400.0,
    ),
    Method(
        name="Downpour",
        algorithm=downpour("sgd", FIXED_RATE),
        replicas=20,
        stop="samples = 160_000",
        every=40.0,
    ),
    Method(
        name="Downpour + Adagrad",
        algorithm=downpour("adagrad", ADAGRAD_RATE),
        replicas=20,
        stop="samples = 160_000",
        every=40.0,
    ),
    Method(
        name="Downpour + Adagrad",
        algorithm=downpour("adagrad", ADAGRAD_RATE_200),
        replicas=200,
        stop="samples = 240_000",
        every=5.0,
    ),
    Method(
        name="Sandblaster L-BFGS",
        algorithm=sandblaster(32),
        replicas=2000,
        stop="samples = 530_000",
        every=100.0,
        haste=200.0,
    ),
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
        for method in METHODS:
            if options.only and options.only not in f"{method.name} {method.replicas}":
                continue
            if options.draw:
                known = kept(method, seed=seed)
                courses += [] if known is None else [known]
                continue
            found = course_of(method, seed=seed)
            show([found])
            courses.append(found)
    from experiments.figures.drawing import draw_methods  # noqa: PLC0415 -- slow

    draw_methods(courses)


if __name__ == "__main__":
    main()
