"""Figure 5: time to a fixed accuracy, against machines and against cores.

    python -m experiments.figures.crossings [--run [--only NAME]] [--seeds 5]

Three methods with four numbers of replicas each, all from the warm starts of Figure 4,
with which it shares what both show. Draws what is kept in experiments/figures/results;
with --run, what is missing is run first.
"""

from collections.abc import Sequence

from experiments.figures.courses import TARGET
from experiments.figures.entries import FIGURE_5
from experiments.figures.findings import crossing_lines
from experiments.figures.gathering import gather
from experiments.figures.running import Runs, options_from


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_from(__doc__, arguments, entries=FIGURE_5)
    with Runs(options.seeds * len(FIGURE_5)) as runs:
        courses = gather(FIGURE_5, options, runs)
        for line in crossing_lines(courses):
            runs.say(line)
    if not courses:
        return
    from experiments.figures.drawing import draw_crossings  # noqa: PLC0415 -- slow

    draw_crossings(courses, target=TARGET)


if __name__ == "__main__":
    main()
