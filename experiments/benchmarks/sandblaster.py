"""What Sandblaster costs beside one process, and what a slow replica costs it.

    python experiments/benchmarks/sandblaster.py [--small] [--only NAME ...]

    optimum     logistic regression (50,000 x 500) and an MLP on digits: seconds and evaluations to
                1e-6 of the optimum (digits, which has many: to 5 % above the one that scipy finds);
                two replicas and two shards, beside scipy and torch.optim.LBFGS, on the same cores.
                The start of the processes counts separately.
    scipy       `sandblaster.minimize` on five problems, without and within bounds, beside scipy:
                evaluations over scipy's; by how much of it the loss is above (one minimum);
                seconds to start and to end the processes, where torch is warm
    overhead    the speech net (41,777,152 parameters), batches of 20,000 frames: time
                of an evaluation over that of the pure gradient by as many plain processes
                in turns with it, once the history is full (about 8 minutes)
    straggler   one of four replicas five times slower (paced processes): time of an
                evaluation over what the summed speeds allow; the same without backup
                tasks; examples computed in vain
    killed      one of four replicas killed in each iteration: sets computed again

All figures: lower is better.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from experiments.benchmarks.batches.beside_scipy import beside_scipy
from experiments.benchmarks.batches.costs import killed, overhead, straggler
from experiments.benchmarks.batches.optima import optimum
from experiments.benchmarks.measuring import measurement


PARTS: Final[Mapping[str, Callable[..., dict[str, float]]]] = {
    "optimum": optimum,
    "scipy": beside_scipy,
    "overhead": overhead,
    "straggler": straggler,
    "killed": killed,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = measurement.options_of(parser, arguments, small={})  # its parts are small
    figures: dict[str, float] = {}
    for name in options.only:
        figures |= PARTS[name](small=options.small)
    print(f"load of this machine in the last minute: {measurement.load():.1f}")
    measurement.conclude("sandblaster", figures)


if __name__ == "__main__":
    main()
