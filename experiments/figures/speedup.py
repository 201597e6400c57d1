"""Figure 3: how much faster a step of one replica is on several machines, of four nets.

    python -m experiments.figures.speedup [--only NAME]

What was planned (`planned`) is kept in experiments/figures/results.
"""

import argparse
from collections.abc import Sequence

import torch

from experiments.figures.planned import COUNTS, NETS, SpeedUp, speed_ups


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", help="part of a net's name")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: list[SpeedUp] = []
    for name in NETS:
        if options.only and options.only not in name:
            continue
        found += speed_ups(name)
        for each in found[-len(COUNTS) :]:
            print(
                f"{each.net:12} {each.machines:4} machines, {each.used:3} used: "
                f"{each.seconds[1]:.4g} s, {each.speed_up:.2f}x, "
                f"evenly {each.even:.2f}x",
                flush=True,
            )
    from experiments.figures.drawing import draw_speed_up  # noqa: PLC0415 -- slow

    draw_speed_up(found)


if __name__ == "__main__":
    main()
