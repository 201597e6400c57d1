"""Figure 4: accuracy of training and held out against time, of five methods.

    python -m experiments.figures.methods [--run [--only NAME]] [--seeds 5]

All begin from one warm start per seed. Draws what is kept in
experiments/figures/results; with --run, what is missing is run first.
"""

from collections.abc import Sequence

from experiments.figures.entries import FIGURE_4
from experiments.figures.findings import order_lines
from experiments.figures.gathering import gather
from experiments.figures.running import Runs, options_from


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_from(__doc__, arguments, entries=FIGURE_4)
    with Runs(options.seeds * len(FIGURE_4)) as runs:
        courses = gather(FIGURE_4, options, runs)
        for line in order_lines(courses):
            runs.say(line)
    if not courses:
        return
    from experiments.figures.drawing import draw_methods  # noqa: PLC0415 -- slow

    draw_methods(courses)


if __name__ == "__main__":
    main()
