"""Programs of scheduled variables (STRADS) beside the libraries that solve the same on one machine.

    pip install celer tomotopy gensim implicit numba
    python experiments/benchmarks/programs.py [--small] [--only NAME ...]

Not in `make bench`: it needs libraries that nothing here installs. One that is missing is named,
and its figures are left out. Times are of the processor, one thread; of `workers` and
`turns`, of the clock.

    lasso       2,000 x 20,000 (1 % of it not zero) and 100,000 x 1,000,000 (10 entries a column)
                with a known support, penalty a tenth and a fiftieth of the largest one: seconds to
                a duality gap of 1e-6, over celer's; objective over celer's; columns missed
    workers     the larger one: seconds of one worker over those of two, threads and replicas of a
                job; and what the processor time of tasks would allow
    schedule    updates of 16 blocks over those of one; of round robin over those of priority
    topics      tokens a second and held-out likelihood, 100 topics, beside tomotopy and gensim
    turns       a job of topics: seconds of the clock with one replica and two, by staleness, and
                the share of their time in which they compute
    factors     entries a second beside implicit, and to its loss after 8 passes; RMSE beside dense
                least squares
    simulated   100 workers in virtual time, scheduled and data-parallel: Lasso and topics
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from experiments.benchmarks.batches.sparse_models import lasso, schedule, workers
from experiments.benchmarks.batches.topics_and_factors import factors, topics, turns
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.simulated.programs import simulated


PARTS: Final[Mapping[str, Callable[..., dict[str, float]]]] = {
    "lasso": lasso,
    "workers": workers,
    "schedule": schedule,
    "topics": topics,
    "turns": turns,
    "factors": factors,
    "simulated": simulated,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = measurement.options_of(parser, arguments, small={})  # its parts are small
    figures: dict[str, float] = {}
    for name in options.only:
        figures |= PARTS[name](small=options.small)
    print(f"load of this machine in the last minute: {measurement.load():.1f}")
    measurement.conclude("programs", figures)


if __name__ == "__main__":
    main()
